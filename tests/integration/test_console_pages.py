"""Pages of the console on the emulator: hostile and malformed rows, forms, search, and bounded reads."""

import html
import math
import re
import threading
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1 import JsonObject
from google.cloud.spanner_v1.database import Database
from starlette.testclient import TestClient

import outbox_admin as admin
from outbox.devtools.emulators import Emulators
from outbox.program.terminal import escaped
from outbox.rows import backlog
from outbox.rows.task_table import TaskTable
from outbox.table.states import NEVER, STATES, UNSENT
from outbox_admin import console as application
from outbox_admin.console import routes
from outbox_admin.operations import Author
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.web import visits
from outbox_admin.web.roles import EVERYTHING, VIEWERS
from tests.support.console import ORIGIN, SAME, console, text
from tests.support.operations import CALLS, CREATED, FUTURE, OF_STATES, PAST, control, insert, opened, pause, row
from tests.support.spanner import record_requests
from tests.support.statements import scans, unbounded
from tests.support.waiting import eventually

#: Texts that a page must show as text: markup, quotes, control characters, and characters that reorder text.
HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "\x00\x1b[31m\n",
    "\u202egnp",
    "..",
    "a/../b",
    "{{ 7*7 }}",
)


def test_hostile_rows_are_shown_as_text(database: Database, jane: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "FRESH_SECONDS", 3_600.0)
    for number, hostile in enumerate(HOSTILE):
        id, place = f"{number} {hostile}", {"Topic": hostile, "OrderingKey": hostile}
        dead = row(id, AvailableAt=NEVER, LastError=f"{hostile}\nsecond line", **place)
        insert(database, [dead, row(f"behind {number}", AvailableAt=FUTURE, BlockedBy=id, **place)])
    pause(database, *HOSTILE)
    for number, hostile in enumerate(HOSTILE):
        id = {"id": f"{number} {hostile}"}
        filtered = jane.get("/tasks", params={"topic": hostile, "error": hostile}).text  # its fields keep the values
        assert not re.search("<script>alert|<img", filtered)
        of_task = [("/task", id), ("/tasks/retry", id), ("/tasks/cancel", id)]
        of_topic = [("/topic", {"name": hostile}), ("/search", {"q": hostile})]
        pages = {path: shown_as_text(jane, path, query) for path, query in [*of_task, *of_topic]}
        assert escaped(hostile) in text(pages["/topic"])
    shown_as_text(jane, "/tasks", {"state": "dead"})
    shown_as_text(jane, "/blocked", {})
    # The link of the overview leads to the topic itself.
    links = [html.unescape(each) for each in re.findall(r'href="(/topic\?[^"]*)"', shown_as_text(jane, "/", {}))]
    assert {"Resume" in jane.get(link).text for link in links} == {True}


def shown_as_text(caller: TestClient, path: str, query: dict[str, str]) -> str:
    answer = caller.get(path, params=query)
    assert answer.status_code == 200, (path, query)
    assert not re.search(r"<script>alert|<img|[\x00-\x09\x0b-\x1f\u202e]", answer.text)
    return answer.text


#: Selections and Infos that no program of this project writes.
WRONG_SELECTIONS = (
    "", "null", "[]", "no JSON", "[" * 5_000, '{"state": "dead", "until": "2026-01-01T00:00:00"}', '{"since": 5}',
    '{"state": "dead", "until": "0001-01-01T00:00:00+14:00"}', '{"state": "dead", "until": "2h"}',
    '{"state": {"a": 1}}',
    '{"state": "dead", "topic": 3}', '{"ids": "abc"}', '{"ids": [1, {}]}', '{"ids": null}', '{"ids": ["\\ud800"]}',
    '{"\\ud800": "\\ud800"}', '{"state": "gone", "id_prefix": []}', '{"include_expired": "yes"}', '{"a": NaN}',
    f'{{"state": {"9" * 5_000}}}', '{"ids": [' + "[" * 900 + "]" * 900 + "]}",
)  # fmt: skip
WRONG_INFOS = (
    None, [], 3, "x", {"shards": 3}, {"shards": [[1, 2, 3], ["a", "b"], [5, 1], [0, 10**9]]}, {"settings": [1]},
    {"settings": {"a": {"b": [None]}}, "version": {"c": 1}}, {"circuits": [3, {"open_seconds": "x"}, {"topic": []}]},
    {"circuits": [{"topic": 5, "open_seconds": 1e300, "seconds_to_probe": -1}]}, {"host": "<script>", "in_flight": "x"},
)  # fmt: skip
FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def test_a_malformed_row_of_another_table_breaks_no_page(
    database: Database, jane: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any program may write these columns. Each page shows what it can."""
    insert(database, [row("a"), row("dead", AvailableAt=NEVER, LastError="x"), row("sent", SentAt=CREATED)])
    with database.batch() as batch:
        columns = ("OperationId", "Operation", "StartedAt", "Principal", "Selection", "Tasks", "Selected", "SeenAt")
        rows = [
            (f"{number}", name, time, None, selection, number - 5, -number, time)
            for number, (selection, name, time) in enumerate(
                (selection, name, time)
                for selection in WRONG_SELECTIONS
                for name, time in (("retry", PAST), ("\x00 odd", FIRST))
            )
        ]
        batch.insert("AsynchronousTaskOperations", columns, rows)
    monkeypatch.setattr(visits, "FRESH_SECONDS", 3_600.0)
    monkeypatch.setattr(visits.Shared, "forget", mock.Mock())
    for path in ("/", "/operations", "/task?id=a", "/task?id=dead", "/task?id=sent", "/tasks/retry?id=dead"):
        answer = jane.get(path)
        assert answer.status_code == 200, (path, text(answer.text))
    for id, name, *_ in rows:
        assert jane.get(f"/operation?id={id}").status_code == 200, id
        if name == "retry":
            answer = jane.post(f"/operation/continue-retry?id={id}", headers=SAME)
            assert answer.status_code in (303, 400), (id, text(answer.text))


def test_a_malformed_info_of_a_worker_breaks_no_page(database: Database, jane: TestClient) -> None:
    with database.batch() as batch:
        columns = ("WorkerId", "SeenAt", "StartedAt", "LivenessTimeoutSeconds", "Info")
        now = TaskTable(opened(database)).now()
        rows = [
            (f"{number} {started_at:%Y}", now, started_at, 2**63 - 1, JsonObject(info))
            for number, info in enumerate(WRONG_INFOS)
            for started_at in (FIRST, now, LAST)
        ]
        batch.insert("AsynchronousTaskWorkers", columns, rows)
    for path in ("/", "/workers", "/topic?name=orders"):
        answer = jane.get(path)
        assert answer.status_code == 200, (path, text(answer.text))


def test_an_error_that_is_one_long_word_is_shown_in_part(database: Database, jane: TestClient) -> None:
    insert(database, [row("a", AvailableAt=NEVER, LastError=f"internal: {'x' * 900}")])
    for path in ("/", "/tasks?state=dead"):
        assert "x" * 150 in text(jane.get(path).text)


def test_a_topic_is_paused_by_a_named_person(database: Database, table: TaskTable, jane: TestClient) -> None:
    insert(database, [row("a")])
    for place, form in (("pause", "reason=too+many+errors"), ("resume", "")):
        answer = jane.post(f"/topic/{place}?name=orders", headers=SAME, content=form)
        assert answer.status_code == 303, answer.text
        shown = jane.get(answer.headers["location"]).text
        assert "Workers apply it within 10 seconds. 0 of 0 have reported since then." in shown
    assert [(each.operation, each.principal, each.reason) for each in admin.operations.latest(table, 10)] == [
        ("resume", "jane@example.com", None), ("pause", "jane@example.com", "too many errors"),
    ]  # fmt: skip


def test_a_page_after_an_action_shows_what_was_written_and_how_old_its_figures_are(
    database: Database, jane: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It offers what is possible now, however long the read of the figures takes."""
    insert(database, [row("a")])
    assert "Pause" in jane.get("/topic?name=orders").text
    may_end, read = threading.Event(), backlog.read
    monkeypatch.setattr(backlog, "read", lambda table: read(table) if may_end.wait(60) else None)
    monkeypatch.setattr(visits, "PATIENCE_SECONDS", 0.05)
    for path, offered in (("pause", "Resume"), ("resume", "Pause"), ("pause", "Resume")):
        answer = jane.post(f"/topic/{path}?name=orders", headers=SAME, content="")
        page = jane.get(answer.headers["location"]).text
        assert re.search(r"Written at 20[\d :-]+ UTC, figures of 20[\d :-]+ UTC", text(page))
        assert f">{offered}</button>" in page
    may_end.set()
    assert eventually(lambda: "Workers apply it within 10 seconds" in jane.get("/topic?name=orders").text)
    assert "figures of" not in text(jane.get("/topic?name=orders").text)


def test_each_page_is_shown_before_the_first_figures(
    database: Database, jane: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(database, [row("dead", AvailableAt=NEVER), row("keyed", OrderingKey="k")])
    may_end = threading.Event()
    monkeypatch.setattr(backlog, "read", lambda _table: may_end.wait(60))
    monkeypatch.setattr(visits, "PATIENCE_SECONDS", 0.05)
    pages = (
        "/", "/topic?name=orders", "/tasks", "/task?id=dead", "/task?id=keyed", "/tasks/cancel?state=dead", "/blocked",
        "/workers", "/operations", "/search?q=none",
    )  # fmt: skip
    assert {path: jane.get(path).status_code for path in pages} == dict.fromkeys(pages, 200)
    may_end.set()


def test_a_topic_is_checked_and_its_controls_are_forgotten(
    database: Database, emulators: Emulators, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", emulators.pubsub_host)
    caller, table = console(database), opened(database)
    insert(database, [row("empty", Topic="", AvailableAt=NEVER)])
    for page in ("/?path=x&self=x", "/topic?name=&path=x"):
        assert 'href="/tasks?state=dead">1<' not in caller.get(page).text  # the tasks of all topics
    answer = caller.post("/topic/check", params={"name": topic}, headers=SAME)
    assert f"Pub/Sub had the topic {topic}" in text(caller.get(answer.headers["location"]).text)
    for forged in ("1", "2026-01-01", "2026-01-01T00:00:00Z", "2999-01-01T00:00:00Z"):
        assert "had the topic" not in caller.get("/topic", params={"name": topic, "exists": forged}).text
    unknown = caller.get("/topic?name=no-such-topic").text
    forms = re.findall(r'action="/topic/(\w+)', unknown)
    assert (forms, "--rate=N --burst=N -- no-such-topic" in unknown) == (["check"], True), "no form that is refused"
    missing = caller.post("/topic/check?name=no-such-topic", headers=SAME)
    assert (missing.status_code, "does not exist" in missing.text, "--force" in missing.text) == (400, True, False)
    with monkeypatch.context() as patch:
        patch.setattr(admin.editing, "check_topic_exists", lambda *_: "Pub/Sub does not say whether it exists: 403")
        unknown = text(caller.post("/topic/check?name=orders", headers=SAME).text)
    assert "It is unknown whether the topic exists. Pub/Sub does not say whether it exists: 403" in unknown
    assert "Nothing was changed" not in unknown
    admin.editing.change(TaskTable(table), "pause", ["a/b"], {"paused": True})
    caller = console(database)
    page = caller.get("/topic?name=a/b").text
    assert re.search(r"Last change: pause [\d.]+s ago", text(page))
    assert caller.post("/topic/unset?name=a/b", headers=SAME, content="").status_code == 400  # without a reason
    assert caller.post("/topic/unset?name=a/b", headers=SAME, content="reason=gone").status_code == 303
    assert TaskTable(table).controls() == {}


def test_errors_say_how_many_fail_and_since_when_and_hopeless_tasks_are_not_retried(
    database: Database, jane: TestClient
) -> None:
    insert(database, [row(f"dead{n}", AvailableAt=NEVER, LastError=f"{'abc'[n % 3] * n}: x") for n in range(25)])
    insert(database, [row("broken", OrderingKey="k", AvailableAt=NEVER, LastError="undecodable: not a message")])
    insert(database, [row("behind", OrderingKey="k", AvailableAt=FUTURE, BlockedBy="broken")])
    page = jane.get("/").text
    assert 'href="/tasks/cancel?id=broken">Cancel the head' in page
    assert 'href="/task?id=broken">Open the task' in console(database, roles=VIEWERS).get("/").text
    assert "All 26 groups of errors" in page
    assert page.count("/tasks?state=dead&amp;topic=orders&amp;error=") == 20
    assert jane.get("/?errors=all").text.count("/tasks?state=dead&amp;topic=orders&amp;error=") == 26
    task = text(jane.get("/task?id=broken").text)
    offered = [sentence in task for sentence in ("No retry can succeed", "Retry this task", "Cancel this task")]
    assert offered == [True, False, True]
    assert "Retry this task" in jane.get("/task?id=dead1").text
    assert "will be dead again" in jane.get("/tasks/retry?state=dead").text


def test_a_wrong_form_changes_nothing(database: Database, table: TaskTable, jane: TestClient) -> None:
    insert(database, [row("a")])
    for path, form, status, sentence in (
        ("ask?name=orders", "", 400, "The form is empty"),
        ("ask?name=orders", "max-in-flight=5&unset=max-in-flight", 400, "The form sets and removes a value"),
        ("ask?name=orders", "route=a%00b", 400, "instead.  'a\\x00b' is not"),
        ("controls?name=orders", "reason=x", 400, "The form is empty"),
        ("pause?name=ordres", "", 400, "Unknown topic 'ordres'"),
        ("resume?name=ordres", "", 400, "Unknown topic 'ordres'"),
        ("controls?name=ordres&max-in-flight=5", "", 400, "Unknown topic 'ordres'"),
        ("pause?name=orders", f"reason={'x' * 1_001}", 400, "Reason  'xxx"),
        ("pause", "", 404, "The address names no topic"),
    ):
        answer = jane.post(f"/topic/{path}", headers=SAME, content=form)
        assert (answer.status_code, sentence in text(answer.text)) == (status, True), text(answer.text)
        assert table.controls() == {}
        assert admin.operations.latest(table, 1) == []


def test_search_finds_a_task_by_its_id_and_a_key(database: Database, jane: TestClient) -> None:
    insert(database, [row("order-31-a", OrderingKey="order-31"), row("order-31-b"), row("x", OrderingKey="key")])
    assert jane.get("/search?q=order-31-a").headers["location"] == "/task?id=order-31-a"
    assert jane.get("/search?q=x").headers["location"] == "/task?id=x"
    assert re.findall(r'href="/task\?id=([^"]*)"', jane.get("/search?q=order-31").text) == [
        "order-31-a", "order-31-b", "order-31-a",
    ]  # fmt: skip
    assert jane.get("/search?q=orde").text.count("/task?id=") == 2
    assert "None" in text(jane.get("/search?q=ord").text)
    assert "no index contains" in jane.get(f"/search?q={'a' * 32}").text


ID = "00000000-0000-0000-0000-000000000001"
FILTERS = (
    "topic=orders", "ordering_key=k", "error=x", "id_prefix=pen", "since=9d&until=1s", "topic=orders&order=oldest",
)  # fmt: skip
BOUNDED = (
    "/", "/signed-in", "/topic?name=orders", "/topic/controls?name=orders&rate=5&burst=5", "/blocked",
    "/workers", "/operations", f"/operation?id={ID}", "/tasks",
    "/task?id=head", "/task?id=keyed", "/search", "/search?q=head", "/search?q=k", "/search?q=pending",
    "/tasks/retry?id=head&id=keyed", "/tasks/cancel?id=head", "/tasks/purge?id=sent0",
    *(f"/tasks?state={state}" for state in STATES),
    *(f"/tasks?state={state}&{more}" for state in UNSENT for more in FILTERS), "/tasks?state=sent&order=oldest",
    "/tasks?state=sent&follow=1",
)  # fmt: skip
#: They read all tasks that match: the person must see the exact number before an action.
ACTIONS = ("/tasks/retry?state=dead", "/tasks/cancel?state=pending", "/tasks/purge?state=sent")
EXACT = ("/topic/controls?name=orders&unset=route", *ACTIONS)
#: They read the sent tasks of growing windows of time until they have found enough.
WINDOWS = tuple(f"/tasks?state=sent&{more}" for more in FILTERS if more.startswith(("topic", "error", "id_prefix")))


def fill(database: Database) -> None:
    """Insert tasks of each state, and an operation."""
    rows = [row(f"{state}{n}", **each) for state, found in OF_STATES.items() for n, each in enumerate(found)]
    insert(database, [*rows, row("head", OrderingKey="k"), row("keyed", OrderingKey="k")])
    table = TaskTable(opened(database))
    admin.execution.begin(table, "retry", TaskSelection(state="dead"), Author("jane"), id=ID, selected=1)


@pytest.mark.extended
def test_every_page_is_about_a_bounded_part_of_the_table(database: Database) -> None:
    fill(database)
    control(database, "orders", PublishTo="orders-v2")
    watched = opened(database)
    requests = record_requests(watched, *CALLS)
    app = application.app(watched, identify=lambda _: "ann", roles=EVERYTHING, allow_actions=True)
    caller = TestClient(app, base_url=ORIGIN)
    pages = {route.path for route in routes() if route.method == "GET"}
    forms = {route.path for route in routes() if route.page}  # opened again, they lead to their pages
    assert pages - forms == {path.partition("?")[0] for path in BOUNDED + EXACT} - forms
    for path in (*BOUNDED, *EXACT, *WINDOWS):
        requests.clear()
        assert caller.get(path).status_code == 200, path
        parts = {part for name, request in requests for part in unbounded_of(name, request, is_exact=path in EXACT)}
        assert bool(parts) == (path not in BOUNDED), (path, parts)


def unbounded_of(name: str, request: Any, *, is_exact: bool) -> list[str]:
    """Return the parts of a request that read an unbounded part of the table. None reads all of it."""
    if name in ("read", "streaming_read"):
        assert not request.key_set.all_ or request.table == "AsynchronousTaskTopics"
        return []
    if not hasattr(request, "sql"):
        return []
    assert scans(request.sql) == []
    values = {key: request.params[key] for key in request.params} if request.params else {}
    ranges = math.prod(len(values.get(key, "1")) for key in ("shards", "topics"))
    for key in {"limit", "ceiling"} & values.keys():
        # A list joins the rows of all ranges.
        most = backlog.MAX_TOTAL / (ranges if key == "ceiling" else 1)
        assert int(values[key]) <= (math.inf if is_exact else most), (key, values[key])
    return unbounded(request.sql)

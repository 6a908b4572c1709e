"""The pages of the console on the emulator: hostile rows, topic controls, and the requests of pages."""

import html
import math
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, JsonObject, RequestOptions
from google.cloud.spanner_v1.database import Database
from starlette.testclient import TestClient

from outbox import admin, console
from outbox.admin import backlog
from outbox.admin.changes import TaskSelection
from outbox.admin.table import TaskTable
from outbox.console import readings
from outbox.console.application import routes
from outbox.console.roles import EVERYTHING
from outbox.program.terminal import escaped
from outbox.table.states import NEVER, STATES
from tests.support.console import ORIGIN, SAME
from tests.support.operations import CALLS, FUTURE, OF_STATES, insert, opened, pause, row
from tests.support.spanner import record_requests
from tests.support.statements import scans, unbounded

#: Pages that show the shared status.
LIVE = ("/", "/topic?name=orders", "/blocked", "/workers")
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


def browser(database: Database) -> TestClient:
    ann = {"identify": lambda _request: "ann@example.com", "roles": EVERYTHING}
    app = console.app(database, **ann, allow_actions=True)
    return TestClient(app, base_url=ORIGIN, follow_redirects=False)


def text(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_hostile_rows_are_shown_as_text(database: Database) -> None:
    """Also in forms, and in the operation that retries the task."""
    dead = {"AvailableAt": NEVER, "LastError": "\n".join(HOSTILE)}
    key = [{"Topic": hostile, "OrderingKey": hostile} for hostile in HOSTILE]
    insert(database, [row(f"{number} {each['Topic']}", **each, **dead) for number, each in enumerate(key)])
    insert(
        database,
        [
            row(f"behind {number}", **each, AvailableAt=FUTURE, BlockedBy=f"{number} {each['Topic']}")
            for number, each in enumerate(key)
        ],
    )
    pause(database, *HOSTILE)
    caller, table = browser(opened(database)), TaskTable(opened(database))
    retry = admin.changes.change(table, "retry", TaskSelection(ids=(f"1 {HOSTILE[1]}",)))
    assert len(list(retry)) == 1
    for number, hostile in enumerate(HOSTILE):
        assert_harmless(caller, "/topic", name=hostile)
        assert_harmless(caller, "/task", id=f"{number} {hostile}")
        assert escaped(hostile) in text(caller.get("/topic", params={"name": hostile}).text)
    assert_harmless(caller, "/search", q=HOSTILE[0])
    assert_harmless(caller, "/tasks", topic=HOSTILE[0], error=HOSTILE[1])
    assert_harmless(caller, "/tasks/retry", state="dead")
    for path in ("/", "/blocked", "/operations", "/tasks"):
        assert_harmless(caller, path)
    # The links of the overview lead to the topics themselves.
    links = [html.unescape(each) for each in re.findall(r'href="(/topic\?[^"]*)"', caller.get("/").text)]
    assert len(links) >= len(HOSTILE)
    assert all("Resume" in caller.get(link).text for link in links)


def assert_harmless(caller: TestClient, path: str, **query: str) -> None:
    answer = caller.get(path, params=query)
    assert answer.status_code == 200, (path, query)
    shown = re.sub(r' value="[^"]*"', "", answer.text)  # which a form sends back
    assert not re.search(r"<script>alert|<img|[\x00-\x09\x0b-\x1f\u202e]", shown), (path, query)


def test_a_topic_is_paused_limited_and_routed_by_a_named_person(database: Database) -> None:
    insert(database, [row("a")])
    caller, table = browser(opened(database)), TaskTable(opened(database))
    paths = {
        "pause": "reason=too+many+errors", "limit": "rate=10&burst=20&max-in-flight=", "route": "to=orders-v2",
        "policy": "max-attempts=3&backoff-max=60s", "resume": "",
    }  # fmt: skip
    for name, form in paths.items():
        answer = caller.post(f"/topic/{name}?name=orders", headers=SAME, content=form)
        assert answer.status_code == 303, answer.text
        shown = caller.get(answer.headers["location"]).text
        assert "Workers apply it within 10 seconds. 0 of 0 have reported since then." in shown
    control = admin.topics.controls(table)["orders"]
    assert control == admin.topics.Control(False, 10, 20, None, "orders-v2", MaxAttempts=3, BackoffMaxSeconds=60)
    recorded = admin.operations.latest(table, 10)
    assert [each.operation for each in reversed(recorded)] == list(paths)
    assert {each.principal for each in recorded} == {"ann@example.com"}
    assert recorded[-1].reason == "too many errors"
    assert "at most 10 tasks a second, 20 at once; published to orders-v2" in text(
        caller.get("/topic?name=orders").text
    )


def test_search_finds_a_task_by_its_id_and_a_key(database: Database) -> None:
    insert(database, [row("order-31-a", OrderingKey="order-31"), row("order-31-b"), row("x", OrderingKey="key")])
    caller = browser(opened(database))
    assert caller.get("/search?q=order-31-a").headers["location"] == "/task?id=order-31-a"
    assert caller.get("/search?q=x").headers["location"] == "/task?id=x"
    assert re.findall(r'href="/task\?id=([^"]*)"', caller.get("/search?q=order-31").text) == [
        "order-31-a", "order-31-b", "order-31-a",
    ]  # fmt: skip
    assert caller.get("/search?q=orde").text.count("/task?id=") == 2
    assert "None" in text(caller.get("/search?q=ord").text)
    assert "no index contains" in caller.get(f"/search?q={'a' * 32}").text


def test_a_wrong_form_or_an_edited_address_changes_nothing(database: Database) -> None:
    caller = browser(opened(database))
    for path, form, status, sentence in (
        ("/topic/limit?name=orders", "rate=fast", 400, "--rate: 'fast' is not allowed"),
        ("/topic/limit?name=orders", "rate=10", 400, "and Burst go together"),
        ("/topic/limit?name=orders", "", 400, "The form is empty"),
        ("/topic/route?name=orders", "to=orders", 400, "would be routed to itself"),
        ("/topic/route?name=orders", "to=a%00b", 400, "--to: 'a\\x00b' is not allowed"),
        ("/topic/pause?name=orders", f"reason={'x' * 1_001}", 400, "reason: "),
        ("/topic/pause", "", 404, "The address names no topic"),
    ):
        answer = caller.post(path, headers=SAME, content=form)
        assert (answer.status_code, sentence in text(answer.text)) == (status, True), (path, form)
    for written in ("", "x", "2h", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59Z", "99999999d"):
        assert caller.get("/topic", params={"name": "orders", "written": written}).status_code == 200, written
    assert admin.operations.latest(TaskTable(opened(database)), 1) == []


def test_workers_and_their_differences_are_marked(database: Database) -> None:
    columns, now = ("WorkerId", "StartedAt", "SeenAt", "Info"), datetime.now(UTC)
    info = {"host": "node-1", "version": "0.1.0", "shards": [[0, 9]], "in_flight": 0, "utilization": 0.0}
    infos = {"a": info | {"settings": {"batch_size": 50}}, "b": info | {"settings": {}}}
    with database.batch() as batch:
        rows = [(id, now, COMMIT_TIMESTAMP, JsonObject(each)) for id, each in infos.items()]
        batch.insert("AsynchronousTaskWorkers", columns, rows)
    caller = browser(opened(database))
    marked = re.findall(r'<span class="differs">([^<]*)</span>', caller.get("/workers").text)
    assert sorted(marked) == ["batch_size=50", "batch_size=default"]
    assert "2 live workers" in text(caller.get("/").text)


def test_pages_share_what_one_of_them_has_read(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request has LOW priority and the tag of the console."""
    insert(database, [row(str(n), AvailableAt=NEVER, LastError="x") for n in range(20)])
    monkeypatch.setattr(readings, "FRESH_SECONDS", 3_600.0)
    watched = opened(database)
    requests = record_requests(watched, *CALLS)
    caller = TestClient(console.app(watched), base_url=ORIGIN)
    assert caller.get("/").status_code == 200
    of_one = len(requests)
    assert {caller.get(path).status_code for path in LIVE * 3} == {200}
    assert len(requests) == of_one
    for _, request in requests:
        options = request.request_options
        assert options.priority == RequestOptions.Priority.PRIORITY_LOW
        assert options.request_tag in (console.application.TAG, "outbox-schema")


ID = "00000000-0000-0000-0000-000000000001"
FILTERS = ("topic=orders", "key=k", "error=x", "prefix=pen", "since=9d&until=1s", "topic=orders&order=oldest")
BOUNDED = (
    "/", "/topic?name=orders", "/blocked", "/workers", "/operations", f"/operation?id={ID}", "/tasks", "/task?id=head",
    "/task?id=keyed", "/search", "/search?q=head", "/search?q=k", "/search?q=pending", "/tasks/retry?id=head&id=keyed",
    "/tasks/cancel?id=head", "/tasks/purge?id=sent0", *(f"/tasks?state={state}" for state in STATES),
    *(f"/tasks?state={state}&{more}" for state in STATES[:-1] for more in FILTERS), "/tasks?state=sent&order=oldest",
)  # fmt: skip
#: They read all tasks that match: the person must see the exact number before an action.
EXACT = ("/tasks/retry?state=dead", "/tasks/cancel?state=pending", "/tasks/purge?state=sent")
#: They read the sent tasks of growing windows of time until they have found enough.
WINDOWS = tuple(f"/tasks?state=sent&{more}" for more in FILTERS if more.startswith(("topic", "error", "prefix")))


@pytest.mark.extended
def test_every_page_is_about_a_bounded_part_of_the_table(database: Database) -> None:
    """So millions of tasks or operations do not slow a page."""
    rows = [row(f"{state}{n}", **each) for state, found in OF_STATES.items() for n, each in enumerate(found)]
    insert(database, [*rows, row("head", OrderingKey="k"), row("keyed", OrderingKey="k")])
    watched = opened(database)
    table, author = TaskTable(watched), admin.operations.Author("jane")
    admin.changes.begin(table, "retry", TaskSelection(state="dead"), author, id=ID, selected=1)
    requests = record_requests(watched, *CALLS)
    caller = browser(watched)
    pages = {route.path for route in routes() if route.method == "GET" and not route.path.startswith("/static/")}
    assert pages - {"/healthz"} == {path.partition("?")[0] for path in BOUNDED}
    for path in (*BOUNDED, *EXACT, *WINDOWS):
        requests.clear()
        assert caller.get(path, follow_redirects=True).status_code == 200, path
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

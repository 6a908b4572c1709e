"""The console's pages of tasks and operations, with Starlette's client and the emulator."""

import html
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from google.cloud.spanner_v1.database import Database
from starlette.testclient import TestClient

from outbox.base.schedules import Schedule
from outbox.rows import backlog
from outbox.rows.task_table import TaskTable
from outbox.table.states import NEVER
from outbox_admin import operations
from outbox_admin.changes import chunks, execution, running
from outbox_admin.operations import Author
from outbox_admin.status import problems
from outbox_admin.tasks import selected, task_pages
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.topics import editing
from outbox_admin.web import visits
from outbox_admin.web.roles import Role, Roles
from tests.support.console import SAME, Outage, begun, console, finished, form_of
from tests.support.fakes import serialized
from tests.support.operations import CREATED, FUTURE, PAST, delete, insert, row, rows_of, update, update_operation
from tests.support.pubsub import PubSub
from tests.support.waiting import eventually

ID = "00000000-0000-0000-0000-000000000001"
DEAD = {"AvailableAt": NEVER, "Attempts": 9, "LastError": "not_found: no topic"}
SCRIPT = "<script>alert(1)</script>"


def dead(database: Database) -> set[str]:
    return {id for id, columns in rows_of(database).items() if columns["AvailableAt"] == NEVER}


def listed(page: str) -> list[str]:
    return re.findall(r'name="exact" value="id=(\w+)"', page)


def test_the_tab_of_a_state_counts_what_it_lists(database: Database, table: TaskTable, jane: TestClient) -> None:
    """Also the tasks of a paused topic, which wait for an operator."""
    insert(database, [row("a"), row("b", Topic="invoices")])
    editing.change(table, "pause", ["orders"], {"paused": True})
    page = jane.get("/tasks?state=pending").text
    assert len(listed(page)) == 2
    assert re.findall(r'>pending <span class="note">(.*?)</span>', page) == ["2"]


def test_some_tasks_are_selected(database: Database, table: TaskTable, jane: TestClient):
    """Also with the expired ones, and those that cannot be changed are named with the reason."""
    insert(database, [row("a", **DEAD), row("b", **DEAD), row("old", **DEAD, ExpiresAt=PAST), row("pending")])
    page = jane.get("/tasks/retry?id=a&id=old&id=pending&id=gone").text
    assert "Retry 1 task" in page
    for reason in ("because ExpiresAt has passed", "because pending tasks need no retry", "not in the table"):
        assert f"1 task would not be changed, {reason}" in page
    [link] = [html.unescape(each) for each in re.findall(r'href="(/tasks/retry[^"]+)"', page)]
    assert finished(table, begun(jane, link, reason="")).tasks == 2
    assert dead(database) == {"b"}


def test_a_destructive_action_needs_a_reason_and_the_typed_number(
    database: Database, table: TaskTable, jane: TestClient
):
    insert(database, [row(f"{n}", **DEAD) for n in range(3)])
    address = form_of(jane.get("/tasks/cancel?state=dead").text, "/tasks/cancel")
    for form, status in (
        ({"reason": "why"}, 409), ({"reason": "why", "typed": "2"}, 409), ({"typed": "3"}, 400), ({}, 400),
    ):  # fmt: skip
        assert jane.post(address, data=form, headers=SAME).status_code == status
    assert operations.latest(table, 10) == []
    assert len(rows_of(database)) == 3
    finished(table, begun(jane, "/tasks/cancel?state=dead", typed="3"))
    assert all(each["CancelledBy"] for each in rows_of(database).values())


def test_a_preview_that_spanner_no_longer_keeps_or_of_the_future_changes_nothing(
    database: Database, table: TaskTable, jane: TestClient
):
    insert(database, [row("a", **DEAD)])
    address = form_of(jane.get("/tasks/retry?state=dead").text, "/tasks/retry")
    for at, text in (("2d", "version_retention_period"), ("2090-01-01T00:00:00Z", "is in the future"), ("", "as_of")):
        answer = jane.post(edited(address, as_of=at), data={"reason": "why"}, headers=SAME)
        assert answer.status_code >= 400
        assert text in html.unescape(answer.text)
    assert operations.latest(table, 10) == []


def test_sent_tasks_are_purged_only_when_their_marks_are_final(database: Database, table: TaskTable, jane: TestClient):
    insert(database, [row("old", SentAt=PAST), row("new", SentAt=table.now() - timedelta(seconds=10))])
    finished(table, begun(jane, "/tasks/purge?state=sent", typed="1"))
    assert rows_of(database).keys() == {"new"}


def test_a_form_that_is_sent_twice_begins_one_operation(database: Database, table: TaskTable, jane: TestClient):
    insert(database, [row("a", **DEAD)])
    address = form_of(jane.get("/tasks/retry?state=dead").text, "/tasks/retry")
    first, second = (jane.post(address, data={"reason": "why"}, headers=SAME) for _ in range(2))
    assert first.headers["location"] == second.headers["location"]
    finished(table, parse_qs(urlsplit(first.headers["location"]).query)["id"][0])
    assert len(operations.latest(table, 10)) == 1


def test_an_operator_cannot_continue_a_cancel_with_the_form_of_a_retry(database: Database, table: TaskTable):
    insert(database, [row("a", **DEAD)])
    operator = console(database, person="joe", roles=Roles({Role.OPERATOR: ("joe",)}))
    execution.begin(table, "cancel", TaskSelection(state="dead"), Author("jane"), id=ID, selected=1)
    address = form_of(operator.get("/tasks/retry?state=dead").text, "/tasks/retry")
    forged = re.sub(r"operation=[\w-]+", f"operation={ID}", address)
    assert operator.post(forged, data={"reason": "why"}, headers=SAME).status_code == 303
    assert operator.post(f"/operation/continue-retry?id={ID}", headers=SAME).status_code == 400
    assert operator.post(f"/operation/continue-cancel?id={ID}", headers=SAME).status_code == 403
    assert operator.get("/tasks/cancel?state=dead").status_code == 403
    assert "Cancel needs the role destroyer" in operator.get("/tasks?state=dead").text
    assert ID not in operator.app.console.running.ids  # type: ignore[attr-defined]  # an ASGI callable
    assert rows_of(database).keys() == {"a"}


def test_a_person_stops_and_continues_an_operation(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """In another console than the one that executes it, as after a crash. The pages show the progress."""
    monkeypatch.setattr(selected, "CHUNK", 2)
    insert(database, [row(f"{n:02}", **DEAD) for n in range(20)])
    jane, john = console(database), console(database, person="john@example.com")
    execution.begin(table, "retry", TaskSelection(state="dead"), Author("jane@example.com", "why"), id=ID, selected=20)
    crashed = execution.resume(table, ID)
    done = sum(len(next(crashed).changed) for _ in range(4))
    page = john.get(f"/operation?id={ID}").text
    assert f"{done} of 20" in page
    assert john.post(form_of(page, "/operation/stop"), data={"reason": "wait"}, headers=SAME).status_code == 303
    with pytest.raises(operations.NotContinued):
        next(crashed)
    page = jane.get(f"/operation?id={ID}").text
    assert '<span class="badge stopped">' in page
    assert "/operation/stop" not in page
    jane.post(form_of(page, "/operation/continue-retry"), data={}, headers=SAME)
    assert finished(table, ID).tasks == 20
    assert [(each.operation, each.principal, each.reason) for each in operations.latest(table, 3)] == [
        ("continue", "jane@example.com", None), ("stop", "john@example.com", "wait"),
        ("retry", "jane@example.com", "why"),
    ]  # fmt: skip
    assert jane.post(f"/operation/stop?id={ID}", headers=SAME).status_code == 400


def test_the_first_page_offers_to_continue_what_another_console_has_left(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """However many messages people have looked at since then."""
    monkeypatch.setattr(problems, "OPERATIONS", 2)
    execution.begin(table, "retry", TaskSelection(state="dead"), Author("jane"), id=ID, selected=1)
    assert "was interrupted" not in console(database).get("/").text
    update_operation(database, ID, SeenAt=PAST)
    for _ in range(2):
        operations.begin(table, "view", {"ids": ["a"]})
    page = console(database).get("/").text
    assert "A retry by jane was interrupted after 0 tasks" in page
    assert f'href="/operation?id={ID}">Continue or stop it' in page


def test_an_operation_goes_on_when_spanner_is_back(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """Meanwhile the pages say so, and keep the last figures with their age. No task is changed twice."""
    monkeypatch.setattr(running, "OPERATION", Schedule(0.05, 0.05))
    monkeypatch.setattr(visits, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(selected, "CHUNK", 1)
    insert(database, [row(f"{n:02}", **DEAD) for n in range(10)])
    jane = console(database)
    assert jane.get("/operations").status_code == 200
    outage = Outage(monkeypatch, begins_with=5)  # the first one begins the operation
    id = begun(jane, "/tasks/retry?state=dead")
    eventually(outage.away.is_set)
    page = jane.get("/operations").text
    assert re.search(r"These are [\d.]+s old. Spanner did not answer: a test", page)
    assert re.search(r"figures of</strong> <time[^>]+>[^<]+</time>, [\d.]+s ago", page)
    assert id in page or "No operation is recorded yet" in page
    answer = jane.get("/tasks")
    assert (answer.status_code, "Spanner did not answer" in answer.text) == (503, True)
    outage.away.clear()
    operation = finished(table, id)
    assert operation.tasks == 10
    assert dead(database) == set()
    assert "Spanner did not answer" not in jane.get("/operations").text
    assert jane.get("/tasks").status_code == 200


def test_pages_of_tasks_keep_their_state_in_the_address(
    database: Database, jane: TestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(task_pages, "PAGE", 2)
    insert(database, [row(f"t{n}", **DEAD, OrderingKey="k", CreatedAt=PAST + timedelta(hours=n)) for n in range(5)])
    insert(database, [row("t5", **DEAD, OrderingKey="k", CreatedAt=PAST + timedelta(hours=5), ExpiresAt=PAST)])
    insert(database, [row("other", **DEAD), row("sent", SentAt=PAST)])
    address, seen = "/tasks?state=dead&ordering_key=k&order=oldest", list[str]()
    while address:
        page = jane.get(address).text
        seen += listed(page)
        following = re.findall(r'href="([^"]+)">Next page', page)
        address = html.unescape(following[0]) if following else ""
    assert seen == ["t0", "t1", "t2", "t3", "t4", "t5"]
    [checked] = re.findall(r'href="([^"]+)">Select this page', page)
    assert re.findall(r'value="id=(\w+)"[^>]* checked>', jane.get(html.unescape(checked)).text) == ["t4", "t5"]
    assert "does not have all of these filters" in jane.get("/tasks?state=dead&id_prefix=t").text
    assert "No dead task matches the filter" in jane.get("/tasks?state=dead&id_prefix=zz").text
    assert listed(jane.get("/tasks?state=sent&since=2026-01-01T00:00:00Z").text) == ["sent"]


def test_sent_tasks_are_followed(database: Database, jane: TestClient) -> None:
    """Followed tasks cannot be selected, because the list changes while a person looks. It has the last minutes."""
    now = datetime.now(UTC) - timedelta(seconds=1)
    sent = {"new": now - timedelta(seconds=9), "newer": now, "old": now - timedelta(minutes=11)}
    insert(database, [row(id, SentAt=at) for id, at in sent.items()])
    [link] = re.findall(r'href="([^"]+)">Follow sent tasks', jane.get("/tasks?state=sent&topic=orders").text)
    page = jane.get(html.unescape(link)).text
    assert re.findall(r'href="/task\?id=(\w+)"', page) == ["newer", "new"]
    assert "Select newer" not in page
    assert "data-still" not in page


def test_an_edited_address_is_answered_with_a_sentence(jane: TestClient):
    for address, message in {
        "/tasks?after=WyJ4Il0": "is not a cursor",
        "/tasks?after=%00": "is not a cursor",
        "/tasks?state=no": "'no' is not allowed. It must be pending",
        "/tasks/retry?id=" + "x" * 65: "A field has a wrong value",
        "/tasks/retry?state=pending": "retry is for tasks that are dead",
        "/tasks/retry": "retry is for tasks that are dead",
        "/tasks/cancel?state=dead&selected=1": "No task is selected",
        "/tasks/purge?state=dead&id=a": "purge is for tasks that are sent",
        "/tasks/cancel?state=sent": "cancel is for tasks that are pending",
        "/operation?id=%3Cscript%3E": "There is no operation",
        "/operation": "There is no operation",
        "/task?id=%3Cscript%3E%00%1b": "There is no task",
        "/task": "There is no task",
    }.items():
        answer = jane.get(address)
        assert answer.status_code in (400, 404), (address, answer.text)
        assert message in html.unescape(answer.text)
        assert "<script>" not in answer.text.replace('<script src="/static', "")


def edited(address: str, **change: str) -> str:
    """Return the address of a form with other values."""
    parts = urlsplit(address)
    return f"{parts.path}?{urlencode({name: values[0] for name, values in parse_qs(parts.query).items()} | change)}"


def test_an_edited_form_changes_nothing(database: Database, table: TaskTable, jane: TestClient):
    insert(database, [row("a", **DEAD)])
    address = form_of(jane.get("/tasks/cancel?id=a").text, "/tasks/cancel")
    for change in ({"count": "0"}, {"count": "1e9"}, {"count": ""}, {"operation": "x"}, {"id": ""}):
        answer = jane.post(edited(address, **change), data={"reason": "why", "typed": "1"}, headers=SAME)
        assert answer.status_code == 400, change
        assert operations.latest(table, 10) == []


@pytest.mark.parametrize("job", ["replay", "purge"])
def test_a_job_is_neither_stopped_nor_continued_here(table: TaskTable, jane: TestClient, job: str) -> None:
    """The purge of an archive would not notice it, and go on."""
    begun = operations.begin(table, job, {"archive": "gs://archive/window"})
    assert "/operation/" not in jane.get(f"/operation?id={begun.id}").text
    answer = jane.post(f"/operation/stop?id={begun.id}", data={"reason": "why"}, headers=SAME)
    assert (answer.status_code, "This operation cannot be stopped here" in answer.text) == (400, True)
    answer = jane.post(f"/operation/continue-purge?id={begun.id}", headers=SAME)
    assert (answer.status_code, operations.latest(table, 9)) == (400, [begun])


def test_an_operation_of_a_hostile_id_is_shown_escaped(database: Database, table: TaskTable, jane: TestClient):
    id = f"<b>'\x07{chr(0x202E)}"
    insert(database, [row(id, **DEAD)])
    query = urlencode({"id": id})
    operation = finished(table, begun(jane, f"/tasks/retry?{query}"))
    assert operation.tasks == 1
    for address in ("/operations", f"/operation?id={operation.id}", f"/task?{query}"):
        assert not re.search("<b>|\x07", jane.get(address).text)


def test_a_task_is_shown_in_words(database: Database, table: TaskTable, jane: TestClient):
    """Its place in its key, and who changed it."""
    key = {"OrderingKey": "k", "Topic": "orders"}
    insert(database, [row("head", **DEAD, **key), row("second", **key, CreatedAt=PAST)])
    behind = {"AvailableAt": FUTURE, "BlockedBy": "head", "ExpiresAt": FUTURE, "AtMostOnce": True}
    insert(database, [row("third", **key, **behind, CreatedAt=PAST + timedelta(hours=1))])
    page = jane.get("/task?id=third").text
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    for words in (
        "blocked Waits for the head of its ordering key.",
        "number 3 of the unsent tasks, behind head , which is dead",
        "Delivery at most once",
        "outbox show",
        "the head of its key is checked again in",
        "Open the head of its key",
    ):
        assert words in text
    assert "first: it is the head" in jane.get("/task?id=head").text
    finished(table, begun(jane, "/tasks/retry?id=head", reason=""))
    update(database, "head", AvailableAt=NEVER)
    finished(table, begun(jane, "/tasks/retry?state=dead&topic=orders"))
    jane.post("/task/message?id=head", headers=SAME)  # is recorded, and changes nothing
    jane.app.console.status.forget()  # type: ignore[attr-defined]  # an ASGI callable
    page = jane.get("/task?id=head").text
    assert re.findall(r">([\w ]*changed: \w+ by jane@example.com)", page) == [
        "changed: retry by jane@example.com", "perhaps changed: retry by jane@example.com",
    ]  # fmt: skip
    insert(database, [row("sent", SentAt=CREATED + timedelta(hours=1))])
    assert "changed: retry" not in jane.get("/task?id=sent").text


@pytest.mark.parametrize("is_counted", [True, False])
def test_the_head_of_a_blocked_key_can_be_retried_or_cancelled(
    database: Database, jane: TestClient, monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    """The page says so if not all blocked tasks are counted."""
    if not is_counted:
        for name in ("MAX_TOTAL", "COUNT_LIMIT", "MIN_COUNT_LIMIT"):
            monkeypatch.setattr(backlog, name, 1)
    insert(
        database,
        [row("head", **DEAD, OrderingKey="k"), row("b", OrderingKey="k", AvailableAt=FUTURE, BlockedBy="head")],
    )
    page = jane.get("/blocked").text
    assert re.findall(r'href="(/tasks/[^"]*)">(\w+)<', page) == [
        ("/tasks/retry?id=head", "Retry"), ("/tasks/cancel?id=head", "Cancel"),
    ]  # fmt: skip
    assert ("Not all blocked tasks were counted" in page) != is_counted
    behind = "1 task of the ordering key k waits behind head, and will then be published"
    assert [behind in jane.get(f"/tasks/{name}?id=head").text for name in ("cancel", "retry")] == [True, False]
    update(database, "head", LastError="undecodable: no message")
    jane.app.console.status.forget()  # type: ignore[attr-defined]  # an ASGI callable
    assert re.findall(r'href="/tasks/(\w+)', jane.get("/blocked").text) == ["cancel"]  # no retry can succeed


MESSAGES = {
    "json": (b'{"a": [1, "<b>"]}', "JSON", "&#34;&lt;b&gt;&#34;"),
    "text": ("schön".encode(), "text", "schön"),
    "hex": (b"\xff\xfe\x00", "hex", "ff fe 00"),
    "large": (b"x" * 10_000_000, "text", "10,000,000 bytes, text. The first 65,536 are shown"),
    "nested": (b"[" * 900 + b"1," * 31_000 + b"1" + b"]" * 900, "JSON", f"\n{32 * ' '}[\n{32 * ' '}1,\n"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_shown_on_demand_and_the_view_is_recorded(
    database: Database, table: TaskTable, jane: TestClient, name: str
):
    data, kind, shown = MESSAGES[name]
    insert(database, [row(name, Data=serialized(data, attributes={"type": SCRIPT}))])
    page = jane.get(f"/task?id={name}").text
    assert shown not in page
    assert operations.latest(table, 10) == []
    answer = jane.post(form_of(page, "/task/message"), headers=SAME)
    assert answer.status_code == 200
    assert kind in answer.text
    assert shown in answer.text
    assert "&lt;script&gt;" in answer.text
    assert len(answer.text) < 1_500_000
    [view] = operations.latest(table, 10)
    assert (view.operation, view.principal, view.selection) == ("view", "jane@example.com", f'{{"ids": ["{name}"]}}')


def test_a_message_needs_the_role_and_a_record(database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch):
    """A hook redacts what people see. If the view cannot be recorded, nothing is shown."""
    trace = {"googclient_traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    insert(database, [row("a", Data=serialized(b"secret", attributes=trace)), row("b", Data=b"\xff no message")])
    joe = console(database, person="joe", roles=Roles({Role.DESTROYER: ("joe",)}))
    assert "The message needs the role data" in joe.get("/task?id=a").text
    assert joe.post("/task/message?id=a", headers=SAME).status_code == 403

    def redact(topic: str, attributes: Any, data: bytes) -> Any:
        return {**attributes, "topic": topic}, data.replace(b"secret", b"redacted")

    jane = console(database, redact=redact)
    answer = jane.post("/task/message?id=a", headers=SAME).text
    assert "redacted" in answer
    assert "secret" not in answer
    assert "traceId=0af7651916cd43dd8448eb211c80319c?project=" in answer
    assert "is not a serialized" in jane.post("/task/message?id=b", headers=SAME).text
    assert len(operations.latest(table, 10)) == 2
    outage = Outage(monkeypatch, begins_with=1)
    answer = jane.post("/task/message?id=a", headers=SAME)
    outage.away.clear()
    assert (answer.status_code, "redacted" in answer.text) == (503, False)
    assert len(operations.latest(table, 10)) == 2


def test_a_resend_in_the_browser_publishes_to_the_named_topic(
    database: Database, table: TaskTable, jane: TestClient, pubsub: PubSub
):
    """A topic that is missing, or that of the tasks, is refused, and the form keeps what was typed."""
    to = pubsub.new_subscription(pubsub.new_topic())
    insert(database, [row("a", SentAt=PAST), row("b", SentAt=PAST), row("broken", SentAt=PAST, Data=b"\xff")])
    before, path = rows_of(database), "/tasks/resend?state=sent&topic=orders"
    assert path in html.unescape(jane.get("/tasks?state=sent&topic=orders").text)
    page = html.unescape(jane.get(path).text)
    assert "Resend 3 tasks" in page
    assert "outbox resend" in page
    for form, sentence in (
        ({"to": "orders"}, "is the topic of the tasks"),
        ({"to": "nowhere"}, "nowhere does not exist. Create it"),
        ({"to": "-"}, "is not a name that Pub/Sub allows"),
        ({"to": to.topic, "rate": "0"}, "a whole number from 1 to 1,000,000"),
    ):
        refused = jane.post(form_of(page, "/tasks/resend"), data={"reason": "why", **form}, headers=SAME)
        assert refused.status_code == 400
        assert sentence in html.unescape(refused.text)
        assert f'value="{form["to"]}"' in html.unescape(refused.text)
    assert operations.latest(table, 10) == []
    done = finished(table, begun(jane, path, to=to.topic, rate="500"))
    assert (done.operation, done.tasks, done.selected) == ("resend", 2, 3)
    assert sorted(each.attributes["asynchronous_task_id"] for each in to.drain()) == ["a", "b"]
    text = jane.get(f"/operation?id={done.id}").text
    assert "2 of 3 in the preview" in text
    assert re.search(r"<dt>Not published</dt><dd>1 \w+", text)
    assert rows_of(database) == before
    assert "needs the IDs or the topic" in jane.get("/tasks/resend?state=sent").text


def test_cancelled_tasks_are_found_and_restored(database: Database, table: TaskTable, jane: TestClient) -> None:
    """From the page of the operation, of the task, and by the search."""
    insert(database, [row("task-1"), row("task-2"), row("task-3")])
    before = rows_of(database)
    number = {"count": "3", "typed": "3"}
    cancel = finished(table, begun(jane, "/tasks/cancel?state=pending", reason="wrong", **number))
    shown = html.unescape(jane.get(f"/operation?id={cancel.id}").text)
    [link] = re.findall(r'href="(/tasks\?[^"]+)">The tasks that it has cancelled', shown)
    assert all(name in jane.get(link).text for name in before)
    assert "Restore this task" in jane.get("/search?q=task-2", follow_redirects=True).text
    assert "task-2" in jane.get("/search?q=task").text
    restoring = link.replace("/tasks?", "/tasks/restore?")
    page = jane.get(restoring).text
    assert "Restore 3 tasks" in page
    with mock.patch.object(chunks, "PAGE_IDS", 2):  # a page does not read all of many tasks
        assert "It is not counted how many would follow later tasks" in jane.get(restoring).text
    delete(database, "task-3")  # between the preview and the form
    done = finished(table, begun(jane, restoring, reason="not wrong"))
    assert (done.tasks, rows_of(database)) == (2, {id: before[id] for id in ("task-1", "task-2")})

"""Each change is recorded in its own transactions, and another process continues it. A resend publishes again."""

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import time
import uuid
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.base.values import shown
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.rows.task_table import TaskTable
from outbox.table.controls import TopicControls
from outbox.table.ddl import Layout
from outbox.table.states import CANCELLED, NEVER
from outbox_admin import operations
from outbox_admin.changes import chunks, execution
from outbox_admin.changes.execution import Outcome
from outbox_admin.operations import RECORDED_IDS, Author, NotContinued, Operation
from outbox_admin.schema.reshard import Resharding
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.topics import editing
from tests.support.commands import Commands
from tests.support.console import SAME, console
from tests.support.fakes import serialized
from tests.support.operations import (
    FUTURE,
    MICROSECOND,
    PAST,
    SECOND,
    changed,
    control,
    insert,
    opened,
    row,
    rows_of,
    update,
    update_operation,
)
from tests.support.pubsub import PubSub, Subscription
from tests.support.waiting import eventually

DEAD = {"AvailableAt": NEVER, "Attempts": 9, "LastError": "not_found: no topic\nmore"}
JANE, JOHN = Author("jane@example.com", "the topic exists now"), Author("john@example.com", "wait for the fix")
NAMES = [f"{n:02}" for n in range(24)]
ID = "00000000-0000-0000-0000-000000000001"
SENT = TaskSelection(state="sent", topic="orders", until=PAST + timedelta(hours=1))
CASES = [
    ("retry", TaskSelection(state="dead", until=FUTURE), DEAD),
    ("retry", TaskSelection(ids=tuple(NAMES)), DEAD),
    ("retry", SENT, {"SentAt": PAST}),
    ("cancel", TaskSelection(state="dead", until=FUTURE), DEAD),
    ("purge", TaskSelection(state="sent", until=FUTURE), {"SentAt": PAST}),
    ("restore", TaskSelection(state=CANCELLED, since=PAST), {}),
    ("resend", SENT, {"SentAt": PAST}),
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 3)
    monkeypatch.setattr(chunks, "PAGE_IDS", 4)


def fill(database: Database, columns: dict[str, Any]) -> None:
    insert(database, [row(id, **columns, OrderingKey="k" if int(id) % 4 else None) for id in NAMES])


@pytest.fixture
def to(pubsub: PubSub) -> Subscription:
    """Where tasks are resent."""
    return pubsub.new_subscription(pubsub.new_topic(), ordered=True)


def ids(to: Subscription) -> list[str]:
    return [message.attributes[TASK_ID_ATTRIBUTE] for message in to.drain()]


def begin(table: TaskTable, selection: TaskSelection, name: str = "retry", id: str = ID) -> None:
    assert execution.begin(table, name, selection, JANE, id=id, selected=len(NAMES))[1]


def dead_again(database: Database, ids: tuple[str, ...]) -> None:
    """What a worker does if the reason of the failure remains."""
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "AvailableAt"), [(id, NEVER) for id in ids])


@pytest.mark.parametrize(("name", "selection", "columns"), CASES)
def test_a_change_that_lost_its_process_continues_after_its_last_chunk(  # noqa: PLR0917 - cases
    database: Database, table: TaskTable, to: Subscription, name: str, selection: TaskSelection, columns: dict[str, Any]
):
    """No task is left out, and a retried task that is dead again is not retried twice."""
    fill(database, columns)
    if name == "restore":
        list(execution.change(table, "cancel", TaskSelection(state="unsent", ids=tuple(NAMES))))
    begin(table, execution.resend_to(table, selection, to.topic) if name == "resend" else selection, name)
    done: list[str] = []
    for number in (1, 2, 4, 100):
        process = execution.resume(TaskTable(opened(database)), ID)
        for outcome in itertools.islice(process, number):
            done += outcome.changed
            if name == "retry" and selection.state != "sent":
                dead_again(database, outcome.changed)
        assert operations.found(table, ID).tasks == len(done)
        assert (operations.found(table, ID).finished_at is None) == (number < 100)
    assert sorted(done) == NAMES
    operation = operations.found(table, ID)
    assert (operation.principal, operation.reason, operation.selected) == (JANE.principal, JANE.reason, len(NAMES))
    assert operation.state(table.now()) == "finished"
    with pytest.raises(NotContinued):
        operations.proceed(table, ID, JOHN)
    with pytest.raises(NotContinued):
        list(execution.resume(table, ID))


def test_no_task_is_changed_twice_whichever_transactions_fail(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """Of three one fails, and one is committed without an answer. The last one records the end."""
    fill(database, DEAD)
    begin(table, TaskSelection(state="dead"))
    original, calls = TaskTable.transact, itertools.count()

    def failing(self: TaskTable, tag: str, work: Any) -> Any:
        number = next(calls)
        result = original(self, tag, work) if number % 3 else None
        if number % 3 < 2:
            raise NotReached("Spanner did not answer")
        return result

    monkeypatch.setattr(TaskTable, "transact", failing)
    retried: list[str] = []
    while operations.found(table, ID).finished_at is None:
        with contextlib.suppress(NotReached):
            list(execution.resume(table, ID))
        new = [id for id, columns in rows_of(database).items() if columns["AvailableAt"] != NEVER]
        if new:
            dead_again(database, tuple(new))
            retried += new
        assert operations.found(table, ID).tasks == len(retried)
    assert sorted(retried) == NAMES


def test_what_runs_again_after_a_commit_without_an_answer_has_one_effect_and_its_result(
    database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch
):
    """Of a change with its chunks, of its stop and continuation, of the record of a job, and of a change of a topic."""
    fill(database, DEAD)
    original = TaskTable.transact

    def repeated(self: TaskTable, tag: str, work: Any) -> Any:
        original(self, tag, work)
        return original(self, tag, work)

    monkeypatch.setattr(TaskTable, "transact", repeated)
    begin(table, TaskSelection(state="dead"))
    assert not execution.begin(table, "retry", TaskSelection(state="dead"), JANE, id=ID, selected=0)[1]
    operations.stop(table, ID, JOHN)
    operations.proceed(table, ID, JOHN)
    assert changed(execution.resume(table, ID)) == NAMES
    operations.end(table, operations.begin(table, "replay", {}).id)
    paused = {"orders": (None, TopicControls(paused=True))}
    assert editing.change(table, "pause", ["orders"], {"paused": True}) == paused
    assert editing.change(table, "unset", ["orders"], None) == {"orders": (TopicControls(paused=True), None)}
    found = operations.latest(table, 10)
    names = ["continue", "pause", "replay", "retry", "stop", "unset"]
    assert sorted(each.operation for each in found) == names
    assert all(each.has_ended for each in found)
    assert operations.found(table, ID).tasks == len(NAMES)


@pytest.mark.parametrize("name", ["retry", "resend"])
def test_processes_that_continue_one_operation_share_its_chunks_once(
    database: Database, table: TaskTable, to: Subscription, name: str
):
    """The one that comes second with a chunk ends, as does that of a stopped operation. Each task counts once."""
    fill(database, DEAD if name == "retry" else {"SentAt": PAST})
    begin(table, TaskSelection(state="dead") if name == "retry" else execution.resend_to(table, SENT, to.topic), name)
    first, second = execution.resume(table, ID), execution.resume(TaskTable(opened(database)), ID)
    done = list(next(first).changed)
    with pytest.raises(NotContinued, match="continued by another process"):
        next(second)
    third = execution.resume(table, ID)
    done += next(third).changed
    with pytest.raises(NotContinued):
        next(first)
    operations.stop(table, ID, JOHN)
    with pytest.raises(NotContinued, match="was stopped"):
        next(third)
    operations.proceed(table, ID, JANE)
    done += changed(execution.resume(table, ID))
    assert sorted(done) == NAMES
    assert operations.found(table, ID).tasks == len(NAMES)
    assert sorted(ids(to)) == (NAMES if name == "resend" else [])


#: Columns of a record that nobody can continue, and why.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "other layout": ({"Position": '{"column": "Shard32", "shard": 3, "after": "x"}'}, "number of shards was changed"),
    "no JSON": ({"Position": "no JSON"}, "the row of the operation is malformed"),
    "no object": ({"Position": "[]"}, "the row of the operation is malformed"),
    "no shard": ({"Position": '{"column": "Shard", "shard": "x"}'}, "the row of the operation is malformed"),
    "no count": ({"Tasks": None}, "the row of the operation is malformed"),
}


def test_the_commands_take_the_beginning_of_an_id_that_operations_prints(
    database: Database, table: TaskTable, outbox: Commands
):
    """Not with --yes, and not if several IDs have it."""
    insert(database, [row(id) for id in "abc"])
    for ids in ("ab", "c"):
        assert outbox.here("cancel", *ids, "--reason", "wrong", "--yes").code == 0
    last, first = (line.split()[0] for line in outbox.here("operations").stdout.splitlines()[2:])
    start = next(last[:end] for end in range(4, len(last)) if not first.startswith(last[:end]))
    refused = outbox.here("restore", start, "--yes")
    assert (refused.code, f"is only a prefix of operation {last}" in refused.stderr) == (2, True)
    done = outbox.here("restore", start)
    assert (done.code, done.stdout) == (0, "restored: 1 task\n")
    assert f"{start} is operation {last}" in done.stderr
    other = outbox.here("restore", "00000000", "--json")
    assert (other.code, json.loads(other.stdout)["unchanged"]) == (1, {"00000000": "missing"})
    for id in ("same-1", "same-2"):
        begin(table, TaskSelection(state="dead"), id=id)
    assert "2 operation IDs begin with 'same': same-1, same-2" in outbox.here("operations", "continue", "same").stderr
    assert outbox.here("operations", "continue", first[:-1], "--dry-run").stdout.startswith("cancel by ")


def test_an_operation_that_cannot_be_continued_says_why(database: Database, table: TaskTable, outbox: Commands):
    """By function, command and page. It stays stopped."""
    ids, jane = tuple(map(str, range(RECORDED_IDS + 1))), console(database)
    begin(table, TaskSelection(ids=ids), id="too many")
    for id, (columns, _) in BROKEN.items():
        begin(table, TaskSelection(state="dead"), id=id)
        update_operation(database, id, **columns)
    for id in ("too many", "other layout"):
        operations.stop(table, id, JOHN)
    stop = operations.latest(table, 1)[0]
    assert (stop.operation, stop.selection) == ("stop", '{"operation": "other layout"}')
    for id, reason in {
        "too many": "operation too many cannot be continued: its record does not contain the whole selection",
        stop.id: "is not a retry, resend, cancel, purge or restore",
        "gone": "does not exist",
        **{id: why for id, (_, why) in BROKEN.items()},
    }.items():
        with pytest.raises(OutboxError, match=reason):
            list(execution.resume(table, id))
        for flags in ([], ["--dry-run"]):
            refused = outbox.here("operations", "continue", id, *flags)
            assert (refused.code, refused.stdout) == (1, "")
            assert re.search(reason, refused.stderr)
    for id in ("too many", "other layout"):
        assert operations.found(table, id).stopped_at is not None, "the note of the stop"
    for change, id in itertools.product((operations.stop, operations.proceed), (stop.id, "gone")):
        with pytest.raises(NotContinued, match="is finished, or does not exist"):
            change(table, id, JOHN)
    for id, (_, why) in BROKEN.items():
        answer = jane.post(f"/operation/continue-retry?id={id}", headers=SAME).text
        shown = functools.partial(jane.get, f"/operation?id={id}")
        assert eventually(lambda why=why, page=answer, shown=shown: why in page + shown().text)  # by the first chunk
        assert eventually(lambda shown=shown: "Continue here" in shown().text)


def recorded(table: TaskTable) -> list[Operation]:
    """Return all operations, the oldest first."""
    return operations.latest(table, 100)[::-1]


def test_each_change_has_a_record(database: Database, table: TaskTable):
    """One that changes nothing has one, too. They are listed by operation, topic and person."""
    insert(database, [row("pending")])
    before, person = table.now(), Author("jane@example.com", "no invoices today")
    assert [each.changed for each in execution.change(table, "retry", TaskSelection(ids=("pending", "missing")))] == [
        ()
    ]
    list(execution.change(table, "purge", TaskSelection(state="sent", topic="orders", until=FUTURE)))
    editing.change(table, "pause", ["orders", "bills"], {"paused": True}, person)
    for _ in range(2):  # the second one changes nothing
        editing.change(table, "controls", ["orders"], {"rate_per_second": 0.5, "burst": 3, "max_in_flight": None})
    found = recorded(table)
    assert [(each.operation, each.tasks) for each in found] == [
        ("retry", 0), ("purge", 0), ("pause", None), ("controls", None)
    ]  # fmt: skip
    purged, paused = (json.loads(each.selection) for each in found[1:3])
    assert datetime.fromisoformat(purged.pop("as_of")) < found[1].started_at
    assert purged == {"state": "sent", "topic": "orders", "until": shown(FUTURE), "include_expired": True}
    assert paused == {"topics": {each: {"paused": [None, True]} for each in ("orders", "bills")}}
    assert [each.principal for each in found] == [*[table.principal] * 2, person.principal, table.principal]
    times = [time for each in found for time in (each.started_at, each.finished_at)]
    assert times == sorted(times, key=lambda time: time or FUTURE)
    assert before < times[0]
    assert [each.id for each in operations.latest(table, 2)] == [found[3].id, found[2].id]
    assert operations.latest(table, 9, at=before) == []
    for narrowed, ids in (
        ({"operation": "pause"}, [2]),
        ({"topic": "orders"}, [3, 2, 1]),
        ({"topic": "order"}, []),
        ({"topic": "orders", "operation": "controls"}, [3]),
        ({"principal": "JANE"}, [2]),
    ):
        assert operations.latest(table, 9, **narrowed) == [found[number] for number in ids], narrowed


def test_a_list_compares_the_last_operations_of_each_range_of_ids(
    table: TaskTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all IDs have the same first digit, so they are in one range."""
    monkeypatch.setattr(operations, "new_id", iter("7" * number for number in range(50, 0, -1)).__next__)
    ids = [operations.begin(table, name, {}).id for name in ("cancel", *["view"] * 4)]
    assert [each.id for each in operations.latest(table, 3)] == ids[:1:-1]
    for compared, found in ((4, []), (5, ids[:1])):
        monkeypatch.setattr(operations, "COMPARED", compared)
        assert [each.id for each in operations.latest(table, 1, operation="cancel")] == found


def test_an_id_begins_with_a_random_digit_and_then_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for number in range(200):
        monkeypatch.setattr(operations.time, "time", lambda number=number: 2e9 + number / 1_000)
        ids.append(operations.new_id())
    assert all(str(uuid.UUID(id)) == id for id in ids)
    assert {id[0] for id in ids} == set("0123456789abcdef")
    assert [id[1:] for id in ids] == sorted((id[1:] for id in ids), reverse=True)
    assert all(id[1:] < "01" and uuid.UUID(id).version == 4 for id in ids)


def test_no_task_is_changed_without_a_record(database: Database, table: TaskTable, monkeypatch: pytest.MonkeyPatch):
    """A transaction that is aborted counts once. One whose commit is not answered has recorded the change."""
    insert(database, [row("a", **DEAD)])
    original = TaskTable.transact

    def twice(self: TaskTable, tag: str, work: Any) -> Any:
        def again(transaction: Any) -> Any:
            work(transaction)  # what Spanner does after an abort, except that it drops these mutations
            transaction._transaction._mutations.clear()
            return work(transaction)

        return original(self, tag, again)

    monkeypatch.setattr(TaskTable, "transact", twice)
    list(execution.change(table, "retry", TaskSelection(ids=("a",))))
    [record] = recorded(table)
    assert record.tasks == 1
    monkeypatch.setattr(TaskTable, "transact", lambda *given: (original(*given), original(*given))[1])
    begin(table, TaskSelection(state="dead"))

    monkeypatch.setattr(TaskTable, "transact", original)
    before = rows_of(database)
    monkeypatch.setattr("outbox_admin.operations.as_json", lambda _selection: None)  # the column is NOT NULL
    insert(database, [row("b", **DEAD)])
    with pytest.raises(Exception, match="Selection"):
        list(execution.change(table, "cancel", TaskSelection(state="dead", ids=("b",))))
    assert rows_of(database).keys() == before.keys() | {"b"}


#: Two keys and no key, ten tasks of each. Neither the ID nor SentAt says their order, and five share a CreatedAt.
TASKS = {
    f"{key or 'none'} {9 - n}": {
        "OrderingKey": key,
        "CreatedAt": PAST + n // 5 * SECOND,
        "Sequence": n,
        "SentAt": PAST + (20 - n) * SECOND,
    }
    for n in range(10)
    for key in ("k", "l", None)
}


def begun(table: TaskTable, to: Subscription, selection: TaskSelection = SENT, **more: Any) -> str:
    found = execution.resend_to(table, selection, to.topic, **more)
    assert execution.begin(table, "resend", found, JANE, id=ID, selected=chunks.preview(table, found).tasks)
    return ID


def test_a_resend_repeats_a_chunk_whose_record_is_missing_in_the_order_of_its_keys(
    database: Database, table: TaskTable, to: Subscription
):
    """As after a process that ended between a publish and its record. It publishes to no other topic."""
    insert(database, [row(id, **columns) for id, columns in TASKS.items()])
    insert(database, [row("other", Topic="mails", SentAt=PAST), row("unsent"), row("new", SentAt=table.now())])
    before = rows_of(database)
    list(itertools.islice(execution.resume(table, begun(table, to)), 2))
    update_operation(database, ID, Position=None, Tasks=0)
    assert changed(execution.resume(table, ID)) == sorted(TASKS)
    found = ids(to)
    assert len(found) > len(TASKS)
    assert {*found} == {*TASKS}
    for key in ("k", "l"):
        assert [id for id in dict.fromkeys(found) if id.startswith(key)] == [f"{key} {9 - n}" for n in range(10)]
    assert rows_of(database) == before


def test_ids_that_cannot_be_published_are_named_and_the_others_go(
    database: Database, table: TaskTable, to: Subscription
):
    """Gone, unsent, sent again since the preview, or refused for what they contain."""
    insert(database, [row("unsent"), row("broken", SentAt=PAST, Data=b"\xff")])
    insert(database, [row("b", SentAt=PAST, OrderingKey="k"), row("again", SentAt=PAST)])
    insert(database, [row("a", SentAt=PAST, Data=serialized(b"data", attributes={"n": "1"}))])
    selection = TaskSelection(state="sent", ids=("gone", "a", "unsent", "broken", "b", "again"), until=table.now())
    found = execution.resend_to(table, selection, to.topic)
    assert chunks.preview(table, found).refused == {"missing": 1, "pending": 1}
    begun(table, to, selection)
    update(database, "again", SentAt=COMMIT_TIMESTAMP)
    outcomes = list(execution.resume(table, ID))
    unchanged = {id: why.split(":")[0] for outcome in outcomes for id, why in outcome.unchanged.items()}
    assert unchanged == {"unsent": "unsent", "again": execution.EXCLUDED, "broken": "undecodable", "gone": "missing"}
    a, b = sorted(to.drain(), key=lambda each: str(each.attributes[TASK_ID_ATTRIBUTE]))
    assert (a.data, dict(a.attributes)) == (b"data", {"n": "1", TASK_ID_ATTRIBUTE: "a"})
    assert (b.attributes[TASK_ID_ATTRIBUTE], b.ordering_key) == ("b", "k")
    assert operations.found(table, ID).tasks == 2


@pytest.mark.parametrize("by_ids", [False, True])
def test_a_selection_narrows_by_topic_time_and_key(
    database: Database, table: TaskTable, to: Subscription, by_ids: bool
):
    """Also if IDs are given, so that no task is published that the preview does not count."""
    edges = {"early": -MICROSECOND, "first": 0 * SECOND, "last": SECOND - MICROSECOND, "late": SECOND}
    insert(database, [row(id, SentAt=PAST + time, OrderingKey="k") for id, time in edges.items()])
    insert(database, [row("of l", SentAt=PAST, OrderingKey="l"), row("of none", SentAt=PAST)])
    insert(database, [row("mail", SentAt=PAST, OrderingKey="k", Topic="mails")])
    every = (*edges, "of l", "of none", "mail") if by_ids else None
    window = dataclasses.replace(SENT, since=PAST, until=PAST + SECOND, ordering_key="k", ids=every)
    list(execution.resume(table, begun(table, to, window)))
    assert sorted(ids(to)) == ["first", "last"]


def test_the_rate_limits_tasks_per_second(
    database: Database, table: TaskTable, to: Subscription, monkeypatch: pytest.MonkeyPatch
):
    """Also of a process that continues. A chunk has at most the tasks of a second."""
    insert(database, [row(f"{n}", SentAt=PAST, OrderingKey="k") for n in range(6)])
    waits: list[float] = []
    monkeypatch.setattr(execution, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    outcomes: list[Outcome] = [*itertools.islice(execution.resume(table, begun(table, to, rate=2)), 1)]
    outcomes += execution.resume(table, ID)
    assert [len(outcome.changed) for outcome in outcomes] == [2, 2, 2]
    assert len([each for each in waits if 0 < each <= 1]) == 1, "the second chunk of the second process"


def test_a_resend_that_makes_no_sense_is_refused(database: Database, table: TaskTable):
    insert(database, [row("a", SentAt=PAST)])
    control(database, "orders", PublishTo="orders-v2")
    for selection, topic, sentence in (
        (SENT, "orders-v2", "--to orders-v2 is the topic of the tasks"),
        (dataclasses.replace(SENT, topic=None, ids=("a",)), "orders", "--to orders is the topic of the tasks"),
        (SENT, "-", "--to: topic '-' is not a name that Pub/Sub allows"),
    ):
        with pytest.raises(SettingError, match=sentence):
            execution.resend_to(table, selection, topic)
    assert execution.resend_to(table, SENT, "orders", own=True).to == f"projects/{table.project}/topics/orders"


@pytest.mark.extended
def test_the_record_of_a_reshard_ends_with_it(own_database: Database) -> None:
    """Or with the beginning of its abort, which has a record of its own. The command that was changing then ends."""
    table = TaskTable(opened(own_database))
    resharding = Resharding(table)
    changing = resharding.run(resharding.target(4))
    next(each for each in changing if "poll Shard4" in each)
    assert [each.state(table.now()) for each in operations.latest(table, 9)] == ["unfinished"]
    list(resharding.run(resharding.former(), aborts=True))
    with pytest.raises(OutboxError, match="another command has begun to change the number of shards to 10"):
        list(changing)
    assert list(resharding.snapshot().layouts) == [Layout(10)]
    assert [each.state(table.now()) for each in operations.latest(table, 9)] == ["finished", "stopped"]

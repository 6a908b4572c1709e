"""A resend on the emulators: which tasks go where, in which order, and how it continues. No task is changed."""

import dataclasses
import itertools
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.admin import changes, operations, resend
from outbox.admin.changes import Outcome, TaskSelection
from outbox.admin.operations import Author, NotContinued
from outbox.admin.table import TaskTable
from outbox.errors import SettingError
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.table.ddl import OPERATIONS
from tests.support.operations import MICROSECOND, PAST, SECOND, insert, opened, row, rows_of, update
from tests.support.pubsub import PubSub, Subscription

JANE = Author("jane@example.com", "ticket 4711")
ID = "00000000-0000-0000-0000-000000000001"
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
SENT = TaskSelection(state="sent", topic="orders", until=PAST + timedelta(hours=1))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CHUNK", 3)
    monkeypatch.setattr(changes, "PAGE", 4)


@pytest.fixture
def to(pubsub: PubSub) -> Subscription:
    return pubsub.new_subscription(pubsub.new_topic(), ordered=True)


def begun(table: TaskTable, to: Subscription, selection: TaskSelection = SENT, **more: Any) -> str:
    found = resend.checked(table, selection, to.topic, **more)
    assert changes.begin(table, "resend", found, JANE, id=ID, selected=changes.preview(table, found).tasks)
    return ID


def ids(to: Subscription) -> list[str]:
    return [message.attributes[TASK_ID_ATTRIBUTE] for message in to.drain()]


def of_key(key: str, found: list[str]) -> list[str]:
    return [id for id in dict.fromkeys(found) if id.startswith(key)]


def test_a_resend_that_lost_its_process_continues_after_its_last_chunk(
    database: Database, table: TaskTable, to: Subscription
):
    """A process that ends between a publish and its record lets the next one publish the chunk again, in order."""
    insert(database, [row(id, **columns) for id, columns in TASKS.items()])
    insert(database, [row("other", Topic="mails", SentAt=PAST), row("unsent"), row("new", SentAt=table.now())])
    before = rows_of(database)
    begun(table, to)
    done: list[str] = []
    for chunks in (1, 2, 100):
        process = changes.resume(TaskTable(opened(database)), ID)
        for outcome in itertools.islice(process, chunks):
            done += outcome.changed
        assert operations.found(table, ID).tasks == len(done)
    assert sorted(done) == sorted(TASKS)
    with database.batch() as batch:  # as if the last process had been killed before it wrote the row
        batch.update(OPERATIONS, ("OperationId", "Position", "Tasks", "FinishedAt"), [(ID, None, 0, None)])
    assert sum(len(outcome.changed) for outcome in changes.resume(table, ID)) == len(TASKS)
    found = ids(to)
    assert sorted(found) == sorted([*TASKS, *TASKS])
    for key in ("k", "l"):
        assert of_key(key, found) == [f"{key} {9 - n}" for n in range(10)]
    assert rows_of(database) == before
    operation = operations.found(table, ID)
    assert (operation.operation, operation.principal, operation.reason) == ("resend", JANE.principal, JANE.reason)
    assert (operation.selected, operation.tasks, operation.has_ended) == (len(TASKS), len(TASKS), True)
    with pytest.raises(NotContinued):
        list(changes.resume(table, ID))


def test_a_stopped_resend_and_the_second_of_two_processes_publish_no_further_chunk(
    database: Database, table: TaskTable, to: Subscription
):
    insert(database, [row(id, **columns) for id, columns in TASKS.items()])
    first, second = changes.resume(table, begun(table, to)), changes.resume(table, ID)
    done = next(first).changed
    with pytest.raises(NotContinued, match="continued by another process"):
        next(second)
    operations.stop(table, ID, JANE)
    with pytest.raises(NotContinued, match="was stopped"):
        next(first)
    assert sorted(ids(to)) == sorted(done)
    operations.proceed(table, ID, JANE)
    rest = [id for outcome in changes.resume(table, ID) for id in outcome.changed]
    assert sorted([*done, *rest]) == sorted(TASKS)


def test_ids_that_cannot_be_published_are_named_and_the_others_go(
    database: Database, table: TaskTable, to: Subscription
):
    """Gone, unsent, sent again since the preview, or refused for what they contain."""
    insert(database, [row("a", SentAt=PAST), row("unsent"), row("broken", SentAt=PAST, Data=b"\xff")])
    insert(database, [row("b", SentAt=PAST, OrderingKey="k"), row("again", SentAt=PAST)])
    selection = TaskSelection(state="sent", ids=("gone", "a", "unsent", "broken", "b", "again"), until=table.now())
    found = resend.checked(table, selection, to.topic)
    assert changes.preview(table, found).refused == {"missing": 1, "pending": 1}
    begun(table, to, selection)
    update(database, "again", SentAt=COMMIT_TIMESTAMP)
    outcomes = list(changes.resume(table, ID))
    unchanged = {id: why.split(":")[0] for outcome in outcomes for id, why in outcome.unchanged.items()}
    assert unchanged == {"unsent": "unsent", "again": resend.EXCLUDED, "broken": "undecodable"}
    assert [id for outcome in outcomes for id in outcome.missing] == ["gone"]
    assert sorted(ids(to)) == ["a", "b"]
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
    list(changes.resume(table, begun(table, to, window)))
    assert sorted(ids(to)) == ["first", "last"]


def test_the_rate_limits_tasks_per_second(
    database: Database, table: TaskTable, to: Subscription, monkeypatch: pytest.MonkeyPatch
):
    """Also of a process that continues. A chunk has at most the tasks of a second."""
    insert(database, [row(f"{n}", SentAt=PAST, OrderingKey="k") for n in range(6)])
    waits: list[float] = []
    monkeypatch.setattr(resend, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    outcomes: list[Outcome] = [*itertools.islice(changes.resume(table, begun(table, to, rate=2)), 1)]
    outcomes += changes.resume(table, ID)
    assert [len(outcome.changed) for outcome in outcomes] == [2, 2, 2]
    assert len([each for each in waits if 0 < each <= 1]) == 1, "the second chunk of the second process"


@pytest.mark.parametrize(
    ("selection", "topic", "sentence"),
    [
        (SENT, "orders-v2", "--to orders-v2 is the topic of the tasks"),
        (dataclasses.replace(SENT, topic=None, ids=("a",)), "orders", "--to orders is the topic of the tasks"),
        (SENT, "-", "--to: topic '-' is not a name that Pub/Sub allows"),
    ],
)
def test_a_resend_that_makes_no_sense_is_refused(
    database: Database, table: TaskTable, selection: TaskSelection, topic: str, sentence: str
):
    insert(database, [row("a", SentAt=PAST)])
    with database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ("Topic", "Paused", "PublishTo"), [("orders", False, "orders-v2")])
    with pytest.raises(SettingError, match=sentence):
        resend.checked(table, selection, topic)
    assert resend.checked(table, SENT, "orders", own=True).to == f"projects/{table.project}/topics/orders"

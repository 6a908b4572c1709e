"""`outbox.reader`: each sent task once, in order, whoever marks it, wherever the reader stopped before."""

import itertools
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox import reading
from outbox.admin.table import TaskTable
from outbox.base.schedules import Schedule
from outbox.errors import NotReached
from outbox.reading import Position, SentTasks
from outbox.table.states import NEVER
from tests.support.fakes import serialized
from tests.support.operations import CREATED, DAY, MICROSECOND, SECOND, insert, row, update
from tests.support.waiting import eventually

SECONDS = 30.0
#: Within the retention.
RECENT = datetime.now(UTC) - timedelta(hours=2)


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FOLLOW", Schedule(0.02, 0.02))


def mark(database: Database, *ids: str) -> None:
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), [(id, COMMIT_TIMESTAMP) for id in ids])


def followed(table: TaskTable, position: Position, topic: str | None = None) -> Iterator[str]:
    """Return the IDs of all pages. Each begins where the one before ended, as a text that was stored."""
    more = True
    while more:
        page = SentTasks(table, Position.read(str(position)), topic).page()
        yield from (each["Id"] for each in page.rows)
        position, more = page.end, page.more


def ids(reader: outbox.Reader, number: int | None = None) -> list[str]:
    """Return the IDs of this number of tasks, or of those that are there."""
    found = []
    while len(found) != number and (task := reader.read(timeout=0 if number is None else SECONDS)):
        found.append(task.id)
    return found


def tied_rows() -> list[dict[str, Any]]:
    """Return tasks of which many share SentAt and CreatedAt, as batches and transactions make them."""
    random = Random(1)
    return [
        row(
            f"task {n}", SentAt=RECENT + random.randrange(3) * SECOND, CreatedAt=CREATED + random.randrange(2) * SECOND,
            Sequence=random.choice((None, 30 - n)), Topic="ab"[n % 2],
        )
        for n in range(30)
    ]  # fmt: skip


def place_of(columns: dict[str, Any]) -> tuple[Any, ...]:
    sequence = columns["Sequence"]
    return columns["SentAt"], columns["CreatedAt"], sequence is not None, sequence or 0, columns["Id"]


@pytest.mark.parametrize("size", [1, 4, 100])
def test_pages_miss_no_task_and_repeat_none(
    database: Database, table: TaskTable, size: int, monkeypatch: pytest.MonkeyPatch
):
    """In the order of publishing, wherever a page ends, from each position, of all topics or one."""
    monkeypatch.setattr(reading, "PAGE_ROWS", size)
    rows = sorted(tied_rows(), key=place_of)
    insert(database, [*rows, row("before", SentAt=RECENT - MICROSECOND), row("unsent"), row("dead", AvailableAt=NEVER)])
    order = [each["Id"] for each in rows]
    assert list(followed(table, Position(RECENT))) == order
    for number in range(0, len(rows), 7):
        assert list(followed(table, Position.of(rows[number]))) == order[number + 1 :]
    assert list(followed(table, Position(RECENT), "b")) == [each["Id"] for each in rows if each["Topic"] == "b"]
    assert list(followed(table, Position(RECENT + MICROSECOND), "none")) == []


def test_a_reader_returns_tasks_with_their_messages_and_goes_on_where_another_stopped(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    """After each task. It holds no more than some messages, so a page has more tasks than it takes at once."""
    monkeypatch.setattr(reading, "BUFFER_BYTES", 3 * len(serialized()))
    columns = {"Topic": "b", "Priority": 7, "OrderingKey": "k", "Sequence": 3, "SentAt": RECENT, "CreatedAt": CREATED}
    insert(
        database,
        [*tied_rows(), row("no message", SentAt=RECENT + timedelta(hours=1), Data=b"\xff\xff"), row("a", **columns)],
    )
    order: list[outbox.SentTask] = []
    reader = outbox.reader(database)
    while task := reader.read(timeout=0):
        order.append(task)
        reader = outbox.reader(database, since=reader.position)
    every = list(itertools.takewhile(lambda each: each.id != "no message", outbox.reader(database)))
    assert [each.id for each in every] == [each.id for each in order[:-1]]
    assert len(order) == 32
    assert order[-1].message is None
    found = next(each for each in order if each.id == "a")
    assert found == outbox.SentTask("a", "b", PubsubMessage.wrap(serialized_message()), 7, "k", CREATED, RECENT)


def serialized_message() -> Any:
    return PubsubMessage.pb().FromString(serialized())


def test_a_task_that_is_sent_again_is_returned_again(database: Database):
    insert(database, [row("first"), row("again"), row("once", AtMostOnce=True)])
    mark(database, "first", "again", "once")
    reader = outbox.reader(database)
    assert ids(reader) == ["again", "first", "once"]
    update(database, "again", SentAt=None)
    assert ids(reader) == []
    mark(database, "again")
    assert ids(reader, 1) == ["again"]
    assert ids(reader) == []


def test_a_reader_waits_until_a_task_is_sent_or_it_is_closed(database: Database):
    """Its position passes the tasks of other topics, so that a later start reads them no more."""
    insert(database, [row("a"), row("other", Topic="invoices")])
    reader, began = outbox.reader(database, since=datetime.now(UTC) - DAY, topic="orders"), datetime.now(UTC)
    found = list[str]()
    thread = threading.Thread(target=lambda: found.extend(task.id for task in reader))
    start = time.monotonic()
    assert reader.read(timeout=0.2) is None
    assert 0.2 <= time.monotonic() - start < SECONDS
    with reader:
        thread.start()
        mark(database, "other")
        mark(database, "a")
        eventually(lambda: found == ["a"], seconds=SECONDS)
        position = reader.position
        eventually(lambda: reader.position > position, seconds=SECONDS)
        assert Position.read(reader.position).sent_at > began
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert reader.read() is None


def test_a_position_that_the_retention_has_passed_is_an_error(own_database: Database):
    """A reader that begins there gets the tasks that are left. After that it has a gap if it falls back."""
    kept, gone = datetime.now(UTC) - 6 * DAY, datetime.now(UTC) - 8 * DAY
    insert(own_database, [row("kept", SentAt=kept), row("gone", SentAt=gone)])
    assert ids(outbox.reader(own_database, since=str(Position(kept)))) == ["kept"]
    reader = outbox.reader(own_database, since=str(Position(gone)))
    for _ in range(2):
        with pytest.raises(outbox.PositionExpired, match="deleted: the retention of the table is 7 days"):
            reader.read()
    assert reader.position == str(Position(gone))
    for since in (None, gone, outbox.reader(own_database).position):
        reader = outbox.reader(own_database, since=since)
        assert ids(reader) == ["gone", "kept"]
    reader._sent.position = Position(gone)
    with pytest.raises(outbox.PositionExpired):
        reader.read(timeout=SECONDS)
    own_database.update_ddl(["ALTER TABLE AsynchronousTasks DROP ROW DELETION POLICY"]).result()
    assert ids(outbox.reader(own_database, since=str(Position(gone)))) == ["gone", "kept"]


def test_a_failed_read_loses_no_task(database: Database, monkeypatch: pytest.MonkeyPatch):
    """Also if Spanner fails between a page and its messages. The position stays, and the next call reads again."""
    insert(database, [row("a", SentAt=RECENT)])
    reader = outbox.reader(database, since=RECENT)
    for method in ("strong_query", "query"):
        with monkeypatch.context() as patch:
            patch.setattr(TaskTable, method, mock.Mock(side_effect=NotReached("Spanner is away")))
            with pytest.raises(NotReached):
                reader.read(timeout=SECONDS)
        assert reader.position == str(Position(RECENT))
    assert ids(reader, 1) == ["a"]

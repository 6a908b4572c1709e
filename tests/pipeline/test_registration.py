"""Registration in one Spark task, on a fake table that a contract test compares with the emulator."""

import base64
import contextlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.message import RawPubsubMessage
from outbox.program.settings import DatabaseSettings
from outbox.registration import COLUMNS
from outbox_pipeline.jobs.register import executor
from outbox_pipeline.jobs.register.executor import COUNTS, REGISTER_ROWS, Writer
from outbox_pipeline.spanner import COMMIT_BYTES, Table, open_table
from outbox_pipeline.spark import spark_tasks
from outbox_pipeline.spark.spark_tasks import Pace
from tests.support.operations import Watch, rows_of
from tests.support.pipeline import FakeTable, FakeTime, row

TAG = "outbox-pipeline-register"


def writer(table: Any, *rows: dict[str, Any], **keywords: Any) -> Writer:
    made = Writer(table, table.now(), [].append, **keywords)
    if rows:
        add(made, *rows)
    return made


def add(made: Writer, *rows: dict[str, Any], flush: bool = True) -> None:
    for each in rows:
        made.add(each)
    if flush:
        made.flush()


def answered(made: Any) -> tuple[tuple[int, int, int], list[str]]:
    """Return the counts (registered, existing, repeated) and the reasons of rejects."""
    counts = [made.counts[name] for name in COUNTS]
    reasons = [each["reason"] for each in made.reject.__self__]
    assert counts[3] == len(reasons)
    return (counts[0], counts[1], counts[2]), reasons


def ids(count: int, start: int = 0) -> list[str]:
    return [f"{number:04}" for number in range(start, start + count)]


def plain(*ids: str) -> list[dict[str, Any]]:
    return [row(task_id=id) for id in ids]


def test_the_fake_table_behaves_like_the_real_one(target: DatabaseSettings, database: Database):
    """An insert writes all rows or none. A read returns the existing rows only, with unchanged Data."""
    data = base64.b64encode(b"abcd")

    def story(table: Any) -> list[Any]:
        def made(*names: str, topic: str = "orders") -> list[tuple[Any, ...]]:
            return [(id, topic, data, 7, "k", 1, COMMIT_TIMESTAMP, None, None, False) for id in names]

        seen = ("Id", "Topic", "Data", "OrderingKey")
        began = table.now()
        told: list[Any] = [table.read_ids(seen, ["a", "b"], TAG)]
        told += [table.insert(COLUMNS, made("a", "b"), TAG), table.insert(COLUMNS, made("c", "b", topic="x"), TAG)]
        told += [table.insert(COLUMNS, made("d", "d"), TAG), sorted(table.read_ids(seen, ["d", "b", "c", "a"], TAG))]
        [[created], [other]] = table.read_ids(("CreatedAt",), ["a", "b"], TAG)
        told += [created == other, created >= began, table.insert(COLUMNS, made("c"), TAG), created < table.now()]
        [[second]] = table.read_ids(("CreatedAt",), ["c"], TAG)
        return [*told, second > created]

    real = story(open_table(target))
    assert real == story(FakeTable())
    assert real == [[], True, False, False, [["a", "orders", data, "k"], ["b", "orders", data, "k"]], *[True] * 5]
    assert sorted(rows_of(database)) == ["a", "b", "c"]


def test_every_request_has_low_priority_and_a_tag(database: Database):
    watch = Watch(database)
    table = Table(watch.database)
    made = writer(table, row(task_id="a"), row(task_id="b"))
    add(made, row(task_id="b", topic="others"), row(task_id="c", priority=0))
    assert answered(made) == ((3, 0, 0), ["task ID 'b' occurs twice, with different messages, topics or ordering keys"])
    assert answered(writer(table, row(task_id="c"))) == ((0, 1, 0), [])
    watch.check()
    assert TAG in watch.tags()
    commits = [request for name, request in watch.requests if name == "commit"]
    assert {request.request_options.transaction_tag for request in commits} == {TAG}
    stored = rows_of(database)
    assert sorted(stored) == ["a", "b", "c"]
    assert stored["c"]["Priority"] == 0, "LOW is a priority, and not none"


@pytest.mark.parametrize("older", [True, False])
def test_the_writer_reads_again_after_a_collision(older: bool):
    """CreatedAt of an existing task tells whether this job registered it."""
    table = FakeTable()
    made = writer(table, *plain(*ids(REGISTER_ROWS)))
    began = made.began
    other = writer(table)
    if older:
        table.time = began - timedelta(days=1)
    add(other, *plain(*ids(3, REGISTER_ROWS + 5)))
    table.time += timedelta(days=2)
    table.calls.clear()
    add(made, *plain(*ids(REGISTER_ROWS, REGISTER_ROWS)), flush=False)
    assert table.kinds() == ["insert", "look", "insert"]
    assert len(table.calls[0][1]) == len(table.calls[1][1]) == len(table.calls[2][1]) + 3
    assert answered(made) == ((2 * REGISTER_ROWS - 3, 3, 0) if older else (2 * REGISTER_ROWS, 0, 0), [])


OTHERS = (
    {"topic": "other"}, {"data": b"other"}, {"ordering_key": "k"}, {"ordering_key": "k2"}, {"attributes": {"a": "2"}},
    {"attributes": {}}, {"attributes": {"a": "1", "b": "2"}}, {"data": b""},
)  # fmt: skip
#: What may change after a task has been registered, or is no part of its message.
SAME = (
    {"priority": 1},
    {"sequence": 5},
    {"available_at": datetime(2090, 1, 1, tzinfo=UTC)},
    {"at_most_once": True},
    {},
)


def test_rows_are_compared_with_the_task_in_the_table_and_not_with_a_rejected_row():
    """In whatever chunks they are."""
    exists = "task 'one' exists with another message, topic or ordering key"
    twice = "task ID 'one' occurs twice, with different messages, topics or ordering keys"
    for flush in (False, True):
        table = FakeTable()
        writer(table, row(data=b"zero"))
        made = writer(table)
        for data in (b"one", b"one", b"zero", b"zero", b"one"):
            add(made, row(data=data), flush=flush)
        made.flush()
        assert answered(made) == ((0, 1, 1), [exists, exists, twice])


@pytest.mark.parametrize("where", ["in the table", "in its group", "at the end of the group before"])
def test_a_different_task_of_the_same_id_is_rejected(where: str):
    base = {"attributes": {"a": "1"}}
    for other, refused in [(each, True) for each in OTHERS] + [(each, False) for each in SAME]:
        table = FakeTable()
        made = writer(table)
        made.add(row(**base))
        if where != "in its group":
            made.flush()
        if where == "in the table":
            made = writer(table)
        add(made, row(**(base | other)))
        counted, reasons = answered(made)
        first = 0 if where == "in the table" else 1
        assert counted == (first, int(not refused and not first), int(not refused and bool(first))), other
        reason = "task ID 'one' occurs twice, with different messages, topics or ordering keys"
        if where == "in the table":
            reason = "task 'one' exists with another message, topic or ordering key"
        assert reasons == [reason] * refused, other
        assert len(table.rows) == 1


def test_serialization_does_not_matter_for_equality():
    """Attributes of a message have no order. Data that is not a message is a different task."""
    table = FakeTable()
    writer(table, row(attributes={"a": "1", "b": "2"}))
    [stored] = table.rows.values()
    message = RawPubsubMessage.FromString(base64.b64decode(stored["Data"]))
    parts = [RawPubsubMessage(data=message.data)]
    parts += [RawPubsubMessage(attributes={name: message.attributes[name]}) for name in sorted(message.attributes)]
    spellings = {b"".join(part.SerializeToString() for part in order) for order in (parts, parts[::-1])}
    assert len(spellings) == 2
    for data, there in [*((each, 1) for each in spellings), (b"\xff", 0)]:
        stored["Data"] = base64.b64encode(data)
        again = writer(table, row(attributes={"b": "2", "a": "1"}))
        assert answered(again)[0] == (0, there, 0), data


def test_chunks_have_max_rows_and_max_bytes():
    """A message of 9 MB ends its chunk, and the next message is in another commit."""
    sizes = [9_000_000, 10, 10, 9_000_000, COMMIT_BYTES // 4, COMMIT_BYTES // 4, COMMIT_BYTES // 4, 10, 10]
    table = FakeTable()
    made = writer(table, *(row(task_id=str(number), data=b"x" * size) for number, size in enumerate(sizes)))
    inserts = [given for kind, given, _ in table.calls if kind == "insert"]
    assert inserts == [["0"], ["1", "2", "3"], ["4", "5", "6"], ["7", "8"]]
    assert answered(made) == ((9, 0, 0), [])


def test_only_a_finished_attempt_replaces_the_rejects_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def attempt(number: int, *, killed: bool = False) -> None:
        task = mock.Mock(**{"partitionId.return_value": 3, "taskAttemptId.return_value": number})
        monkeypatch.setattr(executor.TaskContext, "get", lambda: task)
        with contextlib.suppress(KeyboardInterrupt), executor._rejecting(str(tmp_path)) as reject:
            reject(row(reason=f"of {number}"))
            if killed:
                raise KeyboardInterrupt

    for number, killed, kept in ((1, False, 1), (2, True, 1), (3, False, 3)):
        attempt(number, killed=killed)
        [file] = tmp_path.glob("*.json")
        assert (file.name, json.loads(file.read_text())["reason"]) == ("part-00003.json", f"of {kept}")


def test_a_rate_is_a_limit_at_each_time(monkeypatch: pytest.MonkeyPatch):
    """The first chunk waits, too, and a job that was slower than the rate does not catch up."""
    time = FakeTime()
    monkeypatch.setattr(spark_tasks, "time", time)
    made = writer(FakeTable(), pace=Pace(50.0))
    for start, passes, slept in ((0, 0, 1.0), (50, 0, 1.0), (100, 0.5, 0.5), (150, 10, 0), (200, 0, 1.0)):
        time.now += passes
        add(made, *plain(*ids(50, start)), flush=False)
        assert time.slept[-1] == slept
    assert answered(made)[0] == (250, 0, 0)
    assert answered(writer(FakeTable(), *plain(*ids(2 * REGISTER_ROWS))))[0] == (2 * REGISTER_ROWS, 0, 0)
    assert len(time.slept) == 5, "without a rate"
    add(writer(FakeTable(), pace=Pace(4 / 16)), *plain("a", "b"), flush=False)
    assert time.slept[5:] == [4.0, 4.0], "the share of a Spark task is below 1"

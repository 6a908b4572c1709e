"""`register`: one Spark task without Spark, and the job."""

import base64
import dataclasses
import json
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.errors import SettingError
from outbox.message import RawPubsubMessage
from outbox.program.settings import DatabaseSettings
from outbox_pipeline import Registered
from outbox_pipeline.job_settings import RegisterSettings
from outbox_pipeline.jobs import register as job
from outbox_pipeline.rows.register_rows import COUNTS, REGISTER_ROWS, Writer
from outbox_pipeline.rows.texts import task_id
from outbox_pipeline.spanner import COMMIT_BYTES, Table, open_table
from outbox_pipeline.spark import spark_tasks
from outbox_pipeline.spark.spark_tasks import Pace
from tests.support.operations import Watch, rows_of, update
from tests.support.pipeline import Case, FakeTime, counts, fail_after_writes, rejects, row, rows

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


@pytest.fixture
def table(target: DatabaseSettings) -> mock.Mock:
    """The table, which records its calls."""
    return mock.Mock(wraps=open_table(target))


def inserted(table: mock.Mock) -> list[list[str]]:
    """Return the IDs of each insert."""
    return [[each[0] for each in call.args[1]] for call in table.insert.call_args_list]


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
def test_the_writer_reads_again_after_a_collision(older: bool, table: mock.Mock):
    """CreatedAt of an existing task tells whether this job registered it."""
    made = writer(table, *plain(*ids(REGISTER_ROWS)))
    writer(table, *plain(*ids(3, REGISTER_ROWS + 5)))
    made.began += timedelta(days=older)
    table.reset_mock()
    add(made, *plain(*ids(REGISTER_ROWS, REGISTER_ROWS)), flush=False)
    assert [name for name, _, _ in table.method_calls] == ["insert", "read_ids", "insert"]
    assert list(map(len, inserted(table))) == [REGISTER_ROWS, REGISTER_ROWS - 3]
    assert answered(made) == ((2 * REGISTER_ROWS - 3, 3, 0) if older else (2 * REGISTER_ROWS, 0, 0), [])


OTHERS = (
    {"topic": "other"}, {"data": b"other"}, {"ordering_key": "k"}, {"ordering_key": "k2"}, {"attributes": {"a": "2"}},
    {"attributes": {}}, {"attributes": {"a": "1", "b": "2"}}, {"data": b""},
)  # fmt: skip
#: What may change after a task has been registered, or is no part of its message.
SAME = (
    {"priority": 1}, {"sequence": 5}, {"available_at": datetime(2090, 1, 1, tzinfo=UTC)}, {"at_most_once": True}, {},
)  # fmt: skip


def test_rows_are_compared_with_the_task_in_the_table_and_not_with_a_rejected_row(table: mock.Mock):
    """In whatever chunks they are."""
    for id, flush in (("a", False), ("b", True)):
        writer(table, row(task_id=id, data=b"zero"))
        made = writer(table)
        for data in (b"one", b"one", b"zero", b"zero", b"one"):
            add(made, row(task_id=id, data=data), flush=flush)
        made.flush()
        exists = f"task '{id}' exists with another message, topic or ordering key"
        twice = f"task ID '{id}' occurs twice, with different messages, topics or ordering keys"
        assert answered(made) == ((0, 1, 1), [exists, exists, twice])


@pytest.mark.parametrize("where", ["in the table", "in its group", "at the end of the group before"])
def test_a_different_task_of_the_same_id_is_rejected(where: str, table: mock.Mock, database: Database):
    for n, other in enumerate((*OTHERS, *SAME)):
        base, refused = row(task_id=f"{n}", attributes={"a": "1"}), n < len(OTHERS)
        made = writer(table)
        made.add(base)
        if where != "in its group":
            made.flush()
        if where == "in the table":
            made = writer(table)
        add(made, base | other)
        counted, reasons = answered(made)
        first = 0 if where == "in the table" else 1
        assert counted == (first, int(not refused and not first), int(not refused and bool(first))), other
        reason = f"task ID '{n}' occurs twice, with different messages, topics or ordering keys"
        if where == "in the table":
            reason = f"task '{n}' exists with another message, topic or ordering key"
        assert reasons == [reason] * refused, other
    assert len(rows_of(database)) == n + 1


def test_serialization_does_not_matter_for_equality(table: mock.Mock, database: Database):
    """Attributes of a message have no order. Data that is not a message is a different task."""
    writer(table, row(attributes={"a": "1", "b": "2"}))
    message = message_of(rows_of(database)["one"])
    parts = [RawPubsubMessage(data=message.data)]
    parts += [RawPubsubMessage(attributes={name: message.attributes[name]}) for name in sorted(message.attributes)]
    spellings = {b"".join(part.SerializeToString() for part in order) for order in (parts, parts[::-1])}
    assert len(spellings) == 2
    for data, there in [*((each, 1) for each in spellings), (b"\xff", 0)]:
        update(database, "one", Data=base64.b64encode(data))
        again = writer(table, row(attributes={"b": "2", "a": "1"}))
        assert answered(again)[0] == (0, there, 0), data


def test_chunks_have_max_rows_and_max_bytes(table: mock.Mock):
    """A message of 9 MB ends its chunk, and the next message is in another commit."""
    sizes = [9_000_000, 10, 10, 9_000_000, COMMIT_BYTES // 4, COMMIT_BYTES // 4, COMMIT_BYTES // 4, 10, 10]
    made = writer(table, *(row(task_id=str(number), data=b"x" * size) for number, size in enumerate(sizes)))
    assert inserted(table) == [["0"], ["1", "2", "3"], ["4", "5", "6"], ["7", "8"]]
    assert answered(made) == ((9, 0, 0), [])


def test_a_rate_is_a_limit_at_each_time(monkeypatch: pytest.MonkeyPatch, table: mock.Mock):
    """The first chunk waits, too, and a job that was slower than the rate does not catch up."""
    time = FakeTime()
    monkeypatch.setattr(spark_tasks, "time", time)
    made = writer(table, pace=Pace(50.0))
    for start, passes, slept in ((0, 0, 1.0), (50, 0, 1.0), (100, 0.5, 0.5), (150, 10, 0), (200, 0, 1.0)):
        time.now += passes
        add(made, *plain(*ids(50, start)), flush=False)
        assert time.slept[-1] == slept
    assert answered(made)[0] == (250, 0, 0)
    assert answered(writer(table, *plain(*ids(2 * REGISTER_ROWS, 250))))[0] == (2 * REGISTER_ROWS, 0, 0)
    assert len(time.slept) == 5, "without a rate"
    add(writer(table, pace=Pace(4 / 16)), *plain("a", "b"), flush=False)
    assert time.slept[5:] == [4.0, 4.0], "the share of a Spark task is below 1"


def settings(case: Case, **given: str) -> RegisterSettings:
    return RegisterSettings.read(case.options(rejects=f"{case.folder}/no", topic="usual", **given), {})


def run(case: Case, given: RegisterSettings) -> Registered:
    return Registered(**job.run(case.spark, given))


def message_of(stored: dict[str, Any]) -> Any:
    return RawPubsubMessage.FromString(base64.b64decode(stored["Data"]))


def test_a_table_of_the_catalog_is_an_input(case: Case):
    """A column of its folders keeps the type that the table declares."""
    where = f"USING parquet PARTITIONED BY (month) LOCATION '{case.folder}/invoices'"
    case.spark.sql(f"CREATE TABLE invoices (data STRING, topic STRING, month DATE) {where}")
    case.spark.sql("INSERT INTO invoices VALUES ('a', 'orders', DATE '2026-11-01'), ('b', NULL, DATE '2026-12-01')")
    try:
        given = settings(case, input_table="invoices", key="month")
        others = {"key": "", "select": "upper(data) AS data, topic"}
        done = [run(case, each) for each in (given, given, dataclasses.replace(given, **others))]
    finally:
        case.spark.sql("DROP TABLE invoices")
    assert [counts(each) for each in done] == [(2, 2, 0, 0, 0), (2, 0, 2, 0, 0), (2, 2, 0, 0, 0)]
    assert sorted(message_of(each).data for each in case.rows().values()) == [b"A", b"B", b"a", b"b"]
    topics = {id: each["Topic"] for id, each in case.rows().items() if message_of(each).data.islower()}
    assert topics == {task_id("orders", "2026-11-01"): "orders", task_id("usual", "2026-12-01"): "usual"}


def test_rejected_rows_can_be_corrected_and_registered(case: Case):
    """A rejected row has all its columns if it could be parsed, otherwise its line. Times are exact."""
    path = case.folder / "rows.jsonl"
    bad = {
        "topic": "goog", "data_base64": base64.b64encode(b"\xff" * 100).decode(), "attributes": {"a": "é\n"},
        "priority": -3, "ordering_key": "", "available_at": "2090-01-01T01:00:00.000001+01:00", "at_most_once": True,
        "expires_at": "2090-01-01T00:00:00.000002Z", "n": "7",
    }  # fmt: skip
    lines = [bad, {"data": "x", "n": "8"}, {"data": "y", "n": "9", "priority": "high"}, {"data": "z"}]
    path.write_bytes("\n".join(map(json.dumps, lines)).encode() + b'\n{"data":"\xff"}\n{"data":"a"} {"data":"b"}\n')
    given = settings(case, input=str(path), key="n ")
    done = run(case, given)
    assert counts(done) == (6, 1, 0, 0, 5)
    found = rejects(done.rejects)
    [by_name] = [each for each in found if "goog" in each["reason"]]
    assert by_name["task_id"] == task_id("goog", "7")
    assert by_name["available_at"] == "2090-01-01T00:00:00.000001Z"
    assert [(each["reason"].partition(" ")[0], each.get("line")) for each in found if each is not by_name] == [
        ("key", '{"data": "z"}'),
        ("priority", '{"data": "y", "n": "9", "priority": "high"}'),
        ("the", '{"data":"a"} {"data":"b"}'),
        ("the", '(invalid UTF-8 was replaced) {"data":"\ufffd"}'),
    ]
    # Uncorrected, they are rejected again.
    again = run(case, settings(case, input=f"{done.rejects}/*.json"))
    assert counts(again) == (5, 0, 0, 0, 5)
    # Corrected, they are registered.
    corrected = [by_name | {"topic": "orders"}, json.loads(found[1]["line"]) | {"priority": 1}]
    path.write_text("\n".join(map(json.dumps, corrected)))
    assert counts(run(case, given)) == (2, 2, 0, 0, 0)
    stored = case.rows()
    assert set(stored) == {task_id("usual", "8"), task_id("usual", "9"), task_id("goog", "7")}
    one = stored[task_id("goog", "7")]
    assert (one["Topic"], one["Priority"], one["OrderingKey"], one["AtMostOnce"]) == ("orders", -3, None, True)
    assert message_of(one).data == b"\xff" * 100
    assert message_of(one).attributes["a"] == "é\n"
    assert one["AvailableAt"] == datetime(2090, 1, 1, 0, 0, 0, 1, UTC)
    assert one["ExpiresAt"] == datetime(2090, 1, 1, 0, 0, 0, 2, UTC)


def test_empty_input_and_a_single_row(case: Case):
    unknown = case.spark.createDataFrame([("d", "orders", 1)], "data string, topic string, colour int")
    with pytest.raises(SettingError, match="Unknown column 'colour'"):
        case.register(unknown)
    one = case.spark.createDataFrame([("d", "orders")], "data string, topic string")
    for given, count in ((one.limit(0), 0), (one.where("false"), 0), (one, 1)):
        assert counts(case.register(given)) == (count, count, 0, 0, 0)
        assert len(case.rows()) == count
    assert list(case.folder.iterdir()) == []


def test_a_rate_applies_to_all_spark_tasks_together(case: Case):
    """Each Spark task that can run at once gets an equal share of the rate. Without a rate there is no limit."""
    given = case.spark.createDataFrame([("d", "orders")], "data string, topic string")
    with (
        mock.patch.object(job, "map_rows", wraps=job.map_rows) as mapped,
        mock.patch.object(job, "in_order", wraps=job.in_order) as ordered,
    ):
        assert case.register(given, max_rows_per_second=1000).registered == 1
        assert case.register(given).existing == 1
    tasks = case.spark.sparkContext.defaultParallelism
    assert [call.args[-1] for call in mapped.call_args_list] == [1000 / tasks, 0.0]
    assert [call.args[1] for call in ordered.call_args_list] == [tasks, 0]


def test_a_retried_spark_task_registers_no_task_twice(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Every Spark task fails twice, after writing a part and after writing all rows. Each row is counted once."""
    there = [{"data": f"there {number}".encode()} for number in range(150)]
    assert case.register(rows(case.spark, there), topic="orders").registered == 150
    keyed = [
        {"data": str(number).encode(), "ordering_key": f"k{number % 3}", "sequence": number} for number in range(450)
    ]
    plain = [{"data": f"plain {number}".encode()} for number in range(300)]
    bad = [{"data": b"bad", "topic": "goog"}, {"data": b"bad", "at_most_once": True, "ordering_key": "k1"}]
    given = [*keyed, *plain, *there, *bad, *plain[:20], *keyed[:10], *there[:5]]
    monkeypatch.setattr(job, "register_rows", partial(fail_after_writes, job.register_rows))
    done = case.register(rows(case.spark, given, 3), topic="orders")
    assert counts(done) == (len(given), 750, 150, 35, 2)
    stored = case.rows()
    assert len(stored) == 900
    for key in ("k0", "k1", "k2"):
        of_key = [each for each in stored.values() if each["OrderingKey"] == key]
        assert len(of_key) == 150
    assert len(list(Path(str(done.rejects)).glob("*.json"))) >= 1
    monkeypatch.undo()
    assert counts(case.register(rows(case.spark, given), topic="orders"))[1:3] == (0, 900)

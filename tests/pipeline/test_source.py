"""The format `outbox`: its planner and parts without Spark, reads and writes with Spark, whatever Spark repeats."""

import itertools
import json
import random
import subprocess
import sys
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import EqualTo, GreaterThan, InputPartition
from pyspark.testing import assertSchemaEqual

from outbox.base.values import shown
from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.program.settings import DatabaseSettings
from outbox.rows.task_table import TaskTable
from outbox.table.ddl import Layout
from outbox.table.states import NEVER, STATES
from outbox_admin.schema.reshard import Resharding
from outbox_admin.tasks import task_sql
from outbox_pipeline import schemas, spanner
from outbox_pipeline.jobs.register import register_stream
from outbox_pipeline.rows.texts import task_id
from outbox_pipeline.source import parts
from outbox_pipeline.source.datasource import OF_READER, OutboxReader, parse_options
from outbox_pipeline.source.parts import IdsPart, KeyPart, SentPart
from outbox_pipeline.spark.stack_traces import error_from
from pyspark_outbox import OutboxDataSource
from tests.support.operations import COLUMNS, FUTURE, PAST, insert, opened, row, rows_of, update
from tests.support.pipeline import Case, counts, options, rejects
from tests.support.proxy import Proxy
from tests.support.rpc import Faulty
from tests.support.spanner import place

#: Where a day of sent tasks begins.
DAY = datetime(2026, 6, 1, tzinfo=UTC)
#: Whoever chooses ids himself, chooses what is in no range of random UUIDs.
ODD_IDS = ("0", "00000000", "7fffffff", "80000000", "ffffffff", "ffffffff-z", "Zebra", "zebra", "ä", "😀", " ", "\x01")


def reader_of(target: DatabaseSettings, **given: str) -> OutboxReader:
    source = OutboxDataSource(options(target, **given))
    return source.reader(source.schema())


def read(target: DatabaseSettings, **given: str) -> pa.Table:
    reader = reader_of(target, **given)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches, batches[0].schema) if batches else pa.table({})


def ids(table: pa.Table) -> list[str]:
    return sorted(table["Id"].to_pylist()) if table.num_rows else []


@pytest.fixture
def every_state(database: Database) -> dict[str, str]:
    """A table with tasks of every state in several topics. Returns the states by ID, computed in SQL."""
    chance = random.Random(8)
    names = ("AvailableAt", "Attempts", "OrderingKey", "BlockedBy", "CancelledBy")
    of_each = itertools.product(
        (None, PAST, FUTURE, NEVER), (-1, 0, 2), (None, "k"), (None, "head"), (None, "one"), (None, DAY)
    )
    made = []
    for number, (*values, sent) in enumerate(of_each):
        columns = dict(zip(names, values, strict=True)) | {
            "Topic": f"topic{number % 3}", "SentAt": sent and sent + timedelta(microseconds=number),
            "Sequence": number if number % 2 else None, "ExpiresAt": FUTURE if number % 7 == 0 else None,
            "AtMostOnce": values[2] is None and number % 5 == 0, "Priority": -number,
        }  # fmt: skip
        made.append(row(f"{chance.getrandbits(64):016x}", **columns))
    insert(database, made)
    statement = task_sql.task("Id").replace("WHERE Id = @id", "")
    return {id: state for _, state, id in TaskTable(opened(database)).query(statement, "outbox-show")}


def test_every_column_matches_the_table(every_state: dict[str, str], target: DatabaseSettings, database: Database):
    got = {each["Id"]: each for each in read(target, columns=",".join(schemas.SOURCE.fieldNames())).to_pylist()}
    assert {id: each["State"] for id, each in got.items()} == every_state
    assert set(every_state.values()) == set(STATES)
    for id, expected in rows_of(database).items():
        task = got[id]
        data, _ = task.pop("Data"), expected.pop("Data")
        assert {name: task[name] for name in expected} == expected
        assert task["Bytes"] == len(data)
        assert task["Shard"] in range(10)
        message = PubsubMessage.deserialize(data)
        assert task["Payload"] == message.data
        assert dict(task["Attributes"]) == {**message.attributes, "asynchronous_task_id": id}


def test_every_task_is_read_once_for_any_kind_of_id(target: DatabaseSettings, database: Database):
    chance = random.Random(7)
    for empty in ({}, {"state": "sent", "since": "1h"}):
        assert read(target, **empty).num_rows == 0
    made = [*ODD_IDS, *(f"{chance.getrandbits(128):032x}" for _ in range(60))]
    insert(database, [row(id) for id in made])
    for count in (1, 2, 7, 100):
        assert ids(read(target, columns="Id", partitions=str(count))) == sorted(made), count


def test_options_select_tasks(every_state: dict[str, str], target: DatabaseSettings, database: Database):
    stored = rows_of(database)
    cases: list[dict[str, str]] = [{"state": state} for state in STATES]
    cases += [{"topic": "topic1"}, {"topic": "none"}, {"state": "sent", "topic": "topic2"}]
    for narrowed in cases:
        expected = [
            id
            for id, each in stored.items()
            if narrowed.get("state") in (None, every_state[id]) and narrowed.get("topic") in (None, each["Topic"])
        ]
        assert ids(read(target, columns="Id", **narrowed)) == sorted(expected), narrowed


@pytest.mark.parametrize("few", [True, False])
def test_bounds_are_exact_to_the_microsecond(target: DatabaseSettings, database: Database, few: bool):
    """`since` is inclusive and `until` exclusive, in reads of the index and of the table."""
    times = [DAY + timedelta(microseconds=number) for number in range(6)]
    insert(database, [row(f"sent{number}", SentAt=time) for number, time in enumerate(times)])
    insert(database, [row(f"cancelled{n}", SentAt=time, CancelledBy="an operation") for n, time in enumerate(times)])
    insert(database, [row(f"unsent{number}") for number in range(60 if few else 0)])
    for state in ("sent", "cancelled"):
        given = {"columns": "Id", "state": state, "since": shown(times[1]), "until": shown(times[4]), "partitions": "3"}
        kinds = {type(each.value[0]) for each in reader_of(target, **given).partitions()}
        assert kinds == ({parts.SentPart} if few else {parts.KeyPart})
        assert ids(read(target, **given)) == [f"{state}{number}" for number in (1, 2, 3)]
        assert ids(read(target, **given, topic="other")) == []
        assert ids(read(target, columns="Id", since=shown(times[5]), state=state)) == [f"{state}5"]


def test_bounds_apply_to_created_at_of_unsent_tasks(target: DatabaseSettings, database: Database):
    insert(database, [row("old", CreatedAt=PAST), row("new", CreatedAt=DAY), row("sent", CreatedAt=PAST, SentAt=DAY)])
    assert ids(read(target, since=shown(DAY))) == ["new", "sent"]
    assert ids(read(target, until=shown(DAY))) == ["old"]


def test_all_parts_read_at_one_timestamp(target: DatabaseSettings, database: Database):
    insert(database, [row(id) for id in ("1", "9")])
    reader = reader_of(target, columns="Id,SentAt")
    planned = reader.partitions()
    then = planned[0].value[2]
    insert(database, [row(id) for id in ("0", "5", "f")])
    update(database, "1", SentAt=DAY)
    read_now = [batch for part in planned for batch in reader.read(part)]
    assert pa.Table.from_batches(read_now).to_pylist() == [{"Id": "1", "SentAt": None}, {"Id": "9", "SentAt": None}]
    assert ids(read(target, columns="Id", readTimestamp=shown(then))) == ["1", "9"]
    assert len(ids(read(target, columns="Id"))) == 5


def test_an_unreadable_timestamp_is_an_error_that_says_why(target: DatabaseSettings):
    """A timestamp before the retention period, in the future, or of a part that is read too late."""
    with pytest.raises(OutboxError, match="version_retention_period"):
        read(target, readTimestamp="2h")
    with pytest.raises(SettingError, match="is in the future"):
        read(target, readTimestamp=shown(datetime.now(UTC) + timedelta(hours=1)))
    reader = reader_of(target)
    [part, *_] = reader.partitions()
    of_table, selection, at, layout = part.value
    part = InputPartition((of_table, selection, at - timedelta(hours=2), layout))
    with pytest.raises(OutboxError, match=r"cannot be read as of.*version_retention_period"):
        list(reader.read(part))


@pytest.mark.parametrize("narrowed", [{}, {"state": "sent", "since": shown(DAY)}])
def test_a_session_reads_on_after_the_number_of_shards_was_changed(own_database: Database, narrowed: dict[str, str]):
    """Spark's processes keep their client and what they know about the table for hours."""
    insert(own_database, [row("sent", SentAt=DAY), *(row(f"{number}") for number in range(9))])
    target = place(own_database.database_id)
    before = ids(read(target, **narrowed))
    resharding = Resharding(TaskTable(opened(own_database)))
    assert list(resharding.run(resharding.target(4)))
    reader = reader_of(target, **narrowed)
    planned = reader.partitions()
    reader._table.layout = Layout(10)  # as in the process of an executor
    assert sorted(id for part in planned for batch in reader.read(part) for id in batch["Id"].to_pylist()) == before


def test_a_part_holds_one_batch_in_memory(
    target: DatabaseSettings, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """In reads of the table and of the index, a batch is limited in tasks and bytes."""
    big = PubsubMessage(data=b"x" * 1_000)
    insert(database, [row(f"{n:02}", SentAt=DAY, Data=PubsubMessage.serialize(big)) for n in range(20)])
    insert(database, [row(f"unsent{n:02}") for n in range(60)])
    for name, limit, weight in (("ARROW_ROWS", 7, lambda _payload: 1), ("ARROW_BYTES", 3_000, len)):
        with monkeypatch.context() as patch:
            patch.setattr(parts, name, limit)
            for narrowed, number in (({}, 80), ({"state": "sent", "since": shown(DAY)}, 20)):
                reader = reader_of(target, columns="Id,Payload", partitions="1", **narrowed)
                batches = [batch for part in reader.partitions() for batch in reader.read(part)]
                assert sum(batch.num_rows for batch in batches) == number
                assert len(batches) >= 20 * weight(b"x" * 1_000) / limit
                for batch in batches:  # the last one of a batch may be what fills it
                    assert sum(map(weight, batch["Payload"].to_pylist()[:-1])) < limit


def test_a_body_that_is_not_a_message_is_null(target: DatabaseSettings, database: Database):
    """Invalid rows of other programs do not end a job. An empty message is a message."""
    insert(database, [row("bad", Data=b"\xff\xff"), row("empty", Data=b"")])
    for columns in ("Id,Payload", "Id,Attributes", "Id,Attributes,Payload"):
        got = {each["Id"]: each for each in read(target, columns=columns).to_pylist()}
        for name in columns.split(",")[1:]:
            assert got["bad"][name] is None
            assert got["empty"][name] == {"Payload": b"", "Attributes": [("asynchronous_task_id", "empty")]}[name]


def test_invalid_options_are_named(target: DatabaseSettings):
    cases: tuple[tuple[dict[str, str], str], ...] = (
        ({"stat": "sent"}, "Unknown option stat"),
        ({"state": "gone"}, "Option state: 'gone' is not allowed. It must be pending, retrying"),
        ({"columns": "Id,Nope"}, "Option columns: 'Id,Nope' is not allowed"),
        ({"columns": "Id,Id"}, "unique names"),
        ({"since": "yesterday"}, "Option since: 'yesterday' is not allowed"),
        ({"partitions": "0"}, "Option partitions: '0'"),
        ({"since": "1h", "until": "2h"}, "is not before until"),
        ({"project": "-"}, "--project: '-' is not allowed"),
    )
    for wrong, sentence in cases:
        with pytest.raises(SettingError, match=sentence):
            read(target, **wrong)
    upper = {name.upper(): value for name, value in options(target).items()}
    assert parse_options(upper, OF_READER) == parse_options(options(target), OF_READER)
    with pytest.raises(NotReached, match="not-there"):
        read(target, database="not-there")


def test_executors_use_the_endpoint_of_the_options(case: Case, emulators: Emulators):
    """Also where the emulator's variable names another address."""
    case.insert([row("a")])
    with Proxy(emulators.spanner_host) as network, Faulty(emulators.spanner_host, network) as server:
        found = tasks(case.spark, case.target, spannerEndpoint=f"http://{network.address}").collect()
    assert [each["Id"] for each in found] == ["a"]
    assert server.seen["StreamingRead", None] > 0


def test_every_call_waits_for_spanner_as_long_as_a_commit(target: DatabaseSettings, monkeypatch: pytest.MonkeyPatch):
    """Also the one for a session, for which a worker waits 5 s. So a job survives an outage of a minute."""
    monkeypatch.setattr(spanner, "CALL_SECONDS", 0.2)
    monkeypatch.setenv("SPANNER_EMULATOR_HOST", "127.0.0.1:9")
    with pytest.raises(NotReached, match=r"Timeout of 0\.2s exceeded"):
        spanner.open_table(target)


def test_the_version_retention_period_of_the_database_applies(
    target: DatabaseSettings, monkeypatch: pytest.MonkeyPatch
):
    """1 hour, unless the database has another value. The emulator accepts the option but does not return it."""
    table = spanner.open_table(target)
    assert table.retention() == timedelta(hours=1)
    for rows, hours in (([], 1), ([["1h"]], 1), ([["7d"]], 168), ([["5400s"]], 1.5), ([["90m"]], 1.5)):
        monkeypatch.setattr(table, "query", lambda *_arguments, rows=rows: rows)
        assert table.retention() == timedelta(hours=hours), rows


def tasks(spark: SparkSession, target: DatabaseSettings, schema: str | None = None, **more: str) -> DataFrame:
    reader = spark.read.format("outbox").options(**options(target) | more)
    return (reader.schema(schema) if schema else reader).load()


def test_the_table_can_be_read_as_a_dataframe(case: Case):
    case.insert([row("a", OrderingKey="k", Priority=7), row("b", Topic="other")])
    plain = tasks(case.spark, case.target)
    assertSchemaEqual(plain.schema, schemas.STORED)
    got = {each.Id: each.asDict() for each in plain.collect()}
    assert got["a"]["Priority"] == 7
    assert got["a"]["OrderingKey"] == "k"
    for name in COLUMNS:
        assert (got["b"][name] is None) == (case.rows()["b"][name] is None), name
    whole = tasks(case.spark, case.target, columns=",".join(schemas.SOURCE.fieldNames()))
    assertSchemaEqual(whole.schema, schemas.SOURCE)
    assert whole.where("State = 'pending' AND Attributes['asynchronous_task_id'] = Id").count() == 2
    own = tasks(case.spark, case.target, "Topic STRING, Id STRING, Attributes MAP<STRING, STRING>")
    assert min(own.collect())[:2] == ("orders", "a")


def payload(stored: dict[str, Any]) -> str:
    return PubsubMessage.deserialize(b64decode(stored["Data"])).data.decode()


def write(rows: DataFrame, target: DatabaseSettings, **more: str) -> None:
    rows.write.format("outbox").options(**options(target, **more)).mode("append").save()


ROWS = (
    "SELECT 'a' AS data, 'orders' AS topic, map('k', 'v') AS attributes, 7 AS priority, 'o' AS ordering_key, "
    "TIMESTAMP'2090-01-01 00:00:00Z' AS available_at, NULL AS expires_at UNION ALL "
    "SELECT 'b', NULL, NULL, NULL, NULL, NULL, '2090-01-01T00:00:00Z'"
)


def test_a_written_row_is_the_task_that_the_job_registers(case: Case):
    rows = case.spark.sql(ROWS)
    write(rows, case.target, topic="usual")
    stored = case.rows()
    assert len(stored) == 2
    assert {each["Topic"]: each["Priority"] for each in stored.values()} == {"orders": 7, "usual": 50}
    write(rows.repartition(3), case.target, topic="usual")
    assert case.rows() == stored
    assert counts(case.register(rows, topic="usual")) == (2, 0, 2, 0, 0)


def test_a_sink_ends_at_a_rejected_row(case: Case):
    """A row is rejected, and named, for the same reasons as in the job. A task of the same ID is one of them."""
    names = "n int, data string, topic string, ordering_key string, priority string"
    given = case.spark.createDataFrame(
        [(1, "a", "orders", None, "5"), (2, "b", "goog", None, "5"), (3, "c", "orders", None, "x")], names
    )
    write(given.where("n = 1"), case.target, key=" n ")
    for number, data, said in (
        (1, "other", f"task '{task_id('orders', '1')}' exists with another message, topic or ordering key. The row is"),
        (2, "b", "topic 'goog'"),
        (3, "c", 'priority x is not a whole number. The row is {"n":3,"data":"c"'),
    ):
        with pytest.raises(PySparkException) as raised:
            write(given.where(f"n = {number}").withColumn("data", f.lit(data)), case.target, key="n")
        assert str(error_from(str(raised.value))).startswith(f"A row is rejected: {said}")
        assert "Traceback" not in str(raised.value)


def test_tasks_are_copied_to_another_database(case: Case, own_database: Database):  # OUT-SPARK-3
    """With their IDs, messages and columns, in the order of their keys, without a change of names."""
    keyed = [row(f"{9 - n}", OrderingKey="k", Sequence=-n, CreatedAt=DAY + timedelta(hours=n)) for n in range(8)]
    case.insert(
        [*keyed, row("at", AvailableAt=FUTURE, Priority=7), row("end", ExpiresAt=FUTURE), row("sent", SentAt=DAY)]
    )
    copy = place(own_database.database_id)
    rows = tasks(case.spark, case.target).where("SentAt IS NULL").orderBy("Id")
    write(rows.coalesce(1), copy, maxRowsPerSecond="1000")
    columns = ("Id", "Topic", "Data", "OrderingKey", "Sequence", "CreatedAt", "AvailableAt", "1 AS Shard")
    write(rows.selectExpr(*columns), copy)
    made, given = rows_of(own_database), case.rows()
    assert made.keys() == given.keys() - {"sent"}
    for name in ("Topic", "Priority", "OrderingKey", "AvailableAt", "ExpiresAt", "AtMostOnce"):
        assert {id: each[name] for id, each in made.items()} == {id: given[id][name] for id in made}, name
    of_key = sorted((each["CreatedAt"], each["Sequence"], id) for id, each in made.items() if each["OrderingKey"])
    assert [id for _, _, id in of_key] == [each["Id"] for each in keyed]
    found = (tasks(case.spark, each, columns="Id,Payload,Attributes") for each in (copy, case.target))
    there, here = (each.where("Id = 'at'").collect() for each in found)
    assert there == here


@pytest.mark.skipif(pyspark.__version__ < "4.1", reason="Spark 4.0 pushes no filters to Python sources")
def test_filters_of_spark_narrow_the_read(case: Case, monkeypatch: pytest.MonkeyPatch):
    """A filter changes no result. By ID, the tasks are read by key, and a period of SentAt by the index."""
    sent = [row(f"{n:03}", SentAt=DAY + timedelta(minutes=n), Topic=f"t{n % 3}") for n in range(600)]
    case.insert([*sent, row("unsent"), row("dead", AvailableAt=NEVER)])
    conditions = {
        "Id = '007'": 1, "Id IN ('007', '008', 'none') AND Id <> '008'": 1, "Topic = 't1' AND Id < '010'": 3,
        "SentAt >= TIMESTAMP'2026-06-01 09:00:00Z' AND SentAt < TIMESTAMP'2026-06-01 09:10:00Z'": 10,
        "SentAt >= TIMESTAMP'2026-06-01 09:50:00Z' AND TimesSent < 1": 10, "SentAt IS NULL": 2,
        "Id IN ('007', NULL)": 1, "State = 'dead'": 1, "State IN ('dead', 'pending')": 2,
        "CreatedAt > TIMESTAMP'2020-01-01 00:00:00Z'": 602, "Id = '007' OR Topic = 'none'": 1,
    }  # fmt: skip
    columns = "Id,Topic,State,SentAt,CreatedAt,TimesSent"
    case.spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        for condition, count in conditions.items():
            assert tasks(case.spark, case.target, columns=columns).where(condition).count() == count, condition
        late = tasks(case.spark, case.target, since="2026-06-01T09:55:00Z")
        assert late.where("SentAt >= TIMESTAMP'2026-06-01 09:50:00Z'").count() == 5
    finally:
        case.spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    monkeypatch.setitem(sys.modules, "pyspark.sql.worker.data_source_pushdown_filters", sys)
    for pushed, part in (
        ([EqualTo(("Id",), "007")], IdsPart), ([GreaterThan(("SentAt",), DAY + timedelta(minutes=590))], SentPart),
        ([EqualTo(("Topic",), "t1")], KeyPart),
    ):  # fmt: skip
        reader: Any = reader_of(case.target, columns=columns)
        assert [*reader.pushFilters(pushed)] == pushed
        planned = reader.partitions()
        assert {type(each.value[0]) for each in planned} == {part}
        assert 0 < sum(batch.num_rows for each in planned for batch in reader.read(each)) <= 200


def test_an_error_of_the_driver_is_one_sentence(spark: SparkSession, target: DatabaseSettings):
    with pytest.raises(PySparkException) as raised:
        write(spark.sql("SELECT 1 AS colour"), target)
    assert "Unknown column 'colour'" in str(raised.value)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize("how", ["sink", "register_stream"])
@pytest.mark.skipif(pyspark.__version__ < "4.1", reason="Spark 4.0 writes no stream to the outbox")
def test_a_repeated_micro_batch_registers_nothing_twice(case: Case, how: str):  # OUT-SPARK-3
    """The checkpoint is as a kill between the write and the commit leaves it."""
    for name in ("in", "checkpoint"):
        (case.folder / name).mkdir()

    def run(number: int) -> Any:
        lines = [
            {"data": f"{number} {n}", "topic": "orders", "ordering_key": f"k{n % 2}", "sequence": -n} for n in range(9)
        ]
        lines += [{"data": "no", "topic": "goog"}] if how == "register_stream" else []
        (case.folder / "in" / f"{number}.json").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        columns = "data string, topic string, ordering_key string, sequence long"
        rows = case.spark.readStream.schema(columns).json(str(case.folder / "in"))
        if how == "sink":
            writer = rows.repartition(2, "ordering_key").writeStream.format("outbox").options(**options(case.target))
        else:
            rejected = register_stream(rows, **options(case.target))
            writer = rejected.writeStream.format("json").option("path", str(case.folder / "rejects"))
        writer = writer.option("checkpointLocation", str(case.folder / "checkpoint")).queryName("invoices")
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(150)
        return query.recentProgress

    run(0)
    first = case.rows()
    for file in ("commits/0", "commits/.0.crc"):
        (case.folder / "checkpoint" / file).unlink()
    progress = run(1)
    assert len(case.rows()) == 18
    assert case.rows().items() >= first.items()
    for batch, key in itertools.product("01", ("k0", "k1")):
        made = [each for each in case.rows().values() if (each["OrderingKey"], payload(each)[:1]) == (key, batch)]
        numbers = [payload(each) for each in sorted(made, key=lambda each: (each["CreatedAt"], each["Sequence"]))]
        assert numbers == sorted(numbers, reverse=True), "in the order of their sequence"
    if how == "register_stream":
        assert [each["reason"][:12] for each in rejects(case.folder / "rejects")] == ["topic 'goog'"] * 2
        counted = [each.observedMetrics["outbox"].asDict() for each in progress]
        assert [each for each in counted if each["registered"]] == [
            {"registered": 9, "existing": 0, "repeated": 0, "rejected": 1}
        ]


def test_a_stream_is_not_registered_as_a_batch(case: Case):
    rows = case.spark.readStream.schema("data string, topic string").json(str(case.folder))
    with pytest.raises(SettingError, match=r"is a stream. Write it with writeStream.format\('outbox'\), or pass it to"):
        case.register(rows)


def test_the_format_is_a_table_of_sql(spark: SparkSession, target: DatabaseSettings):
    """Spark finds it by the name of a package. A notebook that has installed the package later registers it."""
    place = ", ".join(f"{name} '{value}'" for name, value in options(target).items())
    given = f"({place}, columns 'Topic,Payload,OrderingKey')"
    spark.dataSource.register(OutboxDataSource)
    spark.sql(f"CREATE TEMPORARY VIEW tasks_of_view USING outbox OPTIONS {given}")
    spark.sql(f"CREATE TABLE tasks_of_sql USING outbox OPTIONS {given}")
    try:
        spark.sql("INSERT INTO tasks_of_view SELECT 'orders', CAST('d' AS BINARY), 'k'")
        spark.sql("INSERT INTO tasks_of_view (Topic, Payload) VALUES ('orders', CAST('e' AS BINARY))")
        # Spark gives the options of a table to neither its reader nor its writer.
        spark.sql(f"INSERT INTO tasks_of_sql WITH {given} SELECT 'orders', CAST('f' AS BINARY), NULL")
        expected = [("orders", "d", "k"), ("orders", "e", None), ("orders", "f", None)]
        for source in ("tasks_of_view", f"tasks_of_sql WITH {given}"):
            found = spark.sql(f"SELECT Topic, CAST(Payload AS STRING), OrderingKey FROM {source}").collect()
            assert sorted(map(tuple, found)) == expected, source
    finally:
        spark.catalog.dropTempView("tasks_of_view")
        spark.sql("DROP TABLE tasks_of_sql")


def test_the_format_costs_other_sources_nothing():
    """Spark imports it in each process that plans any Python source."""
    code = (
        "import sys, pyspark.sql.datasource; n = len(sys.modules); import pyspark_outbox; print(len(sys.modules) - n)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(found.stdout) < 100

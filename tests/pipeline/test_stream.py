"""`spark.readStream.format("outbox")`: each (Id, SentAt) once, whatever happens to the query; and Spark Connect."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyspark
import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from outbox.base.values import shown
from outbox.devtools.emulators import Emulators
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import DatabaseSettings
from outbox_pipeline.rows.texts import EPOCH, MICROSECOND
from outbox_pipeline.source.datasource import OutboxStreamReader
from outbox_pipeline.spanner import open_table
from pyspark_outbox import OutboxDataSource
from tests.support.operations import delete, insert, row, rows_of, update
from tests.support.pipeline import DAY, Case, options
from tests.support.processes import ROOT

Published = Counter[tuple[str, str]]


def reader(target: DatabaseSettings, **more: str) -> OutboxStreamReader:
    source = OutboxDataSource(options(target, columns="Id", **more))
    reader: Any = source.streamReader(source.schema())
    return reader


def batch(of: OutboxStreamReader, start: dict[str, str], end: dict[str, str]) -> list[str]:
    found = [each for part in of.partitions(start, end) for each in of.read(part)]
    return sorted(id for each in found for id in each["Id"].to_pylist())


def begun(of: OutboxStreamReader) -> dict[str, str]:
    """Start a query without `since`, and return its start. Its first batch is empty."""
    start = of.initialOffset()
    assert of.latestOffset(start) == start
    return start


def send(database: Database, *ids: str) -> None:
    insert(database, [row(id, SentAt=COMMIT_TIMESTAMP) for id in ids])


def sent(database: Database) -> Published:
    return Counter({(id, shown(each["SentAt"])): 1 for id, each in rows_of(database).items() if each["SentAt"]})


def streamed(spark: SparkSession, sink: Path) -> Published:
    """Return the output of finished batches."""
    if not (sink / "_spark_metadata").exists():
        return Counter()
    rows = spark.read.schema("Id STRING, SentAt TIMESTAMP").parquet(str(sink))
    times = rows.selectExpr("Id", "unix_micros(SentAt)").collect()
    return Counter((id, shown(EPOCH + micros * MICROSECOND)) for id, micros in times)


def test_batches_adjoin_without_a_gap(target: DatabaseSettings, database: Database):  # OUT-SPARK-2
    of, of_topic = reader(target), reader(target, topic="other")
    start = begun(of)
    send(database, "a")
    middle = {"sent_at": shown(rows_of(database)["a"]["SentAt"])}
    insert(database, [row("b", SentAt=COMMIT_TIMESTAMP, Topic="other")])
    insert(database, [row("unsent")])
    end = of.latestOffset(start)
    assert batch(of, start, middle) == ["a"]
    assert batch(of, middle, end) == ["b"]
    assert batch(of, start, end) == ["a", "b"]
    assert of.partitions(end, end) == []
    assert batch(of_topic, start, of_topic.latestOffset(start)) == ["b"], "a topic is followed alone"


def test_reading_a_batch_again_gives_the_same_tasks(target: DatabaseSettings, database: Database):  # OUT-SPARK-2
    of = reader(target)
    start = begun(of)
    send(database, "again", "deleted")
    end = of.latestOffset(start)
    update(database, "again", SentAt=None)
    delete(database, "deleted")
    send(database, "later")
    assert batch(of, start, end) == ["again", "deleted"]
    update(database, "again", SentAt=COMMIT_TIMESTAMP)
    assert batch(of, end, of.latestOffset(end)) == ["again", "later"]


def test_no_batch_runs_while_no_task_is_sent(target: DatabaseSettings, database: Database):
    """The offset does not change, whether Spark passes the start (since 4.2) or not."""
    of = reader(target)
    start = begun(of)
    insert(database, [row("unsent")])
    assert of.latestOffset(start) == start
    old = reader(target)
    first = old.latestOffset()
    assert old.latestOffset() == first
    send(database, "a")
    assert old.latestOffset() != first
    assert of.latestOffset(start) != start


def test_a_query_starts_at_since(target: DatabaseSettings, database: Database):
    send(database, "before")
    now = reader(target)
    start = now.initialOffset()
    send(database, "later")
    # Spark stores the ends of batches only, so a query that is killed in its first batch asks for the start again.
    assert now.latestOffset(start) == start
    assert batch(now, start, now.latestOffset(start)) == ["later"]
    time = rows_of(database)["before"]["SentAt"]
    since = reader(target, since=shown(time))
    assert since.initialOffset() == since.initialOffset()
    assert batch(since, since.initialOffset(), since.latestOffset()) == ["before", "later"]
    after = reader(target, since=shown(time + timedelta(microseconds=1)))
    assert batch(after, after.initialOffset(), after.latestOffset()) == ["later"]


def test_a_batch_before_the_retention_period_says_what_to_do(target: DatabaseSettings):
    """The query was down for longer than the version retention period, with a planned batch unfinished."""
    of = reader(target)
    now = open_table(target).now()
    start, end = ({"sent_at": shown(now - timedelta(hours=hours))} for hours in (3, 2))
    with pytest.raises(OutboxError, match=rf"version_retention_period.* new output folder .*since={start['sent_at']}"):
        of.partitions(start, end)
    # An old start is no problem, because the table is read as of the end.
    assert batch(of, start, {"sent_at": shown(now)}) == []


def test_a_batch_before_the_retention_period_can_be_read_late(
    target: DatabaseSettings, database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The log and the progress then name the gap: a task that was sent again since is missing."""
    monkeypatch.setattr("outbox.program.logs.configure", lambda: None)
    of = reader(target, failOnDataLoss="false")
    now = open_table(target).now()
    start, end = ({"sent_at": shown(now - timedelta(hours=hours))} for hours in (3, 2))
    insert(database, [row("kept", SentAt=now - timedelta(hours=2.5)), row("again", SentAt=now - timedelta(hours=2.5))])
    update(database, "again", SentAt=COMMIT_TIMESTAMP)
    assert batch(of, start, end) == ["kept"]
    gap = f"{start['sent_at']}/{end['sent_at']}"
    assert gap in caplog.text
    assert of.latestOffset(end) != end
    assert (of.reportLatestOffset() or {})["gap"] == gap


def test_the_progress_of_a_query_has_its_lag(target: DatabaseSettings, database: Database):
    """It ends where unread tasks are sent, even if a limit ends the batch earlier, or at the last read task."""
    begin = datetime.now(UTC) - timedelta(days=7)
    insert(database, [row(f"{n:03d}", SentAt=begin + timedelta(hours=n)) for n in range(120)])
    of = reader(target, since=shown(begin), maxRowsPerTrigger="20")
    end = of.latestOffset(of.initialOffset(), *limits(of))
    assert end["sent_at"] < shown(begin + timedelta(hours=119)) < (of.reportLatestOffset() or {})["sent_at"]
    while (following := of.latestOffset(end, *limits(of))) != end:
        end = following
    assert of.reportLatestOffset() == end


def test_unsupported_stream_options_are_refused(target: DatabaseSettings):
    for name, value in (("state", "pending"), ("until", "1h"), ("readTimestamp", "1m"), ("since", "1h")):
        with pytest.raises(SettingError, match=name):
            reader(target, **{name: value}).initialOffset()


def test_a_week_without_the_query_is_read_in_batches(target: DatabaseSettings, database: Database):
    """Each has at most `maxRowsPerTrigger` tasks, or those of one SentAt, and none needs a version of last week."""
    begin = datetime.now(UTC) - timedelta(days=7)
    insert(database, [row(f"{n:03d}", SentAt=begin + timedelta(hours=n)) for n in range(120)])
    insert(database, [row(f"together {n:02d}", SentAt=begin + timedelta(hours=130)) for n in range(60)])
    of = reader(target, since=shown(begin), maxRowsPerTrigger="20")
    start, found = of.initialOffset(), list[list[str]]()
    while (end := of.latestOffset(start, *limits(of))) != start:
        assert batch(of, start, end) == batch(of, start, end)
        found.append(batch(of, start, end))
        start = end
    assert sorted(itertools.chain(*found)) == sorted(rows_of(database))
    assert len(found) > 6
    assert [len(each) for each in found if len(each) > 20] == [60]
    assert all(found)


def limits(of: OutboxStreamReader) -> list[Any]:
    """Return the limit that Spark passes since 4.2. Before, the source must know it."""
    return [] if pyspark.__version__ < "4.2" else [of.getDefaultReadLimit()]


@pytest.mark.skipif(pyspark.__version__ < "4.2", reason="the trigger Once has no limit since Spark 4.2")
def test_spark_can_ask_for_all_tasks(target: DatabaseSettings, database: Database):
    send(database, "a")
    send(database, "b")
    of = reader(target, since="2026-01-01T00:00:00Z", maxRowsPerTrigger="1")
    start = of.initialOffset()
    assert batch(of, start, of.latestOffset(start, reader(target).getDefaultReadLimit())) == ["a", "b"]


def test_a_wrong_option_of_a_stream_is_one_sentence(case: Case):
    for name, value, sentence in (
        ("maxRowsPerTrigger", "many", "Option maxRowsPerTrigger: 'many' is not allowed. It must be"),
        ("maxFilesPerTrigger", "1", "Unknown option maxfilespertrigger. Known options: state"),
        ("since", "1h", "Option since: a stream needs a time such as"),
    ):
        with pytest.raises(PySparkException) as raised:  # noqa: PT012 - some options are read when the query starts
            stream = case.spark.readStream.format("outbox").options(**options(case.target, **{name: value})).load()
            writer = stream.writeStream.format("noop").option("checkpointLocation", str(case.folder))
            writer.start().awaitTermination(60)
        assert sentence in str(raised.value)
        assert "Traceback" not in str(raised.value)


def query(spark: SparkSession, target: DatabaseSettings, checkpoint: Path, sink: Path, **more: str) -> None:
    how = {"columns": "Id,Topic,SentAt,Payload", "since": "2026-01-01T00:00:00Z", "partitions": "2", **more}
    rows = spark.readStream.format("outbox").options(**options(target, **how)).load()
    writer = rows.writeStream.format("parquet").option("checkpointLocation", str(checkpoint))
    assert writer.trigger(availableNow=True).start(str(sink)).awaitTermination(150)


def test_available_now_reads_everything_after_an_unfinished_batch(case: Case):  # OUT-SPARK-2
    sink, checkpoint = case.folder / "sink", case.folder / "checkpoint"
    send(case.database, "a")
    query(case.spark, case.target, checkpoint, sink)
    # The checkpoint as a kill during the batch leaves it.
    for folder in (checkpoint / "commits", sink / "_spark_metadata"):
        (folder / "0").unlink()
        (folder / ".0.crc").unlink()
    send(case.database, "b")
    send(case.database, "c")
    query(case.spark, case.target, checkpoint, sink, maxRowsPerTrigger="1")
    if pyspark.__version__ < "4.2":  # such a run ends after the unfinished batch
        query(case.spark, case.target, checkpoint, sink)
    assert streamed(case.spark, sink) == sent(case.database)
    if pyspark.__version__ >= "4.2":
        assert len([*(checkpoint / "commits").glob("[0-9]*")]) == 3, "each batch has one task"


@pytest.fixture(scope="module")
def server(spark: SparkSession) -> str:
    """Let the JVM of the tests, which another would cost a minute, serve clients. Return its address."""
    service = getattr(getattr(spark._jvm.org.apache.spark.sql.connect.service, "SparkConnectService$"), "MODULE$")
    context = spark.sparkContext._jsc.sc()
    context.conf().set("spark.connect.grpc.binding.port", "0").set("spark.connect.grpc.binding.address", "127.0.0.1")
    service.start(context)
    return f"sc://127.0.0.1:{service.server().getPort()}"


@pytest.mark.timeout(300)
def test_source_sink_register_and_archive_need_no_jvm(case: Case, server: str, emulators: Emulators):
    case.insert([row("purged", SentAt=DAY)])
    case.archive(to=case.folder / "archive", purge=True, late=True)
    case.insert([row("sent", SentAt=DAY)])
    client = [sys.executable, "-m", "tests.support.connect_client", server, str(case.folder)]
    done = subprocess.run(
        [*client, *(f"{name}={value}" for name, value in options(case.target).items())],
        check=False, cwd=ROOT, env=os.environ | emulators.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ids = sorted(str(number) for number in range(20) if number != 7)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "registered": 19,
        "rejected": ["data is NULL. For a message without data, pass an empty string"],
        "read": ids,
        "streamed": ["sent"],
        "archived": ["purged"],
    }
    written = {*(f"{number} written" for number in range(20)), *["of a stream"][: pyspark.__version__ >= "4.1"]}
    assert case.rows().keys() == {*ids, "sent", *written}

"""The jobs on a standalone cluster, by spark-submit, with executors that have nothing but what is shipped to them."""

import base64
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pyspark
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.message import RawPubsubMessage
from tests.support import spanner
from tests.support.archives import DAY, NEXT_DAY, sent
from tests.support.cluster import Cluster
from tests.support.operations import insert, row, rows_of
from tests.support.pipeline import keyed_rows, write_lines, write_received
from tests.support.processes import kill_family
from tests.support.pubsub import PubSub
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(3600)

#: Tasks that go through all jobs.
TASKS = 100


@pytest.mark.extended
def test_register_on_a_cluster(spark_cluster: Cluster, database: Database, variables: dict[str, str], tmp_path: Path):
    """Spark's log is on stderr, because a cluster has a log configuration of its own. stdout has the summary only."""
    flags = (
        "--input",
        str(write_lines(tmp_path / "in.jsonl", keyed_rows("orders", 300))),
        "--rejects",
        str(tmp_path / "rejects"),
        "--json",
    )
    done = spark_cluster.submit("register", *flags, variables=variables, conf={"spark.cores.max": "1"})
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["registered"] == len(rows_of(database)) == 300
    assert "INFO TaskSetManager: Finished task" in done.stderr


@pytest.mark.extended
def test_every_other_job_on_a_cluster(
    spark_cluster: Cluster, database: Database, variables: dict[str, str], pubsub: PubSub, tmp_path: Path
):
    """A day is archived and purged, other tasks are sent by a drain, and audited. A replay ships the same packages.

    Driver and executors have another time zone than the archive, whose times are in UTC. Each executor costs ten CPU
    seconds, so only the workers of the drain get two, as the rows of `register` do. Spark has its default of 200
    shuffle partitions, but merges those of few rows, also of cached ones.
    """
    variables |= {"TZ": "Asia/Kolkata"}
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    insert(database, [sent(f"{number:03d}", DAY, Topic=topic, CreatedAt=DAY) for number in range(TASKS)])
    insert(database, [row(f"unsent {number:03d}", Topic=topic, CreatedAt=DAY) for number in range(TASKS)])

    def job(*arguments: str, executors: int = 1) -> dict[str, Any]:
        conf = {"spark.cores.max": f"{executors}"}
        done = spark_cluster.submit(*arguments, "--json", variables=variables, conf=conf)
        assert done.code == 0, done.stderr
        assert spark_cluster.spark_tasks() < 100, arguments[0]
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary

    archive, day = str(tmp_path / "archive"), ("--until", NEXT_DAY.isoformat(), "--read-late", "--purge")
    assert job("archive", "--archive", archive, *day)["deleted"] == TASKS
    [file] = (tmp_path / "archive").glob("window=*/run=*/SentDate=2026-10-20/*.parquet")
    assert {*pyarrow.parquet.read_table(file)["SentAt"].to_pylist()} == {DAY}
    assert job("drain", executors=2)["published"] == TASKS
    received = str(write_received(tmp_path / "received.jsonl", subscription.drain()))
    flags = ("--received", received, "--until", NEXT_DAY.isoformat(), "--output", str(tmp_path / "audit"))
    assert job("audit", *flags)["late"] == TASKS, "a month after the end of the window"


#: Writes files to the outbox, one in a batch, and not faster than some hundred rows per second.
STREAM = """
import sys, time
from pyspark.sql import SparkSession, functions

def slow(text: str) -> str:
    time.sleep(0.004)
    return text

folder = sys.argv[1]
spark = SparkSession.builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", 50).getOrCreate()
rows = spark.readStream.schema("data string, topic string").option("maxFilesPerTrigger", 1).json(f"{folder}/in")
rows = rows.withColumn("data", functions.udf(slow, "string", useArrow=True)("data"))
query = rows.writeStream.format("outbox").option("checkpointLocation", f"{folder}/checkpoint")
query.trigger(availableNow=True).start().awaitTermination()
"""


@pytest.mark.long("a repeated batch, without its kills, is in test_sink.py")
@pytest.mark.skipif(pyspark.__version__ < "4.1", reason="Spark 4.0 writes no stream to the outbox")
def test_each_row_of_a_killed_stream_is_one_task(
    spark_cluster: Cluster, database: Database, variables: dict[str, str], tmp_path: Path
):
    """An executor is killed within a batch, and the driver three times, so some batches are repeated."""
    files, size = 4, 300
    (tmp_path / "stream.py").write_text(STREAM)
    (tmp_path / "in").mkdir()
    for number in range(files):
        lines = [{"topic": "orders", "data": f"{n}"} for n in range(number * size, (number + 1) * size)]
        write_lines(tmp_path / "in" / f"{number}.json", lines)
    given: dict[str, Any] = {"variables": variables, "conf": {"spark.cores.max": "1"}, "file": f"{tmp_path}/stream.py"}

    def reached(rows: int) -> None:
        def is_there() -> bool:
            return driver.child.poll() is not None or spanner.count(database, "TRUE") > rows

        eventually(is_there, seconds=600, message=f"more than {rows} rows")
        assert driver.child.poll() is None, driver.stderr

    for rows in (50, 400, 700):
        with spark_cluster.started(str(tmp_path), **given) as driver:
            reached(rows)
            if rows == 50:
                os.kill(spark_cluster.executors()[0], signal.SIGKILL)
                reached(200)
            kill_family(driver.pid)
            driver.wait(60)
        assert spanner.count(database, "TRUE") < files * size
    with spark_cluster.started(str(tmp_path), **given) as driver:
        assert driver.wait(600) == 0, driver.stderr
    stored = [base64.b64decode(each["Data"]) for each in rows_of(database).values()]
    assert sorted(int(RawPubsubMessage.FromString(each).data) for each in stored) == [*range(files * size)]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        (
            {"executorEnv.PYTHONPATH": ""},
            "Package outbox_pipeline is missing on an executor. Ship the packages as docs",
        ),
        pytest.param(
            {"executorEnv.SPANNER_EMULATOR_HOST": ""},
            "This is on an executor. Pass it variables with --conf spark.exec",
            marks=pytest.mark.long("another sentence"),
        ),
    ],
    ids=["package", "variable"],
)
def test_what_an_executor_lacks_is_one_sentence(
    spark_cluster: Cluster, variables: dict[str, str], tmp_path: Path, conf: dict[str, str], sentence: str
):
    """The driver has it. The exit code says that something is missing."""
    wanted = {f"spark.{name}": value for name, value in conf.items()} | {"spark.task.maxFailures": "1"}
    flags = (
        "--input",
        str(write_lines(tmp_path / "in.jsonl", keyed_rows("orders", 10))),
        "--rejects",
        str(tmp_path / "rejects"),
    )
    done = spark_cluster.submit("register", *flags, variables=variables, conf=wanted)
    [error] = re.findall(r"^outbox-pipeline: (.*)$", done.stderr, re.MULTILINE)
    assert sentence in error
    assert done.code == 3

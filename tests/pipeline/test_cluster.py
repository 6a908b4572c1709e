"""The jobs on a standalone cluster, by spark-submit, with executors that have nothing but what is shipped to them.

Faults in the middle of a job end with an audit of what the job changed.
"""

import base64
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import deltalake
import pyarrow.parquet
import pytest
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.devtools.emulators import Emulators
from outbox.message import RawPubsubMessage
from tests.support import cluster, spanner
from tests.support.cluster import Cluster
from tests.support.operations import COLUMNS, insert, limit, row, rows_of
from tests.support.pipeline import DAY, NEXT_DAY, Files, keyed_rows, received, sent, write_lines
from tests.support.processes import Process, kill_family
from tests.support.proxy import Proxy
from tests.support.pubsub import PubSub, Subscription
from tests.support.relays import first_deliveries, key_orders
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(3600)

#: Tasks, and the tasks per second of the jobs that have a limit.
ROWS, RATE = 600, 40
#: Windows of the archived day.
WINDOWS = 4
#: Max in-flight tasks of the two workers of a drain.
IN_FLIGHT = 2 * 2 * 20
OUTAGE_SECONDS = 60
#: Zones whose clocks have changed within the days of the tests. An archive is in UTC.
ZONES = {"TZ": "America/New_York"}


@dataclass(frozen=True)
class Shop:
    """A database, a topic with a subscriber, a folder, and the cluster that runs its jobs."""

    database: Database
    topic: str
    subscription: Subscription
    folder: Path
    cluster: Cluster
    variables: dict[str, str]
    #: Between the executors and Spanner.
    proxy: Proxy

    def count(self, condition: str = "TRUE") -> int:
        return spanner.count(self.database, condition)

    @property
    def options(self) -> dict[str, Any]:
        through = {"spark.executorEnv.SPANNER_EMULATOR_HOST": self.proxy.address}
        return {"variables": self.variables | ZONES, "conf": through}

    def register(self, rows: int) -> tuple[str, ...]:
        """Return the words that register so many rows of a file."""
        file = write_lines(self.folder / "in.jsonl", keyed_rows(self.topic, rows))
        return "register", "--input", str(file), "--rejects", str(self.folder / "rejects")


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster.running(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def shop(
    spark_cluster: Cluster, database: Database, emulators: Emulators, pubsub: PubSub, tmp_path: Path
) -> Iterator[Shop]:
    subscription = pubsub.new_subscription(pubsub.new_topic(), ordered=True)
    variables = emulators.environment() | spanner.variables(str(database.database_id))
    with Proxy(emulators.spanner_host) as proxy:
        yield Shop(database, subscription.topic, subscription, tmp_path, spark_cluster, variables, proxy)


#: Runs jobs as one application, because each driver and each executor costs ten CPU seconds.
JOBS = """
import json, sys
from outbox_pipeline.cli import main
sys.exit(max(main([*words, "--json"]) for words in json.loads(sys.argv[1])))
"""


@pytest.mark.extended
def test_register_on_a_cluster(shop: Shop):
    """Spark's log is on stderr, because a cluster has a log configuration of its own. stdout has the summary only."""
    conf = {"spark.cores.max": "1"}
    done = shop.cluster.submit(*shop.register(300), "--json", variables=shop.variables, conf=conf)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["registered"] == shop.count() == 300
    assert "INFO TaskSetManager: Finished task" in done.stderr


@pytest.mark.extended
def test_every_other_job_on_a_cluster(shop: Shop):
    """A day is audited, archived and purged, and a drain sends other tasks. A replay ships the same packages.

    Driver and executors have another time zone than the archive, whose times are in UTC. Spark has its default of 200
    shuffle partitions, but merges those of few rows, also of cached ones.
    """
    ids = [f"{number:03d}" for number in range(100)]
    insert(shop.database, [sent(id, DAY, Topic=shop.topic, CreatedAt=DAY) for id in ids])
    insert(shop.database, [row(f"unsent {id}", Topic=shop.topic, CreatedAt=DAY) for id in ids])
    messages = write_lines(shop.folder / "received.jsonl", [received(id, DAY, b"data") for id in ids])
    day, folder = ("--until", NEXT_DAY.isoformat()), shop.folder
    words = (
        ("audit", "--received", str(messages), *day, "--output", f"{folder}/audit"),
        ("archive", "--archive", f"{folder}/archive", *day, "--read-late", "--purge"),
        ("drain",),
    )
    file = folder / "jobs.py"
    file.write_text(JOBS)
    given = shop.variables | {"TZ": "Asia/Kolkata"}
    with shop.cluster.started(json.dumps(words), variables=given, file=str(file)) as driver:
        assert driver.wait(600) == 0, driver.stderr
        audit, archive, drain = map(json.loads, driver.stdout.splitlines())
    assert [audit["delivered"], audit["pending"], archive["deleted"], drain["published"]] == [len(ids)] * 4
    [parquet] = (folder / "archive").glob("window=*/run=*/SentDate=2026-10-20/*.parquet")
    assert {*pyarrow.parquet.read_table(parquet)["SentAt"].to_pylist()} == {DAY}
    assert shop.cluster.spark_tasks() < 200


class Job(Protocol):
    """A job that can fail in its middle. Its words are `command`, and `slow` in the first run. It may be a `file`."""

    command: tuple[str, ...]
    slow: tuple[str, ...] = ()
    file: str = ""

    def __init__(self, shop: Shop) -> None: ...

    def has_begun(self, log: str) -> bool:
        """Return whether the job, whose Spark has written the log, has done a part of its work, but not all."""
        ...

    def audit(self, summary: dict[str, Any]) -> None:
        """Check that no task is lost or changed twice, and that the keys keep their order."""
        ...


class Register(Job):
    slow = ("--max-rows-per-second", str(RATE))

    def __init__(self, shop: Shop) -> None:
        self.shop, self.command = shop, shop.register(ROWS)

    def has_begun(self, _log: str) -> bool:
        return ROWS // 8 < self.shop.count() < ROWS

    def audit(self, summary: dict[str, Any]) -> None:
        assert (summary["registered"] + summary["existing"], summary["rejected"]) == (ROWS, 0)
        assert self.shop.count() == ROWS
        order = key_orders(self.shop.database, self.shop.topic)
        assert all(sorted(ids) == ids for ids in order.values()), "in the order of `sequence`"


#: Writes files to the outbox, one in a batch, and about a hundred rows per second.
STREAM = """
import sys, time
from pyspark.sql import SparkSession, functions

def slow(text: str) -> str:
    time.sleep(0.01)
    return text

folder = sys.argv[1]
spark = SparkSession.builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", 50).getOrCreate()
rows = spark.readStream.schema("data string, topic string, ordering_key string, sequence long")
rows = rows.option("maxFilesPerTrigger", 1).json(f"{folder}/in")
rows = rows.withColumn("data", functions.udf(slow, "string", useArrow=True)("data"))
query = rows.writeStream.format("outbox").option("checkpointLocation", f"{folder}/checkpoint")
query.trigger(availableNow=True).start().awaitTermination()
print("{}")
"""


class Stream(Register):
    """Some batches are repeated."""

    slow = ()

    def __init__(self, shop: Shop) -> None:
        self.shop, self.command = shop, (str(shop.folder),)
        self.file = f"{shop.folder}/stream.py"
        Path(self.file).write_text(STREAM)
        (shop.folder / "in").mkdir()
        rows = [{name: each[name] for name in each if name != "task_id"} for each in keyed_rows(shop.topic, ROWS)]
        for number in range(4):
            write_lines(shop.folder / "in" / f"{number}.json", rows[number::4])

    def audit(self, _summary: dict[str, Any]) -> None:
        stored = [base64.b64decode(each["Data"]) for each in rows_of(self.shop.database).values()]
        assert sorted(int(RawPubsubMessage.FromString(each).data) for each in stored) == [*range(ROWS)]


class Drain(Job):
    command = ("drain", "--batch-size", "20", "--concurrency", "2")

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        insert(shop.database, tasks(shop.topic, SentAt=None))
        limit(shop.database, shop.topic, float(RATE))

    def has_begun(self, _log: str) -> bool:
        return ROWS // 8 < self.shop.count("SentAt IS NOT NULL") < ROWS

    def audit(self, summary: dict[str, Any]) -> None:
        assert (summary["work_left"], self.shop.count("SentAt IS NULL OR TimesSent != 1")) == (False, 0)
        received = self.shop.subscription.drain(0.5)
        came = Counter(each.attributes[outbox.TASK_ID_ATTRIBUTE] for each in received)
        assert came.keys() == rows_of(self.shop.database).keys()
        assert came.total() - ROWS <= IN_FLIGHT
        assert first_deliveries(received) == key_orders(self.shop.database, self.shop.topic)


class Archive(Job):
    purge: tuple[str, ...] = ()

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.files = Files(shop.folder / "archive")
        insert(shop.database, tasks(shop.topic))
        rows = rows_of(shop.database)
        self.rows = {id: each | {"Data": base64.b64decode(each["Data"])} for id, each in rows.items()}
        flags = ("--window", "6h", "--since", DAY.isoformat(), "--until", NEXT_DAY.isoformat(), "--read-late")
        self.command = ("archive", "--archive", str(self.files.folder), *flags, *self.purge)

    def has_begun(self, _log: str) -> bool:
        return len(self.files.windows()) == 1

    def audit(self, _summary: dict[str, Any]) -> None:
        assert archived_rows(self.files.folder) == self.rows
        assert len(self.files.runs()) == len(self.files.windows()) == WINDOWS
        assert self.shop.count() == ROWS


class Purge(Archive):
    purge = ("--purge",)

    def has_begun(self, _log: str) -> bool:
        return 0 < self.shop.count() < ROWS

    def audit(self, _summary: dict[str, Any]) -> None:
        assert archived_rows(self.files.folder) == self.rows
        counts = [each["deleted"] + each["missing"] for each in self.files.purges() if each]
        assert (sum(counts), len(counts), self.shop.count()) == (ROWS, WINDOWS, 0)


class Replay(Job):
    slow = ("--max-rows-per-second", str(RATE))

    def __init__(self, shop: Shop) -> None:
        """Archive and purge tasks."""
        self.shop = shop
        archive = Purge(shop)
        with shop.cluster.started(*archive.command, **shop.options | {"file": archive.file}) as driver:
            assert driver.wait(600) == 0, driver.stderr
        self.command = ("replay", "--archive", str(archive.files.folder), "--where", "true")

    def has_begun(self, _log: str) -> bool:
        return ROWS // 8 <= self.shop.count() < ROWS

    def audit(self, summary: dict[str, Any]) -> None:
        assert summary["selected"] == ROWS
        rows = rows_of(self.shop.database)
        assert [each["SentAt"] for each in rows.values()] == [None] * ROWS


def tasks(topic: str, **columns: Any) -> list[dict[str, Any]]:
    """Return tasks that were sent during a day. Half of them have an ordering key."""
    given = enumerate(keyed_rows(topic, ROWS))
    names = {"OrderingKey": "ordering_key", "Sequence": "sequence"}
    return [
        sent(each["task_id"], DAY + number * (NEXT_DAY - DAY) / ROWS, Topic=topic)
        | {column: each.get(name) for column, name in names.items()}
        | columns
        for number, each in given
    ]


def archived_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the archive as docs/pipeline/archive.md says."""
    rows = deltalake.DeltaTable(folder).to_pyarrow_table().to_pylist()
    assert len({each["Id"] for each in rows}) == len(rows), "each task once"
    return {each["Id"]: {name: each[name] for name in COLUMNS} for each in rows}


Fault = Callable[[Shop, Process], None]


def kill_an_executor(shop: Shop, _driver: Process) -> None:
    """Spark starts another executor, and repeats the Spark tasks of the killed one."""
    os.kill(shop.cluster.executors()[0], signal.SIGKILL)


def kill_the_driver(_shop: Shop, driver: Process) -> None:
    kill_family(driver.pid)


def lose_spanner(shop: Shop, driver: Process) -> None:
    shop.proxy.refuse()
    with pytest.raises(AssertionError, match="still running"):
        driver.wait(OUTAGE_SECONDS)
    shop.proxy.forward()


def check(shop: Shop, kind: type[Job], fault: Fault) -> None:
    """Run a job with a fault in its middle, run it again if it did not end by itself, and audit it."""
    job = kind(shop)
    given = shop.options | {"file": job.file}
    with shop.cluster.started(*job.command, *job.slow, "--json", **given) as driver:
        eventually(lambda: job.has_begun(driver.stderr), seconds=300, message=f"{job.command[0]} is in its middle")
        fault(shop, driver)
        driver.wait(600)
        stdout, stderr = driver.stdout, driver.stderr
    if fault is kill_the_driver:
        with shop.cluster.started(*job.command, "--json", **given) as driver:
            driver.wait(600)
            stdout, stderr = driver.stdout, driver.stderr
    assert stdout, stderr
    job.audit(json.loads(stdout))


in_the_middle = pytest.mark.long("jobs that are slow enough to fail in the middle")


@in_the_middle
@pytest.mark.parametrize("fault", [kill_an_executor, kill_the_driver])
@pytest.mark.parametrize("job", [Register, Stream, Drain, Archive, Purge, Replay])
def test_no_killed_process_costs_or_repeats_work(shop: Shop, job: type[Job], fault: Fault):
    check(shop, job, fault)


@in_the_middle
@pytest.mark.parametrize("job", [Register, Drain, Archive, Purge, Replay])
def test_a_job_survives_a_minute_without_spanner(shop: Shop, job: type[Job]):
    check(shop, job, lose_spanner)

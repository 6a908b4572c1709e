"""The jobs on a standalone cluster, by spark-submit, with executors that have nothing but what is shipped to them."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support import cluster, spanner
from tests.support.archives import DAY, NEXT_DAY, sent
from tests.support.cluster import Cluster
from tests.support.operations import insert, rows_of
from tests.support.pipeline import write_received
from tests.support.processes import Process, kill_family
from tests.support.pubsub import PubSub
from tests.support.relays import key_orders
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(3600)

#: Rows, their ordering keys, and the rows per second while something is killed.
ROWS, KEYS, RATE = 1200, 12, 60


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster.running(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def variables(database: Database, emulators: Emulators) -> dict[str, str]:
    return emulators.environment() | spanner.variables(str(database.database_id))


def input_of(folder: Path, topic: str, count: int) -> Path:
    """Write rows, the first half of which have an ordering key."""
    rows: list[dict[str, Any]] = [{"topic": topic, "data": f"{n}", "task_id": f"{n:05d}"} for n in range(count)]
    for number, row in enumerate(rows[: count // 2]):
        row |= {"ordering_key": f"key-{number % KEYS}", "sequence": number}
    file = folder / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_register_on_a_cluster(spark_cluster: Cluster, database: Database, variables: dict[str, str], tmp_path: Path):
    """Spark's log is on stderr, because a cluster has a log configuration of its own. stdout has the summary only."""
    flags = ("--input", str(input_of(tmp_path, "orders", 300)), "--rejects", str(tmp_path / "rejects"), "--json")
    done = spark_cluster.submit("register", *flags, variables=variables)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["registered"] == len(rows_of(database)) == 300
    assert "INFO TaskSetManager: Finished task" in done.stderr


@pytest.mark.extended
def test_every_other_job_on_a_cluster(
    spark_cluster: Cluster, database: Database, variables: dict[str, str], pubsub: PubSub, tmp_path: Path
):
    """A day is archived and purged, restored by a replay, sent again by a drain, and audited.

    Driver and executors have another time zone than the archive, whose times are in UTC.
    """
    variables |= {"TZ": "Asia/Kolkata"}
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    insert(database, [sent(f"{number:03d}", DAY, Topic=topic, CreatedAt=DAY) for number in range(200)])

    def job(*arguments: str) -> dict[str, Any]:
        done = spark_cluster.submit(*arguments, "--json", variables=variables)
        assert done.code == 0, done.stderr
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary

    archive, day = str(tmp_path / "archive"), ("--until", NEXT_DAY.isoformat(), "--read-late", "--purge")
    assert job("archive", "--archive", archive, *day)["deleted"] == 200
    [file] = (tmp_path / "archive").glob("window=*/run=*/SentDate=2026-10-20/*/*.parquet")
    assert {*pyarrow.parquet.read_table(file)["SentAt"].to_pylist()} == {DAY}
    assert job("replay", "--archive", archive, "--where", "true")["registered"] == 200
    assert job("drain")["published"] == 200
    received = str(write_received(tmp_path / "received.jsonl", subscription.drain()))
    flags = ("--received", received, "--until", NEXT_DAY.isoformat(), "--output", str(tmp_path / "audit"))
    assert job("audit", *flags)["late"] == 200, "a month after the end of the window"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        (
            {"executorEnv.PYTHONPATH": ""},
            "Package outbox_pipeline is missing on an executor. Ship the packages as docs",
        ),
        ({"executorEnv.SPANNER_EMULATOR_HOST": ""}, "This is on an executor. Pass it variables with --conf spark.exec"),
    ],
    ids=["package", "variable"],
)
def test_what_an_executor_lacks_is_one_sentence(
    spark_cluster: Cluster, variables: dict[str, str], tmp_path: Path, conf: dict[str, str], sentence: str
):
    """The driver has it. The exit code says that something is missing."""
    wanted = {f"spark.{name}": value for name, value in conf.items()} | {"spark.task.maxFailures": "1"}
    flags = ("--input", str(input_of(tmp_path, "orders", 10)), "--rejects", str(tmp_path / "rejects"))
    done = spark_cluster.submit("register", *flags, variables=variables, conf=wanted)
    [error] = re.findall(r"^outbox-pipeline: (.*)$", done.stderr, re.MULTILINE)
    assert sentence in error
    assert done.code == 3


def kill_an_executor(spark_cluster: Cluster, _driver: Process) -> None:
    os.kill(spark_cluster.executors()[0], signal.SIGKILL)


def kill_the_driver(_cluster: Cluster, driver: Process) -> None:
    kill_family(driver.pid)


@pytest.mark.long("jobs that are slow enough to be killed in the middle")
@pytest.mark.parametrize("fault", [kill_an_executor, kill_the_driver])
def test_each_row_is_registered_once_in_its_order_if_a_process_is_killed(
    spark_cluster: Cluster,
    database: Database,
    variables: dict[str, str],
    tmp_path: Path,
    fault: Callable[[Cluster, Process], None],
):
    """SIGKILL in the middle. Spark repeats the work of an executor. After a killed driver, the job runs again."""
    file = input_of(tmp_path, "orders", ROWS)
    flags = ("register", "--input", str(file), "--rejects", str(tmp_path / "rejects"), "--json")
    slow = ("--max-rows-per-second", str(RATE))
    with spark_cluster.started(*flags, *slow, variables=variables) as driver:
        eventually(lambda: spanner.count(database, "TRUE") > ROWS // 8, seconds=600, message="the job has begun")
        fault(spark_cluster, driver)
        driver.wait(600)
        stdout = driver.stdout
    if fault is kill_the_driver:
        assert ROWS // 8 < spanner.count(database, "TRUE") < ROWS
        stdout = spark_cluster.submit(*flags, variables=variables).stdout
    done = json.loads(stdout)
    assert (done["registered"] + done["existing"], done["rejected"]) == (ROWS, 0)
    assert spanner.count(database, "TRUE") == ROWS
    assert all(sorted(ids) == ids for ids in key_orders(database, "orders").values()), "in the order of `sequence`"

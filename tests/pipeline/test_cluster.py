"""The jobs on a standalone cluster, by spark-submit, with executors that have nothing but what is shipped to them."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.devtools.emulators import Emulators
from tests.support import cluster, spanner
from tests.support.archives import DAY, NEXT_DAY, sent
from tests.support.cluster import Cluster
from tests.support.operations import insert, limit, rows_of
from tests.support.pipeline import write_received
from tests.support.processes import Process, kill_family
from tests.support.proxy import Proxy
from tests.support.pubsub import PubSub
from tests.support.relays import first_deliveries, key_orders
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


@pytest.mark.long("ten jobs, each with a fault")
@pytest.mark.parametrize("fault", [kill_an_executor, kill_the_driver])
def test_no_task_is_lost_or_sent_twice_if_a_process_is_killed_in_every_job(  # noqa: PLR0917 - pytest names them
    spark_cluster: Cluster,
    database: Database,
    variables: dict[str, str],
    pubsub: PubSub,
    tmp_path: Path,
    fault: Callable[[Cluster, Process], None],
):
    """SIGKILL in the middle of register, drain, archive, purge and replay. After a killed driver, the job runs again.

    Only tasks in flight are published twice, and the keys keep their order. The audit finds what this test counts.
    """
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic, ordered=True)

    def rows(condition: str = "TRUE") -> int:
        return spanner.count(database, condition)

    def job(middle: Callable[[], object], *arguments: str, slow: tuple[str, ...] = ()) -> dict[str, Any]:
        with spark_cluster.started(*arguments, *slow, "--json", variables=variables) as driver:
            eventually(middle, seconds=600, message=f"{arguments[0]} has begun")
            fault(spark_cluster, driver)
            driver.wait(600)
            stdout, stderr = driver.stdout, driver.stderr
        if fault is kill_the_driver:
            replay = re.search(r"continue it with (--resume \S+?)\"", stderr)
            again = (arguments[0], *replay[1].split()) if replay else arguments
            done = spark_cluster.submit(*again, "--json", variables=variables)
            stdout = done.stdout
        summary: dict[str, Any] = json.loads(stdout)
        return summary

    rate = ("--max-rows-per-second", str(RATE))
    register = ("register", "--input", str(input_of(tmp_path, topic, ROWS)), "--rejects", str(tmp_path / "rejects"))
    done = job(lambda: rows() > ROWS // 8, *register, slow=rate)
    assert (rows(), done["registered"] + done["existing"], done["rejected"]) == (ROWS, ROWS, 0)
    order = key_orders(database, topic)
    assert all(sorted(ids) == ids for ids in order.values()), "registered in the order of `sequence`"

    limit(database, topic, float(RATE))
    done = job(lambda: rows("SentAt IS NOT NULL") > ROWS // 8, "drain", "--batch-size", "20", "--concurrency", "2")
    assert (done["work_left"], rows("SentAt IS NULL")) == (False, 0)
    received = subscription.drain(0.5)
    came = Counter(each.attributes[outbox.TASK_ID_ATTRIBUTE] for each in received)
    assert len(came) == ROWS
    assert first_deliveries(received) == order
    # Each of two workers had two in-flight batches of 20. If two overlap, the emulator aborts one.
    assert came.total() - ROWS <= 120
    audit = ("--received", str(write_received(tmp_path / "received.jsonl", received)), "--grace", "1s")
    audited = spark_cluster.submit("audit", *audit, "--output", str(tmp_path / "audit"), "--json", variables=variables)
    found = json.loads(audited.stdout)
    assert (audited.code, found["delivered"], found["lost"], found["out_of_order"]) == (0, ROWS, 0, 0)

    archive = tmp_path / "archive"
    first = [each["SentAt"] for each in rows_of(database).values()]
    eventually(lambda: rows("SentAt > TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 70 SECOND)") == 0, seconds=90)
    flags = ("archive", "--archive", str(archive), "--window", "10s", "--purge", "--since", min(first).isoformat())
    done = job(lambda: any(archive.glob("window=*/run=*")), *flags)
    assert (rows(), sum(_counts(archive, "_purged.json", "deleted", "missing"))) == (0, ROWS)
    assert sum(_counts(archive, "_manifest.json", "rows")) == ROWS

    done = job(lambda: rows() > ROWS // 8, "replay", "--archive", str(archive), "--where", "true", slow=rate)
    assert (rows("SentAt IS NULL AND TimesSent = 0"), done["selected"]) == (ROWS, ROWS)
    assert key_orders(database, topic) == order


def _counts(archive: Path, file: str, *names: str) -> list[int]:
    return [json.loads(each.read_text())[name] for each in archive.glob(f"window=*/{file}") for name in names]


@pytest.mark.long("an outage of a minute")
def test_executors_that_lose_spanner_for_a_minute_register_each_row(
    spark_cluster: Cluster, database: Database, emulators: Emulators, variables: dict[str, str], tmp_path: Path
):
    register = ("register", "--input", str(input_of(tmp_path, "orders", ROWS)), "--rejects", str(tmp_path / "rejects"))
    with Proxy(emulators.spanner_host) as proxy:
        conf = {"spark.executorEnv.SPANNER_EMULATOR_HOST": proxy.address}
        flags = (*register, "--max-rows-per-second", str(RATE), "--json")
        with spark_cluster.started(*flags, variables=variables, conf=conf) as driver:
            eventually(lambda: len(rows_of(database)) > ROWS // 8, seconds=600, message="the job has begun")
            proxy.refuse()
            with pytest.raises(AssertionError):
                driver.wait(60)
            proxy.forward()
            assert driver.wait(600) == 0, driver.stderr
            assert len(rows_of(database)) == ROWS == json.loads(driver.stdout)["registered"]

"""The jobs on a standalone cluster, by spark-submit, with executors that have nothing but what is shipped to them."""

import json
import re
from pathlib import Path

import pyarrow.parquet
import pytest
from google.cloud.spanner_v1.database import Database

from tests.support.archives import DAY, NEXT_DAY, sent
from tests.support.certificates import received
from tests.support.cluster import Cluster
from tests.support.operations import insert, row, rows_of
from tests.support.pipeline import keyed_rows, write_lines
from tests.support.pubsub import PubSub

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


#: Runs jobs as one application, because each driver and each executor costs ten CPU seconds.
JOBS = """
import json, sys
from outbox_pipeline.cli import main
sys.exit(max(main([*words, "--json"]) for words in json.loads(sys.argv[1])))
"""


@pytest.mark.extended
def test_every_other_job_on_a_cluster(
    spark_cluster: Cluster, database: Database, variables: dict[str, str], pubsub: PubSub, tmp_path: Path
):
    """A day is audited, archived and purged, and a drain sends other tasks. A replay ships the same packages.

    Driver and executors have another time zone than the archive, whose times are in UTC. Spark has its default of 200
    shuffle partitions, but merges those of few rows, also of cached ones.
    """
    topic = pubsub.new_topic()
    ids = [f"{number:03d}" for number in range(TASKS)]
    insert(database, [sent(id, DAY, Topic=topic, CreatedAt=DAY) for id in ids])
    insert(database, [row(f"unsent {id}", Topic=topic, CreatedAt=DAY) for id in ids])
    messages = write_lines(tmp_path / "received.jsonl", [received(id, DAY, b"data") for id in ids])
    day = ("--until", NEXT_DAY.isoformat())
    words = (
        ("audit", "--received", str(messages), *day, "--output", str(tmp_path / "audit")),
        ("archive", "--archive", str(tmp_path / "archive"), *day, "--read-late", "--purge"),
        ("drain",),
    )
    file = tmp_path / "jobs.py"
    file.write_text(JOBS)
    given = variables | {"TZ": "Asia/Kolkata"}
    with spark_cluster.started(json.dumps(words), variables=given, file=str(file)) as driver:
        assert driver.wait(600) == 0, driver.stderr
        audit, archive, drain = map(json.loads, driver.stdout.splitlines())
    assert (audit["delivered"], audit["pending"], archive["deleted"], drain["published"]) == (TASKS,) * 4
    [parquet] = (tmp_path / "archive").glob("window=*/run=*/SentDate=2026-10-20/*.parquet")
    assert {*pyarrow.parquet.read_table(parquet)["SentAt"].to_pylist()} == {DAY}
    assert spark_cluster.spark_tasks() < 200


@pytest.mark.long("test_command.py has the sentences")
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

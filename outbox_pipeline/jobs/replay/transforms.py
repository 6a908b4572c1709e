"""Which tasks are replayed, and in which order."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

#: What `in_order` needs.
ORDER = ("Id", "OrderingKey", "CreatedAt", "Sequence")


def selected(tasks: DataFrame, *, attribute: str = "", where: str = "") -> DataFrame:
    """Return those tasks whose messages have an attribute, `key=value` or `key`, and that meet a predicate of SQL.

    Raises errors of Spark: the predicate cannot be parsed, or names what there is not.
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
    """Return each id once, as it was sent last."""
    last = Window.partitionBy("Id").orderBy(f.desc("SentAt"))
    return tasks.withColumn("_number", f.row_number().over(last)).where("_number = 1").drop("_number")


def in_order(tasks: DataFrame, partitions: int = 0) -> DataFrame:
    """Return tasks as they are to be written: those of an ordering key side by side in the order of their commits.

    So no worker finds one of them unsent before those that come first. The others go by id, as they lie in the table.
    """
    placed = tasks.withColumn("_place", f.coalesce("OrderingKey", "Id"))
    parted = placed.repartition(partitions, "_place") if partitions else placed.repartition("_place")
    ordered = f.col("OrderingKey").isNotNull()
    of_key = [f.when(ordered, f.col(name)) for name in ("CreatedAt", "Sequence")]
    return parted.sortWithinPartitions("OrderingKey", *of_key, "Id").drop("_place")

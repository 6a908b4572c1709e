"""Prepares the rows of users for registration: parses JSON lines, completes rows, and sorts them."""

import re
from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, DataFrameReader, Window
from pyspark.sql import functions as f

from outbox.errors import SettingError
from outbox_pipeline import schemas
from outbox_pipeline.jobs.register.rows import LINE, PARSE_ERROR, UNPARSED, check, complete
from outbox_pipeline.spark.spark_tasks import placed

#: A temporary view of the rows for `selected`.
_INPUT = "outbox_input"
#: The format of times in rejected rows, which this job can parse again.
TIMES = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


def json_lines(lines: DataFrame) -> DataFrame:
    """Return the lines of a column `value` that are not empty as the column LINE, with the columns of folders."""
    # As bytes, because Spark would replace invalid UTF-8.
    value = f.col("value")
    return lines.where(value.rlike(r"\S")).withColumn("value", value.cast("binary")).withColumnRenamed("value", LINE)


def read_any_json(reader: DataFrameReader, path: str) -> DataFrame:
    """Return the rows of JSON lines with all their columns, in the types that Spark finds."""
    rows = reader.json(path, columnNameOfCorruptRecord=UNPARSED)
    if UNPARSED not in rows.columns:
        return rows
    return rows.withColumn(PARSE_ERROR, f.when(f.col(UNPARSED).isNotNull(), f.lit("the line is not a JSON object")))


def selected(rows: DataFrame, select: str) -> DataFrame:
    """Return the columns that Spark SQL makes of the rows. A line that cannot be parsed is kept as it is.

    Raises SettingError with Spark's own position in `select`.
    """
    rows.createOrReplaceTempView(_INPUT)
    # Under other names, because * selects the columns, too.
    ours = {f"{_INPUT}{name}": name for name in (UNPARSED, PARSE_ERROR) if name in rows.columns}
    more = "".join(f", {name} AS {renamed}" for renamed, name in ours.items())
    try:
        found = rows.sparkSession.sql(f"SELECT\n{select}\n{more} FROM {_INPUT}")
    except AnalysisException as error:
        sentence = re.sub(r";? *SQLSTATE: \w+", "", str(error).strip().partition("\n")[0]).rstrip("; ")
        where = re.sub(r"line (\d+)", lambda found: f"line {int(found[1]) - 1}", sentence)
        raise SettingError(f"--select: {where}") from None
    finally:
        rows.sparkSession.catalog.dropTempView(_INPUT)
    return found.drop(*ours.values()).withColumnsRenamed(ours)


def in_folders(reason: Column, folders: Sequence[str]) -> Column:
    """Add the columns of folders to the reason to reject a line, because the line does not have them."""
    if not folders:
        return reason
    each = [f.concat(f.lit(f"{name}="), f.coalesce(f.col(f"`{name}`"), f.lit("NULL"))) for name in folders]
    return f.concat(reason, f.lit(" (folder "), f.concat_ws("/", *each), f.lit(")"))


def prepared(rows: DataFrame, *, topic: str = "", key: Sequence[str] = ()) -> DataFrame:
    """Return `rows` with the columns of `schemas.INPUT` and their task IDs.

    Raises SettingError: a column is unknown, missing or of a wrong type.
    """
    check(rows.schema, topic, key)
    numbered = rows.toDF(*map(str, range(len(rows.columns))))  # because mapInArrow refuses a dot in a name
    return numbered.mapInArrow(partial(_complete, rows.columns, topic, key), schemas.INPUT)


def _complete(
    names: Sequence[str], topic: str, key: Sequence[str], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    schema = schemas.arrow(schemas.INPUT)
    for rows in complete(names, topic, key, batches):
        yield pa.RecordBatch.from_pylist(rows, schema)


def in_order(tasks: DataFrame, partitions: int = 0) -> DataFrame:
    """Return tasks in write order. Tasks of one ordering key, or with equal IDs, are in one partition.

    Tasks without an ordering key are sorted by ID, so a commit touches few splits of the table:
    https://cloud.google.com/spanner/docs/bulk-loading. Tasks of an ordering key are sorted by `sequence`, then by ID.
    """
    # Rows with equal IDs are adjacent, whatever their sequences. Otherwise a later row would find its task in the
    # table, where it looks like a task that an earlier attempt of the Spark task wrote.
    first = f.min("sequence").over(Window.partitionBy("_place", "task_id"))
    # The hash makes the order of two different rows with one ID deterministic.
    whole = f.xxhash64("topic", "data", f.to_json(f.struct(f.array_sort(f.map_entries("attributes")))), "priority")
    ordered = placed(tasks, partitions, "ordering_key", "task_id", "line").withColumn("_first", first)
    return ordered.sortWithinPartitions("ordering_key", "_first", "task_id", "sequence", whole).drop("_place", "_first")

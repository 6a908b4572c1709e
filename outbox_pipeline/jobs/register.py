"""`register`: turns the rows of files, of a table or of a DataFrame into tasks.

It reads and sorts the rows. `register_rows` checks and inserts them in Spark tasks.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.sql import DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.types import ArrayType, StringType

from outbox.base.values import chunked
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import DatabaseSettings
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import REJECTS, RegisterSettings, format_of_input
from outbox_pipeline.jobs.register_select import NULLS, selected
from outbox_pipeline.rows.register_rows import (
    ANSWER,
    COUNTS,
    FILE,
    HIDDEN,
    INPUT_COLUMNS,
    KNOWN,
    LINE,
    OF_DATA,
    SOME,
    WHY,
    check,
    complete,
    complete_lines,
    register_in_key_order,
    register_rows,
)
from outbox_pipeline.rows.text_files import TextFiles, header
from outbox_pipeline.spanner import open_table
from outbox_pipeline.spark.files import Folder, checked, is_connect, read_all_columns, read_table, whole_files
from outbox_pipeline.spark.spark_tasks import Rows, divided, map_batches, map_rows, new_run, parallelism, placed, report
from outbox_pipeline.spark.stack_traces import spark_errors

#: A line that ends within quotes: values with and without quotes, and then quotes that are not closed. Its quantifiers
#: never go back, so a long line costs neither time nor stack.
_OPEN = r"""^(?:(?:"(?:[^"]++|"")*+"[^,]*+|[^",][^,]*+)?+,)*+"(?:[^"]++|"")*+\z"""
_TEXT = StringType()

_log = logging.getLogger("outbox_pipeline")


@dataclass(frozen=True, slots=True)
class Registered:
    """The outcomes of the rows, described in docs/pipeline/register.md. `rejects` is the folder of rejected rows."""

    read: int
    registered: int
    existing: int
    repeated: int
    rejected: int
    rejects: str | None


def register(
    dataframe: DataFrame,
    *,
    rejects: str,
    project: str | None = None,
    instance: str | None = None,
    database: str | None = None,
    database_role: str | None = None,
    topic: str = "",
    key: Sequence[str] = (),
    max_rows_per_second: int = 0,
) -> Registered:
    """Register each row as a task, with requests of LOW priority. A row whose task exists is not registered again.

    Args:
        dataframe: rows with the columns of docs/pipeline/register.md, at least `data`, and `topic` unless you pass it.
        rejects: folder for rejected rows with their reasons, as JSON lines. Each run creates a subfolder.
        project: project of the database. The default is OUTBOX_PROJECT or GOOGLE_CLOUD_PROJECT.
        instance: the default is OUTBOX_INSTANCE.
        database: the default is OUTBOX_DATABASE.
        database_role: the default is OUTBOX_DATABASE_ROLE or no role.
        topic: topic of rows without a topic.
        key: columns. A row without `task_id` gets an ID that derives from its topic and these columns. See
            `outbox_pipeline.task_id`. Without a key, the ID derives from the whole row, so two equal rows are one task.
        max_rows_per_second: limit of all executors together. 0 is no limit.

    Raises:
        SettingError: a column is unknown, missing or of a wrong type, or a setting is not allowed.
        NotReached: Spanner does not answer, or the database, the table or a permission is missing.
    """
    if dataframe.isStreaming:
        raise SettingError(
            "The DataFrame is a stream. Write it with writeStream.format('outbox'), or pass it to register_stream"
        )
    target = DatabaseSettings.read(
        {"project": project, "instance": instance, "database": database, "database_role": database_role}
    )
    with spark_errors():
        tasks = prepared(dataframe, topic=topic, key=key)
        return _register(tasks, target, REJECTS.value(rejects, "rejects"), max_rows_per_second)


def run(spark: SparkSession, settings: RegisterSettings) -> dict[str, Any]:
    """Register the rows of files or of a table. Return the fields of Registered. Raises the errors of `register`."""
    key = tuple(name.strip() for name in settings.key.split(",")) if settings.key else ()
    if settings.input_table:
        rows = read_table(spark, "--input-table", settings.input_table)
        tasks = prepared(selected(rows, settings.select) if settings.select else rows, topic=settings.topic, key=key)
    else:
        how = {"select": settings.select, "topic": settings.topic}
        tasks = read(spark, settings.input, settings.input_format, key=key, multi_line=settings.multi_line, **how)
    done = _register(tasks, settings, settings.rejects, settings.max_rows_per_second)
    if done.rejected:
        extra = {"action": "rejected", "fields": {"rejected": done.rejected}}
        text = "%s rows were rejected. Write the rows in %s to a new file, correct them there, and register that file"
        _log.warning(text, f"{done.rejected:,}", done.rejects, extra=extra)
    return asdict(done)


def read(
    spark: SparkSession,
    path: str,
    format: str,
    *,
    select: str = "",
    topic: str = "",
    key: Sequence[str] = (),
    multi_line: bool = False,
) -> DataFrame:
    """Return the rows of files as `prepared` does. `select` makes their columns, and a row that it cannot is rejected.

    `multi_line` says that values of CSV files can have line breaks.

    Raises SettingError if a column is unknown, missing or of a wrong type, and OutboxError if Spark would not read all
    rows, or would read deleted ones.
    """
    format = format_of_input(path, format)
    given = checked(spark, path, format, (*INPUT_COLUMNS, *key))
    if multi_line and format == "csv":
        given = whole_files(given)
    if format == "parquet":
        rows = read_all_columns(given).withColumn(FILE, f.expr("_metadata.file_path"))
        return prepared(selected(rows, select) if select else rows, topic=topic, key=key)
    lines = given.lines()
    if format == "csv":
        files = TextFiles(_headers(lines, multi_line=multi_line), given.columns)
        names = dict.fromkeys(name for head in (files.heads or {}).values() for name in head)
        given.check_columns(names)
        names |= dict.fromkeys(given.columns)
    elif select:
        files = TextFiles(None, given.columns)
        names = dict.fromkeys([*_members(files, lines), *given.columns])
    else:
        names = dict.fromkeys([*INPUT_COLUMNS, *key, *given.columns])
        files = TextFiles(None, given.columns, KNOWN.union(key) - {*given.columns})
    if select:
        rows = selected(_staged(files, lines, [*names]), select)
        if format == "json" and not OF_DATA & {*rows.columns}:
            rows = rows.withColumn("data", f.when(f.col(WHY).isNull(), f.col(LINE)))
        return prepared(rows, topic=topic, key=key)
    check(schemas.optional(**dict.fromkeys(names, _TEXT)), topic, key)
    return map_batches(lines, schemas.INPUT, complete_lines, files, topic, key)


def _headers(lines: DataFrame, *, multi_line: bool) -> dict[str, list[str]]:
    """Return the columns of each CSV file. Raises OutboxError if a value has a line break that is not announced.

    Spark would divide the value while it divides the file. In a file of one column, a footer of psql looks like a row.
    """
    text = f.col("value").cast("string")
    broken = f.lit(None) if multi_line else f.when(text.rlike(_OPEN), f.substring(text, 1, 80))
    first = f.when((f.col("begin") == 0) & text.rlike(r"\S"), f.substring("value", 1, 100_000))
    found = lines.withColumn("place", f.monotonically_increasing_id()).groupBy("file").agg(
        f.first(first, ignorenulls=True).alias("head"), f.first(broken, ignorenulls=True).alias("line"),
        f.max_by(f.substring(text, 1, 30), f.struct("begin", "place")).alias("last"), f.count(f.lit(1)).alias("count"),
    )  # fmt: skip
    heads = {}
    for file, head, line, last, count in sorted(found.collect()):
        heads[file] = header(file, head and bytes(head))
        rows = count - 2
        if len(heads[file]) == 1 and last.rstrip("\r") == ("(1 row)" if rows == 1 else f"({rows} rows)"):
            raise OutboxError(f"{file}: the last line {last!r} is a footer of psql. Write the file with psql --csv")
        if line is not None:
            raise OutboxError(
                f"{file}: a value has a line break, or quotes that are not closed, in the line {line!r}. If values "
                "have line breaks, pass --multi-line: one Spark task then reads a whole file. Otherwise correct the "
                "line: quotes inside of quotes are doubled, not escaped by a backslash"
            )
    return heads


def _members(files: TextFiles, lines: DataFrame) -> list[str]:
    """Return the names of the members of all JSON lines."""

    def names(batches: Iterator[pa.RecordBatch]) -> Iterator[Rows]:
        found = dict.fromkeys(name for record in files.records(batches) for name in record.values)
        yield [{"name": each} for each in found]

    found = dict.fromkeys(name for (name,) in map_batches(lines, schemas.optional(name=_TEXT), names).collect())
    return [name for name in found if name not in files.folders]


def _staged(files: TextFiles, lines: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the values of text files, and columns that `selected` hides."""
    places = [str(number) for number in range(len(names))]  # because mapInArrow refuses a dot in a name
    schema = schemas.optional(**dict.fromkeys([*places, *HIDDEN], _TEXT), **{NULLS: ArrayType(_TEXT)})

    def staged(batches: Iterator[pa.RecordBatch]) -> Iterator[Rows]:
        for some in chunked(files.records(batches), SOME):
            yield [
                {place: each.values.get(name) for place, name in zip(places, names, strict=True)}
                | {FILE: each.file, LINE: each.line, WHY: each.why, NULLS: each.nulls}
                for each in some
            ]

    return map_batches(lines, schema, staged).toDF(*names, *HIDDEN, NULLS)


def prepared(rows: DataFrame, *, topic: str = "", key: Sequence[str] = ()) -> DataFrame:
    """Return `rows` with the columns of `schemas.INPUT` and their task IDs.

    Raises SettingError: a column is unknown, missing or of a wrong type.
    """
    check(rows.schema, topic, key)
    numbered = rows.toDF(*map(str, range(len(rows.columns))))  # because mapInArrow refuses a dot in a name
    return map_batches(numbered, schemas.INPUT, complete, rows.columns, topic, key)


def in_order(tasks: DataFrame, partitions: int = 0) -> DataFrame:
    """Return tasks in write order. Tasks of one ordering key, or with equal IDs, are in one partition.

    Tasks without an ordering key are sorted by ID, so a commit touches few splits of the table:
    https://cloud.google.com/spanner/docs/bulk-loading. Tasks of an ordering key are sorted by `sequence`, then by ID.
    """
    # Rows with equal IDs are adjacent, whatever their sequences. Otherwise a later row would find its task in the
    # table, where it looks like a task that an earlier attempt of the Spark task wrote.
    has_order = f.col("created_at").isNotNull() | f.col("sequence").isNotNull()
    order = f.when(has_order, f.struct("created_at", "sequence"))
    first = f.min(order).over(Window.partitionBy("_place", "task_id"))
    # The hash makes the order of two different rows with one ID deterministic.
    whole = f.xxhash64("topic", "data", f.to_json(f.struct(f.array_sort(f.map_entries("attributes")))), "priority")
    ordered = placed(tasks, partitions, "ordering_key", "task_id", "line").withColumn("_first", first)
    return ordered.sortWithinPartitions("ordering_key", "_first", "task_id", "sequence", whole).drop("_place", "_first")


def register_stream(
    stream: DataFrame,
    *,
    project: str | None = None,
    instance: str | None = None,
    database: str | None = None,
    database_role: str | None = None,
    topic: str = "",
    key: Sequence[str] = (),
    max_rows_per_second: int = 0,
) -> DataFrame:
    """Return the rejected rows of a stream. A query that writes them registers the other rows.

    Its progress has the counts of each batch as `observedMetrics["outbox"]`. They are logged, and sent as a metric. The
     arguments are those of `register`. Raises SettingError.
    """
    given = {"project": project, "instance": instance, "database": database, "database_role": database_role}
    spark, target = stream.sparkSession, DatabaseSettings.read(given)
    parts, rate = divided(spark, max_rows_per_second)
    # Spark does not merge the partitions of a stream.
    tasks = placed(
        prepared(stream, topic=topic, key=key), parts or parallelism(spark), "ordering_key", "task_id", "line"
    )
    answers = map_rows(tasks.drop("_place"), ANSWER, register_in_key_order, target, rate)
    if spark not in _REPORTERS:
        _REPORTERS[spark] = _Reporter()
        spark.streams.addListener(_REPORTERS[spark])
    return rejected(answers, "outbox")


class _Reporter(StreamingQueryListener):
    """Logs and counts the outcomes of the rows of streams."""

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Do nothing."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        if counts := event.progress.observedMetrics.get("outbox"):
            report("stream", {name: counts[name] or 0 for name in COUNTS}, event.progress.batchId)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Do nothing."""


#: The one of each session.
_REPORTERS = WeakKeyDictionary[SparkSession, _Reporter]()


def _register(tasks: DataFrame, target: DatabaseSettings, rejects: str, per_second: int) -> Registered:
    folder = f"{rejects.rstrip('/')}/{new_run()}"
    began = open_table(target).now()
    parts, rate = divided(tasks.sparkSession, per_second)
    answers = map_rows(in_order(tasks, parts), ANSWER, register_rows, target, began, rate)
    counted = Observation()
    rejected(answers, counted).write.json(folder)
    counts = {name: counted.get[name] or 0 for name in COUNTS}
    if not counts["rejected"] and not is_connect(tasks.sparkSession):
        Folder(tasks.sparkSession, folder).delete()
    return Registered(read=sum(counts.values()), **counts, rejects=folder if counts["rejected"] else None)


def rejected(answers: DataFrame, observed: Observation | str) -> DataFrame:
    """Return the rejected rows of ANSWER. Spark counts the outcomes while they are written."""
    counts = [f.sum(name).alias(name) for name in COUNTS]
    first, *others = counts
    return answers.observe(observed, first, *others).where("reject IS NOT NULL").select("reject.*")

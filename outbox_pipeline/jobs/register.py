"""`register`: turns the rows of files, of a table or of a DataFrame into tasks.

It reads and sorts the rows. `register_rows` checks and inserts them in Spark tasks.
"""

import csv
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructType

from outbox.errors import OutboxError, SettingError
from outbox.program.settings import DatabaseSettings
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import RegisterSettings, format_of_input
from outbox_pipeline.rows.register_rows import (
    ANSWER,
    COLUMNS,
    LINE,
    PARSE_ERROR,
    REJECTS,
    UNPARSED,
    check,
    complete,
    new_run,
    register_rows,
)
from outbox_pipeline.rows.texts import CONVERT
from outbox_pipeline.spanner import open_table
from outbox_pipeline.spark.files import Input, checked, read_all_columns, read_table
from outbox_pipeline.spark.spark_tasks import divided, map_rows, placed, totals
from outbox_pipeline.spark.stack_traces import spark_errors

#: CSV is read in this encoding, which keeps every byte. As UTF-8, Spark would replace invalid bytes.
_BYTES = "ISO-8859-1"
#: Marks a quoted empty text while CSV is read, to tell it from a missing one, which is NULL. It is not valid UTF-8.
_EMPTY = "\xffan empty text\xff"

#: A line that ends within quotes: values with and without quotes, and then quotes that are not closed. Its quantifiers
#: never go back, so a long line costs neither time nor stack.
_OPEN = r"""^(?:(?:"(?:[^"]++|"")*+"[^,]*+|[^",][^,]*+)?+,)*+"(?:[^"]++|"")*+\z"""
#: What other programs write to CSV for NULL.
_NULL, _NULL_DATA = r"^(?:NULL|null|\\N|\(null\)|<NA>|NaN|nan|None)$", r"^(?:NULL|\\N)$"

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
            "The DataFrame is a stream. Write it with writeStream.format('outbox'), or call register in foreachBatch"
        )
    target = DatabaseSettings.read(
        {"project": project, "instance": instance, "database": database, "database_role": database_role}
    )
    with spark_errors():
        tasks = prepared(dataframe, topic=topic, key=key)
        return _register(tasks, target, REJECTS.value(rejects, "rejects"), max_rows_per_second)


def run(spark: SparkSession, settings: RegisterSettings) -> Registered:
    """Register the rows of files or of a table. Raises the errors of `register`."""
    key = tuple(name.strip() for name in settings.key.split(",")) if settings.key else ()
    if settings.input_table:
        rows = read_table(spark, "--input-table", settings.input_table)
    else:
        options = {"any_columns": bool(settings.select), "multi_line": settings.multi_line}
        rows = read(spark, settings.input, settings.input_format, key, **options)
    if settings.select:
        rows = selected(rows, settings.select)
    tasks = prepared(rows, topic=settings.topic, key=key)
    rejects = REJECTS.value(settings.rejects, "--rejects")
    done = _register(tasks, settings, rejects, settings.max_rows_per_second)
    if done.rejected:
        extra = {"action": "rejected", "fields": {"rejected": done.rejected}}
        text = "%s rows were rejected. Write the rows in %s to a new file, correct them there, and register that file"
        _log.warning(text, f"{done.rejected:,}", done.rejects, extra=extra)
    return done


def read(
    spark: SparkSession,
    path: str,
    format: str,
    key: Sequence[str] = (),
    *,
    any_columns: bool = False,
    multi_line: bool = False,
) -> DataFrame:
    """Return the rows of files, with the columns of the job, or with `any_columns`, in the types that Spark finds.

    `multi_line` says that values of CSV files can have line breaks.

    Raises SettingError if the format is auto and the extension is unknown, and OutboxError if Spark would not read all
    rows, or would read deleted ones.
    """
    format = format_of_input(path, format)
    given = checked(spark, path, format, (*COLUMNS, *key))
    if format == "parquet":
        return read_all_columns(given)
    if format == "csv":
        return _read_csv(given, multi_line=multi_line)
    if any_columns:
        rows = given.reader().json(path, columnNameOfCorruptRecord=UNPARSED)
        if UNPARSED not in rows.columns:
            return rows
        return rows.withColumn(PARSE_ERROR, f.when(f.col(UNPARSED).isNotNull(), f.lit("the line is not a JSON object")))
    lines = given.reader().text(path).where(f.col("value").rlike(r"\S"))
    # As bytes, because Spark would replace invalid UTF-8.
    return lines.withColumn("value", f.col("value").cast("binary")).withColumnRenamed("value", LINE)


def _read_csv(given: Input, *, multi_line: bool) -> DataFrame:
    """Return the rows of CSV files, as texts that can contain invalid UTF-8. Raises SettingError, OutboxError."""
    path, of_folders = given.path, given.columns
    # If Spark detected the line separator itself, it would also change line breaks inside quotes.
    first = given.reader_of_files().text(path, lineSep="\n").first()
    end = "\r\n" if first and first["value"].endswith("\r") else "\n"
    if not multi_line:
        _check_lines(given, end)
    options: dict[str, Any] = {
        "header": True, "quote": '"', "escape": '"', "multiLine": multi_line, "lineSep": end, "emptyValue": _EMPTY,
        "encoding": _BYTES, "maxColumns": 1_000_000,  # Spark refuses a file with a longer line
    }  # fmt: skip
    head = given.reader_of_files().options(**options).csv(path)
    if not head.columns:
        raise SettingError(f"--input {path}: the file is empty. Its first line must be a header with names of columns")
    schema = StructType([*head.schema, *schemas.optional(**{UNPARSED: StringType()})])
    options |= {"enforceSchema": False, "columnNameOfCorruptRecord": UNPARSED}
    rows = given.reader().schema(schema).options(**options).csv(path)
    why = f.when(
        f.col(UNPARSED).isNotNull(), f.lit("the line has more or fewer columns than the header, or bad quotes")
    )
    columns = head.columns
    if end == "\n":  # otherwise the last value of the line would end with a carriage return
        last = f.col(f"`{columns[-1]}`")
        why = why.when(last.endswith("\r"), f.lit("the line ends with CR LF, but the header with LF"))
    texts = {name: f.col(f"`{name}`") for name in (*columns, UNPARSED)}
    decoded = {
        _name(name, path): f.when(text == _EMPTY, f.lit("")).otherwise(f.encode(text, _BYTES).cast("string"))
        for name, text in texts.items()
    }
    given.check_columns(decoded)
    decoded |= {name: f.col(f"`{name}`") for name in of_folders}  # Spark reads names of folders as UTF-8
    read = rows.select(*(text.alias(name) for name, text in decoded.items()), why.alias(PARSE_ERROR))
    return _without_null_texts(read, [name for name in decoded if name != UNPARSED], of_folders)


def _check_lines(given: Input, end: str) -> None:
    """Raise OutboxError if a value has a line break, because Spark would divide it while it divides the file."""
    lines = given.reader_of_files().text(given.path, lineSep=end)
    broken = lines.where(f.col("value").rlike(_OPEN) | f.col("value").contains("\n"))
    if found := broken.select("_metadata.file_path", f.substring("value", 1, 80).alias("line")).first():
        raise OutboxError(
            f"{found.file_path}: a value has a line break, or quotes that are not closed, in the line "
            f"{found.line!r}. If values have line breaks, pass --multi-line: one Spark task then reads a whole file. "
            "Otherwise correct the line"
        )


def _without_null_texts(rows: DataFrame, columns: Sequence[str], of_folders: Sequence[str]) -> DataFrame:
    """Reject rows with a text that other programs write for NULL. Spark does not tell whether the text is in quotes."""
    nulls = {name: f.col(f"`{name}`").rlike(_NULL_DATA if name == "data" else _NULL) for name in columns}
    reasons = [
        f.when(
            is_null, f.lit(f"{name} is a text for NULL. In CSV, write nothing for NULL. JSON lines can have this text")
        )
        for name, is_null in nulls.items()
    ]
    reason = f.coalesce(PARSE_ERROR, *reasons)
    if of_folders:  # the line does not have their columns
        values = [f.concat(f.lit(f"{name}="), f.coalesce(f.col(f"`{name}`"), f.lit("NULL"))) for name in of_folders]
        reason = f.concat(reason, f.lit(" (folder "), f.concat_ws("/", *values), f.lit(")"))
    # So that nobody can register the line by accident.
    line = f.concat(f.lit("(a text can mean NULL) "), f.to_json(f.struct(*(f.col(f"`{name}`") for name in columns))))
    return rows.withColumns(
        {
            UNPARSED: f.coalesce(UNPARSED, f.when(f.greatest(*nulls.values(), f.lit(False)), line)),
            PARSE_ERROR: reason,
        }
    )


def _name(column: str, path: str) -> str:
    """Decode the name of a column, without a byte order mark. Raises SettingError."""
    try:
        name = column.encode(_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        name = "\0"
    if "\0" in name:  # UTF-16 has null characters
        raise SettingError(f"--input {path}: the header {column!r} is not valid UTF-8. {CONVERT}")
    # After a byte order mark, Spark keeps the quotes.
    return name if name.encode().decode(_BYTES) == column else next(csv.reader([name]))[0]


def selected(rows: DataFrame, select: str) -> DataFrame:
    """Return the columns that Spark SQL makes of the rows. A line that cannot be parsed is kept as it is.

    Raises SettingError with Spark's own position in `select`.
    """
    # Under other names, because * selects the columns, too.
    ours = {f"outbox{name}": name for name in (UNPARSED, PARSE_ERROR) if name in rows.columns}
    more = "".join(f", {name} AS {renamed}" for renamed, name in ours.items())
    literal = select.replace("{", "{{").replace("}", "}}")
    try:
        found = rows.sparkSession.sql(f"SELECT\n{literal}\n{more} FROM {{rows}}", rows=rows)
    except AnalysisException as error:
        sentence = re.sub(r";? *SQLSTATE: \w+", "", str(error).strip().partition("\n")[0]).rstrip("; ")
        where = re.sub(r"line (\d+)", lambda found: f"line {int(found[1]) - 1}", sentence)
        raise SettingError(f"--select: {where}") from None
    return found.drop(*ours.values()).withColumnsRenamed(ours)


def prepared(rows: DataFrame, *, topic: str = "", key: Sequence[str] = ()) -> DataFrame:
    """Return `rows` with the columns of `schemas.INPUT` and their task IDs.

    Raises SettingError: a column is unknown, missing or of a wrong type.
    """
    names = rows.columns
    check(rows.schema, topic, key)

    def completed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for found in complete(names, topic, key, batches):
            yield pa.RecordBatch.from_pylist(found, schemas.arrow(schemas.INPUT))

    numbered = rows.toDF(*map(str, range(len(names))))  # because mapInArrow refuses a dot in a name
    return numbered.mapInArrow(completed, schemas.INPUT)


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


def _register(tasks: DataFrame, target: DatabaseSettings, rejects: str, per_second: int) -> Registered:
    folder = f"{rejects}/{new_run()}"
    began = open_table(target).now()
    parts, rate = divided(tasks.sparkSession, per_second)
    counts = totals(map_rows(in_order(tasks, parts), ANSWER, register_rows, target, began, rate, folder))
    return Registered(read=sum(counts.values()), **counts, rejects=folder if counts["rejected"] else None)

"""Reads what `audit` compares with tasks: messages of Pub/Sub's subscriptions, and records of a subscriber's inbox."""

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import fastavro
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, MapType, StringType, StructType, TimestampType

from outbox.base.values import chunked
from outbox.errors import OutboxError, SettingError
from outbox.inbox.once import PROCESSED_TABLE as INBOX
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.program.settings import DatabaseSettings
from outbox.table.connection import open_database
from outbox.table.timeouts import retry_and_timeout
from outbox.table.transactions import table_errors
from outbox_pipeline import schemas
from outbox_pipeline.file_names import format_of
from outbox_pipeline.job_settings import AuditSettings
from outbox_pipeline.rows.text_files import TextFiles
from outbox_pipeline.rows.texts import ADDED, ADDED_PREFIXES, EPOCH
from outbox_pipeline.source.parts import ARROW_BYTES, ARROW_ROWS, KeyPart, column, key_parts
from outbox_pipeline.spanner import CALL_SECONDS, LOW, TABLE_SECONDS
from outbox_pipeline.spark.files import checked, read_all_columns, read_table
from outbox_pipeline.spark.spark_tasks import Rows, map_batches, read_partitions, read_parts

#: A publish time after this one, or before 1970, is unreadable.
_LAST = datetime(9000, 1, 1, tzinfo=UTC)
#: The columns of the messages, described in docs/pipeline/audit.md, with the types of Avro files:
#: https://cloud.google.com/pubsub/docs/create-cloudstorage-subscription#file_format. Other columns are ignored.
MESSAGES = schemas.optional(
    message_id=StringType(),
    publish_time=TimestampType(),
    attributes=MapType(StringType(), StringType()),
    data=BinaryType(),
)
#: The columns of JSON lines. Each is read as a text and parsed later.
LINES = schemas.optional(**dict.fromkeys(MESSAGES.names, StringType()))
#: A record, without its consumer.
RECORD = StructType([schemas.FOUND["task_id"], schemas.FOUND["processed_at"]])


def messages(spark: SparkSession, settings: AuditSettings) -> DataFrame:
    """Return the received messages with the columns of their table or files. Raises SettingError, OutboxError."""
    if settings.received_table:
        return read_table(spark, "--received-table", settings.received_table)
    form = settings.received_format
    if form == "auto":
        form = format_of(settings.received) or "parquet"
    given = checked(spark, settings.received, form)
    if form == "avro":  # needs no jar, but a Spark task holds a whole file in memory
        files = given.reader().format("binaryFile").load(given.path)
        return files.select("path", "content").mapInArrow(_of_avro, MESSAGES)
    if form == "json":
        given.check_columns(LINES.names)
        return map_batches(given.lines(), LINES, _of_lines, TextFiles(None, given.columns))
    return read_all_columns(given)


def _of_lines(files: TextFiles, batches: Iterator[pa.RecordBatch]) -> Iterator[Rows]:
    """Yield the messages of JSON lines. Those of a line that is no JSON object have no values."""
    for some in chunked(files.records(batches), ARROW_ROWS):
        yield [{name: each.values.get(name) for name in LINES.names} for each in some]


def _of_avro(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the messages of Avro files. Raises SettingError for another schema, and OutboxError for a damaged file."""
    schema = schemas.arrow(MESSAGES)
    for batch in batches:
        for path, content in zip(batch["path"].to_pylist(), batch["content"], strict=True):
            try:
                file: Any = fastavro.reader(pa.BufferReader(content.as_buffer()))
                _check(path, {field["name"] for field in file.writer_schema["fields"]})
                for found in chunked(file, ARROW_ROWS, ARROW_BYTES, lambda message: len(message["data"])):
                    yield pa.RecordBatch.from_pylist(found, schema)
            except OutboxError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise OutboxError(f"{path} is not a complete Avro file of Pub/Sub messages: {reason}") from error


def _check(path: str, fields: set[str]) -> None:
    if missing := [name for name in MESSAGES.names if name not in fields]:
        raise SettingError(
            f"{path} has no field {missing[0]}. Set write_metadata and remove use_topic_schema in the configuration of "
            "the subscription"
        )


def received(messages: DataFrame, *, base64: bool, certified: bool = False) -> DataFrame:
    """Return one row for each delivery: task_id, message_id, publish_time, digest, and `readable`.

    `task_id` is NULL for a foreign message. `digest` covers the attributes and, if there is a column `data`, the data.
    A text in `data` is base64 or the data itself. With `certified`, it is the digest of certificates.

    Raises SettingError: a column is missing or of a wrong type.
    """
    has = set(messages.columns)
    if missing := [name for name in MESSAGES.names[:3] if name not in has]:
        raise SettingError(
            f"The received messages have no column {missing[0]}. Their columns are {', '.join(messages.columns)}. "
            "Set write_metadata in the configuration of the subscription"
        )
    read = messages.select(
        f.col("message_id").cast("string").alias("message_id"),
        _time(messages).alias("publish_time"),
        _attributes(messages).alias("attributes"),
        _data(messages, base64=base64).alias("data"),
    )
    return read.select(
        f.try_element_at("attributes", f.lit(TASK_ID_ATTRIBUTE)).alias("task_id"),
        "message_id",
        "publish_time",
        digest(f.col("attributes"), f.col("data"), certified=certified).alias("digest"),
        (f.col("message_id").isNotNull() & f.col("publish_time").isNotNull() & f.col("attributes").isNotNull()).alias(
            "readable"
        ),
    )


def _attributes(messages: DataFrame) -> Column:
    """Return the attributes as a map, or NULL if they cannot be parsed. A blank text is an empty map."""
    type_ = messages.schema["attributes"].dataType
    given = f.col("attributes")
    if isinstance(type_, MapType):
        return f.coalesce(given.cast("map<string,string>"), f.create_map().cast("map<string,string>"))
    if not isinstance(type_, StringType):
        raise SettingError(f"Column attributes is {type_.simpleString()}, but must be a map or a JSON text")
    text = f.when(given.isNull() | (f.trim(given) == ""), f.lit("{}")).otherwise(given)
    return f.from_json(text, "map<string,string>")


def _time(messages: DataFrame) -> Column:
    type_ = messages.schema["publish_time"].dataType.simpleString()
    if type_ not in ("timestamp", "string"):
        raise SettingError(f"Column publish_time is {type_}, but must be a timestamp, or a string with an offset")
    time = f.col("publish_time").try_cast("timestamp")
    # Spark supports years that Python's datetime does not.
    return f.when(time.between(f.lit(EPOCH), f.lit(_LAST)), time)


def _data(messages: DataFrame, *, base64: bool) -> Column:
    """Return the data as bytes, or NULL if there is no such column."""
    if "data" not in messages.columns:
        return f.lit(None).cast("binary")
    type_ = messages.schema["data"].dataType
    if isinstance(type_, BinaryType):
        return f.coalesce(f.col("data"), f.lit(b""))
    if not isinstance(type_, StringType):
        raise SettingError(f"Column data is {type_.simpleString()}, but must be binary or a string")
    text = f.coalesce(f.col("data"), f.lit(""))
    return f.coalesce(f.try_to_binary(text, f.lit("base64")), f.lit(b"")) if base64 else f.encode(text, "UTF-8")


def digest(attributes: Column, data: Column, *, certified: bool = False) -> Column:
    """Return the digest of a message, or NULL if the attributes are NULL. NULL data is left out.

    It is computed for tasks and for received messages, so that the audit does not shuffle bodies. The int64 of an audit
    finds corruption, which suffices, because each message is compared with its own task only. The SHA-256 of a
    certificate also finds forgeries.
    """
    entries = f.sort_array(f.map_entries(f.map_filter(attributes, _is_registered)))
    whole = f.sha2(f.to_json(f.struct(entries.alias("a"), f.sha2(data, 256).alias("d"))), 256)
    return f.when(attributes.isNotNull(), whole if certified else f.xxhash64(entries, data))


def _is_registered(name: Column, _: Column) -> Column:
    added = name.isin(*ADDED)
    for prefix in ADDED_PREFIXES:
        added |= name.startswith(prefix)
    return ~added


def records(spark: SparkSession, settings: AuditSettings) -> DataFrame:
    """Return the records of the consumer. Raises NotReached, or OutboxError if there is none."""
    *path, name = (settings.inbox_database or settings.database).split("/")
    named: dict[str, Any] = dict(zip(("project", "instance"), path[1::2], strict=False))
    database = dataclasses.replace(settings, database=name, **named)
    if not any(True for _ in inbox_rows(database, settings.inbox, KeyPart("", ""), limit=1)):
        raise OutboxError(
            f"Consumer {settings.inbox!r} has no record in {INBOX} of {name}. Check --inbox and --inbox-database"
        )

    def read(part: KeyPart) -> Iterator[pa.RecordBatch]:
        for rows in chunked(inbox_rows(database, settings.inbox, part), ARROW_ROWS):
            ids, at = zip(*rows, strict=True)
            yield pa.RecordBatch.from_arrays([column("Id", ids), column("SentAt", at)], schema=schemas.arrow(RECORD))

    return read_parts(spark, read, key_parts(read_partitions(spark)), RECORD)


def inbox_rows(settings: DatabaseSettings, consumer: str, part: KeyPart, limit: int = 0) -> Iterator[list[Any]]:
    """Yield TaskId and ProcessedAt of a range of task IDs, undecoded. Raises NotReached if the table is missing."""
    database: Any = open_database(settings, CALL_SECONDS)
    with table_errors(INBOX), database.snapshot() as snapshot:
        yield from snapshot.read(
            INBOX, ("TaskId", "ProcessedAt"), part.keys(consumer), limit=limit, lazy_decode=True,
            request_options={"priority": LOW, "request_tag": "outbox-pipeline-inbox"},
            **retry_and_timeout(TABLE_SECONDS),
        )  # fmt: skip

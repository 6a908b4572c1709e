"""Reads the messages that Pub/Sub's subscriptions to BigQuery and Cloud Storage write."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import fastavro
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, MapType, StringType, TimestampType

from outbox.base.values import chunked
from outbox.errors import OutboxError, SettingError
from outbox.message import TASK_ID_ATTRIBUTE
from outbox_pipeline import schemas
from outbox_pipeline.jobs.audit.attributes import ADDED, ADDED_PREFIXES
from outbox_pipeline.source.parts import ARROW_BYTES, ARROW_ROWS
from outbox_pipeline.spark.inputs import Input

#: A publish time outside these bounds is unreadable.
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
#: The columns of the messages, described in docs/pipeline/audit.md, with the types of Avro files:
#: https://cloud.google.com/pubsub/docs/create-cloudstorage-subscription#file_format. Other columns are ignored.
MESSAGES = schemas.optional(
    message_id=StringType(),
    publish_time=TimestampType(),
    attributes=MapType(StringType(), StringType()),
    data=BinaryType(),
)
#: The schema for JSON lines. Every column is read as a text and parsed later.
LINES = schemas.optional(**dict.fromkeys(MESSAGES.names, StringType()))


def read_avro(given: Input) -> DataFrame:
    """Return the messages of a subscription's Avro files, without a jar. A Spark task holds a whole file in memory.

    Spark raises SettingError if the files have another schema, and OutboxError if a file is damaged.
    """
    files = given.reader_of_files().format("binaryFile").load(given.path).select("path", "content")
    return files.mapInArrow(_decode, MESSAGES)


def _decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    schema = schemas.arrow(MESSAGES)
    for batch in batches:
        for path, content in zip(batch["path"].to_pylist(), batch["content"], strict=True):
            try:
                file: Any = fastavro.reader(pa.BufferReader(content.as_buffer()))
                _check(path, {field["name"] for field in file.writer_schema["fields"]})
                for messages in chunked(file, ARROW_ROWS, ARROW_BYTES, lambda message: len(message["data"])):
                    yield pa.RecordBatch.from_pylist(messages, schema)
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
        (sha256 if certified else digest)(f.col("attributes"), f.col("data")).alias("digest"),
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
    return f.when(time.between(f.lit(_FIRST), f.lit(_LAST)), time)


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


def digest(attributes: Column, data: Column) -> Column:
    """Return the digest of a message as an int64, or NULL if the attributes are NULL. NULL data is left out.

    It is computed for tasks and for received messages, so that the audit does not shuffle bodies. The hash finds
    corruption, not forgeries. 64 bits suffice, because each message is compared with its own task only.
    """
    entries = f.sort_array(f.map_entries(f.map_filter(attributes, _is_registered)))
    return f.when(attributes.isNotNull(), f.xxhash64(entries, data))


def sha256(attributes: Column, data: Column) -> Column:
    """Return the digest of a message that also finds forgeries, as `attributes.sha256_of`. NULL data is empty.

    Without a message, it is the digest of no line.
    """
    entries = f.map_entries(f.map_filter(attributes, _is_registered))
    lines = f.transform(entries, lambda each: f.concat_ws(" ", f.sha2(each["key"], 256), f.sha2(each["value"], 256)))
    all_lines = f.concat(f.array(f.sha2(f.coalesce(data, f.lit(b"")), 256)), f.sort_array(lines))
    return f.sha2(f.coalesce(f.concat(f.array_join(all_lines, "\n"), f.lit("\n")), f.lit("")), 256)


def _is_registered(name: Column, _: Column) -> Column:
    added = name.isin(*ADDED)
    for prefix in ADDED_PREFIXES:
        added |= name.startswith(prefix)
    return ~added

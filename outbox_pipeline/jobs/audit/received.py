"""Reads the messages that Pub/Sub's subscriptions to BigQuery and Cloud Storage write."""

from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, MapType, StringType, StructField, StructType

from outbox.errors import SettingError
from outbox.message import TASK_ID_ATTRIBUTE
from outbox_pipeline.jobs.audit.digests import digest

#: The columns of the messages, described in docs/pipeline/audit.md. Other columns are ignored.
COLUMNS = ("message_id", "publish_time", "attributes", "data")
#: A publish time outside these bounds is unreadable.
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
_NEEDED = ("message_id", "publish_time", "attributes")
#: The schema for JSON lines. Every column is read as a text and parsed later.
LINES = StructType([StructField(name, StringType()) for name in COLUMNS])


def received(messages: DataFrame, *, base64: bool) -> DataFrame:
    """Return one row for each delivery: task_id, message_id, publish_time, digest, and `readable`.

    `task_id` is NULL for a foreign message. `digest` covers the attributes and, if there is a column `data`, the data.
    A text in `data` is base64 or the data itself.

    Raises SettingError: a column is missing or of a wrong type.
    """
    has = set(messages.columns)
    if missing := [name for name in _NEEDED if name not in has]:
        raise SettingError(
            f"The received messages have no column {missing[0]}. Their columns are {', '.join(messages.columns)}. "
            "Set write_metadata "
            "in the configuration of the subscription"
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
        digest(f.col("attributes"), f.col("data")).alias("digest"),
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

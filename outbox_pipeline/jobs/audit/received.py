"""What subscribers received, as Pub/Sub's subscriptions to BigQuery and Cloud Storage write it: pure."""

from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, MapType, StringType, StructField, StructType

from outbox.errors import SettingError
from outbox.message import TASK_ID_ATTRIBUTE
from outbox_pipeline.jobs.audit.digests import digest

#: Columns of the messages; docs/pipeline/audit.md says what each may be. Others are not looked at.
COLUMNS = ("message_id", "publish_time", "attributes", "data")
#: A publish time outside of these is none.
_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
_NEEDED = ("message_id", "publish_time", "attributes")
#: As the columns of JSON lines are read: as texts, whatever is in them.
LINES = StructType([StructField(name, StringType()) for name in COLUMNS])


def received(messages: DataFrame, *, base64: bool) -> DataFrame:
    """Return one row a delivery: task_id, message_id, publish_time, digest, and `readable`.

    `task_id` is NULL of a message that is none of the outbox. `digest` is of the message's data and attributes, of the
    attributes alone where there is no column `data`. Texts in `data` are base64, or the data itself.

    Raises SettingError: a column is missing or of a type that it cannot have.
    """
    has = set(messages.columns)
    if missing := [name for name in _NEEDED if name not in has]:
        raise SettingError(
            f"column {missing[0]} is missing from the received messages, there are {', '.join(messages.columns)}: "
            "does the subscription write its metadata?"
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
    """Return the attributes as a map, or NULL; none if their text is blank."""
    type_ = messages.schema["attributes"].dataType
    given = f.col("attributes")
    if isinstance(type_, MapType):
        return f.coalesce(given.cast("map<string,string>"), f.create_map().cast("map<string,string>"))
    if not isinstance(type_, StringType):
        raise SettingError(f"column attributes is {type_.simpleString()}, it must be a map or a text of JSON")
    text = f.when(given.isNull() | (f.trim(given) == ""), f.lit("{}")).otherwise(given)
    return f.from_json(text, "map<string,string>")


def _time(messages: DataFrame) -> Column:
    type_ = messages.schema["publish_time"].dataType.simpleString()
    if type_ not in ("timestamp", "string"):
        raise SettingError(f"column publish_time is {type_}, it must be a time, or a text of one with its zone")
    time = f.col("publish_time").try_cast("timestamp")
    # Spark knows years that Python's datetime does not, and no message is from there.
    return f.when(time.between(f.lit(_FIRST), f.lit(_LAST)), time)


def _data(messages: DataFrame, *, base64: bool) -> Column:
    """Return the data as bytes; none where there is no such column."""
    if "data" not in messages.columns:
        return f.lit(None).cast("binary")
    type_ = messages.schema["data"].dataType
    if isinstance(type_, BinaryType):
        return f.coalesce(f.col("data"), f.lit(b""))
    if not isinstance(type_, StringType):
        raise SettingError(f"column data is {type_.simpleString()}, it must be bytes or a text")
    text = f.coalesce(f.col("data"), f.lit(""))
    return f.coalesce(f.try_to_binary(text, f.lit("base64")), f.lit(b"")) if base64 else f.encode(text, "UTF-8")

"""What subscribers received, as Pub/Sub's subscriptions to BigQuery and Cloud Storage write it: pure."""

import json
from typing import Any

import pandas as pd
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, BooleanType, LongType, MapType, StringType, StructField, StructType

from outbox.errors import SettingError
from outbox.message import TASK_ID_ATTRIBUTE
from outbox_pipeline.transforms.digests import digest, in_python

#: Columns of the messages; docs/pipeline/audit.md says what each may be. Others are not looked at.
COLUMNS = ("message_id", "publish_time", "attributes", "data")
_NEEDED = ("message_id", "publish_time", "attributes")
#: As the columns of JSON lines are read: as texts, whatever is in them.
LINES = StructType([StructField(name, StringType()) for name in COLUMNS])
#: What is found in the attributes, and of them and the data.
_CONTENTS = StructType(
    [StructField("task_id", StringType()), StructField("digest", LongType()), StructField("readable", BooleanType())]
)


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
    made = messages.select(
        f.col("message_id").cast("string").alias("message_id"),
        _time(messages).alias("publish_time"),
        _contents(_data(messages, base64=base64), _attributes(messages)).alias("found"),
    )
    readable = f.col("message_id").isNotNull() & f.col("publish_time").isNotNull() & f.col("found.readable")
    return made.select("found.task_id", "message_id", "publish_time", "found.digest", readable.alias("readable"))


def _read(data: pd.Series, attributes: pd.Series) -> pd.DataFrame:
    found = [_message(body, text) for body, text in zip(data, attributes, strict=True)]
    names = _CONTENTS.fieldNames()
    columns = zip(*found, strict=True) if found else [()] * len(names)
    types = ("object", "Int64", "bool")
    return pd.DataFrame({n: pd.Series(c, dtype=t) for n, c, t in zip(names, columns, types, strict=True)})


def _message(data: bytes | None, text: str | None) -> tuple[str | None, int | None, bool]:
    """Return the id, the digest, and whether the attributes can be read: none if the text is blank."""
    attributes: Any = {}
    if text and not text.isspace():
        try:
            attributes = json.loads(text)
        except (ValueError, RecursionError):
            return None, None, False
        if type(attributes) is not dict or not all(type(value) is str for value in attributes.values()):
            return None, None, False
    return attributes.get(TASK_ID_ATTRIBUTE), digest(data, attributes), True


_contents = in_python(_read, _CONTENTS)


def _attributes(messages: DataFrame) -> Column:
    """Return the attributes as a text of JSON, or NULL."""
    type_ = messages.schema["attributes"].dataType
    if isinstance(type_, MapType):
        return f.to_json(f.col("attributes").cast("map<string,string>"))
    if not isinstance(type_, StringType):
        raise SettingError(f"column attributes is {type_.simpleString()}, it must be a map or a text of JSON")
    return f.col("attributes")


def _time(messages: DataFrame) -> Column:
    type_ = messages.schema["publish_time"].dataType.simpleString()
    if type_ not in ("timestamp", "string"):
        raise SettingError(f"column publish_time is {type_}, it must be a time, or a text of one with its zone")
    return f.col("publish_time").try_cast("timestamp")


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

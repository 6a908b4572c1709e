"""The schemas of DataFrames: tasks, rows to register, and the results of Spark tasks."""

import re
from inspect import signature
from typing import Any

import pyarrow as pa
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from outbox.table import ddl

_TEXT, _NUMBER, _TIME, _BYTES, _FLAG = t.StringType(), t.LongType(), t.TimestampType(), t.BinaryType(), t.BooleanType()
_ATTRIBUTES = t.MapType(_TEXT, _TEXT, valueContainsNull=False)


def optional(**types: t.DataType) -> t.StructType:
    """Return columns that can be NULL."""
    return t.StructType([t.StructField(name, type_) for name, type_ in types.items()])


def required(**types: t.DataType) -> t.StructType:
    """Return columns that are never NULL."""
    return t.StructType([t.StructField(name, type_, nullable=False) for name, type_ in types.items()])


def counts(*names: str) -> t.StructType:
    return required(**dict.fromkeys(names, _NUMBER))


_TYPES = {"STRING": _TEXT, "INT64": _NUMBER, "TIMESTAMP": _TIME, "BYTES": _BYTES, "BOOL": _FLAG}
#: The columns of the table, in its order and with its names.
STORED = t.StructType(
    [
        t.StructField(name, _TYPES[re.split(r"\W", definition)[0]], nullable="NOT NULL" not in definition)
        for name, definition in ddl.columns().items()
    ]
)
#: Columns derived from the table: the state at the read timestamp, and the message in Data as subscribers get it. The
#: message is NULL if Data is not a message.
DERIVED = t.StructType([*required(State=_TEXT), *optional(Attributes=_ATTRIBUTES, Payload=_BYTES)])
#: All columns of the data source.
SOURCE = t.StructType([*STORED, *DERIVED])

#: A row to register, after its columns were parsed. `created_at` orders the tasks of a key that the table already has.
#: `reason` is why the row is rejected, or NULL.
INPUT = optional(
    task_id=_TEXT, topic=_TEXT, data=_BYTES, attributes=t.MapType(_TEXT, _TEXT), priority=_NUMBER, ordering_key=_TEXT,
    available_at=_TIME, expires_at=_TIME, at_most_once=_FLAG, sequence=_NUMBER, created_at=_TIME, file=_TEXT,
    line=_TEXT, reason=_TEXT,
)  # fmt: skip
#: A rejected row. Its columns, except `reason`, `file` and `line`, can be registered again.
REJECT = optional(
    reason=_TEXT, file=_TEXT, line=_TEXT, task_id=_TEXT, topic=_TEXT, data_base64=_TEXT,
    attributes=t.MapType(_TEXT, _TEXT), priority=_NUMBER, ordering_key=_TEXT, available_at=_TEXT, expires_at=_TEXT,
    at_most_once=_FLAG, sequence=_NUMBER,
)  # fmt: skip

#: An archived task: the table's columns, and the day of SentAt in UTC.
ARCHIVED = t.StructType([*STORED, *required(SentDate=t.DateType())])

#: A finding of the audit: a task, or an ID that no task has. `overtaken_at` is when an earlier task of its ordering key
#: was first published, `processed_at` is from the inbox.
FOUND = optional(
    **{"class": _TEXT}, task_id=_TEXT, topic=_TEXT, created_at=_TIME, sent_at=_TIME, cancelled_at=_TIME, first_at=_TIME,
    messages=_NUMBER, overtaken_at=_TIME, processed_at=_TIME,
)  # fmt: skip


def arrow(schema: t.StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects for batches of these columns, including nullability."""
    # Spark 4.0 has no argument `timezone` and always uses UTC.
    zoned: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zoned)

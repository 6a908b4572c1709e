"""Converts rows from Spanner to Arrow, one column at a time, without a Python object for each value.

Values come as `google.protobuf.Value`: text for all types but BOOL (https://cloud.google.com/spanner/docs/reference/rest/v1/TypeCode).
"""

from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, BooleanType, DataType, LongType, StringType, TimestampType

from outbox.message import TASK_ID_ATTRIBUTE, parsed
from outbox.table.states import arrow_states
from outbox_pipeline import schemas

#: The columns from which a derived column is computed.
NEEDS = {
    "State": ("SentAt", "AvailableAt", "Attempts", "BlockedBy"),
    "Attributes": ("Id", "Data"),
    "Payload": ("Id", "Data"),
}
#: How to read the values of the types that are neither numbers nor times.
_OTHERS: dict[type[DataType], tuple[pa.DataType, Callable[[Any], Any]]] = {
    BooleanType: (pa.bool_(), attrgetter("bool_value")),
    BinaryType: (pa.binary(), lambda value: b64decode(value.string_value)),
    StringType: (pa.string(), attrgetter("string_value")),
}
_TIME = pa.timestamp("us", tz="UTC")
#: The length of a time up to its microseconds, the precision of Spark's times.
_TO_MICROSECONDS = len("2026-11-21T13:00:00.123456")


def needed(names: Iterable[str]) -> tuple[str, ...]:
    """Return the table's columns that must be read for the columns `names`, each once."""
    return tuple(dict.fromkeys(column for name in names for column in NEEDS.get(name, (name,))))


def column(name: str, values: Sequence[Any]) -> pa.Array:
    """Return the values of one column of the table, or CancelledAt."""
    field = schemas.ARCHIVED[name]
    if isinstance(field.dataType, LongType | TimestampType):
        # Only NULL has an empty text.
        texts = pa.array([value.string_value or None for value in values], pa.string())
        return times(texts) if isinstance(field.dataType, TimestampType) else texts.cast(pa.int64())
    type_, read = _OTHERS[type(field.dataType)]
    if field.nullable:
        return pa.array([None if value.HasField("null_value") else read(value) for value in values], type_)
    return pa.array([read(value) for value in values], type_)


def times(texts: pa.Array) -> pa.Array:
    """Parse RFC 3339 texts in UTC, as Spanner writes them, and truncate them to microseconds."""
    cut = pc.utf8_slice_codeunits(pc.utf8_rtrim(texts, characters="Z"), 0, _TO_MICROSECONDS)
    return cut.cast(pa.timestamp("us")).cast(_TIME)


def batch(columns: Mapping[str, pa.Array], wanted: pa.Schema, at: datetime) -> pa.RecordBatch:
    """Return the wanted columns, including the derived ones."""
    values: dict[str, Any] = dict(columns)
    if "State" in wanted.names:
        values["State"] = arrow_states(pc, columns, at)
    if "Attributes" in wanted.names or "Payload" in wanted.names:
        values |= message_columns(columns["Id"].to_pylist(), columns["Data"].to_pylist())
    return pa.RecordBatch.from_arrays([_of_type(values[field.name], field.type) for field in wanted], schema=wanted)


def message_columns(ids: Sequence[str], data: Sequence[bytes]) -> dict[str, pa.Array]:
    """Return `Attributes` and `Payload` of tasks, NULL if `data` is not a message.

    The attribute with the task ID comes from `ids`, because the relay sets it from the row.
    """
    # One list of all names is twice as fast as one list for each task.
    starts: list[int | None] = []
    names: list[str] = []
    texts: list[str] = []
    payloads: list[bytes | None] = []
    for id, each in zip(ids, data, strict=True):
        message = parsed(each)
        starts.append(None if message is None else len(names))
        payloads.append(None if message is None else message.data)
        if message is not None:
            attributes = message.attributes
            for name in attributes:  # twice as fast as items()
                if name != TASK_ID_ATTRIBUTE:
                    names.append(name)
                    texts.append(attributes[name])
            names.append(TASK_ID_ATTRIBUTE)
            texts.append(id)
    starts.append(len(names))
    maps = pa.MapArray.from_arrays(
        pa.array(starts, pa.int32()), pa.array(names, pa.string()), pa.array(texts, pa.string())
    )
    return {"Attributes": maps, "Payload": pa.array(payloads, pa.binary())}


def _of_type(values: Any, type_: pa.DataType) -> pa.Array:
    return values.cast(type_) if isinstance(values, pa.Array) else pa.array(values, type_)

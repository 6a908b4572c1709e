"""Divides a read into parts, one for each Spark task, selects rows, and converts them to Arrow by columns.

A part is plain data, because Spark sends it to an executor and may read it more than once. All parts read at the same
timestamp. No Python object is created for each value. Values come as `google.protobuf.Value`: text for all types but
BOOL (https://cloud.google.com/spanner/docs/reference/rest/v1/TypeCode).
"""

import itertools
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import reduce
from operator import attrgetter
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from google.cloud.spanner_v1 import KeyRange, KeySet
from pyspark.sql.types import BinaryType, BooleanType, DataType, LongType, StringType, TimestampType

from outbox.base.values import chunked
from outbox.message import TASK_ID_ATTRIBUTE, parsed
from outbox.table.ddl import LayoutShards, by_layout
from outbox.table.shared_sql import TO_SEND_INDEX
from outbox.table.states import arrow_states
from outbox_pipeline import schemas
from outbox_pipeline.rows.texts import MICROSECOND
from outbox_pipeline.source import filters
from outbox_pipeline.source.filters import ColumnFilter
from outbox_pipeline.spanner import Table

#: Max tasks, and max bytes of messages, in a batch and so in memory. A single task can have 10 MB.
ARROW_ROWS, ARROW_BYTES = 2_000, 8_000_000
#: The columns in the index. Only the others must be read from the table.
INDEXED = (
    "Id", "Shard", "SentAt", "Topic", "AvailableAt", "Priority", "CreatedAt", "OrderingKey", "Bytes", "Attempts",
    "BlockedBy", "DueAt", "CancelledBy",
)  # fmt: skip
#: The size of the sample, and the share of tasks below which an index read is faster. Reading a task by its key after
#: an index read costs about three times as much as reading it in a scan.
SAMPLED, INDEX_PAYS = 500, 1 / 3
#: The columns from which a derived column is computed.
NEEDS = {
    "State": ("SentAt", "CancelledBy", "AvailableAt", "Attempts", "BlockedBy"),
    "Attributes": ("Id", "Data"),
    "Payload": ("Id", "Data"),
}
#: How to read the values of the types that are neither numbers nor times.
_OTHERS: dict[type[DataType], tuple[pa.DataType, Callable[[Any], Any]]] = {
    BooleanType: (pa.bool_(), attrgetter("bool_value")),
    BinaryType: (pa.binary(), lambda value: b64decode(value.string_value)),
    StringType: (pa.string(), attrgetter("string_value")),
}
#: The length of a time up to its microseconds.
_TO_MICROSECONDS = len("2026-11-21T13:00:00.123456")
Columns = Mapping[str, pa.Array]


def needed(names: Iterable[str]) -> tuple[str, ...]:
    """Return the table's columns that must be read for the columns `names`, each once."""
    return tuple(dict.fromkeys(column for name in names for column in NEEDS.get(name, (name,))))


def column(name: str, values: Sequence[Any]) -> pa.Array:
    field = schemas.STORED[name]
    if isinstance(field.dataType, LongType | TimestampType):
        # Only NULL has an empty text.
        texts = pa.array([value.string_value or None for value in values], pa.string())
        if isinstance(field.dataType, LongType):
            return texts.cast(pa.int64())
        cut = pc.utf8_slice_codeunits(pc.utf8_rtrim(texts, characters="Z"), 0, _TO_MICROSECONDS)
        return cut.cast(pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC"))
    type_, read = _OTHERS[type(field.dataType)]
    return pa.array([None if value.HasField("null_value") else read(value) for value in values], type_)


def arrow_batch(columns: Columns, wanted: pa.Schema, at: datetime) -> pa.RecordBatch:
    """Return the wanted columns, including the derived ones."""
    values = dict(columns)
    if "State" in wanted.names:
        values["State"] = arrow_states(pc, columns, at)
    if "Attributes" in wanted.names or "Payload" in wanted.names:
        values |= message_columns(columns["Id"].to_pylist(), columns["Data"].to_pylist())
    return pa.RecordBatch.from_arrays([values[field.name].cast(field.type) for field in wanted], schema=wanted)


def message_columns(ids: Sequence[str], data: Sequence[bytes]) -> Columns:
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


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A selection of tasks by all `filters`.

    `since` is inclusive, `until` exclusive. They apply to the SentAt of a sent or cancelled task and the CreatedAt of
    any other task.
    """

    filters: tuple[ColumnFilter, ...] = ()
    since: datetime | None = None
    until: datetime | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the columns that the selection depends on."""
        times = ("SentAt", "CreatedAt") if self.since or self.until else ()
        return (*times, *(name for name, _, _ in self.filters))

    def mask(self, columns: Columns, at: datetime) -> pa.Array | None:
        """Return a mask of the selected tasks, or None if all are selected."""
        masks = [
            filters.mask(arrow_states(pc, columns, at) if each[0] == "State" else columns[each[0]], each)
            for each in self.filters
        ]
        if self.since or self.until:
            masks.append(self.between(pc.coalesce(columns["SentAt"], columns["CreatedAt"])))
        return reduce(pc.and_, masks) if masks else None

    def between(self, times: pa.Array) -> pa.Array:
        """Return a mask of the times from `since` on and before `until`. NULL is not in it."""
        masks = [pc.is_valid(times)]
        masks += [pc.greater_equal(times, pa.scalar(self.since, times.type))] if self.since else []
        masks += [pc.less(times, pa.scalar(self.until, times.type))] if self.until else []
        return pc.fill_null(reduce(pc.and_, masks), False)


@dataclass(frozen=True, slots=True)
class KeyPart:
    """A range of IDs from `first` to `last`, without `last`. "" is the end of the table."""

    first: str
    last: str

    def keys(self, *prefix: str) -> KeySet:
        """Return the range of a primary key that has the ID after the `prefix`."""
        end = {"end_open": [*prefix, self.last]} if self.last else {"end_closed": [*prefix]}
        return KeySet(ranges=[KeyRange(start_closed=[*prefix, self.first], **end)])

    def read(self, table: Table, names: Sequence[str], selection: RowFilter, at: datetime) -> Iterator[Columns]:
        return _selected(_batches(table.rows(names, self.keys(), at), names), selection, at)


@dataclass(frozen=True, slots=True)
class IdsPart:
    ids: tuple[str, ...]

    def read(self, table: Table, names: Sequence[str], selection: RowFilter, at: datetime) -> Iterator[Columns]:
        keys = KeySet(keys=[[id] for id in self.ids])
        return _selected(_batches(table.rows(names, keys, at), names), selection, at)


@dataclass(frozen=True, slots=True)
class SentPart:
    """Tasks of some shards whose SentAt is in a period, read through the index, so the cost depends on their number.

    The reader may be another process, and find another layout than that of `shards` in the table. `since` is inclusive
    and `until` exclusive.
    """

    shards: LayoutShards
    since: datetime
    until: datetime

    @property
    def index(self) -> str:
        return self.shards.sql(TO_SEND_INDEX)

    @property
    def keys(self) -> KeySet:
        bounds = [([each, self.since], [each, self.until]) for each in self.shards.numbers]
        return KeySet(ranges=[KeyRange(start_closed=start, end_open=end) for start, end in bounds])

    def read(self, table: Table, names: Sequence[str], selection: RowFilter, at: datetime) -> Iterator[Columns]:
        """Read the ranges of the index and then the tasks by key."""
        found = tuple(name for name in INDEXED if name in {*names, "Id", "Bytes", "Topic"})
        rows = table.rows(found, self.keys, at, index=self.index)
        # The filters of other columns are Spark's, which applies them again. The index has all columns of a state.
        of_index = replace(selection, filters=tuple(each for each in selection.filters if each[0] in (*found, "State")))
        for columns in _selected(_batches(rows, found), of_index, at):
            if set(names) <= set(found):
                yield columns
                continue
            keys = KeySet(keys=[[id] for id in columns["Id"].to_pylist()])
            yield from _batches(table.rows(names, keys, at), names)


Part = KeyPart | SentPart | IdsPart


def key_parts(count: int) -> list[KeyPart]:
    """Return `count` ranges that cover the whole primary key. They have equal sizes if the IDs are random UUIDs."""
    bounds = ["", *(f"{number * 2**32 // count:08x}" for number in range(1, count)), ""]
    return [KeyPart(first, last) for first, last in itertools.pairwise(bounds)]


def sent_parts(shards: Sequence[int], since: datetime, until: datetime, count: int) -> list[SentPart]:
    """Return parts for SentAt from `since` to `until`, divided by shards, and by time if `count` is larger."""
    groups = [each for start in range(min(count, len(shards))) for each in by_layout(shards[start::count])]
    slices = -(-count // len(groups))
    step = max((until - since) / slices, MICROSECOND)
    times = [since, *(time for number in range(1, slices) if (time := since + step * number) < until), until]
    return [SentPart(group, *pair) for pair in itertools.pairwise(times) for group in groups]


def share_of_sent(table: Table, since: datetime, until: datetime, at: datetime) -> float:
    """Estimate the share of all tasks with a SentAt from `since` to `until`.

    The sample starts at a random UUID, or at the start of the table if no ID follows that UUID.
    """
    for first in (str(uuid4()), ""):
        if rows := list(table.rows(("SentAt",), KeyPart(first, "").keys(), at, limit=SAMPLED)):
            inside = RowFilter(since=since, until=until).between(column("SentAt", [value for (value,) in rows]))
            return float(inside.true_count / len(rows))
    return 1.0


def _batches(rows: Iterable[Sequence[Any]], names: Sequence[str]) -> Iterator[Columns]:
    data = names.index("Data") if "Data" in names else None
    sizes = names.index("Bytes") if "Bytes" in names else None

    def size(row: Sequence[Any]) -> int:
        if data is not None:
            return len(row[data].string_value) * 3 // 4
        return 0 if sizes is None else int(row[sizes].string_value)

    for batch in chunked(rows, ARROW_ROWS, ARROW_BYTES, size):
        values = zip(*batch, strict=True)
        yield {name: column(name, each) for name, each in zip(names, values, strict=True)}


def _selected(batches: Iterable[Columns], selection: RowFilter, at: datetime) -> Iterator[Columns]:
    for columns in batches:
        mask = selection.mask(columns, at)
        if mask is None:
            yield columns
        elif mask.true_count:
            yield {name: values.filter(mask) for name, values in columns.items()}

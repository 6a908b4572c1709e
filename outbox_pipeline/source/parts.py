"""Divides a read into parts, one for each Spark task. All parts read at the same timestamp.

A part is plain data, because Spark sends it to an executor and may read it more than once.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pyarrow as pa
from google.cloud.spanner_v1 import KeyRange, KeySet

from outbox.admin.operator_sql import CANCELLED_INDEX, CANCELLED_SHARDS
from outbox.base.values import chunked
from outbox.table.ddl import CANCELLED, LayoutShards, by_layout
from outbox.table.shared_sql import TO_SEND_INDEX
from outbox_pipeline.source import columns as arrow
from outbox_pipeline.source.options import RowFilter
from outbox_pipeline.spanner import Table

#: Max tasks, and max bytes of messages, in a batch and so in memory. A single task can have 10 MB.
ARROW_ROWS, ARROW_BYTES = 2_000, 8_000_000
#: The columns in the index. Only the others must be read from the table.
INDEXED = (
    "Id", "Shard", "SentAt", "Topic", "AvailableAt", "Priority", "CreatedAt", "OrderingKey", "Bytes", "Attempts",
)  # fmt: skip
#: The size of the sample, and the share of tasks below which an index read is faster. Reading a task by its key after
#: an index read costs about three times as much as reading it in a scan.
SAMPLED, INDEX_PAYS = 500, 1 / 3
#: The columns from which batches of IDs are made.
_FOUND = ("Id", "Bytes")
Columns = Mapping[str, pa.Array]


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
        """Read the range of the table."""
        return _selected(_batches(table.rows(names, self.keys(), at), names), selection, at)


@dataclass(frozen=True, slots=True)
class SentPart:
    """Tasks of some shards that were sent in a period, read through the index, so the cost depends on their number.

    The reader may be another process, and find another layout than that of `shards` in the table. `since` is inclusive
    and `until` exclusive. With `after`, for a stream, `since` is exclusive and `until` inclusive.
    """

    shards: LayoutShards
    since: datetime
    until: datetime
    after: bool = False

    @property
    def index(self) -> str:
        """Return the name of the index."""
        return self.shards.sql(TO_SEND_INDEX)

    @property
    def keys(self) -> KeySet:
        """Return the ranges of the index."""
        start, end = ("start_open", "end_closed") if self.after else ("start_closed", "end_open")
        numbers = self.shards.numbers
        return KeySet(ranges=[KeyRange(**{start: [each, self.since], end: [each, self.until]}) for each in numbers])

    def read(self, table: Table, names: Sequence[str], selection: RowFilter, at: datetime) -> Iterator[Columns]:
        """Read the ranges of the index and then the tasks by key."""
        found = tuple(name for name in INDEXED if name in {*names, "Id", "Bytes", "Topic"})
        rows = table.rows(found, self.keys, at, index=self.index)
        narrowed = RowFilter(topic=selection.topic)
        for columns in _selected(_batches(rows, found), narrowed, at):
            if set(names) <= set(found):
                yield columns
                continue
            yield from _batches(table.rows(names, _keys(columns), at), names)


Part = KeyPart | SentPart


def key_parts(count: int) -> list[KeyPart]:
    """Return `count` ranges that cover the whole primary key. They have equal sizes if the IDs are random UUIDs."""
    bounds = ["", *(f"{number * 2**32 // count:08x}" for number in range(1, count)), ""]
    return [KeyPart(first, last) for first, last in itertools.pairwise(bounds)]


def sent_parts(
    shards: Sequence[int], since: datetime, until: datetime, count: int, *, after: bool = False
) -> list[SentPart]:
    """Return parts for the tasks sent from `since` to `until`, divided by shards, and by time if `count` is larger."""
    groups = [each for start in range(min(count, len(shards))) for each in by_layout(shards[start::count])]
    slices = -(-count // len(groups))
    step = max((until - since) / slices, timedelta(microseconds=1))
    times = [since, *(time for number in range(1, slices) if (time := since + step * number) < until), until]
    return [SentPart(group, *pair, after) for pair in itertools.pairwise(times) for group in groups]


def cancelled(table: Table, names: Sequence[str], since: datetime, until: datetime, at: datetime) -> Iterator[Columns]:
    """Read tasks that operators cancelled from `since` on and before `until`, as of `at`. Their `SentAt` is NULL."""
    shards = range(CANCELLED_SHARDS)
    ranges = [KeyRange(start_closed=[each, since], end_open=[each, until]) for each in shards]
    rows = table.rows(_FOUND, KeySet(ranges=ranges), at, table=CANCELLED, index=CANCELLED_INDEX)
    there = [name for name in names if name != "SentAt"]
    columns = ["CancelledShard" if name == "Shard" else name for name in there]
    for found in _batches(rows, _FOUND):
        for batch in _batches(table.rows(columns, _keys(found), at, table=CANCELLED), there):
            yield {**batch, "SentAt": pa.nulls(len(batch["Id"]))}


def _keys(found: Columns) -> KeySet:
    return KeySet(keys=[[id] for id in found["Id"].to_pylist()])


def share_of_sent(table: Table, since: datetime, until: datetime, at: datetime) -> float:
    """Estimate the share of all tasks that were sent from `since` to `until`.

    The sample starts at a random UUID, or at the start of the table if no ID follows that UUID.
    """
    for first in (str(uuid4()), ""):
        if rows := list(table.rows(("SentAt",), KeyPart(first, "").keys(), at, limit=SAMPLED)):
            sent = arrow.column("SentAt", [value for (value,) in rows])
            inside = RowFilter("sent", since=since, until=until).between(sent)
            return float(inside.true_count / len(rows))
    return 1.0


def _batches(rows: Iterable[Sequence[Any]], names: Sequence[str]) -> Iterator[Columns]:
    """Collect rows into batches of columns."""
    data = names.index("Data") if "Data" in names else None
    sizes = names.index("Bytes") if "Bytes" in names else None

    def size(row: Sequence[Any]) -> int:
        if data is not None:
            return len(row[data].string_value) * 3 // 4
        return 0 if sizes is None else int(row[sizes].string_value)

    for batch in chunked(rows, ARROW_ROWS, ARROW_BYTES, size):
        values = zip(*batch, strict=True)
        yield {name: arrow.column(name, each) for name, each in zip(names, values, strict=True)}


def _selected(batches: Iterable[Columns], selection: RowFilter, at: datetime) -> Iterator[Columns]:
    for columns in batches:
        mask = selection.mask(columns, at)
        if mask is None:
            yield columns
        elif mask.true_count:
            yield {name: values.filter(mask) for name, values in columns.items()}

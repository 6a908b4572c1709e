"""How a read is divided into parts, one for each Spark task. All parts read at the same timestamp.

A part is plain data: it is sent to an executor, and may be read again.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol
from uuid import uuid4

import pyarrow as pa
from google.cloud.spanner_v1 import KeyRange, KeySet

from outbox_pipeline.source import columns as arrow
from outbox_pipeline.source.options import RowFilter
from outbox_pipeline.spanner import TO_SEND, Table

#: Max tasks and bytes of messages in a batch, and so in the memory of a part. A single task may have 10 MB.
BATCH_ROWS, BATCH_BYTES = 2_000, 8_000_000
#: The columns in the index. Only the others must be read from the table.
INDEXED = (
    "Id", "Shard", "SentAt", "Topic", "AvailableAt", "Priority", "CreatedAt", "OrderingKey", "Bytes", "Attempts",
)  # fmt: skip
#: Tasks that are looked at to guess how many are wanted; a task that the index names costs some three times as much
#: to read as one that is read where it lies among others.
LOOKED_AT, INDEX_PAYS = 500, 1 / 3
Columns = Mapping[str, pa.Array]


class Part(Protocol):
    """A part of a reading."""

    def read(self, table: Table, names: Sequence[str], selection: RowFilter, at: datetime) -> Iterator[Columns]:
        """Yield batches of the columns `names` of the table, of selected tasks."""


@dataclass(frozen=True, slots=True)
class KeyPart:
    """A range of the primary key, from `first` on, up to `last` and without it; "" is the end of the table."""

    first: str
    last: str

    def read(self, table: Table, names: Sequence[str], selection: RowFilter, at: datetime) -> Iterator[Columns]:
        """Read the range of the table."""
        end = {"end_open": [self.last]} if self.last else {"end_closed": []}
        rows = table.rows(names, KeySet(ranges=[KeyRange(start_closed=[self.first], **end)]), at)
        return _selected(_batches(rows, names), selection, at)


@dataclass(frozen=True, slots=True)
class SentPart:
    """What was sent in a time, in some shards: read in the index, so it costs what it gives and not what is there.

    From `since` on, up to `until` and without it; of a stream the bounds are the other way round: `after` says so.
    """

    shards: tuple[int, ...]
    since: datetime
    until: datetime
    after: bool = False

    @property
    def keys(self) -> KeySet:
        """Return the ranges of the index."""
        if self.after:
            bounds = [{"start_open": [shard, self.since], "end_closed": [shard, self.until]} for shard in self.shards]
        else:
            bounds = [{"start_closed": [shard, self.since], "end_open": [shard, self.until]} for shard in self.shards]
        return KeySet(ranges=[KeyRange(**each) for each in bounds])

    def read(self, table: Table, names: Sequence[str], selection: RowFilter, at: datetime) -> Iterator[Columns]:
        """Read the ranges of the index, and the tasks that it names."""
        found = tuple(name for name in INDEXED if name in {*names, "Id", "Bytes", "Topic"})
        rows = table.rows(found, self.keys, at, index=TO_SEND)
        narrowed = RowFilter(topic=selection.topic)
        for columns in _selected(_batches(rows, found), narrowed, at):
            if set(names) <= set(found):
                yield columns
                continue
            ids = columns["Id"].to_pylist()
            looked_up = table.rows(names, KeySet(keys=[[id] for id in ids]), at)
            yield from _batches(looked_up, names)


@dataclass(frozen=True, slots=True)
class QueryPart:
    """A partition that Spanner made of a query, with the session and transaction that all of them share."""

    snapshot: Mapping[str, Any]
    partition: Mapping[str, Any]

    def read(self, table: Table, names: Sequence[str], selection: RowFilter, at: datetime) -> Iterator[Columns]:
        """Run the query on its partition."""
        return _selected(_batches(table.partition_rows(self.snapshot, self.partition), names), selection, at)


def of_keys(count: int) -> list[KeyPart]:
    """Return `count` ranges of the primary key, of equal size where ids are random UUIDs or their like.

    The first one begins at the beginning and the last one ends at the end, whatever ids users have chosen.
    """
    bounds = ["", *(f"{number * 2**32 // count:08x}" for number in range(1, count)), ""]
    return [KeyPart(first, last) for first, last in itertools.pairwise(bounds)]


def of_sent(
    shards: Sequence[int], since: datetime, until: datetime, count: int, *, after: bool = False
) -> list[SentPart]:
    """Return parts for what was sent from `since` to `until`: by shards, and by time where there are more parts."""
    groups = [tuple(shards[start::count]) for start in range(min(count, len(shards)))]
    slices = -(-count // len(groups))
    step = max((until - since) / slices, timedelta(microseconds=1))
    times = [since, *(time for number in range(1, slices) if (time := since + step * number) < until), until]
    return [SentPart(group, *pair, after) for pair in itertools.pairwise(times) for group in groups]


def share_of_sent(table: Table, since: datetime, until: datetime, at: datetime) -> float:
    """Return the share of all tasks that were sent from `since` to `until`, estimated from a sample.

    They are those behind a random UUID, or the first ones where ids are of another kind.
    """
    for first in (str(uuid4()), ""):
        keys = KeySet(ranges=[KeyRange(start_closed=[first], end_closed=[])])
        rows = list(table.rows(("SentAt",), keys, at, limit=LOOKED_AT))
        if rows:
            sent = arrow.column("SentAt", [value for (value,) in rows])
            inside = RowFilter("sent", since=since, until=until).between(sent)
            return float(inside.true_count / len(rows))
    return 1.0


def of_query(table: Table, names: Sequence[str], selection: RowFilter, at: datetime, count: int) -> list[QueryPart]:
    """Return the partitions that Spanner makes of the selection, to be read with Data Boost.

    Spanner reads with machines of its own then, and answers what is selected only:
    https://cloud.google.com/spanner/docs/databoost/databoost-overview.
    """
    snapshot, partitions = table.partitions(
        names, at, count, topic=selection.topic, since=selection.since, until=selection.until,
        sent=None if selection.state is None else selection.state == "sent",
    )  # fmt: skip
    return [QueryPart(snapshot, partition) for partition in partitions]


def _batches(rows: Iterable[Sequence[Any]], names: Sequence[str]) -> Iterator[Columns]:
    """Cut rows into batches, and these into columns."""
    kept: list[Sequence[Any]] = []
    size = 0
    data = names.index("Data") if "Data" in names else None
    sizes = names.index("Bytes") if data is None and "Bytes" in names else None
    for row in rows:
        kept.append(row)
        if data is not None:
            size += len(row[data].string_value) * 3 // 4
        elif sizes is not None:
            size += int(row[sizes].string_value)
        if len(kept) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield _columns(kept, names)
            kept, size = [], 0
    if kept:
        yield _columns(kept, names)


def _columns(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> Columns:
    values = zip(*rows, strict=True)
    return {name: arrow.column(name, each) for name, each in zip(names, values, strict=True)}


def _selected(batches: Iterable[Columns], selection: RowFilter, at: datetime) -> Iterator[Columns]:
    for columns in batches:
        mask = selection.mask(columns, at)
        if mask is None:
            yield columns
        elif mask.true_count:
            yield {name: values.filter(mask) for name, values in columns.items()}

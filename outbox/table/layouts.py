"""Layouts: a generated column that numbers the shards of the tasks, and the two indexes that begin with it.

A table has one layout, and two while its number of shards changes (`outbox.admin.reshard`). Each task is in all
layouts. The first layout has the names of schema.sql. The names of the others end with the number of shards: `Shard32`,
`AsynchronousTasksToSend32`, `AsynchronousTasksInOrder32`. SQL is written with the first names, and `sql` changes them.

A shard ID names a shard and its layout: 0 to 999 are shards of the first layout, 32,000 to 32,031 are those of Shard32.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

COLUMN = "Shard"
MAX_SHARDS = 1000

_NAMES = re.compile(r"\b(Shard|AsynchronousTasksToSend|AsynchronousTasksInOrder)\b")


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of shards, and the end of the names: "" for the first layout. Sorted by the column's name."""

    shards: int
    suffix: str = ""

    @classmethod
    def added(cls, shards: int) -> "Layout":
        """Return the layout that a change to this number of shards adds."""
        return cls(shards, str(shards))

    @classmethod
    def recorded(cls, column: str, shards: int) -> "Layout | None":
        """Return the layout of a row of AsynchronousTaskShards, or None: any program may write anything there."""
        suffix = column.removeprefix(COLUMN)
        is_layout = 1 <= shards <= MAX_SHARDS and column == COLUMN + suffix and suffix in ("", str(shards))
        return cls(shards, suffix) if is_layout else None

    @classmethod
    def usable(cls, rows: Iterable[Sequence[Any]]) -> "Layout":
        """Return a layout that holds all tasks, by the rows of `shared_sql.LAYOUTS`. It can be used for statements."""
        return next(filter(None, (cls.recorded(column, shards) for column, shards in rows)), cls(1))

    def __lt__(self, other: "Layout") -> bool:
        return self.column < other.column

    @property
    def column(self) -> str:
        """Return the name of the column."""
        return COLUMN + self.suffix

    @property
    def ids(self) -> range:
        """Return the IDs of the shards."""
        begin = int(self.suffix or 0) * MAX_SHARDS
        return range(begin, begin + self.shards)

    def sql(self, statement: str) -> str:
        """Return a statement for this layout."""
        return _renamed(statement, self.suffix)


@dataclass(frozen=True, slots=True)
class LayoutShards:
    """Some shards of one layout. `numbers` are the values of its column, `first_id` is the ID of its shard 0."""

    numbers: list[int]
    first_id: int

    def __contains__(self, shard: int) -> bool:
        return shard // MAX_SHARDS * MAX_SHARDS == self.first_id

    def sql(self, statement: str) -> str:
        """Return a statement, or a name, for this layout."""
        return _renamed(statement, str(self.first_id // MAX_SHARDS or ""))


def by_layout(shards: Iterable[int]) -> list[LayoutShards]:
    """Divide shard IDs by their layout. The IDs of a layout keep their order."""
    found: dict[int, list[int]] = defaultdict(list)
    for shard in shards:
        found[shard // MAX_SHARDS * MAX_SHARDS].append(shard % MAX_SHARDS)
    return [LayoutShards(numbers, first_id) for first_id, numbers in found.items()]


@lru_cache(maxsize=256)
def _renamed(statement: str, suffix: str) -> str:
    return _NAMES.sub(rf"\g<1>{suffix}", statement) if suffix else statement

"""The live workers, and the column Info of each: each read is one of a small table.

Any program may write the column, so a part that is not as a worker writes it, or is larger, is left out. Each read
raises NotReached or OutboxError.
"""

import dataclasses
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from itertools import accumulate, islice
from typing import Any

from outbox.base.values import json_object
from outbox.rows import counts_sql
from outbox.rows.task_table import TaskTable
from outbox.table.ddl import MAX_SHARDS
from outbox.table.shared_sql import FORGET_WORKER_SECONDS, WORKERS

#: Minutes of a worker's history.
MINUTES = 60

WORKERS_TAG = "outbox-workers"
#: The time until the heartbeats tell who polls the shards of a worker that has just started or left. The others notice
#: it with their next discovery, and an idle one writes a heartbeat every 21 s. The first heartbeat has no shards.
TAKE_OVER = timedelta(minutes=1)
#: Max characters of the Infos of all workers together: 150 of the largest, or many more usual ones. As Python values,
#: they take up to 20 times as much.
MAX_INFOS = 1_000_000
#: Max items of a list or an object in an Info.
MAX_ITEMS = 400
#: Max circuits of a worker. A worker writes at most 2.5 kB of them.
MAX_CIRCUITS = 50


@dataclasses.dataclass(frozen=True, slots=True)
class Circuit:
    """The circuit of a topic that is not closed in some `workers`: the first, with its reason.

    It is half-open if the time of the next probe has passed.
    """

    topic: str
    reason: str
    error: str
    since: datetime
    next_probe: datetime
    workers: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker. `info` is empty if it is of an older version. `age` is that of its heartbeat in seconds."""

    id: str
    age: float
    started_at: datetime
    seen_at: datetime
    info: Mapping[str, Any]
    #: The seconds for which a heartbeat makes it live.
    timeout: float = 14.0

    @property
    def is_live(self) -> bool:
        return self.age < self.timeout

    def text(self, name: str) -> str:
        return str(self.info.get(name, ""))

    def number(self, name: str) -> float:
        """Return a number of the Info, or 0."""
        return _number(self.info.get(name))

    @property
    def shards(self) -> list[int]:
        """Return the IDs of the shards that the worker polls."""
        runs = [run for run in _list(self.info.get("shards")) if _is_run(run)]
        # During a reshard, it polls two layouts.
        return [*islice((id for first, last in runs for id in range(first, last + 1)), 2 * MAX_SHARDS)]

    @property
    def is_starting(self) -> bool:
        """Tell whether the worker has just started, and has not yet said which shards it polls."""
        return not self.shards and self.seen_at - self.started_at + timedelta(seconds=self.age) < TAKE_OVER

    @property
    def settings(self) -> Mapping[str, Any]:
        return part(self.info, "settings")

    @property
    def circuits(self) -> list[Circuit]:
        """Return the circuits that are not closed."""
        found = _list(self.info.get("circuits"))[:MAX_CIRCUITS]
        return [self._circuit(each) for each in found if isinstance(each, dict)]

    def of_topics(self, topics: Collection[str]) -> "SeenWorker":
        """Return the worker with the circuits of these topics only."""
        circuits = [each for each in _list(self.info.get("circuits")) if part({"": each}, "").get("topic") in topics]
        return dataclasses.replace(self, info={**self.info, "circuits": circuits})

    def _circuit(self, found: Mapping[str, Any]) -> Circuit:
        topic, reason, error = (str(found.get(name, "")) for name in ("topic", "reason", "error"))
        since = self.seen_at - timedelta(seconds=_number(found.get("open_seconds")))
        return Circuit(
            topic, reason, error, since, self.seen_at + timedelta(seconds=_number(found.get("seconds_to_probe")))
        )


def live(table: TaskTable, at: datetime) -> list[SeenWorker]:
    """Return the live workers at a time, by ID."""
    return [each for each in rows_at(table, at) if each.is_live]


def rows_at(table: TaskTable, at: datetime) -> list[SeenWorker]:
    """Return the workers that have a row at a time, by ID: the live ones, and those that died within the hour."""
    rows = table.query(counts_sql.WORKERS_AT, WORKERS_TAG, {"now": at}, at=at)
    sizes = accumulate(len(info or "") for *_, info in rows)
    found = (
        SeenWorker(id, age / 1000, started_at, seen_at, json_object(info) if size <= MAX_INFOS else {}, timeout)
        for (id, age, timeout, _, started_at, seen_at, info), size in zip(rows, sizes, strict=True)
    )
    return sorted(found, key=lambda worker: worker.id)


def died(table: TaskTable) -> int:
    """Return the number of workers that died within the hour. Reads no Info, so it costs little with many workers."""
    ages = ((milliseconds / 1000, timeout) for _, milliseconds, timeout, _ in table.query(WORKERS, WORKERS_TAG))
    return sum(timeout <= age < FORGET_WORKER_SECONDS for age, timeout in ages)


def part(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object with a name, or an empty one if there is none."""
    found = value.get(name)
    return dict(islice(found.items(), MAX_ITEMS)) if isinstance(found, dict) else {}


def _list(value: Any) -> list[Any]:
    return value[:MAX_ITEMS] if isinstance(value, list) else []


def _number(value: Any) -> float:
    """Return a number that a time or a table can have, or 0."""
    return value if isinstance(value, int | float) and 0 <= value < 1e9 else 0.0


def _is_run(run: Any) -> bool:
    """Tell whether a value is the first and the last of some shard IDs."""
    is_pair = isinstance(run, list) and len(run) == 2 and all(type(id) is int for id in run)
    return is_pair and 0 <= run[0] <= run[1] < run[0] + MAX_SHARDS

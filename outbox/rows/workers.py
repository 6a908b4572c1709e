"""The live workers, and what they say about themselves in the column Info: each read is one of a small table.

Any program may write the column, so a part that is not as a worker writes it, or is larger, is left out. Each read
raises NotReached or OutboxError.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate, islice
from typing import Any

from outbox.base.values import counted, json_object, spoken
from outbox.rows import counts_sql
from outbox.rows.task_table import TaskTable, read_before
from outbox.table.ddl import MAX_SHARDS, POLLED, Layout
from outbox.table.shared_sql import FORGET_WORKER_SECONDS, WORKERS

MINUTES = 60

_TAG = "outbox-workers"
#: The time until the heartbeats tell who polls the shards of a worker that has just started or left. The others notice
#: it with their next discovery, and an idle one writes a heartbeat every 21 s. The first heartbeat has no shards.
TAKE_OVER = timedelta(minutes=1)
#: Workers that die within the hour are a problem from this number on: one is probably killed again and again.
MANY_DEATHS = 3
#: Max characters of the Infos of all workers together: 150 of the largest, or many more usual ones. As Python values,
#: they take up to 20 times as much. Max items of a list or an object in an Info, and of what is found in all of them.
MAX_INFOS, MAX_ITEMS = 2_000_000, 400


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
class Worker:
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
        """Tell whether the heartbeat is young enough."""
        return self.age < self.timeout

    def text(self, name: str) -> str:
        """Return a text of the Info, or an empty one."""
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
        """Return the settings that differ from their defaults."""
        return part(self.info, "settings")

    @property
    def circuits(self) -> list[Circuit]:
        """Return the circuits that are not closed."""
        return [self._circuit(each) for each in _list(self.info.get("circuits")) if isinstance(each, dict)]

    def _circuit(self, found: Mapping[str, Any]) -> Circuit:
        topic, reason, error = (str(found.get(name, "")) for name in ("topic", "reason", "error"))
        since = self.seen_at - timedelta(seconds=_number(found.get("open_seconds")))
        return Circuit(
            topic, reason, error, since, self.seen_at + timedelta(seconds=_number(found.get("seconds_to_probe")))
        )


def live(table: TaskTable, at: datetime) -> list[Worker]:
    """Return the live workers at a time, by ID."""
    return [each for each in rows_at(table, at) if each.is_live]


def rows_at(table: TaskTable, at: datetime) -> list[Worker]:
    """Return the workers that have a row at a time, by ID: the live ones, and those that died within the hour."""
    rows = table.query(counts_sql.WORKERS_AT, _TAG, {"now": at}, at=at)
    sizes = accumulate(len(info or "") for *_, info in rows)
    found = (
        Worker(id, age / 1000, started_at, seen_at, json_object(info) if size <= MAX_INFOS else {}, timeout)
        for (id, age, timeout, _, started_at, seen_at, info), size in zip(rows, sizes, strict=True)
    )
    return sorted(found, key=lambda worker: worker.id)


def died(table: TaskTable) -> int:
    """Return the number of workers that died within the hour. Reads no Info, so it costs little in a large fleet."""
    ages = ((milliseconds / 1000, timeout) for _, milliseconds, timeout, _ in table.query(WORKERS, _TAG))
    return sum(timeout <= age < FORGET_WORKER_SECONDS for age, timeout in ages)


def lost(live: Sequence[Worker], silent: Sequence[Worker]) -> str | None:
    """Return what is known of the workers whose heartbeats ended, if all did, or MANY_DEATHS within the hour."""
    last = min(silent, key=lambda each: each.age, default=None)
    recent = sum(each.age < FORGET_WORKER_SECONDS for each in silent)
    if last and not live:
        number = sum(last.seen_at - each.seen_at < TAKE_OVER for each in silent)
        since = f"No heartbeat since {last.seen_at:%Y-%m-%d %H:%M:%S}, of {counted(number, 'worker')}"
        return f"{since}: either they stopped, or Spanner refuses their writes"
    if last and recent >= MANY_DEATHS:
        return f"{counted(recent, 'worker')} died within the hour, the last one {spoken(last.age)} ago: {last.id}"
    return None


def open_circuits(workers: Sequence[Worker]) -> list[Circuit]:
    """Return the circuits that are not closed, by topic."""
    found: dict[str, list[Circuit]] = defaultdict(list)
    for circuit in (circuit for worker in workers for circuit in worker.circuits):
        found[circuit.topic].append(circuit)
    return [
        dataclasses.replace(
            min(circuits, key=lambda circuit: circuit.since),
            next_probe=min(circuit.next_probe for circuit in circuits),
            workers=len(circuits),
        )
        for _, circuits in sorted(found.items())[:MAX_ITEMS]
    ]


def differing(workers: Sequence[Worker]) -> dict[str, list[str]]:
    """Return the settings, and `version`, that differ between workers with Info, each with its values."""
    known = [{**worker.settings, "version": worker.text("version")} for worker in workers if worker.info]
    names = sorted({name for values in known for name in values})
    values = {name: sorted({str(each.get(name, "default")) for each in known}) for name in names[:MAX_ITEMS]}
    return {name: found for name, found in values.items() if len(found) > 1}


def shards_without_worker(table: TaskTable, workers: Sequence[Worker], at: datetime) -> list[int] | None:
    """Return the IDs of the shards that no live worker polls. None: a worker does not say yet which it polls.

    `workers` are those that are live `at` a time. Shards that a live worker polled TAKE_OVER ago are left out: if it
    has left since then, another polls them, and may not have said so yet.
    """
    workers = [*workers, *read_before(at, TAKE_OVER, lambda before: live(table, before))]
    if any(not worker.info or worker.number("shards_left_out") or worker.is_starting for worker in workers):
        return None
    rows = table.query(counts_sql.RECORDED_SHARDS, _TAG)
    recorded = [Layout.recorded(column, shards) for column, shards, state in rows if state == POLLED]
    left = [id for layout in filter(None, recorded or [table.layout]) for id in layout.ids]
    polled = {*left}.intersection(id for worker in workers for id in worker.shards)
    return [id for id in left if id not in polled]


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


def runs(shards: Sequence[int]) -> str:
    """Return shard IDs as `0-4 9`."""
    runs: list[list[int]] = []
    for id in sorted(shards):
        if runs and id == runs[-1][-1] + 1:
            runs[-1][1:] = [id]
        else:
            runs.append([id])
    return " ".join("-".join(map(str, run)) for run in runs)

"""What the live workers say about themselves together: circuits, settings, and shards that none polls."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime

from outbox.base.values import counted, spoken
from outbox.rows import counts_sql
from outbox.rows.task_table import TaskTable, read_before
from outbox.rows.workers import MAX_ITEMS, TAKE_OVER, WORKERS_TAG, Circuit, SeenWorker, live
from outbox.table.ddl import POLLED, Layout
from outbox.table.shared_sql import FORGET_WORKER_SECONDS

#: Workers that die within the hour are a problem from this number on: one is probably killed again and again.
MANY_DEATHS = 3


def lost(live: Sequence[SeenWorker], silent: Sequence[SeenWorker]) -> str | None:
    """Return what is known of the workers whose heartbeats ended, if all did, or MANY_DEATHS within the hour."""
    last = min(silent, key=lambda each: each.age, default=None)
    recent = sum(each.age < FORGET_WORKER_SECONDS for each in silent)
    if last and not live:
        number = sum(last.seen_at - each.seen_at < TAKE_OVER for each in silent)
        since = f"No heartbeat since {last.seen_at:%Y-%m-%d %H:%M:%S} UTC, of {counted(number, 'worker')}"
        return f"{since}: either they stopped, or Spanner refuses their writes"
    if last and recent >= MANY_DEATHS:
        return f"{counted(recent, 'worker')} died within the hour, the last one {spoken(last.age)} ago: {last.id}"
    return None


def open_circuits(workers: Sequence[SeenWorker]) -> list[Circuit]:
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


def usual(workers: Sequence[SeenWorker], name: str) -> str | None:
    """Return the value of a setting, or of `version`, that more than half of the live workers with Info have."""
    known = [_value(each, name) for each in workers]
    value, number = Counter(known).most_common(1)[0] if known else ("", 0)
    return value if 2 * number > len(known) else None


def differing(workers: Sequence[SeenWorker]) -> dict[str, list[str]]:
    """Return the settings, and `version`, that differ between workers with Info, each with its values."""
    known = [worker for worker in workers if worker.info]
    names = sorted({name for worker in known for name in (*worker.settings, "version")})
    values = {name: sorted({_value(each, name) for each in known}) for name in names[:MAX_ITEMS]}
    return {name: found for name, found in values.items() if len(found) > 1}


def unusual_first(workers: Sequence[SeenWorker]) -> list[tuple[SeenWorker, list[str]]]:
    """Return each worker with what differs from the usual: first those with a difference, a circuit or no Info."""
    values = {name: usual(workers, name) for name in differing(workers)}
    found = [(each, [name for name in values if _value(each, name) != values[name]]) for each in workers]
    return sorted(found, key=lambda pair: not (pair[1] or pair[0].circuits or not pair[0].info))


def _value(worker: SeenWorker, name: str) -> str:
    return worker.text("version") if name == "version" else str(worker.settings.get(name, "default"))


def shards_without_worker(table: TaskTable, workers: Sequence[SeenWorker], at: datetime) -> list[int] | None:
    """Return the IDs of the shards that no live worker polls. None: a worker does not say yet which it polls.

    `workers` are those that are live `at` a time. Shards that a live worker polled TAKE_OVER ago are left out: if it
    has left since then, another polls them, and may not have said so yet.
    """
    workers = [*workers, *read_before(at, TAKE_OVER, lambda before: live(table, before))]
    if any(not worker.info or worker.number("shards_left_out") or worker.is_starting for worker in workers):
        return None
    rows = table.query(counts_sql.RECORDED_SHARDS, WORKERS_TAG)
    recorded = [Layout.recorded(column, shards) for column, shards, state in rows if state == POLLED]
    left = [id for layout in filter(None, recorded or [table.layout]) for id in layout.ids]
    polled = {*left}.intersection(id for worker in workers for id in worker.shards)
    return [id for id in left if id not in polled]


def runs(shards: Sequence[int]) -> str:
    """Return shard IDs as `0-4 9`."""
    runs: list[list[int]] = []
    for id in sorted(shards):
        if runs and id == runs[-1][-1] + 1:
            runs[-1][1:] = [id]
        else:
            runs.append([id])
    return " ".join("-".join(map(str, run)) for run in runs)

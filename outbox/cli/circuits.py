"""The circuits that are not closed in a live worker: to which topics it does not publish, why, and until when."""

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from outbox import admin
from outbox.cli.output import shortened, table
from outbox.program.terminal import say
from outbox.program.times import spoken

HEADS = ("CIRCUIT", "TOPIC", "WORKERS", "SINCE", "NEXT PROBE", "ERROR")


def fields(workers: "Sequence[admin.workers.Worker]") -> list[dict[str, Any]]:
    """Return the circuits as JSON has them."""
    return [dataclasses.asdict(each) for each in admin.workers.open_circuits(workers)]


def lines(workers: "Sequence[admin.workers.Worker]", now: datetime) -> list[str]:
    """Return an empty line and a table, or nothing if all circuits are closed."""
    rows = []
    for each in admin.workers.open_circuits(workers):
        wait = (each.next_probe - now).total_seconds()
        state, probe = ("open", f"in {spoken(wait)}") if wait > 0 else ("half-open", "now")
        since = f"{spoken((now - each.since).total_seconds())} ago"
        rows.append([state, each.topic, each.workers, since, probe, shortened(f"{each.reason}: {each.error}")])
    left_out = int(sum(worker.number("circuits_left_out") for worker in workers))
    more = [f"... and {left_out:,} more, which did not fit into the heartbeats"] if left_out else []
    return ["", table(HEADS, rows), *more] if rows else more


def print_table(workers: "Sequence[admin.workers.Worker]", now: datetime) -> None:
    """Print the table, if a circuit is not closed."""
    if found := lines(workers, now):
        say(*found)

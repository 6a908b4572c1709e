"""Why tasks are not published: their errors, counted, and the circuits that are not closed in a live worker."""

from collections.abc import Sequence
from datetime import datetime

from outbox import admin
from outbox.base.values import spoken
from outbox.program.terminal import SHOWN, Escaped, joined, shortened, table

#: The states in which LastError is the reason for the state.
FAILING = ("dead", "retrying")
CIRCUITS = ("CIRCUIT", "TOPIC", "WORKERS", "SINCE", "NEXT PROBE", "ERROR")


def text(counts: "Sequence[admin.error_groups.ErrorCount]") -> Escaped:
    """Return a table of the first SHOWN counts."""
    rows = [
        [f">= {each.tasks:,}" if each.at_least else each.tasks, each.state, each.topic, shortened(each.error)]
        for each in counts[:SHOWN]
    ]
    others = [f"... and {len(counts) - SHOWN:,} more"] if len(counts) > SHOWN else []
    return joined(table(("TASKS", "STATE", "TOPIC", "ERROR"), rows), *others)


def circuit_lines(workers: "Sequence[admin.workers.Worker]", now: datetime) -> list[str]:
    """Return an empty line and a table, or nothing if all circuits are closed."""
    rows = []
    for each in admin.workers.open_circuits(workers):
        wait = (each.next_probe - now).total_seconds()
        state, probe = ("open", f"in {spoken(wait)}") if wait > 0 else ("half-open", "now")
        since = f"{spoken((now - each.since).total_seconds())} ago"
        rows.append([state, each.topic, each.workers, since, probe, shortened(f"{each.reason}: {each.error}")])
    left_out = int(sum(worker.number("circuits_left_out") for worker in workers))
    more = [f"... and {left_out:,} more, which did not fit into the heartbeats"] if left_out else []
    return ["", table(CIRCUITS, rows), *more] if rows else more

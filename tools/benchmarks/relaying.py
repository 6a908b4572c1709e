"""The relay, with the worker as it is assembled, driven turn by turn."""

import time
from collections.abc import Callable

from outbox.devtools.emulators import Emulators
from outbox.program import logs
from publishworker.process.app import App
from publishworker.process.commands import collect_garbage_rarely
from publishworker.process.worker_settings import RelaySettings
from publishworker.telemetry.metrics import Metrics
from publishworker.types import Next
from tests.support.spanner import INSTANCE, PROJECT
from tools.benchmarks.bench import ROWS, Bench, Speed, Table, connecting_to, fresh_table, stopwatch

#: Seconds that a turn waits for its batches where costs are measured. The emulator runs one transaction at a time, so
#: after the usual 0.25 s most batches would be in flight, and each poll would read their tasks again.
PATIENT_SECONDS = 60.0
#: Seconds for one measurement; nothing here takes a tenth of it.
LIMIT = 120.0


def open_worker(hosts: Emulators, database_id: str, **settings: str) -> App:
    fixed = {"project": PROJECT, "instance": INSTANCE, "database": database_id}
    logs.configure(level="error")
    with connecting_to(hosts):
        worker = App(RelaySettings.read({**fixed, **settings}, {}), id="benchmark", metrics=Metrics())
    collect_garbage_rarely()  # as the command does
    return worker


def warm_worker(hosts: Emulators, table: Table, **settings: str) -> App:
    """Return a worker that has sent one task, so that it is connected and knows the topic."""
    worker = open_worker(hosts, table.id, **settings)
    table.fill(1)
    drive(worker, 1)
    return worker


def drive(worker: App, tasks: int) -> int:
    """Turn until at least so many tasks are published and nothing is in flight; return how many are."""
    end = time.monotonic() + LIMIT
    published = 0
    while published < tasks:
        turn = worker.relay.turn()
        published += turn.published
        if turn.in_flight and turn.next in (Next.SOON, Next.LATER):  # the worker waits here and does not poll
            published += worker.relay.finish().published
        if time.monotonic() > end:
            raise TimeoutError(f"{published} of {tasks} tasks after {LIMIT:g} s")
    return published + worker.relay.finish().published


def relay(
    bench: Bench, hosts: Emulators, fill: Callable[[Table], object] = Table.fill, tasks: int = ROWS, **settings: str
) -> Speed:
    with fresh_table(bench) as table:
        worker = warm_worker(hosts, table, **settings)
        fill(table)
        with stopwatch() as watch:
            drive(worker, tasks)
        return Speed(tasks, watch)

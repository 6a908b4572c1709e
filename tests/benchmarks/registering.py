"""The client's CPU to register tasks in one commit: by `register` for each, and by one `register_many`."""

from collections.abc import Callable
from typing import Any

import outbox
from tests.benchmarks.bench import MESSAGE, Bench, fresh_table, stopwatch
from tests.benchmarks.results import Section, figures

TASKS = 500
COMMITS = 5
ATTRIBUTES = {"kind": "placed"}

CONDITIONS = f"""\
- {COMMITS} commits of each kind in each round, {TASKS} tasks of {len(MESSAGE)} bytes in each. CPU of the process from
  the first call until the commit has returned."""


def singly(batch: Any) -> None:
    for _ in range(TASKS):
        outbox.register(batch, "orders", MESSAGE, ATTRIBUTES)


def at_once(batch: Any) -> None:
    outbox.register_many(batch, [outbox.Task("orders", MESSAGE, ATTRIBUTES) for _ in range(TASKS)])


WAYS: dict[str, Callable[[Any], None]] = {"register": singly, "register_many": at_once}


def run(bench: Bench) -> Section:
    samples = []
    with fresh_table(bench) as table:
        table.fill(1)  # connects
        for _ in bench.each_round("registering"):
            seconds = dict.fromkeys(WAYS, 0.0)
            for _ in range(COMMITS):
                for row, register in WAYS.items():
                    with stopwatch() as watch, table.database.batch() as batch:
                        register(batch)
                    seconds[row] += watch.cpu_seconds
            samples += [(row, "client CPU us/task", seconds[row] / TASKS / COMMITS * 1e6) for row in WAYS]
    kept = figures(samples)
    section = Section("Registering many tasks", kept, CONDITIONS, "the ratio.")
    many, single = (section.value(row, "client CPU us/task") for row in ("register_many", "register"))
    section.at_most("register_many / register", many / single, 0.5)
    return section

"""The client's CPU to register tasks in one commit: by `register` for each, by one `register_many`, and by hand."""

import math
from collections.abc import Callable
from typing import Any

import outbox
from tools.benchmarks.bench import MESSAGE, Bench, fresh_table, stopwatch
from tools.benchmarks.results import Section, figures

TASKS = 100
COMMITS = 20
ATTRIBUTES = {"kind": "placed"}

INSERT, WHOLE = "before the commit, us/task", "client CPU us/task"

CONDITIONS = f"""\
- {COMMITS} commits of each kind in each round, in turns, {TASKS} tasks of {len(MESSAGE)} bytes in each. CPU of the
  process from the first call until the commit has returned, and until the commit begins; the smallest of the
  {COMMITS}. The tasks for register_many exist before.
- By hand: the same columns and values that the function above it passes to the client, from a list that exists before.
  Our own part is the difference before the commit."""

#: Adds prepared tasks or inserts to a batch.
Way = Callable[[Any], None]


class Recorder:
    """Takes inserts instead of a batch."""

    def __init__(self) -> None:
        self.inserts: list[tuple[str, tuple[str, ...], Any]] = []

    def insert(self, table: str, columns: Any, rows: Any) -> None:
        self.inserts.append((table, tuple(columns), rows))


def singly() -> Way:
    def register(batch: Any) -> None:
        for _ in range(TASKS):
            outbox.register(batch, "orders", MESSAGE, ATTRIBUTES)

    return register


def at_once() -> Way:
    tasks = [outbox.Task("orders", MESSAGE, ATTRIBUTES) for _ in range(TASKS)]
    return lambda batch: outbox.register_many(batch, tasks)  # type: ignore[func-returns-value]  # not used


def by_hand(way: Callable[[], Way]) -> Callable[[], Way]:
    def prepared() -> Way:
        recorder = Recorder()
        way()(recorder)

        def insert(batch: Any) -> None:
            for table, columns, rows in recorder.inserts:
                batch.insert(table, columns, rows)

        return insert

    return prepared


WAYS: dict[str, Callable[[], Way]] = {
    "register": singly, "register, by hand": by_hand(singly),
    "register_many": at_once, "register_many, by hand": by_hand(at_once),
}  # fmt: skip


def run(bench: Bench) -> Section:
    samples = []
    with fresh_table(bench) as table:
        table.fill(1)  # connects
        for _ in bench.each_round("registering"):
            seconds = {(row, column): math.inf for row in WAYS for column in (INSERT, WHOLE)}
            for _ in range(COMMITS):
                for row, way in WAYS.items():
                    add = way()
                    with stopwatch() as whole, table.database.batch() as batch, stopwatch() as before:
                        add(batch)
                    seconds[row, INSERT] = min(seconds[row, INSERT], before.cpu_seconds)
                    seconds[row, WHOLE] = min(seconds[row, WHOLE], whole.cpu_seconds)
            samples += [(row, column, value / TASKS * 1e6) for (row, column), value in seconds.items()]
    section = Section("Registering many tasks", figures(samples), CONDITIONS, "the ratio.")

    def own(row: str) -> float:
        return section.value(row, INSERT) - section.value(f"{row}, by hand", INSERT)

    section.at_most("register: own CPU us/task", own("register"), 15)
    section.at_most("register_many: own CPU us/task", own("register_many"), 8)
    return section

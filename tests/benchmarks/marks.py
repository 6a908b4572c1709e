"""Ways to lock and to mark a batch, compared with the relay's statement on the emulator."""

import time
from collections.abc import Sequence
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, param_types

from outbox.storage.connection import open_database
from publishworker.spanner import statements
from tests.benchmarks.bench import ROWS, Bench, Table, connecting_to, fresh_table
from tests.benchmarks.results import Section, figures
from tests.support.spanner import place

BATCH = 100
#: The expected plan: the planner finds the seeks.
BY_LIST = statements.LOCK[: statements.LOCK.index("FROM UNNEST")] + "FROM AsynchronousTasks WHERE Id IN UNNEST(@ids)"

WAYS = {
    "Id IN UNNEST(@ids), all columns": (BY_LIST, statements.MARK_COLUMNS),
    "Id IN UNNEST(@ids), two columns": (BY_LIST, statements.MARK_CLEAN_COLUMNS),
    "join with a fixed plan, all columns": (statements.LOCK, statements.MARK_COLUMNS),
    "join with a fixed plan, two columns (as it ships)": (statements.LOCK, statements.MARK_CLEAN_COLUMNS),
}

CONDITIONS = f"""\
- The lock query with its rows, and the commit, for a batch of {BATCH} in a table of the given size. Nothing is
  published. The first transaction of each connection is excluded."""


def mark(database: Any, ids: Sequence[str], statement: str, columns: Sequence[str]) -> tuple[float, float]:
    """Lock and mark a batch in one transaction; return the milliseconds of both steps."""
    times = []

    def work(transaction: Any) -> None:
        times.append(time.perf_counter())
        types = {"ids": param_types.Array(param_types.STRING)}
        rows = list(transaction.execute_sql(statement, params={"ids": sorted(ids)}, param_types=types))
        times.append(time.perf_counter())
        values = [(row[0], COMMIT_TIMESTAMP, 1, None, None, None, None, 0)[: len(columns)] for row in rows]
        transaction.update("AsynchronousTasks", columns, values)

    database.run_in_transaction(work)
    times.append(time.perf_counter())
    begin, locked, end = times[-3:]
    return (locked - begin) * 1000, (end - locked) * 1000


def measure(bench: Bench, table: Table, rows: int, statement: str, columns: Sequence[str]) -> tuple[float, float]:
    """Mark one batch of a table with so many rows, after another one."""
    ids = table.fill(rows)
    with connecting_to(bench.emulators):
        database = open_database(place(table.id))
    mark(database, ids[:1], statement, columns)
    return mark(database, ids[1 : BATCH + 1], statement, columns)


def run(bench: Bench) -> Section:
    samples = []
    for _ in bench.each_round("marks"):
        for rows in (ROWS, bench.choose(2_000, 400)):
            for name, way in WAYS.items():
                with fresh_table(bench) as table:
                    lock, commit = measure(bench, table, rows, *way)
                samples += [(name, f"lock, {rows:,} rows: ms", lock), (name, f"commit, {rows:,} rows: ms", commit)]
    return Section(
        "Ways to lock and mark",
        figures(samples),
        CONDITIONS,
        "That fewer cells are written. The times of the lock query do not: on Spanner all of these seek, where the "
        "emulator scans.",
    )

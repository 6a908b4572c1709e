"""Memory of a worker with a small and a large backlog: it must not grow with the backlog."""

import base64
from uuid import uuid4

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from tqdm import tqdm

from outbox.message import RawPubsubMessage
from tests.support.processes import run as run_process
from tools.benchmarks.bench import MESSAGE, Bench, Table, fresh_table
from tools.benchmarks.costs import answer_of
from tools.benchmarks.results import Section, figures

BACKLOGS, QUICK_BACKLOGS = (5_000, 20_000, 100_000), (500, 1_000)
#: Rows of a commit: the emulator's commit grows with the square of it.
ROWS_A_COMMIT = 100
#: Tasks to send: a few turns.
TASKS = 4_000

RSS, TRACED = "peak RSS MB", "peak of Python's allocations MB"


def run(bench: Bench) -> Section:
    backlogs = QUICK_BACKLOGS if bench.quick else BACKLOGS
    tasks = bench.choose(TASKS, 400)
    samples = []
    for backlog in tqdm(backlogs, desc="memory", disable=None):
        row = f"backlog of {backlog:,}"
        with fresh_table(bench) as table:
            insert(table, backlog)
            arguments = ("--database", table.id, "--tasks", str(tasks), "--trace")
            done = run_process(
                "tools.benchmarks.child", *arguments, environment=bench.emulators.environment(), seconds=300
            )
            took = answer_of(done, done.code)
        samples += [(row, RSS, took["rss_bytes"] / 1e6), (row, TRACED, took["traced_bytes"] / 1e6)]
    conditions = f"""\
- One process for each backlog, with default settings and messages of 300 bytes, until it has sent {tasks:,} tasks. RSS
  includes Python, the clients' modules and `tracemalloc`."""
    section = Section("Memory", figures(samples), conditions, "all of it.")
    for column in (RSS, TRACED):
        values = [figure.median for figure in section.figures if figure.column == column]
        section.at_most(f"{column}, largest backlog / smallest", values[-1] / values[0], 1.2)
    return section


def insert(table: Table, count: int) -> None:
    """Insert so many pending tasks, faster than by `register`."""
    data = base64.b64encode(RawPubsubMessage(data=MESSAGE).SerializeToString()).decode()
    columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
    for _ in range(count // ROWS_A_COMMIT):
        with table.database.batch() as batch:
            rows = [(str(uuid4()), table.topic, data, 50, COMMIT_TIMESTAMP) for _ in range(ROWS_A_COMMIT)]
            batch.insert("AsynchronousTasks", columns, rows)

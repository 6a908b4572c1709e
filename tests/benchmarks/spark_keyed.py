"""The jobs that change tasks by their keys, beside plain loops of the same transactions: replaying, purging."""

import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset as files
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from pyspark.sql import SparkSession

from outbox_pipeline.jobs.archive import job as archive
from outbox_pipeline.jobs.archive.executor import GROUP_ROWS
from outbox_pipeline.jobs.archive.windows import PURGED
from outbox_pipeline.jobs.replay import job as replay
from outbox_pipeline.settings import ArchiveSettings, ReplaySettings
from tests.benchmarks.bench import Bench, fresh_table, stopwatch
from tests.benchmarks.results import Bar, Plot, Section, figures
from tests.benchmarks.spark import BODY, DAY, LOOP, SPARK, TICK, Sample, Way, fill, here, in_turns
from tests.support.archives import remove
from tests.support.spanner import INSTANCE, PROJECT

TABLE = "AsynchronousTasks"
RETRIED = ("Id", "SentAt", "ExpiresAt", "Attempts", "AvailableAt")


def replaying(bench: Bench) -> Section:
    size = bench.choose(5_000, 1_000)
    with here(bench) as engine, fresh_table(bench) as table:
        fill(table.database, size)
        ways = {
            LOOP: _after(partial(_mark, table.database), partial(_loop_replays, table.database)),
            SPARK: _after(partial(_mark, table.database), partial(_job_replays, engine, table.id)),
        }
        samples = in_turns(bench, size, ways)
    return _section(
        "Replaying with Spark",
        samples,
        size,
        f"""\
- One table of sent tasks with messages of {len(BODY)} bytes, marked as sent again before each turn. The loop reads all
  ids in one process and makes the tasks unsent in transactions of {GROUP_ROWS}, which look at `SentAt` under the lock;
  the job selects, sorts, does the same with two Spark tasks, asks for the database's time in each transaction, and
  notes the replay.""",
    )


def purging(bench: Bench) -> Section:
    size = bench.choose(5_000, 1_000)
    with here(bench) as engine, fresh_table(bench) as table, tempfile.TemporaryDirectory() as folder:
        fill(table.database, size)
        assert _job_purges(engine, table.id, folder) == size
        ways = {
            LOOP: _after(partial(fill, table.database, size), partial(_loop_purges, table.database, folder)),
            SPARK: _after(
                partial(_refill, table.database, size, folder), partial(_job_purges, engine, table.id, folder)
            ),
        }
        samples = in_turns(bench, size, ways)
    return _section(
        "Purging with Spark",
        samples,
        size,
        f"""\
- Sent tasks with messages of {len(BODY)} bytes in one window of an archive. The loop reads ids and times from its files
  with pyarrow in one process, and deletes in transactions of {GROUP_ROWS}, which look at `SentAt` under the lock; the
  job proves number and checksum of the files first, and deletes with two Spark tasks.""",
    )


def _after(prepare: Callable[[], None], work: Callable[[], int]) -> Way:
    """Return a way that takes as long as `work`, without what is prepared for it."""

    def way() -> tuple[int, float]:
        prepare()
        with stopwatch() as watch:
            rows = work()
        return rows, watch.seconds

    return way


def _section(title: str, samples: list[Sample], size: int, conditions: str) -> Section:
    section = Section(
        title,
        figures(samples),
        [],
        conditions + "\n- Warm: each way has run once before it counts. Loop, Spark and emulator share the cores.",
        "The ratios, as a lower bound: the emulator carries out one transaction at a time, the service many.",
        Plot(["rows/s"]),
    )
    job, loop = (section.value(f"{way}, {size:,} rows", "rows/s") for way in (SPARK, LOOP))
    section.bars.append(Bar(f"Spark / loop, {size:,} rows", job / loop, 0.65, at_least=True))
    return section


def _groups(rows: list[Any]) -> Iterator[list[Any]]:
    yield from (rows[start : start + GROUP_ROWS] for start in range(0, len(rows), GROUP_ROWS))


def _rows(database: Database) -> list[tuple[str, datetime]]:
    with database.snapshot() as snapshot:
        return [(id, sent_at) for id, sent_at in snapshot.read(TABLE, ("Id", "SentAt"), KeySet(all_=True))]


def _mark(database: Database) -> None:
    """Mark all tasks as sent on the day, as at the beginning."""
    writer: Any = database
    for group in _groups(_rows(database)):
        with writer.batch() as batch:
            batch.update(TABLE, ("Id", "SentAt", "AvailableAt"), [(id, DAY + TICK, None) for id, _ in group])


def _loop_replays(database: Database) -> int:
    began, count = datetime.now(UTC), 0

    def work(transaction: Any, ids: list[str]) -> int:
        found = transaction.read(TABLE, ("Id", "SentAt"), KeySet(keys=[[id] for id in ids]))
        sent = [id for id, sent_at in found if sent_at is not None and sent_at < began]
        transaction.update(TABLE, RETRIED, [(id, None, None, 0, datetime.now(UTC)) for id in sent])
        return len(sent)

    for group in _groups([id for id, sent_at in _rows(database) if sent_at is not None]):
        count += database.run_in_transaction(work, group)
    return count


def _job_replays(engine: SparkSession, database: str) -> int:
    flags = {"project": PROJECT, "instance": INSTANCE, "database": database, "until": "0s"}
    return replay.run(engine, ReplaySettings.read(flags, {})).replayed


def _refill(database: Database, size: int, folder: str) -> None:
    """Bring back what was deleted, and forget that it was."""
    fill(database, size)
    for file in Path(folder).rglob(PURGED):
        remove(file)


def _loop_purges(database: Database, folder: str) -> int:
    [data] = Path(folder).glob("window=*/run=*")
    kept = files.dataset(data).to_table(["Id", "SentAt"])
    rows = list(zip(kept["Id"].to_pylist(), kept["SentAt"].to_pylist(), strict=True))
    count = 0

    def work(transaction: Any, group: list[tuple[str, datetime]]) -> int:
        wanted = dict(group)
        found = transaction.read(TABLE, ("Id", "SentAt"), KeySet(keys=[[id] for id in wanted]))
        same = [id for id, sent_at in found if sent_at == wanted[id]]
        transaction.delete(TABLE, KeySet(keys=[[id] for id in same]))
        return len(same)

    for group in _groups(sorted(rows)):
        count += database.run_in_transaction(work, group)
    return count


def _job_purges(engine: SparkSession, database: str, folder: str) -> int:
    flags = {"project": PROJECT, "instance": INSTANCE, "database": database, "archive": folder, "window": "31d"}
    return archive.run(engine, ArchiveSettings.read(flags, {}), purge=True, late=True).deleted

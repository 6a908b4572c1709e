"""The jobs on Spark compared with plain loops that do the same in one process: reading, registering, archiving."""

import base64
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.dataset as files
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from tqdm import tqdm

import outbox
from outbox.message import RawPubsubMessage
from outbox_pipeline import schemas
from outbox_pipeline.jobs.archive import job as archive
from outbox_pipeline.jobs.register import job as register
from outbox_pipeline.jobs.register.ids import task_id
from outbox_pipeline.settings import ArchiveSettings
from outbox_pipeline.source.datasource import register_source
from outbox_pipeline.spark.session import session
from tests.benchmarks.backlogs import insert_rows
from tests.benchmarks.bench import Bench, connecting_to, fresh_table, stopwatch
from tests.benchmarks.results import Plot, Section, figures
from tests.support.spanner import INSTANCE, PROJECT

Sample = tuple[str, str, float]
#: Does its work, and returns for how many rows, and how long it took.
Way = Callable[[], tuple[int, float]]
#: Rows of a commit, of the loop and of the job.
COMMIT = 100
TOPICS = 5
#: Bytes of a message.
BODY = b"x" * 150
#: Columns that are filled and read.
READ = ("Id", "Topic", "Data", "Priority", "CreatedAt", "SentAt")
LOOP, SPARK = "plain loop", "Spark"
TRANSFERS = "The ratios, roughly: on the service reading and writing scale with executors, which here share two cores."
#: The day on which everything was sent.
DAY, TICK = datetime(2026, 11, 1, tzinfo=UTC), timedelta(milliseconds=1)


@cache
def spark(spanner_host: str) -> SparkSession:
    with mock.patch.dict(os.environ, {"SPANNER_EMULATOR_HOST": spanner_host}):
        created = session("benchmarks", "local[2,4]")
    register_source(created)
    return created


def growing(database: Database, sizes: Iterable[int]) -> Iterator[int]:
    """Insert sent tasks of one day, until there are as many as each size says; yield it then."""
    data = base64.b64encode(RawPubsubMessage(data=BODY, attributes={"kind": "paid"}).SerializeToString())
    for begin, end in pairwise((0, *sizes)):
        numbers = tqdm(range(begin, end), desc="filling", disable=None)
        rows = ((task_id("fill", str(n)), f"topic-{n % TOPICS}", data, 50, DAY, DAY + n * TICK) for n in numbers)
        insert_rows(database, READ, rows)
        yield end


def read(bench: Bench) -> Section:
    sizes = (bench.choose(100_000, 2_000), bench.choose(300_000, 4_000))
    samples: list[Sample] = []
    with here(bench) as engine, fresh_table(bench) as table:

        def loop() -> int:
            with table.database.snapshot() as snapshot:
                return sum(1 for _ in snapshot.read("AsynchronousTasks", READ, KeySet(all_=True)))

        def source() -> int:
            options = {"project": PROJECT, "instance": INSTANCE, "database": table.id, "columns": ",".join(READ)}
            engine.read.format("outbox").options(**options).load().write.format("noop").mode("overwrite").save()
            return size

        for size in growing(table.database, sizes):
            samples += in_turns(bench, size, {LOOP: timed(loop), SPARK: timed(source)})
    return beside_loops(
        "Reading with Spark",
        samples,
        dict(zip(sizes, (0.85, 0.95), strict=True)),
        f"""\
- One table of sent tasks with messages of {len(BODY)} bytes, six columns. The loop is `snapshot.read` of the whole
  table in one process, with the client's own decoding, and leaves `Data` as base64; Spark is the data source on
  `local[2]`, eight ranges of the key, every value decoded, written to nowhere.""",
    )


def registering(bench: Bench) -> Section:
    sizes = (bench.choose(20_000, 400), bench.choose(40_000, 800))
    samples: list[Sample] = []
    with here(bench) as engine, tempfile.TemporaryDirectory() as rejects:
        for size in sizes:
            rows = _rows(engine, size)
            job = partial(_job_registers, bench, rows, rejects)
            samples += in_turns(bench, size, {LOOP: partial(_loop_registers, bench, size), SPARK: job})
            rows.unpersist()
    return beside_loops(
        "Registering with Spark",
        samples,
        dict(zip(sizes, (None, 0.8), strict=True)),
        f"""\
- A fresh table each time, {COMMIT} rows in a commit, messages of {len(BODY)} bytes. The loop is `outbox.register` in
  `database.batch()`, with ids that are made beforehand, and the back-off of the job; the job makes the ids, sorts,
  writes with two tasks, and looks for rejects.""",
    )


def archiving(bench: Bench) -> Section:
    sizes = (bench.choose(50_000, 1_000), bench.choose(100_000, 2_000))
    samples: list[Sample] = []
    with here(bench) as engine, fresh_table(bench) as table, tempfile.TemporaryDirectory() as folder:
        for size in growing(table.database, sizes):
            ways = {
                LOOP: timed(partial(_loop_archives, table.database, Path(folder) / "loop")),
                SPARK: timed(partial(_job_archives, engine, table.id, Path(folder) / "job")),
            }
            samples += in_turns(bench, size, ways)
    return beside_loops(
        "Archiving with Spark",
        samples,
        dict(zip(sizes, (None, 0.85), strict=True)),
        f"""\
- Sent tasks of one day and {TOPICS} topics, all columns, messages of {len(BODY)} bytes. The loop is `snapshot.read` of
  the table in one process and pyarrow's dataset writer, parted by day and topic; the job reads as of one time, shuffles
  the tasks of a day and topic together, writes, and notes their number and checksum in the window's manifest.""",
    )


@contextlib.contextmanager
def here(bench: Bench) -> Iterator[SparkSession]:
    with connecting_to(bench.emulators):
        yield spark(bench.emulators.spanner_host)


def timed(work: Callable[[], int]) -> Way:
    def way() -> tuple[int, float]:
        with stopwatch() as watch:
            rows = work()
        return rows, watch.seconds

    return way


def in_turns(bench: Bench, size: int, ways: dict[str, Way]) -> list[Sample]:
    samples: list[Sample] = []
    for turn in tqdm(range(bench.rounds + 1), desc=f"{size:,} rows", disable=None):
        for name, way in ways.items():
            rows, seconds = way()
            assert rows == size, (name, rows)
            if turn:
                row = f"{name}, {size:,} rows"
                samples += [(row, "rows/s", rows / seconds), (row, "seconds", seconds)]
    return samples


def beside_loops(
    title: str,
    samples: list[Sample],
    limits: dict[int, float | None],
    conditions: str,
    *,
    transfers: str = TRANSFERS,
    growth: float = 1.25,
) -> Section:
    conditions += "\n- Warm: each way has run once before it counts. Loop, Spark and emulator share the cores."
    section = Section(title, figures(samples), conditions, transfers, Plot(["rows/s"]))

    def value(way: str, size: int, column: str) -> float:
        return section.value(f"{way}, {size:,} rows", column)

    for size, limit in limits.items():
        if limit is not None:
            ratio = value(SPARK, size, "rows/s") / value(LOOP, size, "rows/s")
            section.at_least(f"Spark / loop, {size:,} rows", ratio, limit)
    small, large = limits
    measured = value(SPARK, large, "seconds") / value(SPARK, small, "seconds") / (large / small)
    section.at_most(f"growth of time over growth of rows, to {large:,}", measured, growth)
    return section


def _rows(engine: SparkSession, size: int) -> DataFrame:
    rows = engine.range(size).select(
        f.lit("orders").alias("topic"),
        f.repeat(f.lit("x"), len(BODY)).alias("data"),
        f.create_map(f.lit("kind"), f.lit("paid")).alias("attributes"),
        f.col("id").cast("string").alias("payment"),
    )
    kept = rows.repartition(2).cache()
    kept.count()
    return kept


def _loop_registers(bench: Bench, size: int) -> tuple[int, float]:
    ids = [task_id("orders", str(number)) for number in range(size)]
    with fresh_table(bench) as table:
        writer: Any = table.database
        with stopwatch() as watch:
            for start in range(0, size, COMMIT):
                with writer.batch(default_retry_delay=0.005) as batch:
                    for id in ids[start : start + COMMIT]:
                        outbox.register(batch, "orders", BODY, {"kind": "paid"}, task_id=id)
    return size, watch.seconds


def _job_registers(bench: Bench, rows: DataFrame, rejects: str) -> tuple[int, float]:
    with fresh_table(bench) as table:
        place: Any = {"project": PROJECT, "instance": INSTANCE, "database": table.id}
        with stopwatch() as watch:
            done = register.register(rows, key=["payment"], rejects=rejects, **place)
        return done.registered, watch.seconds


def _loop_archives(database: Database, folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    schema = schemas.arrow(schemas.ARCHIVED)
    names = schemas.TABLE.fieldNames()
    count = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal count
        kept: list[list[Any]] = []
        with database.snapshot() as snapshot:
            for row in snapshot.read("AsynchronousTasks", names, KeySet(all_=True)):
                row[names.index("Data")] = base64.b64decode(row[names.index("Data")])
                kept.append([*row, row[names.index("SentAt")].date()])
                if len(kept) == 2_000:
                    count += len(kept)
                    yield _batch(kept, schema)
                    kept.clear()
        count += len(kept)
        yield _batch(kept, schema)

    parted = files.partitioning(pa.schema([schema.field("SentDate"), schema.field("Topic")]), flavor="hive")
    files.write_dataset(batches(), folder, schema=schema, format="parquet", partitioning=parted)
    return count


def _batch(rows: list[list[Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
    arrays = [pa.array(each, field.type) for each, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _job_archives(engine: SparkSession, database: str, folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    flags = {"project": PROJECT, "instance": INSTANCE, "database": database, "archive": str(folder), "window": "31d"}
    return archive.run(engine, ArchiveSettings.read(flags, {}), late=True).written

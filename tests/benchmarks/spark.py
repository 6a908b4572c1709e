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
from tests.benchmarks.bench import Bench, Stopwatch, connecting_to, fresh_table, stopwatch
from tests.benchmarks.results import Section, figures
from tests.support.processes import children
from tests.support.spanner import INSTANCE, PROJECT

Sample = tuple[str, str, float]
#: Does its work, and returns for how many rows, how long it took, and the CPU time of this process.
Way = Callable[[], tuple[int, Stopwatch]]
#: Rows of a commit, of the loop and of the job.
COMMIT = 100
TOPICS = 5
#: Bytes of a message.
BODY = b"x" * 150
#: Columns that are filled and read.
READ = ("Id", "Topic", "Data", "Priority", "CreatedAt", "SentAt")
LOOP, SPARK, CPU = "plain loop", "Spark", "CPU seconds"
TRANSFERS = "the ratios of CPU, roughly."
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
            samples += in_turns(bench, engine, size, {LOOP: timed(loop), SPARK: timed(source)})
    section = beside_loops(
        "Reading with Spark",
        samples,
        f"""\
- A table of sent tasks with messages of {len(BODY)} bytes. The loop is `snapshot.read`. Spark is the data source on
  `local[2]`.""",
    )
    return compares_cpu(section, *sizes)


def registering(bench: Bench) -> Section:
    sizes = (bench.choose(20_000, 400), bench.choose(40_000, 800))
    samples: list[Sample] = []
    with here(bench) as engine, tempfile.TemporaryDirectory() as rejects:
        for size in sizes:
            rows = _rows(engine, size)
            job = partial(_job_registers, bench, rows, rejects)
            samples += in_turns(bench, engine, size, {LOOP: partial(_loop_registers, bench, size), SPARK: job})
            rows.unpersist()
    section = beside_loops(
        "Registering with Spark",
        samples,
        f"""\
- {COMMIT} rows in a commit, messages of {len(BODY)} bytes. The loop is `outbox.register` in `database.batch()`.""",
    )
    return compares_cpu(section, *sizes)


def archiving(bench: Bench) -> Section:
    sizes = (bench.choose(50_000, 1_000), bench.choose(100_000, 2_000))
    samples: list[Sample] = []
    with here(bench) as engine, fresh_table(bench) as table, tempfile.TemporaryDirectory() as folder:
        for size in growing(table.database, sizes):
            ways = {
                LOOP: timed(partial(_loop_archives, table.database, Path(folder) / "loop")),
                SPARK: timed(partial(_job_archives, engine, table.id, Path(folder) / "job")),
            }
            samples += in_turns(bench, engine, size, ways)
    section = beside_loops(
        "Archiving with Spark",
        samples,
        f"""\
- Sent tasks of one day, {TOPICS} topics, messages of {len(BODY)} bytes. The loop is `snapshot.read` and pyarrow's
  dataset writer.""",
    )
    return compares_cpu(section, *sizes)


@contextlib.contextmanager
def here(bench: Bench) -> Iterator[SparkSession]:
    with connecting_to(bench.emulators):
        yield spark(bench.emulators.spanner_host)


def timed(work: Callable[[], int]) -> Way:
    def way() -> tuple[int, Stopwatch]:
        with stopwatch() as watch:
            rows = work()
        return rows, watch

    return way


def in_turns(bench: Bench, engine: SparkSession, size: int, ways: dict[str, Way]) -> list[Sample]:
    samples: list[Sample] = []
    for turn in tqdm(range(bench.rounds + 1), desc=f"{size:,} rows", disable=None):
        for name, way in ways.items():
            before = _cpu_of_spark(engine)
            rows, watch = way()
            spark_cpu = _cpu_of_spark(engine) - before
            assert rows == size, (name, rows)
            if turn:
                row = f"{name}, {size:,} rows"
                samples += [(row, "rows/s", rows / watch.seconds), (row, CPU, watch.cpu_seconds + spark_cpu)]
    return samples


def _cpu_of_spark(engine: SparkSession) -> float:
    """Return the CPU seconds of the JVM, which is a child of this process, and of its Python workers."""
    context: Any = engine.sparkContext
    return cpu_of([context._gateway.proc.pid])


def cpu_of(processes: Iterable[int]) -> float:
    """Return the CPU seconds of processes and of all below them."""
    family = [*processes]
    for pid in family:
        family += children(pid)
    ticks = 0
    for pid in family:
        with contextlib.suppress(FileNotFoundError):
            # utime, stime, and those of children that have ended: proc(5), fields 14 to 17
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def beside_loops(title: str, samples: list[Sample], conditions: str) -> Section:
    return Section(title, figures(samples), conditions, TRANSFERS)


def compares_cpu(section: Section, small: int, large: int) -> Section:
    """Add the bars that Spark takes at most 1.6 times the loop's CPU, and that it grows no faster than the rows."""
    of_spark = section.value(f"{SPARK}, {large:,} rows", CPU)
    ratio = of_spark / section.value(f"{LOOP}, {large:,} rows", CPU)
    section.at_most(f"CPU of Spark / loop, {large:,} rows", ratio, 1.6)
    growth = of_spark / section.value(f"{SPARK}, {small:,} rows", CPU)
    section.at_most(f"growth of CPU seconds over growth of rows, to {large:,}", growth / (large / small), 1.0)
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


def _loop_registers(bench: Bench, size: int) -> tuple[int, Stopwatch]:
    ids = [task_id("orders", str(number)) for number in range(size)]
    with fresh_table(bench) as table:
        writer: Any = table.database
        with stopwatch() as watch:
            for start in range(0, size, COMMIT):
                with writer.batch(default_retry_delay=0.005) as batch:
                    for id in ids[start : start + COMMIT]:
                        outbox.register(batch, "orders", BODY, {"kind": "paid"}, task_id=id)
    return size, watch


def _job_registers(bench: Bench, rows: DataFrame, rejects: str) -> tuple[int, Stopwatch]:
    with fresh_table(bench) as table:
        place: Any = {"project": PROJECT, "instance": INSTANCE, "database": table.id}
        with stopwatch() as watch:
            done = register.register(rows, key=["payment"], rejects=rejects, **place)
        return done.registered, watch


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

"""The audit compared with a loop over dictionaries that finds the same in one process."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.dataset
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as f

from outbox.message import TASK_ID_ATTRIBUTE, parsed
from outbox.program.times import shown
from outbox_pipeline import schemas
from outbox_pipeline.jobs.archive.windows import Archive, Manifest, archivable, checksum_columns, rebalanced
from outbox_pipeline.jobs.audit import job as audit
from outbox_pipeline.settings import AuditSettings
from tests.benchmarks.bench import Bench, fresh_table
from tests.benchmarks.results import Section
from tests.benchmarks.spark import (
    DAY,
    LOOP,
    SPARK,
    TOPICS,
    Sample,
    beside_loops,
    compares_cpu,
    here,
    in_turns,
    timed,
)
from tests.support.spanner import INSTANCE, PROJECT

MILLION = 1_000_000
#: Of a million tasks: never received, received as two messages, and messages of no task.
LOST, TWICE, UNKNOWN = 1_000, 2_000, 100
HOURS = 24
GRACE = timedelta(minutes=10)
UNTIL = DAY + timedelta(hours=HOURS)


def auditing(bench: Bench) -> Section:
    sizes = (bench.choose(300_000, 5_000), bench.choose(MILLION, 15_000))
    samples: list[Sample] = []
    with here(bench) as engine, fresh_table(bench) as table:
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                archive(engine, place, size, f"projects/{PROJECT}/instances/{INSTANCE}/databases/{table.id}")
                receive(engine, place, size)
                job = timed(partial(_job, engine, table.id, place, count()))
                samples += in_turns(bench, engine, size, {LOOP: timed(partial(_loop, place)), SPARK: job})
    section = beside_loops(
        "Auditing with Spark",
        samples,
        f"""\
- A day's tasks in an archive, {TOPICS} topics, messages of 150 bytes, and received messages as Parquet. Of a million
  tasks, {LOST:,} are lost, {TWICE:,} were published twice, and {UNKNOWN} messages are of no task. The loop reads both
  with pyarrow and counts the same classes in dictionaries.""",
    )
    return compares_cpu(section, *sizes)


def _id(number: Column) -> Column:
    digits = f.md5(number.cast("string"))
    lengths = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
    return f.concat_ws("-", *(f.substring(digits, start, length) for start, length in lengths))


def _body(number: Column) -> Column:
    """Return 150 bytes that can hardly be compressed."""
    digits = f.concat(*(f.md5(f.concat(number.cast("string"), f.lit(f".{part}"))) for part in range(5)))
    return f.encode(f.substring(digits, 1, 150), "UTF-8")


def _created(number: Column, size: int) -> Column:
    return f.timestamp_micros(f.unix_micros(f.lit(DAY)) + number * int(HOURS * 3600 * 1e6 / size))


def archive(engine: SparkSession, folder: Path, size: int, database: str) -> None:
    """Write and prove an archive of generated tasks as the job does."""
    number = f.col("id")
    # The bytes of a PubsubMessage: data, and twice an attribute.
    data = f.concat(
        f.lit(b"\x0a\x96\x01"), _body(number),
        f.lit(b"\x12\x0c\x0a\x04kind\x12\x04paid\x12\x3c\x0a\x14" + TASK_ID_ATTRIBUTE.encode() + b"\x12\x24"),
        f.encode(_id(number), "UTF-8"),
    )  # fmt: skip
    created = _created(number, size)
    created = {
        "Id": _id(number), "Topic": f.concat(f.lit("topic-"), number % TOPICS), "Data": data, "Priority": f.lit(50),
        "OrderingKey": f.when(number % 10 == 0, f.concat(f.lit("key-"), (number / 10).cast("long") % 1000)),
        "Sequence": number, "CreatedAt": created, "SentAt": created + f.expr("interval 2 seconds"),
    }  # fmt: skip
    others = {field.name: f.lit(None).cast(field.dataType) for field in schemas.TABLE if field.name not in created}
    tasks = engine.range(size).select(
        *((created | others)[field.name].cast(field.dataType).alias(field.name) for field in schemas.TABLE)
    )
    files = Archive(engine, str(folder / "archive"))
    since, until = DAY, UNTIL + GRACE + timedelta(hours=1)
    window, data_folder = files.folder_of(since, until), files.new_run()
    rebalanced(archivable(tasks)).write.partitionBy(*schemas.ARCHIVE_PARTITIONS).parquet(str(window / data_folder))
    [(rows, checksum)] = (
        engine.read.schema(schemas.STORED).parquet(str(window / data_folder)).select(*checksum_columns()).collect()
    )
    files.finish(window, Manifest(database, since, until, until, rows, checksum, data_folder, datetime.now(UTC)))


def receive(engine: SparkSession, folder: Path, size: int) -> None:
    number = f.col("id")
    twice = engine.range(size).where(number % MILLION >= MILLION - TWICE)
    strangers = engine.range(size, size + max(1, size * UNKNOWN // MILLION))
    came = engine.range(size).where(number % MILLION >= LOST).union(twice).union(strangers)
    published = _created(number, size) + f.expr("interval 1 second")
    attributes = f.concat(f.lit(f'{{"{TASK_ID_ATTRIBUTE}":"'), _id(number), f.lit('","kind":"paid"}'))
    messages = came.select(
        f.monotonically_increasing_id().cast("string").alias("message_id"),
        f.least(published, f.lit(UNTIL)).alias("publish_time"),
        attributes.alias("attributes"),
        _body(number).alias("data"),
    )
    messages.write.parquet(str(folder / "received"))


def flags(database: str, folder: Path, turn: int) -> dict[str, str]:
    return {
        "project": PROJECT, "instance": INSTANCE, "database": database, "tasks": "archive",
        "archive": str(folder / "archive"), "received": str(folder / "received"), "grace": f"{GRACE.total_seconds():g}",
        "since": shown(DAY), "until": shown(UNTIL), "output": str(folder / f"report-{turn}"),
    }  # fmt: skip


def _job(engine: SparkSession, database: str, folder: Path, turns: Iterator[int]) -> int:
    done = audit.run(engine, AuditSettings.read(flags(database, folder, next(turns)), {}))
    found = (done.lost, done.republished, done.unknown, done.mismatched)
    assert found == expected(done.tasks), done
    return done.tasks


def expected(size: int) -> tuple[int, int, int, int]:
    millions, rest = divmod(size, MILLION)
    lost = millions * LOST + min(rest, LOST)
    twice = millions * TWICE + max(0, rest - (MILLION - TWICE))
    return lost, twice, max(1, size * UNKNOWN // MILLION), 0


def _rows(folder: Path, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    for batch in pyarrow.dataset.dataset(folder).to_batches(columns=list(columns)):
        yield from zip(*(batch[name].to_pylist() for name in columns), strict=True)


def _digest(data: bytes, attributes: Mapping[str, str]) -> int:
    return hash((data, tuple(sorted((name, text) for name, text in attributes.items() if name != TASK_ID_ATTRIBUTE))))


def _loop(folder: Path) -> int:
    received: dict[str, list[tuple[str, datetime, int]]] = {}
    for message_id, at, text, data in _rows(folder / "received", ("message_id", "publish_time", "attributes", "data")):
        attributes = json.loads(text)
        received.setdefault(attributes[TASK_ID_ATTRIBUTE], []).append((message_id, at, _digest(data, attributes)))
    numbers: Counter[tuple[str, datetime, str]] = Counter()
    keys: dict[tuple[str, str], list[tuple[datetime, int, str, datetime]]] = {}
    [window] = (folder / "archive").glob("window=*/run=*")
    names = ("Id", "Topic", "Data", "OrderingKey", "Sequence", "CreatedAt", "SentAt")
    for id, topic, data, key, sequence, created, _ in _rows(window, names):
        hour = created.replace(minute=0, second=0, microsecond=0)
        message: Any = parsed(data)
        wanted = _digest(message.data, message.attributes)
        came = received.pop(id, None)
        numbers[topic, hour, "tasks"] += 1
        if came is None:
            numbers[topic, hour, "lost"] += 1
            continue
        ids = {each[0] for each in came}
        first_at = min(each[1] for each in came)
        numbers[topic, hour, "late" if first_at >= UNTIL + GRACE else "delivered"] += 1
        numbers[topic, hour, "republished"] += len(ids) - 1
        numbers[topic, hour, "redelivered"] += len(came) - len(ids)
        numbers[topic, hour, "mismatched"] += any(each[2] != wanted for each in came)
        if key is not None:
            keys.setdefault((topic, key), []).append((created, sequence, id, first_at))
    overtaken = 0
    for tasks in keys.values():
        latest = None
        for *_, first_at in sorted(tasks):
            overtaken += latest is not None and first_at < latest
            latest = first_at if latest is None else max(latest, first_at)
    sums: Counter[str] = Counter()
    for (_, _, what), number in numbers.items():
        sums[what] += number
    found = (sums["lost"], sums["republished"], len(received), sums["mismatched"])
    assert (found, overtaken) == (expected(sums["tasks"]), 0), (found, overtaken)
    return sums["tasks"]

"""A day of generated tasks in an archive, and the messages that were received of them: Spark makes both."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as f

from outbox.message import TASK_ID_ATTRIBUTE
from outbox_pipeline import schemas
from outbox_pipeline.jobs.archive_files import Archive, archivable, checksum_columns, rebalanced
from outbox_pipeline.jobs.archive_windows import ArchivedWindow

TOPICS = 5
MILLION = 1_000_000
#: Of a million tasks: never received, received as two messages, and messages of no task.
LOST, TWICE, UNKNOWN = 1_000, 2_000, 100
HOURS = 24
GRACE = timedelta(minutes=10)
DAY = datetime(2026, 11, 1, tzinfo=UTC)
UNTIL = DAY + timedelta(hours=HOURS)


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
    others = {field.name: f.lit(None).cast(field.dataType) for field in schemas.STORED if field.name not in created}
    tasks = engine.range(size).select(
        *((created | others)[field.name].cast(field.dataType).alias(field.name) for field in schemas.STORED)
    )
    files = Archive(engine, str(folder / "archive"))
    since, until = DAY, UNTIL + GRACE + timedelta(hours=1)
    data_folder = files.new_folder(since, until)
    files.write(data_folder, rebalanced(archivable(tasks)))
    stored = engine.read.schema(schemas.ARCHIVED).parquet(files.path(data_folder))
    [(rows, checksum)] = stored.select(*checksum_columns()).collect()
    files.finish(ArchivedWindow(database, since, until, until, rows, checksum, data_folder, {}))


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


def expected(size: int) -> tuple[int, int, int, int]:
    millions, rest = divmod(size, MILLION)
    lost = millions * LOST + min(rest, LOST)
    twice = millions * TWICE + max(0, rest - (MILLION - TWICE))
    return lost, twice, max(1, size * UNKNOWN // MILLION), 0

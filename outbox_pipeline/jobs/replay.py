"""`replay`: sends archived tasks again, or publishes them to another topic.

The Spark tasks lock the row of each task. One that was sent before the replay began is made unsent, and one that is
gone is inserted again. No other task is changed. So a Spark task that Spark runs again changes nothing twice, unless a
task was sent and deleted after its first attempt.
"""

import base64
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from outbox.base.values import chunked, shown
from outbox.errors import SettingError
from outbox.program.settings import DatabaseSettings, PubSubSettings, resolved
from outbox.program.terminal import escaped
from outbox.registration import TASK_COLUMNS
from outbox.rows.task_table import Transaction
from outbox.table.shared_sql import NOW, by_ids
from outbox.table.states import TASKS_TABLE
from outbox_admin import operations
from outbox_admin.changes import execution, resending
from outbox_admin.changes.resending import message
from outbox_admin.changes.writes import RETRY_COLUMNS, retry_values
from outbox_admin.operations import Author, as_json
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.topics import editing
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import ReplaySettings
from outbox_pipeline.jobs.archive_files import Archive, read_archive
from outbox_pipeline.source.datasource import decoded
from outbox_pipeline.spanner import COMMIT_BYTES, Table, open_table
from outbox_pipeline.spark.spark_tasks import Pace, Rows, collected, divided, inform, map_rows, placed, totals
from outbox_pipeline.spark.stack_traces import refused

#: Max topics and tasks that a dry run shows. Topics with the most tasks come first.
TOPICS, SAMPLE = 20, 10
#: Max tasks in one transaction.
REPLAY_ROWS = 200
_TAG = "outbox-pipeline-replay"
_LOCK = by_ids("Id, CreatedAt, SentAt, CancelledBy", lock=True)
_COUNTS = schemas.counts("replayed", "registered", "unsent", "resent", "cancelled", "replaced")
_COUNTS_TO = schemas.counts("published", "refused", "cancelled")
#: The archived columns of a task that is inserted again.
ARCHIVED_COLUMNS = (*(name for name in TASK_COLUMNS if name not in ("AvailableAt", "ExpiresAt")), "TimesSent")

_log = logging.getLogger("outbox_pipeline")


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """A selection of archived tasks. `since` is inclusive, `until` exclusive. A field of None does not narrow it.

    `to` is the full name of the topic to publish to. Then no task is changed.
    """

    archive: str
    topic: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    where: str | None = None
    to: str | None = None


def run(
    spark: SparkSession,
    settings: ReplaySettings,
    *,
    dry_run: bool = False,
    reason: str | None = None,
    to: str | None = None,
) -> dict[str, Any]:
    """Replay the selected tasks. The record has the `reason`.

    With `to`, they are published to this topic instead. Returns the counts of docs/pipeline/replay.md. Each task is
    counted once, by the last attempt of its Spark task. Raises SettingError, NotReached, OutboxError.
    """
    table = open_table(settings)
    now = table.now()
    selection = _selection_of(settings, now)
    if to:
        selection = replace(selection, to=_destination(table, selection, to))
    _check(spark, table, selection)
    if dry_run:
        return _dry_run(_selected(spark, selection, now))
    begun = operations.begin(table, "replay", asdict(selection), Author(reason=reason))
    inform("replay", f"Replay {begun.id} of {as_json(asdict(selection))} begins")
    parts, rate = divided(spark, settings.max_rows_per_second)
    rows = in_order_of_commits(_selected(spark, selection, begun.started_at), parts)
    if selection.to:
        rows = rows.select("Id", "OrderingKey", "Data", "CreatedAt")
        counts = totals(map_rows(rows, _COUNTS_TO, publish_rows, settings, table.pubsub, selection.to, rate))
    else:
        rows = rows.select(*ARCHIVED_COLUMNS)
        counts = totals(map_rows(rows, _COUNTS, replay_rows, settings, begun.started_at, rate))
    selected = sum(counts.values())
    # Not `unsent` and `resent`: an earlier attempt of a Spark task can have made them unsent.
    left = sum(counts.get(name, 0) for name in ("cancelled", "replaced", "refused"))
    operations.end(table, begun.id, Tasks=selected - left)
    told = "" if selection.to else ". Workers send its tasks. outbox status shows how many are pending"
    inform("replay", f"Replay {begun.id} finished{told}")
    return {"replay_id": begun.id, "selected": selected, **counts}


def _selection_of(settings: ReplaySettings, now: datetime) -> ReplaySelection:
    """Return the selection of the settings. Raises SettingError if since is not before until."""
    since, until = (None if each is None else resolved(each, now) for each in (settings.since, settings.until))
    if since and since >= (end := min(until or now, now)):
        raise SettingError(f"--since {shown(since)} is not before {'--until' if end == until else 'now,'} {shown(end)}")
    return ReplaySelection(settings.archive, settings.topic or None, since, until, settings.where or None)


def _destination(table: Table, selection: ReplaySelection, to: str) -> str:
    """Return the full name of the topic to publish to. Raises SettingError, OutboxError if it is not for the tasks."""
    if selection.topic is None:
        raise SettingError("--to needs --topic. Pass both")
    found = execution.resend_to(table, TaskSelection(state="sent", topic=selection.topic), to)
    if unchecked := editing.check_destinations(table, [found.to], otherwise=""):
        inform("replay", unchecked)
    return str(found.to)


def _check(spark: SparkSession, table: Table, selection: ReplaySelection) -> None:
    """Check what would fail after the operation is recorded: the archive, and the predicate.

    Spark must be able to parse the predicate, and it must be deterministic. Raises SettingError, OutboxError.
    """
    Archive(spark, selection.archive).finished(table.name)
    if not selection.where:
        return
    with refused(f"--where {selection.where}"):
        found: Any = spark.createDataFrame([], schemas.SOURCE).where(selection.where)
    if not found._jdf.queryExecution().analyzed().deterministic():  # noqa: SLF001 - no public API
        raise SettingError(f"--where {selection.where} is not deterministic. Spark may compute it more than once")


def _dry_run(tasks: DataFrame) -> dict[str, Any]:
    # Persist, so that the archive is read once for both results.
    tasks = tasks.select("Id", "Topic", "SentAt").persist()
    topics = collected(tasks.groupBy("Topic").count().orderBy(f.desc("count"), "Topic"))
    sample = collected(tasks.limit(SAMPLE))
    tasks.unpersist()
    return {
        "selected": sum(row["count"] for row in topics),
        "topics": {row["Topic"]: row["count"] for row in topics[:TOPICS]},
        "sample": [{"id": row["Id"], "topic": row["Topic"], "sent_at": row["SentAt"]} for row in sample],
    }


def _selected(spark: SparkSession, given: ReplaySelection, started_at: datetime) -> DataFrame:
    """Return the selected tasks: of each task that was not cancelled last, the last archived row."""
    tasks = read_archive(spark, given.archive, since=given.since)
    last = Window.partitionBy("Id").orderBy(f.desc("SentAt"))
    tasks = tasks.withColumn("_number", f.row_number().over(last)).where("_number = 1").drop("_number")
    tasks = tasks.where((tasks.SentAt < min(given.until or started_at, started_at)) & tasks.CancelledBy.isNull())
    tasks = tasks.where(tasks.Topic == given.topic) if given.topic else tasks
    return decoded(tasks).withColumn("State", f.lit("sent")).where(given.where) if given.where else tasks


def in_order_of_commits(tasks: DataFrame, partitions: int = 0) -> DataFrame:
    """Return tasks in write order: the tasks of an ordering key are adjacent and sorted by commit.

    So a task is never unsent while an earlier task of its key is still sent. Tasks without a key are sorted by ID.
    """
    has_key = f.col("OrderingKey").isNotNull()
    of_key = [f.when(has_key, f.col(name)) for name in ("CreatedAt", "Sequence")]
    parted = placed(tasks, partitions, "OrderingKey", "Id")
    return parted.sortWithinPartitions("OrderingKey", *of_key, "Id").drop("_place")


def replay_rows(
    database: DatabaseSettings, started_at: datetime, rate: float, batches: Iterator[Rows]
) -> Iterator[Rows]:
    """Replay rows with ARCHIVED_COLUMNS in a Spark task. Yield the counts of each chunk.

    `started_at` is the start of the replay by the database's clock. `rate` is rows per second of this Spark task, 0 is
    no limit.
    """
    table = open_table(database)
    for chunk in _paced(batches, rate):
        yield [replay_chunk(table, chunk, started_at)]


def publish_rows(
    database: DatabaseSettings, settings: PubSubSettings, to: str, rate: float, batches: Iterator[Rows]
) -> Iterator[Rows]:
    """Publish rows with Id, OrderingKey, Data and CreatedAt to a topic, in a Spark task. Yield counts of each chunk.

    A task that was cancelled since it was archived is not published. If Spark runs the Spark task again, all of its
    rows are published again.
    """
    table, send = open_table(database), resending.opened(settings, to)
    for chunk in _paced(batches, rate):
        found = table.read_ids(("Id", "CancelledBy"), [row["Id"] for row in chunk], _TAG)
        cancelled = {id for id, by in found if by is not None}
        wanted = [row for row in chunk if row["Id"] not in cancelled]
        refused = send([message(row["Id"], row["OrderingKey"], row["Data"], row["CreatedAt"]) for row in wanted])
        for id, why in refused.items():
            _log.warning("the task %s was not published: %s", escaped(id), escaped(why))
        yield [{"published": len(wanted) - len(refused), "refused": len(refused), "cancelled": len(cancelled)}]


def _paced(batches: Iterator[Rows], rate: float) -> Iterator[Rows]:
    """Yield the rows in chunks of a transaction, each when the rate allows it."""
    pace = Pace(rate)
    for rows in batches:
        for chunk in chunked(rows, pace.chunk(REPLAY_ROWS), COMMIT_BYTES, lambda row: len(row["Data"])):
            pace.wait(len(chunk))
            yield chunk


def replay_chunk(table: Table, rows: Sequence[Mapping[str, Any]], started_at: datetime) -> dict[str, int]:
    """Make the tasks of archived rows unsent, in one transaction. Return the number of each outcome.

    A task that was sent before `started_at` is `replayed`, and one that is gone is `registered`. Others are unchanged:
    an `unsent` task, one that was `resent` since, a `cancelled` one, and another task that has the ID now (`replaced`).
    """
    wanted = {row["Id"]: row for row in rows}

    def outcome(id: str, created_at: datetime, sent_at: datetime | None, cancelled_by: str | None) -> str:
        if created_at != wanted[id]["CreatedAt"]:
            return "replaced"
        if cancelled_by is not None:
            return "cancelled"
        return "unsent" if sent_at is None else "replayed" if sent_at < started_at else "resent"

    def work(transaction: Transaction) -> dict[str, int]:
        there = {id: outcome(id, *others) for id, *others in transaction.query(_LOCK, {"ids": sorted(wanted)})}
        outcomes = dict.fromkeys(wanted, "registered") | there
        # Read after locking: by this time, a worker with the task in doubt knows that it was reset after the publish.
        [[now]] = transaction.query(NOW, {})
        reset = [retry_values(id, now) for id, each in outcomes.items() if each == "replayed"]
        if reset:
            transaction.update(TASKS_TABLE, RETRY_COLUMNS, reset)
        for values in (_inserted(wanted[id], now) for id, each in outcomes.items() if each == "registered"):
            transaction.insert(TASKS_TABLE, tuple(values), [tuple(values.values())])
        counts = Counter(outcomes.values())
        return {name: counts[name] for name in _COUNTS.names}

    return table.transact(_TAG, work)


def _inserted(row: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return an archived row in the state that `outbox retry` leaves, with the columns that are not NULL.

    The row keeps its CreatedAt, and so its place in the order of its ordering key. It differs from each earlier row of
    the task in TimesSent, or in DueAt, if another replay has inserted that one. Otherwise a batch that is in doubt
    about such a row would mark this one, as if it had been published. A column that is newer than the archive is NULL
    there, and gets its default.
    """
    values = {**row, "Data": base64.b64encode(row["Data"]), "AvailableAt": now, "DueAt": now}
    values["TimesSent"] = (row["TimesSent"] or 0) + 1
    return {name: value for name, value in values.items() if value is not None}

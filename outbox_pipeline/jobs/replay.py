"""`replay`: sends sent tasks again, from the table or from the archive, or publishes them to another topic.

The Spark tasks lock each row and reset SentAt if the task was sent before the replay began. Spark can run a Spark task
again, and a replay can be resumed. A task that is already unsent, or was sent since the replay began, is not changed.
So no task is replayed twice. A replay from the archive also inserts tasks that are gone. The transaction of each chunk
records its tasks in ProcessedTasks. So a task that was deleted after its chunk stays deleted, whoever deleted it, also
if several replays run at the same time.
"""

import base64
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from outbox.admin import changes, operations, operator_sql, topics
from outbox.admin.changes import RETRY_COLUMNS, Message, retry_values
from outbox.admin.operations import Author, as_json
from outbox.admin.selections import TaskSelection
from outbox.admin.table import Transaction
from outbox.base.values import chunked, shown
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.inbox.once import COLUMNS as INBOX_COLUMNS
from outbox.inbox.once import TABLE as INBOX
from outbox.program.settings import DatabaseSettings, PubSubSettings, resolved
from outbox.program.terminal import escaped
from outbox.registration import COLUMNS, TABLE
from outbox.table.ddl import CANCELLED
from outbox.table.shared_sql import NOW
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import ReplaySettings
from outbox_pipeline.jobs.archive_files import Archive, read_archive
from outbox_pipeline.source.datasource import decoded, read_tasks
from outbox_pipeline.source.parts import RowFilter
from outbox_pipeline.spanner import CALL_SECONDS, COMMIT_BYTES, TIME_TO_READ, Table, open_table
from outbox_pipeline.spark.spark_tasks import Pace, Rows, collected, divided, map_rows, placed, totals
from publishworker.delivery.marking import MAX_MARKING_SECONDS
from publishworker.pubsub import resending

#: Max topics and tasks that a dry run shows. Topics with the most tasks come first.
TOPICS, SAMPLE = 20, 10
#: Max tasks in one transaction.
REPLAY_ROWS = 200
_TAG = "outbox-pipeline-replay"
_LOCK = operator_sql.rows_by_ids("Id, SentAt, CreatedAt")
_COUNTS = schemas.counts("replayed", "registered", "unsent", "resent", "missing")
_COUNTS_TO = schemas.counts("published", "refused")
#: The columns of a task from the table, and of a task from the archive, which is inserted again if it is gone.
_OF_TABLE = ("Id", "OrderingKey", "CreatedAt", "Sequence")
ARCHIVED_COLUMNS = (*(name for name in COLUMNS if name not in ("AvailableAt", "ExpiresAt")), "TimesSent")
#: How long a worker remembers tasks in doubt.
_REMEMBERED = timedelta(seconds=MAX_MARKING_SECONDS)
#: The consumer in ProcessedTasks that has the tasks of all replays from an archive.
_CONSUMER = "outbox-pipeline replay"

_log = logging.getLogger("outbox_pipeline")


@dataclass(slots=True)
class Replayed:
    """The outcomes of the selected tasks, described in docs/pipeline/replay.md. A dry run sets `topics` and `sample`.

    `published` and `refused` are set if the tasks went to another topic.

    Each task is counted once, by the last attempt of its Spark task.
    """

    replay_id: str | None = None
    selected: int = 0
    replayed: int = 0
    registered: int = 0
    unsent: int = 0
    resent: int = 0
    missing: int = 0
    published: int | None = None
    refused: int | None = None
    topics: dict[str, int] | None = None
    sample: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """A selection of sent tasks. `since` is inclusive, `until` exclusive. A field of None does not narrow it.

    `to` is the full name of the topic to publish to. Then no task is changed.
    """

    archive: str | None = None
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
    resume: str = "",
    reason: str | None = None,
    to: str | None = None,
) -> Replayed:
    """Replay the selected tasks, or continue the replay with the ID `resume`. The record has the `reason`.

    With `to`, they are published to this topic instead. Raises SettingError, NotReached, OutboxError.
    """
    check(settings, dry_run=dry_run, resume=resume, reason=reason, to=to)
    table = open_table(settings)
    now = table.now()
    selection, started_at = _resumed(table, resume) if resume else (_selection_of(settings, now), now)
    if to:
        selection = replace(selection, to=_destination(table, selection, to))
    _check(spark, table, selection)
    if dry_run:
        return _dry_run(_selected(spark, table, settings, selection, started_at))
    id = resume
    if not resume:
        begun = operations.begin(table, "replay", asdict(selection), Author(reason=reason))
        id, started_at = begun.id, begun.started_at
    _info(f"Replay {id} of {as_json(asdict(selection))}. If it is interrupted, continue it with --resume {id}")
    tasks = _selected(spark, table, settings, selection, started_at)
    done = _replay(tasks, table, settings, selection, started_at)
    done.replay_id = id
    operations.end(table, id, Tasks=done.selected - done.missing - (done.refused or 0))
    told = "" if selection.to else ". Workers send its tasks. outbox status shows how many are pending"
    _info(f"Replay {id} finished{told}")
    return done


def check(
    settings: ReplaySettings, *, dry_run: bool, resume: str, reason: str | None = None, to: str | None = None
) -> None:
    """Check settings and flags that depend on each other. Raises SettingError."""
    given = [field.name for field in fields(ReplaySelection) if getattr(settings, field.name, None) not in ("", None)]
    others = [flag for flag, value in (("dry-run", dry_run), ("reason", reason), ("to", to)) if value]
    if resume and (given or others):
        named = [f"--{name} and OUTBOX_{name.upper()}" for name in given] + [f"--{flag}" for flag in others]
        raise SettingError(f"--resume continues the interrupted replay as it began. Remove {', '.join(named)}")
    if not resume and not set(given) - {"archive"}:
        raise SettingError(
            "No tasks are selected. Pass --topic, --since, --until or --where. --where true selects all sent tasks"
        )


def _selection_of(settings: ReplaySettings, now: datetime) -> ReplaySelection:
    """Return the selection of the settings. Raises SettingError if since is not before until."""
    since, until = (None if each is None else resolved(each, now) for each in (settings.since, settings.until))
    if since and since >= (end := min(until or now, now)):
        raise SettingError(f"--since {shown(since)} is not before {'--until' if end == until else 'now,'} {shown(end)}")
    texts = {name: getattr(settings, name) or None for name in ("archive", "topic", "where")}
    return ReplaySelection(since=since, until=until, **texts)


def _destination(table: Table, selection: ReplaySelection, to: str) -> str:
    """Return the full name of the topic to publish to. Raises SettingError, OutboxError if it is not for the tasks."""
    if selection.topic is None:
        raise SettingError("--to needs --topic. Pass both")
    found = changes.resend_to(table, TaskSelection(state="sent", topic=selection.topic), to)
    if unchecked := topics.check_destinations(table, [found.to], otherwise=""):
        _info(unchecked)
    return str(found.to)


def _resumed(table: Table, id: str) -> tuple[ReplaySelection, datetime]:
    """Return the selection and StartedAt of an unfinished replay. Raises SettingError."""
    found = operations.operation(table, id)
    if found is None or found.operation != "replay":
        raise SettingError(f"--resume {id}: AsynchronousTaskOperations of {table.name} has no replay with this ID")
    if found.finished_at is not None:
        raise SettingError(
            f"--resume {id}: this replay finished at {shown(found.finished_at)}. Start a new one instead"
        )
    try:
        given = json.loads(found.selection)
        times = {name: datetime.fromisoformat(given[name]) for name in ("since", "until") if name in given}
        return ReplaySelection(**given | times), found.started_at
    except (ValueError, TypeError, RecursionError):
        raise SettingError(
            f"--resume {id}: the column Selection of this row is not that of a replay: {found.selection!r}"
        ) from None


def _check(spark: SparkSession, table: Table, selection: ReplaySelection) -> None:
    """Check what would fail after the operation is recorded: the archive, and the predicate.

    Spark must be able to parse the predicate, and it must be deterministic. Raises SettingError, OutboxError.
    """
    if selection.archive and not Archive(spark, selection.archive).log.windows(table.name):
        raise OutboxError(f"--archive {selection.archive} has no finished window. Check the path")
    if not selection.where:
        return
    try:
        found: Any = spark.createDataFrame([], schemas.TASK).where(selection.where)
    except (ParseException, AnalysisException) as error:
        reason = next(line for line in str(error).splitlines() if line)
        raise SettingError(f"--where {selection.where}: {reason}") from error
    if not found._jdf.queryExecution().analyzed().deterministic():  # noqa: SLF001 - no public API
        raise SettingError(f"--where {selection.where} is not deterministic, so the replay could not be resumed")


def _dry_run(tasks: DataFrame) -> Replayed:
    """Count the selected tasks and return some of them."""
    # Persist, so that the table is read once for both results.
    tasks = tasks.select("Id", "Topic", "SentAt").persist()
    topics = collected(tasks.groupBy("Topic").count().orderBy(f.desc("count"), "Topic"))
    sample = collected(tasks.limit(SAMPLE))
    tasks.unpersist()
    return Replayed(
        selected=sum(row["count"] for row in topics),
        topics={row["Topic"]: row["count"] for row in topics[:TOPICS]},
        sample=[{"id": row["Id"], "topic": row["Topic"], "sent_at": row["SentAt"]} for row in sample],
    )


def _replay(
    tasks: DataFrame, table: Table, settings: ReplaySettings, selection: ReplaySelection, started_at: datetime
) -> Replayed:
    """Make the selected tasks unsent, and insert those that only the archive has."""
    parts, rate = divided(tasks.sparkSession, settings.max_rows_per_second)
    rows = in_order(tasks, parts)
    if selection.to:
        rows = rows.select("Id", "OrderingKey", "Data", "CreatedAt")
        counts = totals(map_rows(rows, _COUNTS_TO, publish_rows, table.pubsub, selection.to, rate))
    else:
        rows = rows.select(*ARCHIVED_COLUMNS) if selection.archive else rows.select("Id")
        counts = totals(map_rows(rows, _COUNTS, replay_rows, settings, started_at, rate))
    return Replayed(selected=sum(counts.values()), **counts)


def _selected(
    spark: SparkSession, table: Table, settings: ReplaySettings, given: ReplaySelection, started_at: datetime
) -> DataFrame:
    """Return the selected tasks, with at least _OF_TABLE or ARCHIVED_COLUMNS, Topic and SentAt.

    The table is read as of `started_at`, or as of now if Spanner has no versions of then. The remaining tasks are the
    same, because the finished ones are unsent or were sent since.
    """
    until = min(given.until or started_at, started_at)
    if given.archive:
        tasks = _of_archive(spark, given.archive, given, until)
    else:
        now = table.now()
        is_kept = started_at > now - table.retention() + TIME_TO_READ and table.keeps(started_at)
        needed = (*_OF_TABLE, "Topic", "SentAt", *(["Data"] if given.to else []))
        columns = tuple(schemas.TASK.fieldNames()) if given.where else needed
        wanted = RowFilter("sent", given.topic, given.since, until)
        tasks = read_tasks(spark, settings, columns, started_at if is_kept else now, wanted)
    return tasks.where(given.where) if given.where else tasks


def _of_archive(spark: SparkSession, archive: str, given: ReplaySelection, until: datetime) -> DataFrame:
    tasks = read_archive(spark, archive, since=given.since)
    # The last row of each task decides, as in the table. A resumed replay excludes tasks that were replayed, sent and
    # archived before the interruption.
    last = Window.partitionBy("Id").orderBy(f.desc("SentAt"))
    tasks = tasks.withColumn("_number", f.row_number().over(last)).where("_number = 1").drop("_number")
    tasks = tasks.where(tasks.SentAt < until)
    tasks = tasks.where(f.col("Topic") == given.topic) if given.topic else tasks
    return decoded(tasks).withColumn("State", f.lit("sent")) if given.where else tasks


def in_order(tasks: DataFrame, partitions: int = 0) -> DataFrame:
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
    """Replay rows with Id, or with the columns of the archive, in a Spark task. Yield the counts of each chunk.

    `started_at` is the start of the replay by the database's clock. `rate` is rows per second of this Spark task, 0 is
    no limit.
    """
    table, pace = open_table(database), Pace(rate)
    for rows in batches:
        for chunk in chunked(rows, pace.chunk(REPLAY_ROWS), COMMIT_BYTES, lambda row: len(row.get("Data", b""))):
            pace.wait(len(chunk))
            yield [replay_chunk(table, chunk, started_at)]


def publish_rows(settings: PubSubSettings, to: str, rate: float, batches: Iterator[Rows]) -> Iterator[Rows]:
    """Publish rows with Id, OrderingKey, Data and CreatedAt to a topic, in a Spark task. Yield counts of each chunk.

    If Spark runs the Spark task again, all of its rows are published again.
    """
    send, pace = resending.opened(settings, to), Pace(rate)
    for rows in batches:
        for chunk in chunked(rows, pace.chunk(REPLAY_ROWS), COMMIT_BYTES, lambda row: len(row["Data"])):
            pace.wait(len(chunk))
            refused = send([Message(row["Id"], row["OrderingKey"], row["Data"], row["CreatedAt"]) for row in chunk])
            for id, why in refused.items():
                _log.warning("the task %s was not published: %s", escaped(id), escaped(why))
            yield [{"published": len(chunk) - len(refused), "refused": len(refused)}]


def replay_chunk(table: Table, rows: Sequence[Mapping[str, Any]], started_at: datetime) -> dict[str, int]:
    """Reset SentAt of tasks that were sent before `started_at`, in one transaction. Return the number of each outcome.

    A row with Data comes from the archive and is inserted again if its ID is not in the table, unless the task was
    cancelled, or handled by a replay since `started_at`. If another task has its ID since, it is `missing`. An unsent
    task is `unsent`. A task that was sent since is `resent`.
    """
    wanted = {row["Id"]: row for row in rows}
    archived = [row["Id"] for row in rows if "Data" in row]

    def work(transaction: Transaction) -> dict[str, int]:
        there = transaction.query(_LOCK, {"ids": sorted(wanted)})
        found = {id: sent_at for id, sent_at, at in there if at == wanted[id].get("CreatedAt", at)}
        before = [id for id, sent_at in found.items() if sent_at is not None and sent_at < started_at]
        ids = {id for id, *_ in there}
        gone = [row for id, row in wanted.items() if id not in ids]
        handled = _record_handled(transaction, archived, started_at) if archived else set()
        again = [row["Id"] for row in gone if "Data" in row and row["Id"] not in handled]
        cancelled = _cancelled(table, transaction, again, started_at) if again else set()
        again = [id for id in again if id not in cancelled]
        if before or again:
            # Read after locking: by this time, a worker with the task in doubt knows that it was reset after the
            # publish.
            [[now]] = transaction.query(NOW, {})
            transaction.update(TABLE, RETRY_COLUMNS, [retry_values(id, now) for id in before])
            for values in (_inserted(wanted[id], now) for id in again):
                transaction.insert(TABLE, tuple(values), [tuple(values.values())])
        unsent = sum(sent_at is None for sent_at in found.values())
        return {
            "replayed": len(before),
            "registered": len(again),
            "unsent": unsent,
            "resent": len(found) - len(before) - unsent,
            "missing": len(wanted) - len(found) - len(again),
        }

    return table.transact(_TAG, work)


def _record_handled(transaction: Transaction, tasks: Sequence[str], started_at: datetime) -> set[str]:
    """Record that a replay has handled the `tasks`. Return those that any replay has handled since `started_at`.

    And those that it has handled shortly before: a worker may remember the row as published that it has inserted.
    """
    keys = KeySet(keys=[[_CONSUMER, task] for task in tasks])
    found = dict(map(tuple, transaction.read(INBOX, ("TaskId", "ProcessedAt"), keys)))
    if new := [(_CONSUMER, id, COMMIT_TIMESTAMP) for id in tasks if id not in found or found[id] <= started_at]:
        transaction.insert_or_update(INBOX, INBOX_COLUMNS, new)
    return {id for id, processed_at in found.items() if processed_at > started_at - _REMEMBERED}


def _cancelled(table: Table, transaction: Transaction, tasks: Sequence[str], started_at: datetime) -> set[str]:
    """Return the missing `tasks` that operators have cancelled, and those that were unsent at `started_at`.

    Only cancels take unsent tasks away. Those of applications leave no other trace, and none at all if Spanner no
    longer has the versions of that time.
    """
    keys = KeySet(keys=[[task] for task in tasks])
    cancelled = {task for (task,) in transaction.read(CANCELLED, ("Id",), keys)}
    try:
        then = list(table.rows(("Id", "SentAt"), keys, started_at, seconds=CALL_SECONDS))
    except NotReached:
        raise
    except OutboxError:
        return cancelled
    return cancelled | {task.string_value for task, sent_at in then if not sent_at.string_value}


def _inserted(row: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return an archived row in the state that `outbox retry` leaves, with the columns that are not NULL.

    The row keeps its CreatedAt, and so its place in the order of its ordering key. Its TimesSent is higher than that of
    any earlier row of the task. Otherwise a batch that is in doubt about such a row would mark this one, as if it had
    been published. A column that is newer than the archive is NULL there, and gets its default.
    """
    values = {**row, "Data": base64.b64encode(row["Data"]), "AvailableAt": now}
    values["TimesSent"] = (row["TimesSent"] or 0) + 1
    return {name: value for name, value in values.items() if value is not None}


def _info(text: str) -> None:
    _log.info("%s", text, extra={"action": "replay"})

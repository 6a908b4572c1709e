"""`replay`: sends sent tasks again, from the table or from the archive."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from outbox.errors import OutboxError, SettingError
from outbox.shared.settings import DatabaseSettings
from outbox.shared.times import resolved, shown
from outbox_pipeline import schemas
from outbox_pipeline.jobs.archive.windows import Archive, read_archive
from outbox_pipeline.jobs.replay.executor import Replay
from outbox_pipeline.jobs.replay.transforms import ORDER, in_order, latest, selected
from outbox_pipeline.settings import ReplaySettings
from outbox_pipeline.source.datasource import register_source
from outbox_pipeline.source.options import of_database
from outbox_pipeline.spanner import READING, Table, table_of
from outbox_pipeline.spark.counts import totals
from outbox_pipeline.spark.messages import decoded
from outbox_pipeline.spark.pacing import shared

#: What a dry run shows: so many topics, those with the most tasks, and so many tasks.
TOPICS, SAMPLE = 20, 10
_TIMES = ("since", "until")


@dataclass(slots=True)
class Replayed:
    """What became of the selected tasks: each is counted once, by the last try of its Spark task.

    `replayed` were made unsent, `registered` were inserted again, `waiting` were unsent already, `changed` were sent
    since the replay began, `missing` are not in the table. `topics` and `sample` are of a dry run.
    """

    replay_id: str | None = None
    selected: int = 0
    replayed: int = 0
    registered: int = 0
    waiting: int = 0
    changed: int = 0
    missing: int = 0
    topics: dict[str, int] | None = None
    sample: list[dict[str, Any]] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """Which tasks, of those that were sent. `since` is inclusive, `until` exclusive; empty is no limit."""

    archive: str = ""
    topic: str = ""
    since: datetime | None = None
    until: datetime | None = None
    attribute: str = ""
    where: str = ""

    def text(self) -> str:
        """Return what is given, as JSON."""
        given = {name: value for name, value in asdict(self).items() if value}
        return json.dumps(given | {name: shown(given[name]) for name in _TIMES if name in given}, ensure_ascii=False)

    @classmethod
    def parsed(cls, text: str) -> "ReplaySelection":
        """Return the selection of a text."""
        given = json.loads(text)
        return cls(**given | {name: datetime.fromisoformat(given[name]) for name in _TIMES if name in given})


def run(
    spark: SparkSession,
    settings: ReplaySettings,
    *,
    dry_run: bool = False,
    resume: str = "",
    note: Callable[[str], None] = lambda _text: None,
) -> Replayed:
    """Replay the selected tasks, or continue the replay with the ID `resume`. `note` first gets the ID.

    Raises:
        SettingError: nothing is selected, or what cannot be; there is nothing to resume.
        NotReached: Spanner, the database, a table or a permission.
        OutboxError: the archive is of another database, or cannot be read.
    """
    begin = time.monotonic()
    _check_flags(settings, dry_run=dry_run, resume=resume)
    register_source(spark)
    target = settings.database_settings
    table = table_of(target)
    if not dry_run:
        table.require_replays()
    now = table.now()
    selection, started_at = _resumed(table, resume) if resume else (_of(settings, now), now)
    _check(spark, selection)
    job = _Job(spark, table, target, selection)
    if dry_run:
        done = job.dry_run(started_at)
    else:
        id = resume or str(uuid4())
        if not resume:
            started_at = table.begin_replay(id, selection.text())
        note(f"replay {id} of {selection.text()}: if it ends early, --resume {id} goes on with it")
        done = job.replay(started_at, settings.max_rows_per_second)
        done.replay_id = id
        table.end_replay(id, done.selected - done.missing)
    done.seconds = time.monotonic() - begin
    return done


def _check_flags(settings: ReplaySettings, *, dry_run: bool, resume: str) -> None:
    given = [field.name for field in fields(ReplaySelection) if getattr(settings, field.name) not in ("", None)]
    if resume and dry_run:
        raise SettingError("--resume goes on with a replay, --dry-run writes nothing: give one of them")
    if resume and given:
        raise SettingError(
            f"--resume takes the selection that the replay began with: leave --{given[0]} away, and "
            f"OUTBOX_{given[0].upper()} too"
        )
    if not resume and not set(given) - {"archive"}:
        raise SettingError(
            "nothing is selected: give --topic, --since, --until, --attribute or --where; all that was ever sent is "
            "--where true"
        )


def _of(settings: ReplaySettings, now: datetime) -> ReplaySelection:
    """Return the selection of the settings. Raises SettingError: nothing can be in its time."""
    since, until = (None if each is None else resolved(each, now) for each in (settings.since, settings.until))
    if since and since >= (end := min(until or now, now)):
        raise SettingError(f"--since {shown(since)} is not before {'--until' if until else 'now,'} {shown(end)}")
    return ReplaySelection(settings.archive, settings.topic, since, until, settings.attribute, settings.where)


def _resumed(table: Table, id: str) -> tuple[ReplaySelection, datetime]:
    """Return the selection of a replay that is not finished, and when it began. Raises SettingError."""
    found = table.replay(id)
    if found is None:
        raise SettingError(f"--resume {id}: {table.name} has no such replay in AsynchronousTaskOperations")
    started_at, finished_at, predicate = found
    if finished_at is not None:
        raise SettingError(f"--resume {id}: it was finished at {shown(finished_at)}; begin a new one without --resume")
    return ReplaySelection.parsed(predicate), started_at


def _check(spark: SparkSession, selection: ReplaySelection) -> None:
    """Return if Spark can read the predicate. Raises SettingError."""
    try:
        found: Any = selected(spark.createDataFrame([], schemas.TASK), where=selection.where)
    except (ParseException, AnalysisException) as error:
        said = next(line for line in str(error).splitlines() if line)
        raise SettingError(f"--where {selection.where}: {said}") from error
    if not found._jdf.queryExecution().analyzed().deterministic():  # noqa: SLF001 - nothing public says it
        raise SettingError(f"--where {selection.where}: it selects others each time, so it could not be resumed")


def _time(micros: int) -> datetime:
    """Return a time of Spark; as a time of its own it would come in the zone of the machine."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


@dataclass(frozen=True)
class _Job:
    """What all steps need."""

    spark: SparkSession
    table: Table
    target: DatabaseSettings
    selection: ReplaySelection

    def dry_run(self, started_at: datetime) -> Replayed:
        """Count the selected tasks, and show some of them."""
        # Kept, so that it is read once.
        tasks = self._selected(started_at).select("Id", "Topic", f.unix_micros("SentAt").alias("SentAt")).persist()
        observed = Observation("replay")
        counts = tasks.groupBy("Topic").count().observe(observed, f.sum("count").alias("selected"))
        topics = counts.orderBy(f.desc("count"), "Topic").limit(TOPICS).collect()
        sample = tasks.limit(SAMPLE).collect()
        tasks.unpersist()
        return Replayed(
            selected=observed.get["selected"] or 0,
            topics={row["Topic"]: row["count"] for row in topics},
            sample=[{"id": row["Id"], "topic": row["Topic"], "sent_at": _time(row["SentAt"])} for row in sample],
        )

    def replay(self, started_at: datetime, per_second: int) -> Replayed:
        """Reset SentAt of the selected tasks."""
        parts, rate = shared(self.spark, per_second)
        columns = schemas.ARCHIVED_ROW.fieldNames() if self.selection.archive else ["Id"]
        rows = in_order(self._selected(started_at), parts).select(*columns)
        answers = rows.mapInArrow(Replay(self.target, started_at, rate), schemas.REPLAYED)
        [counts] = totals(answers).collect()
        return Replayed(selected=sum(counts), **counts.asDict())

    def _selected(self, started_at: datetime) -> DataFrame:
        """Return the tasks, at least with the columns of `schemas.ARCHIVED_ROW` or `ORDER`, Topic and SentAt."""
        until = min(self.selection.until or started_at, started_at)
        if self.selection.archive:
            return self._of_archive(until, started_at)
        return self._of_table(until, started_at)

    def _of_table(self, until: datetime, started_at: datetime) -> DataFrame:
        given = self.selection
        now = self.table.now()
        # Of a replay that is resumed late what is left is the same: what it has done is unsent, or was sent since.
        at = started_at if started_at > now - self.table.retention() + READING else now
        if given.where:
            columns = schemas.TASK.fieldNames()
        else:
            columns = [*ORDER, "Topic", "SentAt", *(["Attributes"] if given.attribute else [])]
        options = of_database(self.target) | {
            "state": "sent", "until": shown(until), "readTimestamp": shown(at), "columns": ",".join(columns),
            "partitions": str(max(8, 4 * self.spark.sparkContext.defaultParallelism)),
        }  # fmt: skip
        options |= {"since": shown(given.since)} if given.since else {}
        options |= {"topic": given.topic} if given.topic else {}
        tasks = self.spark.read.format("outbox").options(**options).load()
        return selected(tasks, attribute=given.attribute, where=given.where)

    def _of_archive(self, until: datetime, started_at: datetime) -> DataFrame:
        given = self.selection
        if not Archive(self.spark, given.archive).windows_of(self.table.name):
            raise OutboxError(f"--archive {given.archive} holds no finished window: is that the folder of the archive?")
        tasks = read_archive(self.spark, given.archive, since=given.since, until=until)
        tasks = tasks.where(f.col("Topic") == given.topic) if given.topic else tasks
        if given.attribute or given.where:
            tasks = decoded(tasks).withColumn("State", f.lit("sent")).select(*schemas.TASK.fieldNames())
            tasks = selected(tasks, attribute=given.attribute, where=given.where)
        # What this replay had sent before it was interrupted may be archived, and purged, since.
        since = read_archive(self.spark, given.archive, since=started_at).select("Id")
        return latest(tasks).join(since, "Id", "left_anti")

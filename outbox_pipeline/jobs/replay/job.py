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
from outbox_pipeline.source.datasource import read_tasks
from outbox_pipeline.spanner import TIME_TO_READ, Table, open_table
from outbox_pipeline.spark.counts import totals
from outbox_pipeline.spark.messages import decoded
from outbox_pipeline.spark.pacing import divided

#: Max topics and tasks that a dry run shows. Topics with the most tasks come first.
TOPICS, SAMPLE = 20, 10
_TIMES = ("since", "until")


@dataclass(slots=True)
class Replayed:
    """The outcomes of the selected tasks. Each is counted once, by the last attempt of its Spark task.

    `replayed` tasks were made unsent, `registered` tasks were inserted again, `unsent` tasks were already unsent,
    `resent` tasks were sent since the replay began, and `missing` tasks are not in the table. A dry run sets `topics`
    and `sample`. `seconds` is the duration of the job.
    """

    replay_id: str | None = None
    selected: int = 0
    replayed: int = 0
    registered: int = 0
    unsent: int = 0
    resent: int = 0
    missing: int = 0
    topics: dict[str, int] | None = None
    sample: list[dict[str, Any]] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """A selection of sent tasks. `since` is inclusive, `until` exclusive. An empty field does not narrow it."""

    archive: str = ""
    topic: str = ""
    since: datetime | None = None
    until: datetime | None = None
    attribute: str = ""
    where: str = ""

    def text(self) -> str:
        """Return the fields that are not empty, as JSON."""
        given = {name: value for name, value in asdict(self).items() if value}
        return json.dumps(given | {name: shown(given[name]) for name in _TIMES if name in given}, ensure_ascii=False)

    @classmethod
    def parsed(cls, text: str) -> "ReplaySelection":
        """Return the selection that `text` describes."""
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
    """Replay the selected tasks, or continue the replay with the ID `resume`. `note` is called with the ID first.

    Raises:
        SettingError: the selection is empty or invalid, or there is no unfinished replay to resume.
        NotReached: Spanner does not answer, or the database, a table or a permission is missing.
        OutboxError: the archive belongs to another database or is damaged.
    """
    begin = time.monotonic()
    _check_flags(settings, dry_run=dry_run, resume=resume)
    target = settings.database_settings
    table = open_table(target)
    if not dry_run:
        table.require_replays()
    now = table.now()
    selection, started_at = _resumed(table, resume) if resume else (_selection_of(settings, now), now)
    _check(spark, selection)
    job = _Job(spark, table, target, selection)
    if dry_run:
        done = job.dry_run(started_at)
    else:
        id = resume or str(uuid4())
        if not resume:
            started_at = table.begin_operation(id, "replay", selection.text())
        note(f"Replay {id} of {selection.text()}. If it is interrupted, continue it with --resume {id}")
        done = job.replay(started_at, settings.max_rows_per_second)
        done.replay_id = id
        table.end_operation(id, "replay", done.selected - done.missing)
        note(f"Replay {id} finished. Workers send its tasks. outbox status shows how many are pending")
    done.seconds = time.monotonic() - begin
    return done


def _check_flags(settings: ReplaySettings, *, dry_run: bool, resume: str) -> None:
    given = [field.name for field in fields(ReplaySelection) if getattr(settings, field.name) not in ("", None)]
    if resume and dry_run:
        raise SettingError("--resume and --dry-run exclude each other. Pass only one of them")
    if resume and given:
        raise SettingError(
            f"--resume uses the selection of the interrupted replay. Remove --{given[0]} and OUTBOX_{given[0].upper()}"
        )
    if not resume and not set(given) - {"archive"}:
        raise SettingError(
            "No tasks are selected. Pass --topic, --since, --until, --attribute or --where. --where true selects all "
            "sent tasks"
        )


def _selection_of(settings: ReplaySettings, now: datetime) -> ReplaySelection:
    """Return the selection of the settings. Raises SettingError if since is not before until."""
    since, until = (None if each is None else resolved(each, now) for each in (settings.since, settings.until))
    if since and since >= (end := min(until or now, now)):
        raise SettingError(f"--since {shown(since)} is not before {'--until' if end == until else 'now,'} {shown(end)}")
    return ReplaySelection(settings.archive, settings.topic, since, until, settings.attribute, settings.where)


def _resumed(table: Table, id: str) -> tuple[ReplaySelection, datetime]:
    """Return the selection and StartedAt of an unfinished replay. Raises SettingError."""
    found = table.replay(id)
    if found is None:
        raise SettingError(f"--resume {id}: AsynchronousTaskOperations of {table.name} has no replay with this ID")
    started_at, finished_at, selection = found
    if finished_at is not None:
        raise SettingError(f"--resume {id}: this replay finished at {shown(finished_at)}. Start a new one instead")
    return ReplaySelection.parsed(selection), started_at


def _check(spark: SparkSession, selection: ReplaySelection) -> None:
    """Check that Spark can parse the predicate and that it is deterministic. Raises SettingError."""
    try:
        found: Any = selected(spark.createDataFrame([], schemas.TASK), where=selection.where)
    except (ParseException, AnalysisException) as error:
        reason = next(line for line in str(error).splitlines() if line)
        raise SettingError(f"--where {selection.where}: {reason}") from error
    if not found._jdf.queryExecution().analyzed().deterministic():  # noqa: SLF001 - no public API
        raise SettingError(f"--where {selection.where} is not deterministic, so the replay could not be resumed")


def _time(micros: int) -> datetime:
    """Convert unix_micros. A collected timestamp would be in the time zone of the machine."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


@dataclass(frozen=True)
class _Job:
    """What all steps share."""

    spark: SparkSession
    table: Table
    target: DatabaseSettings
    selection: ReplaySelection

    def dry_run(self, started_at: datetime) -> Replayed:
        """Count the selected tasks and return some of them."""
        # Persist, so that the table is read once for both results.
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
        """Make the selected tasks unsent, and insert those that only the archive has."""
        parts, rate = divided(self.spark, per_second)
        columns = schemas.ARCHIVED_ROW.fieldNames() if self.selection.archive else ["Id"]
        rows = in_order(self._selected(started_at), parts).select(*columns)
        answers = rows.mapInArrow(Replay(self.target, started_at, rate), schemas.REPLAYED)
        [counts] = totals(answers).collect()
        return Replayed(selected=sum(counts), **counts.asDict())

    def _selected(self, started_at: datetime) -> DataFrame:
        """Return the tasks. From the archive they have ARCHIVED_ROW, from the table ORDER, Topic and SentAt."""
        until = min(self.selection.until or started_at, started_at)
        if self.selection.archive:
            return self._of_archive(until, started_at)
        return self._of_table(until, started_at)

    def _of_table(self, until: datetime, started_at: datetime) -> DataFrame:
        given = self.selection
        now = self.table.now()
        # A replay that is resumed too late for a snapshot at `started_at` reads the table as of now. The remaining
        # tasks are the same, because the finished ones are unsent or were sent since.
        at = started_at if started_at > now - self.table.retention() + TIME_TO_READ else now
        if given.where:
            columns = schemas.TASK.fieldNames()
        else:
            columns = [*ORDER, "Topic", "SentAt", *(["Attributes"] if given.attribute else [])]
        bounds = {"since": given.since, "until": until}
        tasks = read_tasks(self.spark, self.target, columns, at, state="sent", topic=given.topic or None, **bounds)
        return selected(tasks, attribute=given.attribute, where=given.where)

    def _of_archive(self, until: datetime, started_at: datetime) -> DataFrame:
        given = self.selection
        if not Archive(self.spark, given.archive).windows_of(self.table.name):
            raise OutboxError(f"--archive {given.archive} has no finished window. Check the path")
        tasks = read_archive(self.spark, given.archive, since=given.since, until=until)
        tasks = tasks.where(f.col("Topic") == given.topic) if given.topic else tasks
        if given.attribute or given.where:
            tasks = decoded(tasks).withColumn("State", f.lit("sent")).select(*schemas.TASK.fieldNames())
            tasks = selected(tasks, attribute=given.attribute, where=given.where)
        # A resumed replay excludes tasks that were replayed, sent and archived before the interruption.
        resent = read_archive(self.spark, given.archive, since=started_at).select("Id")
        return latest(tasks).join(resent, "Id", "left_anti")

"""Writes the certificate of an audit. Everything in it is as of the end of the archived windows that it names.

So a later run has the same certificate, even if tasks were sent again, purged or archived since.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox._version import __version__
from outbox.base.values import counted, shown
from outbox.errors import OutboxError, SettingError
from outbox.rows.task_table import SCHEMA_OPTIONS
from outbox.table import schema
from outbox_admin import operations
from outbox_pipeline.certificate import document
from outbox_pipeline.certificate.document import ARCHIVE, MOST_LISTED, OUTCOMES, RECEIVED
from outbox_pipeline.certificate.uncertainties import Read, uncertainties
from outbox_pipeline.job_settings import AuditSettings
from outbox_pipeline.jobs import audit_transforms as transforms
from outbox_pipeline.jobs.archive_files import Archive
from outbox_pipeline.jobs.archive_windows import ArchivedWindow, floor
from outbox_pipeline.spanner import Table
from outbox_pipeline.spark.files import PATTERN, Folder
from outbox_pipeline.spark.spark_tasks import collected

_DAY = timedelta(days=1)
_OF_DAY = "%Y-%m-%d"
#: More operations than there are: the search for purges must not end early.
_OPERATIONS = 1_000_000


def dated(settings: AuditSettings, now: datetime) -> AuditSettings:
    """Return the settings with the bounds of the window, and with its day in the paths. Raises SettingError."""

    def bound(moment: timedelta | datetime) -> datetime:
        return floor(now - moment, _DAY) if isinstance(moment, timedelta) else moment

    if settings.since is None or settings.until is None:
        raise SettingError("--certificate needs --since and --until, such as 2d and 1d for the day before yesterday")
    since, until = bound(settings.since), bound(settings.until)

    def path(pattern: str, day: datetime) -> str:
        return pattern.replace(_OF_DAY, f"{day.astimezone(UTC):%Y-%m-%d}")

    # Messages of the last tasks arrive after midnight.
    first, last = floor(since, _DAY), until + timedelta(seconds=settings.grace)
    days = [path(_OF_DAY, first + n * _DAY) for n in range((last - first) // _DAY + 1)]
    return dataclasses.replace(
        settings,
        since=since,
        until=until,
        received=settings.received.replace(_OF_DAY, f"{{{','.join(days)}}}"),
        output=path(settings.output, since),
        certificate=path(settings.certificate, since),
        previous=path(settings.previous, since - (until - since)),
    )


class Certifier:
    def __init__(self, spark: SparkSession, settings: AuditSettings, table: Table) -> None:
        """Load the key and the previous certificate. Raises SettingError, OutboxError, NotReached."""
        self._spark = spark
        self._settings = settings
        self._table = table
        bounds: tuple[Any, Any] = (settings.since, settings.until)
        self._since, self._until = bounds
        kms, file = settings.kms_key, settings.key_file
        self._signer = document.kms_signer(kms) if kms else document.file_signer(file)
        self._previous: document.Certificate | None = None
        if path := settings.previous:
            if (payload := self._payload(path)) is None:
                raise OutboxError(f"--previous {path} does not exist. Certify that window first")
            self._previous = document.read(payload, path)
            document.check_next(self._previous, settings.certificate, table.name, self._since)
        self._archive = Archive(spark, settings.archive)

    def _payload(self, path: str) -> bytes | None:
        """Return the payload of a certificate, or None if the file does not exist. Raises OutboxError."""
        text = Folder(self._spark, path).read()
        return None if text is None else document.envelope(text.encode(), path)[0]

    def covering(self, windows: Sequence[ArchivedWindow], rules: transforms.Rules) -> Sequence[ArchivedWindow]:
        """Return the archived windows since the start of the window. The last one is not always in the certificate.

        The certificate names those to the first that ends `grace` after the window. A task that was unsent then may
        have been sent and deleted since, but a later window has it. Raises OutboxError if a window to name is missing
        or damaged.
        """
        first, last = windows[0].since, self._until + rules.grace
        if first > self._since:
            raise OutboxError(f"The archive begins at {shown(first)}, so no window before {shown(first)} is certified")
        cut = next((n for n, each in enumerate(windows, 1) if each.until >= last), None)
        if cut is None or (end := windows[cut - 1].until) + rules.grace > rules.horizon:
            raise OutboxError(
                f"The window to {shown(self._until)} is open: the archive must reach {shown(last)}, and reaches "
                f"{shown(windows[-1].until)}; the messages must be known for --grace longer. Certify it later"
            )
        self._end = end
        self._windows = [each for each in windows[:cut] if each.until > self._since]
        self._read = [*self._windows, *windows[cut:]]
        self._purges = {each.operation for each in windows}
        for window in self._windows:
            found = self._digests(self._archive.path(window.data)) if window.rows else []
            if {path[path.index(window.data) :]: digest for path, digest in found} != window.files:
                raise OutboxError(f"The files of {window.data} are not those that were archived. Restore them")
        return self._read

    def known(self, table: DataFrame, archived: DataFrame) -> list[DataFrame]:
        """Return the sendings as of the end of the named windows. Raises OutboxError if they lack one."""
        task, nothing = ["task_id", "created_at"], f.lit(None).cast("timestamp")
        live, kept = (each.withColumn("ended", f.coalesce("sent_at", "cancelled_at")) for each in (table, archived))
        ended = f.col("ended") < f.lit(self._end)
        named = kept.where(ended)
        created = f.col("created_at")
        due = live.where((created >= f.lit(self._since)) & (created < f.lit(self._until)) & ended)
        if lacking := due.join(named, [*task, "ended"], "left_anti").count():
            raise OutboxError(
                f"{self._settings.archive} lacks {counted(lacking, 'task')} of the window, sent or cancelled before "
                f"{shown(self._end)}. Use the complete archive"
            )
        later = live.unionByName(kept).where(~f.coalesce(ended, f.lit(False)))
        unsent = later.join(named.where("sent_at IS NOT NULL"), task, "left_anti")
        as_of_end = unsent.withColumns({"sent_at": nothing, "cancelled_at": nothing})
        return [each.select(*archived.columns) for each in (named, as_of_end)]

    def issue(self, rows: DataFrame, rules: transforms.Rules, counts: Mapping[str, int]) -> dict[str, Any]:
        """Sign and write the certificate. Return what `audit.run` returns of it. Raises OutboxError, NotReached."""
        if counts["unreadable"]:
            raise OutboxError(
                f"{self._settings.received} has {counted(counts['unreadable'], 'unreadable line')}, as a file that "
                "ends early. Export the messages again. No certificate was written"
            )
        listed, topics = self._outcomes(rows)
        content = {
            "database": self._table.name,
            "window": {"since": shown(self._since), "until": shown(self._until)},
            "previous": self._previous.digest if self._previous else None,
            "audit": {
                "version": __version__,
                "archived_until": shown(self._end),
                "grace_seconds": rules.grace.total_seconds(),
                "received_data": self._settings.received_data,
            },
            "uncertainties": self._uncertainties(),
            "counts": {name: counts[name] for name in ("unknown", "foreign")},
            "topics": topics,
            "not_delivered": listed,
        }
        payload = document.payload(content, self._inputs())
        path = self._settings.certificate
        certificate = document.read(payload, path)
        written = Folder(self._spark, path).create(document.signed(payload, self._signer))
        if not written and self._payload(path) != payload:
            raise OutboxError(f"--certificate {path} exists, and is another certificate. Pass another file")
        verdict = str(certificate.content["summary"])
        return {"certificate": certificate.digest, "complete": certificate.is_complete, "verdict": verdict}

    def _outcomes(self, rows: DataFrame) -> tuple[list[dict[str, Any]], dict[str, dict[str, int]]]:
        """Return the tasks that were not delivered, and the counts of outcomes by topic. A task has its best state."""
        states = f.array(*map(f.lit, transforms.STATES))
        best = f.element_at(states, f.min(f.array_position(states, f.col("state"))).cast("int"))
        tasks = (
            rows.where(f.col("state").isin(*transforms.STATES))
            .groupBy("topic", "task_id", "created_at")
            .agg(best.alias("best"), f.sum("mismatched").alias("mismatched"), f.sum("republished").alias("republished"))
            .withColumn("outcome", f.when(f.col("mismatched") > 0, "mismatched").otherwise(f.col("best")))
        )
        wrong = tasks.where(f.col("outcome").isin(*[name for name, text in OUTCOMES.items() if text]))
        columns = wrong.select("task_id", "topic", "outcome").orderBy("task_id", "topic", "outcome").limit(MOST_LISTED)
        counts = tasks.groupBy("topic", "outcome").agg(
            f.count("*").alias("tasks"), f.sum("republished").alias("republished")
        )
        topics: dict[str, dict[str, int]] = {}
        for row in collected(counts):
            of_topic = topics.setdefault(row["topic"], dict.fromkeys((*OUTCOMES, "republished"), 0))
            of_topic[row["outcome"]] = row["tasks"]
            of_topic["republished"] += row["republished"]
        return collected(columns), topics

    def _uncertainties(self) -> list[str]:
        """Return the facts that can hide a loss, from the archive, the records of purges and the retention."""
        now = self._table.now()
        reads = [Read(max(each.since, self._since), each.until, each.read_timestamp) for each in self._read]
        reads.append(Read(reads[-1].until, now, now))
        purges = operations.latest(self._table, _OPERATIONS, operation="purge", views=False)
        kept = schema.retention(self._table.database, request_options=SCHEMA_OPTIONS)
        return uncertainties(reads, [each for each in purges if each.id not in self._purges], kept)

    def _inputs(self) -> dict[str, str]:
        """Return the digests of the files by their names in a certificate."""
        files: dict[str, str] = {}
        for window in self._windows:
            named = {window.commit: self._archive.log.sha256(window.commit), **window.files}
            files |= {ARCHIVE + name: digest for name, digest in named.items()}
        # Received files are named as in the folder before the first pattern, so a copy of that folder can be checked.
        received = self._settings.received
        pattern = PATTERN.search(received)
        folder = "".join(received[: pattern.start()].rpartition("/")[:2]) if pattern else received
        base = Folder(self._spark, folder or ".").qualified()
        for path, digest in self._digests(received):
            files[RECEIVED + (path.removeprefix(base).lstrip("/") or path.rpartition("/")[2])] = digest
        return files

    def _digests(self, path: str) -> list[tuple[str, str]]:
        files = self._spark.read.option("recursiveFileLookup", True).format("binaryFile").load(path)
        found = files.select("path", f.sha2("content", 256).alias("digest"))
        return [(row.path, row.digest) for row in found.collect()]

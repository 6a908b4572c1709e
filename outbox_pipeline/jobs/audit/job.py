"""`audit`: compares the tasks of a window with the messages that a subscription received."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.base.values import shown
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import resolved
from outbox.program.terminal import as_json
from outbox_pipeline.job_settings import AuditSettings, format_of
from outbox_pipeline.jobs.archive.windows import Archive
from outbox_pipeline.jobs.audit import effects, received
from outbox_pipeline.jobs.audit import transforms as audit
from outbox_pipeline.jobs.audit.page import page
from outbox_pipeline.source.columns import needed
from outbox_pipeline.source.datasource import decoded, read_cancelled, read_tasks
from outbox_pipeline.source.options import RowFilter
from outbox_pipeline.spanner import Table, open_table
from outbox_pipeline.spark.files import Folder
from outbox_pipeline.spark.inputs import checked, read_all_columns, read_table
from outbox_pipeline.spark.spark_tasks import collected

SUMMARY, REPORT, FINDINGS = "summary.json", "report.html", "findings"
#: Classes without files of findings: these tasks are in the database, and their messages are not due.
UNSENT = ("pending", "dead", "cancelled", "arriving")
_Line = dict[str, Any]
#: How long Pub/Sub keeps a message at most.
_KEPT = timedelta(days=31)
#: Max samples of each class in the report.
SAMPLES = 20

_log = logging.getLogger("outbox_pipeline")


@dataclass(frozen=True, slots=True)
class Audited:
    """The counts of an audit, described in docs/pipeline/audit.md, and the bounds of the window.

    `report` is the path of the HTML page.
    """

    since: datetime | None
    until: datetime
    tasks: int
    delivered: int
    late: int
    lost: int
    arriving: int
    pending: int
    dead: int
    cancelled: int
    messages: int
    unknown: int
    republished: int
    redelivered: int
    mismatched: int
    cancelled_after_publish: int
    out_of_order: int
    foreign: int
    unreadable: int
    report: str
    #: Counts of effects, None without --inbox.
    applied: int | None = None
    not_applied: int | None = None
    applied_late: int | None = None
    unregistered: int | None = None
    #: The digest of the certificate, None without --certificate.
    certificate: str | None = None
    #: The first line of the certificate. Or that there was no task, None if there was one.
    verdict: str | None = None


def run(spark: SparkSession, settings: AuditSettings) -> Audited:
    """Compare tasks and messages, and write a report to a new folder. Raises SettingError, OutboxError, NotReached."""
    table, certifier = open_table(settings), None
    if settings.certificate:
        from outbox_pipeline.jobs.audit import certified  # noqa: PLC0415 - it needs the packages of an extra

        settings = certified.dated(settings, table.now())
        certifier = certified.Certifier(spark, settings, table.name)
    output = Folder(spark, settings.output)
    if output.exists():
        raise OutboxError(f"--output {output} exists. Each audit needs a new folder")
    job = _Job(spark, settings, table, certifier)
    rules, sources = job.rules_and_tasks()
    bodies, deliveries = job.deliveries()
    inbox = effects.records(spark, settings) if settings.inbox else None
    sendings = [audit.sends(tasks, bodies=bodies, certified=bool(certifier)) for tasks in sources]
    if certifier:
        sendings = certifier.known(*sendings)
    sends = audit.once(reduce(DataFrame.unionByName, sendings))
    rows = audit.judged(sends, deliveries, rules).persist(StorageLevel.DISK_ONLY)
    try:
        done = job.report(rows, deliveries, rules, output, bodies=bodies, inbox=inbox)
        if certifier:
            digest, verdict = certifier.issue(rows, rules, done)
            done = dataclasses.replace(done, certificate=digest, verdict=verdict)
        if not done.tasks:
            bounds = f"{f'from {shown(rules.since)} ' if rules.since else ''}before {shown(rules.until)}"
            done = dataclasses.replace(done, verdict=f"Nothing was audited: no task was created {bounds}")
    finally:
        rows.unpersist()
    problems = {
        "lost": "lost: sent, but not received within --grace",
        "not_applied": "without effect: received, but not recorded in the inbox within --grace",
    }
    for name, problem in problems.items():
        if count := getattr(done, name):
            text = f"{count:,} {'task is' if count == 1 else 'tasks are'} {problem}"
            extra = {"action": name, "fields": {name: count}}
            _log.error("%s. %s lists them and says what to do", text, done.report, extra=extra)
    return done


@dataclass(frozen=True)
class _Job:
    """What all steps share."""

    spark: SparkSession
    settings: AuditSettings
    table: Table
    certifier: Any = None

    def rules_and_tasks(self) -> tuple[audit.Rules, list[DataFrame]]:
        """Return the rules of the audit, and the tasks of each source with `audit.OF_TASKS` and CancelledAt.

        Raises SettingError, OutboxError.
        """
        settings, now = self.settings, self.table.now()
        archive = Archive(self.spark, settings.archive) if settings.archive else None
        windows = archive.windows(self.table.name) if archive else []
        if archive and not windows:
            raise OutboxError(f"--archive {settings.archive} has no finished window. Check the path")
        horizon = min(now, resolved(settings.received_until, now))
        grace = timedelta(seconds=settings.grace)
        latest = horizon - grace
        until = latest if settings.until is None else resolved(settings.until, now)
        since = None if settings.since is None else resolved(settings.since, now)
        if until > latest:
            raise SettingError(
                f"--until {shown(until)} is too late. Pass at most {shown(latest)}: the tasks and messages are known "
                f"until {shown(horizon)}, and a task is audited only after --grace, {settings.grace:g} s"
            )
        if since is not None and since >= until:
            raise SettingError(f"--since {shown(since)} is not before the end of the window, {shown(until)}")
        columns = (*needed(audit.OF_TASKS), "CancelledAt")
        cancelled = decoded(read_cancelled(self.spark, settings, columns, now))
        # Of a record in the inbox, the task can have been sent as long ago as Pub/Sub keeps a message.
        earliest = since - _KEPT if since and settings.inbox else since
        sources = [self._of_table(now, earliest).withColumn("CancelledAt", f.lit(None).cast("timestamp")), cancelled]
        # A certificate only counts unknown messages of its window, because later tasks may be purged when it is issued.
        known = min(now - audit.CLOCK_SKEW, until) if self.certifier else now - audit.CLOCK_SKEW
        rules = audit.Rules(since, until, horizon, known, grace)
        if archive:
            used = self.certifier.covering(windows, rules) if self.certifier else windows
            sources.append(decoded(archive.read(used, earliest).select(*columns)))
        return rules, sources

    def _of_table(self, at: datetime, since: datetime | None) -> DataFrame:
        """Return the tasks that can have messages since `since`: unsent tasks, and tasks sent since then."""
        tasks = read_tasks(self.spark, self.settings, audit.OF_TASKS, at, RowFilter())
        return tasks if since is None else tasks.where(f.col("SentAt").isNull() | (f.col("SentAt") >= f.lit(since)))

    @property
    def _source(self) -> str:
        return self.settings.received or self.settings.received_table

    def deliveries(self) -> tuple[bool, DataFrame]:
        """Return whether the messages have a column data, and the deliveries. Raises SettingError."""
        settings = self.settings
        if settings.received_table:
            messages = read_table(self.spark, "--received-table", settings.received_table)
        else:
            messages = self._of_files()
        bodies, certified = "data" in messages.columns, bool(self.certifier)
        if certified and not bodies:
            raise OutboxError(f"{self._source} has no column data, which a certificate needs. Export it, too")
        base64 = settings.received_data == "base64"
        return bodies, received.received(messages, base64=base64, certified=certified)

    def _of_files(self) -> DataFrame:
        settings = self.settings
        form = settings.received_format
        if form == "auto":
            form = format_of(settings.received) or "parquet"
        given = checked(self.spark, settings.received, form)
        if form == "avro":
            return received.read_avro(given)
        if form == "json":
            given.check_columns(received.LINES.names)
            return given.reader().schema(received.LINES).json(settings.received)
        return read_all_columns(given)

    def report(
        self,
        rows: DataFrame,
        deliveries: DataFrame,
        rules: audit.Rules,
        output: Folder,
        *,
        bodies: bool,
        inbox: DataFrame | None,
    ) -> Audited:
        """Write the report and return the counts."""
        total, topics = self._numbers(rows)
        # Not an Observation of another query: before Spark 4.3, it counts a Spark task again that is repeated.
        readable = f.col("readable")
        foreign = f.count_if(readable & f.col("task_id").isNull()).alias("foreign")
        counts = (f.count_if(readable).alias("readable"), f.count_if(~readable).alias("unreadable"), foreign)
        [others] = collected(deliveries.agg(*counts))
        if not others.pop("readable") and others["unreadable"]:
            raise OutboxError(
                f"None of the {others['unreadable']:,} rows or lines of {self._source} is a received message "
                "with message_id, publish_time and attributes"
            )
        found, classes = audit.findings(rows, audit.out_of_order(rows)), [audit.OUT_OF_ORDER]
        if inbox is not None:
            found = found.unionByName(effects.effects(rows, inbox, rules))
            classes += effects.CLASSES
        found = found.persist(StorageLevel.DISK_ONLY)
        of_class: Any = Counter({row["class"]: row["count"] for row in found.groupBy("class").count().collect()})
        listed = found.where(f.col("class") != effects.APPLIED)
        listed.where(~f.col("class").isin(*UNSENT)).write.partitionBy("class").json(str(output / FINDINGS))
        samples = collected(audit.samples(listed, SAMPLES))
        found.unpersist()
        done = Audited(
            since=rules.since,
            until=rules.until,
            **{name: total[name] for name in (*audit.COUNTS, "unknown")},
            **others,
            **{name: of_class[name] for name in classes},
            report=str(output / REPORT),
        )
        summary = {
            "job": "audit",
            "database": self.table.name,
            "tasks_from": "table and archive" if self.settings.archive else "table",
            "received_from": self._source,
            "data_compared": bodies,
            "inbox": self.settings.inbox,
            "known_until": shown(rules.known_until),
            "horizon": shown(rules.horizon),
            "grace_seconds": rules.grace.total_seconds(),
            **dataclasses.asdict(done),
            "latency": {name: total[name] for name in (*audit.PERCENTILES, "max")},
            "by_topic": topics,
            "samples": _by_class(sorted(samples, key=lambda row: (row["class"], row["task_id"]))),
        }
        (output / SUMMARY).create(as_json(summary) + "\n")
        (output / REPORT).create(page(summary))
        return done

    def _numbers(self, rows: DataFrame) -> tuple[_Line, list[_Line]]:
        """Return the numbers of all tasks, and of each topic, the largest first."""
        found = collected(audit.numbers(audit.counted(rows)))
        nothing = dict.fromkeys(audit.NUMBERS) | dict.fromkeys((*audit.COUNTS, "unknown"), 0)
        topics = [{name: row[name] for name in ("topic", *audit.NUMBERS)} for row in found if not row["is_total"]]
        topics.sort(key=lambda line: (-line["tasks"], line["topic"]))
        return next((row for row in found if row["is_total"]), nothing), topics


def _by_class(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if value is not None}
        found.setdefault(values.pop("class"), []).append(values)
    return found

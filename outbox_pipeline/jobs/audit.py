"""`audit`: compares the tasks of a window with the messages that a subscription received, and writes a report.

In the order of the data: `audit_inputs` reads the messages, `audit_transforms` judges each task and counts.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from functools import cache, reduce
from operator import itemgetter
from typing import Any

from jinja2 import Environment, PackageLoader, Template, Undefined
from markupsafe import Markup
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox.base.values import shown, spoken
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import resolved
from outbox.program.terminal import as_json, cell
from outbox_pipeline.job_settings import AuditSettings
from outbox_pipeline.jobs import audit_inputs as inputs
from outbox_pipeline.jobs import audit_transforms as transforms
from outbox_pipeline.jobs.archive_files import Archive
from outbox_pipeline.source.datasource import decoded, read_tasks
from outbox_pipeline.source.parts import RowFilter, needed
from outbox_pipeline.spanner import Table, open_table
from outbox_pipeline.spark.files import Folder
from outbox_pipeline.spark.spark_tasks import collected

SUMMARY, REPORT, FINDINGS = "summary.json", "report.html", "findings"
#: Classes without files of findings: these tasks are in the database, and their messages are not due.
_WITHOUT_FILES = ("pending", "dead", "cancelled", "arriving")
_Line = dict[str, Any]
#: What an audit returns, by the names of its summary.
Counts = dict[str, Any]
#: How long Pub/Sub keeps a message at most.
_KEPT = timedelta(days=31)
#: Max samples of each class in the report.
SAMPLES = 20
#: Max rows of the table of topics. summary.json has all topics.
MOST_ROWS = 200
#: Counts that should be 0, the most serious first.
_WRONG = (
    "lost", "not_applied", "mismatched", "cancelled_after_publish", "unknown", "unregistered", "out_of_order", "dead",
    "unreadable",
)  # fmt: skip

_log = logging.getLogger("outbox_pipeline")


def run(spark: SparkSession, settings: AuditSettings) -> Counts:
    """Compare tasks and messages, and write a report to a new folder. Raises SettingError, OutboxError, NotReached.

    Returns the counts of docs/pipeline/audit.md, the bounds of the window and the path of the report. `certificate` is
    the digest of a certificate, `complete` tells whether it is COMPLETE, and `verdict` is its first line. Without a
    certificate, `verdict` tells that there was no task.
    """
    table, certifier = open_table(settings), None
    if settings.certificate:
        from outbox_pipeline.jobs.audit_certifier import Certifier, dated  # noqa: PLC0415 - needs the packages of an extra

        settings = dated(settings, table.now())
        certifier = Certifier(spark, settings, table)
    output = Folder(spark, settings.output)
    if output.exists():
        raise OutboxError(f"--output {output} exists. Each audit needs a new folder")
    rules, sources = _rules_and_tasks(spark, settings, table, certifier)
    messages, certified = inputs.messages(spark, settings), bool(certifier)
    bodies = "data" in messages.columns
    if certified and not bodies:
        raise OutboxError(f"{settings.received} has no column data, which a certificate needs. Export it, too")
    deliveries = inputs.received(messages, base64=settings.received_data == "base64", certified=certified)
    inbox = inputs.records(spark, settings) if settings.inbox else None
    sendings = [transforms.sends(tasks, bodies=bodies, certified=certified) for tasks in sources]
    if certifier:
        sendings = certifier.known(*sendings)
    sends = transforms.once(reduce(DataFrame.unionByName, sendings))
    rows = transforms.judged(sends, deliveries, rules).persist(StorageLevel.DISK_ONLY)
    try:
        facts = {
            "database": table.name,
            "tasks_from": "table and archive" if settings.archive else "table",
            "received_from": settings.received or settings.received_table,
            "data_compared": bodies,
            "inbox": settings.inbox,
        }
        done = _report(rows, deliveries, rules, output, facts=facts, inbox=inbox, certifier=certifier)
        if not (certifier or done["tasks"]):
            bounds = f"{f'from {shown(rules.since)} ' if rules.since else ''}before {shown(rules.until)}"
            done["verdict"] = f"Nothing was audited: no task was created {bounds}"
    finally:
        rows.unpersist()
    problems = {
        "lost": "lost: sent, but not received within --grace",
        "not_applied": "without effect: received, but not recorded in the inbox within --grace",
    }
    for name, problem in problems.items():
        if count := done.get(name):
            text = f"{count:,} {'task is' if count == 1 else 'tasks are'} {problem}"
            extra = {"action": name, "fields": {name: count}}
            _log.error("%s. %s lists them and says what to do", text, done["report"], extra=extra)
    return done


def _rules_and_tasks(
    spark: SparkSession, settings: AuditSettings, table: Table, certifier: Any
) -> tuple[transforms.Rules, list[DataFrame]]:
    """Return the rules of the audit, and the tasks of each source with `transforms.OF_TASKS`.

    Raises SettingError, OutboxError.
    """
    now = table.now()
    archive = Archive(spark, settings.archive) if settings.archive else None
    windows = archive.finished(table.name) if archive else []
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
    tasks = read_tasks(spark, settings, transforms.OF_TASKS, now, RowFilter())
    # Of a record in the inbox, the task can have been sent as long ago as Pub/Sub keeps a message.
    earliest = since - _KEPT if since and settings.inbox else since
    if earliest is not None:
        tasks = tasks.where(f.col("SentAt").isNull() | (f.col("SentAt") >= f.lit(earliest)))
    sources = [tasks]
    # A certificate only counts unknown messages of its window, because later tasks may be purged when it is issued.
    known = min(now - transforms.CLOCK_SKEW, until) if certifier else now - transforms.CLOCK_SKEW
    rules = transforms.Rules(since, until, horizon, known, grace)
    if archive:
        used = certifier.covering(windows, rules) if certifier else windows
        sources.append(decoded(archive.read(used, earliest).select(*needed(transforms.OF_TASKS))))
    return rules, sources


def _report(
    rows: DataFrame,
    deliveries: DataFrame,
    rules: transforms.Rules,
    output: Folder,
    *,
    facts: _Line,
    inbox: Any,
    certifier: Any,
) -> _Line:
    """Write the certificate and the report, and return the counts.

    `inbox` has the records of a consumer, or is None. So is `certifier` without a certificate.
    """
    total, topics = _numbers(rows)
    # Not an Observation of another query: before Spark 4.3, it counts a Spark task again that is repeated.
    readable = f.col("readable")
    foreign = f.count_if(readable & f.col("task_id").isNull()).alias("foreign")
    counts = (f.count_if(readable).alias("readable"), f.count_if(~readable).alias("unreadable"), foreign)
    [others] = collected(deliveries.agg(*counts))
    if not others.pop("readable") and others["unreadable"]:
        raise OutboxError(
            f"None of the {others['unreadable']:,} rows or lines of {facts['received_from']} is a received message "
            "with message_id, publish_time and attributes"
        )
    # Before the report, because an audit without a certificate is repeated, and then --output must not exist.
    issued = certifier.issue(rows, rules, total | others) if certifier else {}
    found, classes = transforms.findings(rows, transforms.out_of_order(rows)), [transforms.OUT_OF_ORDER]
    if inbox is not None:
        found = found.unionByName(transforms.effects(rows, inbox, rules))
        classes += transforms.EFFECTS
    found = found.persist(StorageLevel.DISK_ONLY)
    of_class: Any = Counter({row["class"]: row["count"] for row in found.groupBy("class").count().collect()})
    listed = found.where(f.col("class") != transforms.APPLIED)
    listed.where(~f.col("class").isin(*_WITHOUT_FILES)).write.partitionBy("class").json(str(output / FINDINGS))
    samples: dict[str, list[_Line]] = {}
    for row in sorted(collected(transforms.samples(listed, SAMPLES)), key=itemgetter("class", "task_id")):
        values = {name: value for name, value in row.items() if value is not None}
        samples.setdefault(values.pop("class"), []).append(values)
    found.unpersist()
    done = {
        "since": rules.since,
        "until": rules.until,
        **{name: total[name] for name in (*transforms.COUNTS, "unknown")},
        **others,
        **{name: of_class[name] for name in classes},
        "report": str(output / REPORT),
    }
    summary = {
        "job": "audit",
        **facts,
        "known_until": shown(rules.known_until),
        "horizon": shown(rules.horizon),
        "grace_seconds": rules.grace.total_seconds(),
        **done,
        "latency": {name: total[name] for name in (*transforms.PERCENTILES, "max")},
        "by_topic": topics,
        "samples": samples,
    }
    (output / SUMMARY).create(as_json(summary) + "\n")
    (output / REPORT).create(page(summary))
    return done | issued


def _numbers(rows: DataFrame) -> tuple[_Line, list[_Line]]:
    """Return the numbers of all tasks, and of each topic, the largest first."""
    found = collected(transforms.numbers(transforms.counted(rows)))
    nothing = dict.fromkeys(transforms.NUMBERS) | dict.fromkeys((*transforms.COUNTS, "unknown"), 0)
    topics = [{name: row[name] for name in ("topic", *transforms.NUMBERS)} for row in found if not row["is_total"]]
    topics.sort(key=lambda line: (-line["tasks"], line["topic"]))
    return next((row for row in found if row["is_total"]), nothing), topics


def page(summary: Mapping[str, Any]) -> str:
    """Return the HTML page of a summary, with times as RFC 3339 texts or datetimes and latencies in seconds."""

    def tone(name: str, counts: Mapping[str, Any] = summary) -> str:
        return "zero" if not counts.get(name) else "wrong" if name in _WRONG else ""

    return _template().render(
        summary=summary,
        states=transforms.STATES,
        counts=("tasks", *transforms.STATES, "mismatched"),
        wrong=_WRONG,
        tone=tone,
        topics=sorted(summary["by_topic"], key=lambda row: (-row["lost"], -row["tasks"], row["topic"])),
        most_rows=MOST_ROWS,
        latencies=(*transforms.PERCENTILES, "max"),
    )


@cache
def _template() -> Template:
    def shown_cell(value: object) -> object:
        """Format a value. Control characters become escapes, because XML does not allow them."""
        return value if isinstance(value, Markup) else "" if isinstance(value, Undefined) else cell(value)

    environment = Environment(loader=PackageLoader(__package__, "."), autoescape=True, finalize=shown_cell)
    environment.filters |= {
        "time": lambda value: cell(value).replace(".000000Z", "Z"),
        "seconds": _seconds,
        "spoken": spoken,
        "words": lambda name: name.replace("_", " "),
    }
    return environment.get_template("audit_report.html.jinja")


def _seconds(value: float | None) -> str:
    if value is None:
        return "\u2013"
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"

"""`outbox-pipeline JOB`: run a job with Spark in this process, or as the application of spark-submit.

Exit codes: 0 success; 1 the job failed, rows were rejected, or an audit found a lost task or no task; 2 usage; 3 a
service, the table, a permission, Java or a package is missing; 4 a drain ended with work left; 130 after Ctrl-C.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from outbox._version import __version__
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.shared import logs
from outbox.shared.arguments import Parser
from outbox.shared.settings import unknown_variables
from outbox.shared.times import shown
from outbox_pipeline.settings import (
    ArchiveSettings,
    AuditSettings,
    DrainSettings,
    JobSettings,
    RegisterSettings,
    ReplaySettings,
)
from publishworker.exits import DONE, FAILED, INTERRUPTED, NOT_REACHED, USAGE, WORK_LEFT
from publishworker.settings import add_deadline

_log = logging.getLogger("outbox_pipeline")

REGISTER = """\
Register the rows of files as tasks, even millions of them. You can run the job again:
it skips each row whose task is already in the table.

    outbox-pipeline register --input gs://shop/2026-12/*.parquet --key customer,month \\
        --rejects gs://shop/rejects --project shop --instance main --database orders"""
ARCHIVE = """\
Write sent tasks to Parquet, one folder for each time window. Each run continues where the
last run stopped. With --purge, the job then deletes the archived tasks from the table.

    outbox-pipeline archive --archive gs://shop/outbox --window 1d --purge \\
        --project shop --instance main --database orders"""
DRAIN = """\
Send a backlog that is too large for the live workers, with more workers on Spark's executors.
The job ends when no task is pending or retrying, and counts the tasks that are left.

    outbox-pipeline drain --deadline 3600 \\
        --project shop --instance main --database orders"""
AUDIT = """\
Compare tasks with the messages that Pub/Sub's subscriptions to BigQuery or Cloud Storage
received. Writes report.html, summary.json and every finding. Exit code 1 if a task is lost,
or if there was no task to audit.

    outbox-pipeline audit --received gs://shop/received/*.avro --since 1d \\
        --output gs://shop/audits/2026-11-21 --project shop --instance main --database orders"""
REPLAY = """\
Send sent tasks again, from the table or from the archive. A replay from the archive also
restores purged tasks. Each task is sent once more, even if the job is interrupted and resumed.

    outbox-pipeline replay --topic orders --since 2h --dry-run \\
        --project shop --instance main --database orders"""

_Settings = JobSettings | DrainSettings
#: Runs a job: its module, Spark, its settings and its other flags. Returns the result and the exit code.
_Run = Callable[[Any, Any, Any, argparse.Namespace], tuple[Any, int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job and return its exit code. An expected error is one sentence on stderr."""
    try:
        options = _parser().parse_args(arguments)
        return _run(options.job, options.settings.read(vars(options)), options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutboxError as error:
        print(f"outbox-pipeline: {error}", file=sys.stderr)
        if isinstance(error, SettingError):
            return USAGE
        return NOT_REACHED if isinstance(error, NotReached) else FAILED


def _run(name: str, settings: _Settings, options: argparse.Namespace) -> int:
    from outbox_pipeline.spark import session  # noqa: PLC0415 - the imports below need the packages

    session.check_packages()

    from outbox_pipeline import summary as report  # noqa: PLC0415 - see above
    from outbox_pipeline.spark.errors import spark_errors  # noqa: PLC0415 - see above
    from publishworker.telemetry.clients import client  # noqa: PLC0415 - half a second, wasted if a flag is wrong
    from publishworker.telemetry.metrics import Metrics  # noqa: PLC0415 - the same

    logs.configure(settings.log_format, settings.log_level)
    for sentence in unknown_variables():
        _log.warning("%s", sentence, extra={"action": "unknown_variable"})
    metrics = Metrics(client(settings.metrics))
    result = None
    try:
        with spark_errors():
            job = import_module(f"outbox_pipeline.jobs.{name}.job")
            result, code = options.run(job, session.session(name), settings, options)
    finally:
        report.record(metrics, name, result)
        metrics.stop()
    print(report.summary(name, result, json=options.json))
    return int(code)


def _register(job: Any, spark: Any, settings: RegisterSettings, _options: argparse.Namespace) -> tuple[Any, int]:
    result = job.run(spark, settings)
    if result.rejected:
        extra = {"action": "rejected", "fields": {"rejected": result.rejected}}
        advice = "Correct the lines in %s and register that folder"
        _log.warning(f"%s rows were rejected. {advice}", f"{result.rejected:,}", result.rejects, extra=extra)
    return result, FAILED if result.rejected else DONE


def _archive(job: Any, spark: Any, settings: ArchiveSettings, options: argparse.Namespace) -> tuple[Any, int]:
    return job.run(spark, settings, purge=options.purge, late=options.read_late, note=_note("archive")), DONE


def _audit(job: Any, spark: Any, settings: AuditSettings, options: argparse.Namespace) -> tuple[Any, int]:
    result = job.run(spark, settings)
    if result.lost:
        extra = {"action": "lost", "fields": {"lost": result.lost}}
        reason = "sent, but not received within --grace. %s lists them and says what to do"
        tasks = "1 task is" if result.lost == 1 else f"{result.lost:,} tasks are"
        _log.error(f"%s lost: {reason}", tasks, result.report, extra=extra)
    if result.not_applied:
        extra = {"action": "not_applied", "fields": {"not_applied": result.not_applied}}
        reason = "received, but not recorded in the inbox within --grace. %s lists them and says what to do"
        tasks = "1 task has" if result.not_applied == 1 else f"{result.not_applied:,} tasks have"
        _log.error(f"%s no effect: {reason}", tasks, result.report, extra=extra)
    if not result.tasks:
        since = f"from {shown(result.since)} " if result.since else ""
        headline = f"Nothing was audited: no task was created {since}before {shown(result.until)}"
        if options.json:
            _log.error(headline, extra={"action": "empty"})
        else:
            print(headline)
    return result, FAILED if result.lost or result.not_applied or not (result.tasks or options.allow_empty) else DONE


def _drain(job: Any, spark: Any, settings: DrainSettings, options: argparse.Namespace) -> tuple[Any, int]:
    result = job.run(spark, settings, deadline=options.deadline, note=_note("drain"))
    if result.work_left:
        _log.warning(
            "Drain stopped at its deadline with %s pending and %s retrying tasks left. Run it again to continue",
            f"{result.pending:,}", f"{result.retrying:,}", extra={"action": "work_left"},
        )  # fmt: skip
    return result, WORK_LEFT if result.work_left else DONE


def _replay(job: Any, spark: Any, settings: ReplaySettings, options: argparse.Namespace) -> tuple[Any, int]:
    return job.run(spark, settings, dry_run=options.dry_run, resume=options.resume, note=_note("replay")), DONE


def _note(action: str) -> Callable[[str], None]:
    return partial(_log.info, extra={"action": action})


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="outbox-pipeline", description="Jobs of the outbox on Spark.")
    parser.add_argument("--version", action="version", version=f"spanner-outbox {__version__}")
    jobs = parser.add_subparsers(metavar="JOB", required=True, dest="job")

    def add(name: str, settings: type[_Settings], run: _Run, help: str, description: str) -> argparse.ArgumentParser:
        job = jobs.add_parser(
            name, help=help, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        settings.add_flags(job)
        job.add_argument("--json", action="store_true", help="Print the summary as one line of JSON.")
        job.set_defaults(settings=settings, run=run)
        return job

    add("register", RegisterSettings, _register, "register rows of files as tasks", REGISTER)
    archive = add("archive", ArchiveSettings, _archive, "write sent tasks to Parquet", ARCHIVE)
    archive.add_argument("--purge", action="store_true", help="Then delete the archived tasks from the table.")
    archive.add_argument(
        "--read-late",
        action="store_true",
        help="If a window is too old for a snapshot, read the table as of now. Tasks that were resent or deleted since "
        "are missing.",
    )
    drain = add("drain", DrainSettings, _drain, "send a large backlog", DRAIN)
    add_deadline(drain)
    audit = add("audit", AuditSettings, _audit, "compare tasks with received messages", AUDIT)
    audit.add_argument("--allow-empty", action="store_true", help="Exit with code 0 if no task is in the window.")
    replay = add("replay", ReplaySettings, _replay, "send sent tasks again", REPLAY)
    replay.add_argument("--dry-run", action="store_true", help="Count the selected tasks by topic and change nothing.")
    replay.add_argument(
        "--resume", metavar="ID", default="", help="Continue an interrupted replay with its own selection."
    )
    return parser

"""`python -m outbox_pipeline JOB`: inside this process, or what spark-submit runs.

Exit codes: 0 done, 1 failed, or some rows were rejected, 2 usage, 3 a service, the table, a permission, Java or a
package is missing, 4 a drain ran out of time with work left, 130 when Ctrl-C ended it.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from outbox._version import __version__
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.shared import logs
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
Register rows of files as tasks: month-start batches of millions, at LOW priority. A row
whose task is there is not registered again, so the job can be run again.

    python -m outbox_pipeline register --input gs://shop/2026-12/*.parquet --key customer,month \\
        --rejects gs://shop/rejects --project shop --instance main --database orders"""
ARCHIVE = """\
Write tasks that were sent to Parquet, a folder for each window of time, from where the
last run stopped up to now. With --purge they are deleted from the table then.

    python -m outbox_pipeline archive --archive gs://shop/outbox --window 1d --purge \\
        --project shop --instance main --database orders"""
DRAIN = """\
Send a backlog that is too large for the workers, by relays on Spark's executors, which share
the shards with workers that run. Ends when nothing is left to send, and says what stays.

    python -m outbox_pipeline drain --deadline 3600 \\
        --project shop --instance main --database orders"""
AUDIT = """\
Hold the tasks of a time against the messages that subscribers received, as Pub/Sub's
subscriptions to BigQuery and Cloud Storage write them. Writes report.html, summary.json and
every finding. Exit code 1 if a message is lost.

    python -m outbox_pipeline audit --received gs://shop/received/*.parquet --since 1d \\
        --output gs://shop/audits/2026-11-21 --project shop --instance main --database orders"""
REPLAY = """\
Send again what was sent: out of the table, or out of the archive, from which tasks that were
purged come back. Each is sent once more, also when the job is interrupted and resumed.

    python -m outbox_pipeline replay --topic orders --since 2h --dry-run \\
        --project shop --instance main --database orders"""

_Settings = JobSettings | DrainSettings
#: Runs a job: given its settings and flags that are no settings, returns its result and the exit code.
_Job = Callable[[Any, argparse.Namespace], tuple[Any, int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job and return its exit code. An expected fault is one sentence on stderr."""
    try:
        options = _parser().parse_args(arguments)
        return _run(options.job, options.settings.read(vars(options)), options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutboxError as error:
        print(f"outbox_pipeline: {error}", file=sys.stderr)
        if isinstance(error, SettingError):
            return USAGE
        return NOT_REACHED if isinstance(error, NotReached) else FAILED


def _run(name: str, settings: _Settings, options: argparse.Namespace) -> int:
    from outbox_pipeline.spark.session import check_packages  # noqa: PLC0415 - what follows needs the packages

    check_packages()

    from outbox_pipeline import summary as report  # noqa: PLC0415 - see above
    from outbox_pipeline.spark.errors import spark_errors  # noqa: PLC0415 - see above
    from publishworker.telemetry import datadog  # noqa: PLC0415 - half a second, for nothing if a flag is wrong

    logs.configure(settings.log_format, settings.log_level)
    metrics = datadog.from_environment()
    result = None
    try:
        with spark_errors():
            result, code = options.run(settings, options)
    finally:
        report.record(metrics, name, result)
        metrics.stop()
    print(report.summary(name, result, json=options.json))
    return int(code)


def _register(settings: RegisterSettings, _options: argparse.Namespace) -> tuple[Any, int]:
    from outbox_pipeline.jobs.register import job as register  # noqa: PLC0415 - see _run

    result = register.run(_session("register"), settings)
    if result.rejected:
        extra = {"action": "rejected", "fields": {"rejected": result.rejected}}
        _log.warning("%s rows were rejected, see %s", f"{result.rejected:,}", result.rejects, extra=extra)
    return result, FAILED if result.rejected else DONE


def _archive(settings: ArchiveSettings, options: argparse.Namespace) -> tuple[Any, int]:
    from outbox_pipeline.jobs.archive import job as archive  # noqa: PLC0415 - see _run

    note = partial(_log.info, extra={"action": "archive"})
    result = archive.run(_session("archive"), settings, purge=options.purge, late=options.read_late, note=note)
    return result, DONE


def _audit(settings: AuditSettings, _options: argparse.Namespace) -> tuple[Any, int]:
    from outbox_pipeline.jobs.audit import job as audit  # noqa: PLC0415 - see _run

    result = audit.run(_session("audit"), settings)
    if result.lost:
        extra = {"action": "lost", "fields": {"lost": result.lost}}
        _log.error("%s tasks are lost, see %s", f"{result.lost:,}", result.report, extra=extra)
    return result, FAILED if result.lost else DONE


def _drain(settings: DrainSettings, options: argparse.Namespace) -> tuple[Any, int]:
    from outbox_pipeline.jobs.drain import job as drain  # noqa: PLC0415 - see _run

    note = partial(_log.info, extra={"action": "drain"})
    result = drain.run(_session("drain"), settings, deadline=options.deadline, note=note)
    if result.work_left:
        left = result.pending + result.retrying
        _log.warning("stopped with %s tasks left to send", f"{left:,}", extra={"action": "work_left"})
    return result, WORK_LEFT if result.work_left else DONE


def _replay(settings: ReplaySettings, options: argparse.Namespace) -> tuple[Any, int]:
    from outbox_pipeline.jobs.replay import job as replay  # noqa: PLC0415 - see _run

    note = partial(_log.info, extra={"action": "replay"})
    return replay.run(_session("replay"), settings, dry_run=options.dry_run, resume=options.resume, note=note), DONE


def _session(name: str) -> Any:
    from outbox_pipeline.spark.session import session  # noqa: PLC0415 - see _run

    return session(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m outbox_pipeline", description="The outbox on Spark.")
    parser.add_argument("--version", action="version", version=f"spanner-outbox {__version__}")
    jobs = parser.add_subparsers(metavar="JOB", required=True, dest="job")

    def add(name: str, settings: type[_Settings], run: _Job, help: str, description: str) -> argparse.ArgumentParser:
        job = jobs.add_parser(
            name, help=help, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        settings.add_flags(job)
        job.add_argument("--json", action="store_true", help="Print the summary as one line of JSON.")
        job.set_defaults(settings=settings, run=run)
        return job

    add("register", RegisterSettings, _register, "register rows of files as tasks", REGISTER)
    archive = add("archive", ArchiveSettings, _archive, "write sent tasks to Parquet", ARCHIVE)
    archive.add_argument("--purge", action="store_true", help="Then delete from the table what the archive holds.")
    archive.add_argument(
        "--read-late",
        action="store_true",
        help="Read windows that are too old for it as of now, without what was sent again or deleted since.",
    )
    drain = add("drain", DrainSettings, _drain, "send a large backlog", DRAIN)
    add_deadline(drain)
    add("audit", AuditSettings, _audit, "hold tasks against received messages", AUDIT)
    replay = add("replay", ReplaySettings, _replay, "send again what was sent", REPLAY)
    replay.add_argument("--dry-run", action="store_true", help="Change nothing: count the tasks by topic, show some.")
    replay.add_argument(
        "--resume", metavar="ID", default="", help="Go on with a replay that ended early, with its selection."
    )
    return parser

"""`outbox-pipeline JOB`: run a job with Spark in this process, or as the application of spark-submit.

The exit codes are in docs/operations/pipeline-deploy.md.
"""

import argparse
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from outbox._version import __version__
from outbox.base.start import need
from outbox.base.values import spoken
from outbox.program import logs
from outbox.program.settings import Parser, Settings, unknown_variables
from outbox.program.terminal import Escaped, as_json, cell, ended, prepare_streams, say
from outbox_admin.flags import add_reason
from outbox_pipeline.job_settings import ArchiveSettings, AuditSettings, RegisterSettings, ReplaySettings
from outbox_pipeline.spark import session
from outbox_pipeline.spark.session import is_submitted, redirect_stderr
from publishworker.process import DONE, FAILED, WORK_LEFT
from publishworker.process.worker_settings import RelaySettings, add_deadline
from publishworker.telemetry.clients import client
from publishworker.telemetry.metrics import PIPELINE_ROWS, PIPELINE_RUNS, Metrics

#: The counts of results that make a job fail, with the names that the metric has for this.
_FAILURES = ("rejected", "refused", "lost", "not_applied")
#: The fields of results that count rows.
_ROWS = (
    "registered", "existing", "repeated", "rejected", "written", "deleted", "replayed", "unsent", "resent", "cancelled",
    "replaced", "missing",
    "delivered", "late", "lost", "unknown", "republished", "redelivered", "mismatched", "out_of_order",
    "cancelled_after_publish",
    "applied", "not_applied", "applied_late", "unregistered",
    "published", "refused", "already_published", "uncommitted", "became_dead",
)  # fmt: skip

_log = logging.getLogger("outbox_pipeline")

REGISTER = """\
Register the rows of files as tasks, even millions of them. You can run the job again:
it skips each row whose task is already in the table.

    outbox-pipeline register --input gs://shop/2026-12/*.parquet --key customer,month \\
        --rejects gs://shop/rejects --project shop --instance main --database orders"""
ARCHIVE = """\
Write sent and cancelled tasks to Parquet, one folder for each time window. Each run continues
where the last run stopped. With --purge, the job then deletes the archived tasks from the table.

    outbox-pipeline archive --archive gs://shop/outbox --window 1d --purge \\
        --project shop --instance main --database orders"""
DRAIN = """\
Send a backlog that is too large for the live workers, with more workers on Spark's executors.
The job ends when no task is pending or retrying, and counts the tasks that are left.

    outbox-pipeline drain --deadline 3600 \\
        --project shop --instance main --database orders"""
AUDIT = """\
Compare tasks with the messages that Pub/Sub's subscriptions to BigQuery or Cloud Storage
received. Writes report.html, summary.json and every finding. Exit code 1 if a task is lost or
not applied, or if there was no task to audit.

    outbox-pipeline audit --received gs://shop/received/*.avro --since 1d \\
        --output gs://shop/audits/2026-11-21 --project shop --instance main --database orders"""
REPLAY = """\
Send archived tasks again, also those that were purged from the table. With --to, they are
published to another topic at least once, and no task is changed. To send tasks again that are
still in the table, use `outbox retry --state sent` or `outbox resend`.

    outbox-pipeline replay --archive gs://shop/outbox --topic orders --since 7d --dry-run \\
        --project shop --instance main --database orders"""

CERTIFICATE = """\
Check certificates that `audit --certificate` wrote. It needs neither Spark nor Spanner.

    outbox-pipeline certificate verify 2026-11-*.json --public-key certificate.pub \\
        --archive copy/archive --received copy/received"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job and return its exit code. An expected error is one sentence on stderr."""
    prepare_streams()
    if is_submitted():
        redirect_stderr()
    given = sys.argv[1:] if arguments is None else arguments
    logs.begin(given, is_service=not {*given[:1]}.isdisjoint(("register", "drain", "archive", "audit", "replay")))
    return ended("outbox-pipeline", lambda: _run(_parser().parse_args(given)))


def _run(options: argparse.Namespace) -> int:
    if options.job == "certificate":
        for package in ("cryptography", "rfc8785"):
            need(package, "certificate", "certificate")
        from outbox_pipeline.certificate.document import verify  # noqa: PLC0415 - it needs the packages

        return verify(options)
    name, settings = options.job, options.settings.read(vars(options))
    session.check_packages()

    from outbox_pipeline.spark.stack_traces import spark_errors  # noqa: PLC0415 - it needs the packages

    logs.configure(settings.log_format, settings.log_level)
    for sentence in unknown_variables():
        _log.warning("%s", sentence, extra={"action": "unknown_variable"})
    metrics = Metrics(client(settings.metrics))
    begin, values = time.monotonic(), dict[str, Any]()
    try:
        with spark_errors():
            from outbox_pipeline.jobs import archive, audit, drain, register, replay  # noqa: PLC0415 - the same

            jobs = {"archive": archive, "audit": audit, "drain": drain, "register": register, "replay": replay}
            job: Any = jobs[name]
            flags = {flag: getattr(options, flag) for flag in options.flags}
            values = job.run(session.session(name), settings, **flags)
    finally:
        ended_as = _ended_as(values, options)
        _record(metrics, name, values, ended_as)
        metrics.stop()
    if values.get("verdict") and not options.json:
        say(values["verdict"])
    say(_summary(name, values, time.monotonic() - begin, json=options.json))
    return {"done": DONE, "work_left": WORK_LEFT}.get(ended_as, FAILED)


def _ended_as(values: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Return how the job ended, in the words of the metric `outbox.pipeline_run_count`."""
    if not values:
        return "failed"
    if values.get("work_left"):
        return "work_left"
    if options.job == "audit" and not (values["tasks"] or options.allow_empty):
        return "empty"
    if failures := [name for name in _FAILURES if values.get(name)]:
        return failures[0]
    return "done" if values.get("complete", True) else "incomplete"


def _summary(job: str, values: Mapping[str, Any], seconds: float, *, json: bool) -> Escaped:
    """Return the fields of a result, and the duration of the job, as one line of JSON, or one field per line."""
    if json:
        return as_json({"job": job, **values, "seconds": round(seconds, 3)})
    lines = {"job": job, **values, "seconds": spoken(seconds)}
    width = max(15, *map(len, lines))
    return Escaped(
        "\n".join(
            f"{name.replace('_', ' '):<{width}} {_shown(value)}" for name, value in lines.items() if value is not None
        )
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = [{"tasks": number, "topic": topic} for topic, number in value.items()]
    if isinstance(value, list):
        # One per line, indented to the column of values.
        return f"\n{'':<15} ".join("  ".join(cell(each) for each in row.values()) for row in value)
    return cell(value)


def _record(metrics: Metrics, job: str, values: Mapping[str, Any], ended_as: str) -> None:
    """Send metrics of the rows. For a failed job, only count the failure."""
    metrics.count(PIPELINE_RUNS, 1, job=job, result=ended_as)
    if values.get("certificate"):  # whose monitor notices a day without one
        metrics.count(PIPELINE_RUNS, 1, job="certificate", result="done")
    for name in _ROWS:
        if number := values.get(name):
            metrics.count(PIPELINE_ROWS, number, job=job, outcome=name)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="outbox-pipeline", description="Jobs of the outbox on Spark.")
    parser.add_argument("--version", action="version", version=f"spanner-outbox {__version__}")
    jobs = parser.add_subparsers(metavar="JOB", required=True, dest="job")

    def add(name: str, settings: type[Settings], help: str, description: str, *flags: str) -> argparse.ArgumentParser:
        """Add a job. Its function `run` gets the `flags`, which are no settings, as named arguments."""
        job = jobs.add_parser(name, help=help, description=description)
        settings.add_flags(job)
        job.add_argument("--json", action="store_true", help="Print the summary as one line of JSON.")
        job.set_defaults(settings=settings, flags=flags)
        return job

    add("register", RegisterSettings, "register rows of files as tasks", REGISTER)
    archive = add("archive", ArchiveSettings, "write sent and cancelled tasks to Parquet", ARCHIVE, "purge", "late")
    archive.add_argument("--purge", action="store_true", help="Then delete the archived tasks from the table.")
    archive.add_argument(
        "--read-late",
        dest="late",
        action="store_true",
        help="If a window is too old for a snapshot, read the table as of now. Tasks that were resent or deleted since "
        "are missing.",
    )
    drain = add("drain", RelaySettings, "send a large backlog", DRAIN, "deadline")
    add_deadline(drain)
    audit = add("audit", AuditSettings, "compare tasks with received messages", AUDIT)
    audit.add_argument("--allow-empty", action="store_true", help="Exit with code 0 if no task is in the window.")
    replay = add("replay", ReplaySettings, "send archived tasks again", REPLAY, "dry_run", "reason", "to")
    replay.add_argument("--dry-run", action="store_true", help="Count the selected tasks by topic and change nothing.")
    replay.add_argument("--to", metavar="TOPIC", help="Publish to this topic instead, and change no task.")
    add_reason(replay)
    _add_certificate(jobs)
    return parser


def _add_certificate(jobs: Any) -> None:
    certificate = jobs.add_parser("certificate", help="check certificates of audits", description=CERTIFICATE)
    actions = certificate.add_subparsers(metavar="ACTION", required=True, dest="action")
    verify = actions.add_parser("verify", help="check signatures, the chain and the inputs")
    verify.add_argument("files", metavar="FILE", nargs="+", help="Certificates, whose windows must adjoin.")
    verify.add_argument(
        "--public-key",
        metavar="FILE",
        action="append",
        required=True,
        help="Public key in PEM form. Repeat it if the key was rotated.",
    )
    verify.add_argument("--archive", metavar="PATH", help="Folder of the archive, to check its files.")
    verify.add_argument("--received", metavar="PATH", help="Folder with the received messages, to check.")

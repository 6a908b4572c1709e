"""A month's payments in bulk: registered, drained, collected, archived, audited and replayed, on the emulators.

python -m payments.demo --tasks 5000
"""

import argparse
import contextlib
import logging
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.api_core.exceptions import GoogleAPIError
from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1, spanner
from orders import stage
from orders.stage import Stage

from outbox import schema
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.settings import flag_of, whole_number
from payments.collector import Collector

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from outbox_pipeline.jobs.audit import Audited

DONE, FAILED, USAGE, NOT_REACHED, INTERRUPTED = 0, 1, 2, 3, 130

TOPICS = ("debits", "credits", "statements")
#: The topic that is replayed.
AGAIN = "statements"
WORKERS = MEMBERS = 2
#: So many that each of the four relays has some; the emulator scans the table for each of them.
SHARDS = 8
#: Seconds without a message until nothing more is expected.
QUIET = 3.0
#: Seconds for which a message may be on its way: both clocks are this machine's.
GRACE = 5.0
#: Seconds without a message until the demo gives up.
PATIENCE = 60.0
#: What the archive takes is of a window that ended a minute ago.
ARCHIVED_AFTER, WINDOW = 72.0, "10s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code: 0 if nothing is lost."""
    logging.getLogger("google").setLevel(logging.CRITICAL)
    # SIGTERM, and SIGHUP from a closed terminal, are Ctrl-C: everything is stopped on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        options = _parser().parse_args(arguments)
        return demonstrate(options.tasks, Path(options.output or tempfile.mkdtemp(prefix="payments-demo-")))
    except KeyboardInterrupt:
        print("demo: interrupted; Spark, workers and emulators are stopped", file=sys.stderr)
        return INTERRUPTED
    except GoogleAPIError as error:
        print(f"demo: an emulator failed: {str(error).splitlines()[0]}", file=sys.stderr)
        return FAILED
    except OutboxError as error:
        print(f"demo: {error}", file=sys.stderr)
        return {SettingError: USAGE, NotReached: NOT_REACHED}.get(type(error), FAILED)


def demonstrate(tasks: int, output: Path) -> int:
    """Run it all, print what came of it, return the exit code. Raises OutboxError."""
    from outbox_pipeline.faults import spark_errors  # noqa: PLC0415 - the packages may be missing
    from outbox_pipeline.session import session  # noqa: PLC0415 - the same

    began = time.monotonic()
    with stage.emulators(), contextlib.ExitStack() as stack:
        # First, before a client is used: gRPC and the start of Java do not go together in one process.
        spark = session("payments demo")
        stack.callback(spark.stop)
        with spark_errors():
            audits = Demo(spark, make(), output).play(tasks)
    lost = sum(each.lost for each in audits)
    print(f"\nIn {time.monotonic() - began:.0f} s, with the start of emulators, Spark and workers. The reports:")
    for each in audits:
        print(f"  {each.report}")
    print(f"WRONG: {lost:,} tasks are lost." if lost else "Nothing is lost.")
    return FAILED if lost else DONE


def make() -> Stage:
    """Make the database, topics and subscriptions in a project of its own name."""
    project = f"payments-demo-{uuid.uuid4().hex[:8]}"
    client = spanner.Client(project=project, credentials=AnonymousCredentials(), disable_builtin_metrics=True)
    instance = client.instance("demo", configuration_name=f"projects/{project}/instanceConfigs/emulator-config")
    instance.create().result(timeout=stage.ADMIN_SECONDS)
    database = instance.database("payments", ddl_statements=schema.statements(SHARDS))
    database.create().result(timeout=stage.ADMIN_SECONDS)
    publisher, subscriber = pubsub_v1.PublisherClient(), pubsub_v1.SubscriberClient()
    subscriptions = tuple(f"projects/{project}/subscriptions/audit-of-{topic}" for topic in TOPICS)
    for topic, subscription in zip(TOPICS, subscriptions, strict=True):
        name = f"projects/{project}/topics/{topic}"
        publisher.create_topic(name=name, timeout=stage.ADMIN_SECONDS)
        wanted = {"name": subscription, "topic": name, "enable_message_ordering": True}
        subscriber.create_subscription(request=wanted, timeout=stage.ADMIN_SECONDS)
    return Stage(project, database, subscriptions)


def payments(spark: "SparkSession", count: int) -> "DataFrame":
    """Return so many payments as rows for `register`: of a thousand accounts, whose debits keep their order."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - the packages may be missing

    number = f.col("id")
    account = f.concat(f.lit("account-"), number % 1000)
    topic = f.element_at(f.array(*map(f.lit, TOPICS)), (number % len(TOPICS) + 1).cast("int"))
    return spark.range(count).select(
        topic.alias("topic"),
        f.to_json(f.struct(number.alias("payment"), account.alias("account"), (number % 997).alias("cents"))).alias(
            "data"
        ),
        f.concat(f.lit("2026-12/"), number).alias("payment"),
        f.when(topic == TOPICS[0], account).alias("ordering_key"),
        number.alias("sequence"),
    )


@dataclass
class Demo:
    """The steps, one after the other, on the Spark that is there."""

    spark: "SparkSession"
    stage: Stage
    output: Path

    def play(self, tasks: int) -> "list[Audited]":
        """Do all steps, and return what the two audits found."""
        self.output.mkdir(parents=True, exist_ok=True)
        with Collector(self.stage.subscriptions, self.received) as collector:
            self.register(tasks)
            with stage.workers(self.stage, WORKERS) as workers:
                self.drain(tasks)
                wait_for(collector, tasks)
                self.archive()
                first = self.audit("first")
                replayed = self.replay()
                wait_for(collector, tasks + replayed)
                time.sleep(GRACE)
                second = self.audit("second")
                for fault in (workers.ended(), *workers.stop()):
                    if fault:
                        raise OutboxError(fault)
        return [first, second]

    @property
    def received(self) -> Path:
        """Return the file of what was received."""
        return self.output / "received.jsonl"

    @property
    def of_database(self) -> dict[str, Any]:
        """Return the settings that every job has."""
        return dict(zip(("project", "instance", "database"), self.stage.flags[1::2], strict=True))

    def register(self, tasks: int) -> None:
        """Register payments by Spark."""
        from outbox_pipeline import register  # noqa: PLC0415 - the packages may be missing

        done = register(
            payments(self.spark, tasks), rejects=str(self.output / "rejects"), key=("payment",), **self.of_database
        )
        if done.registered != tasks:
            raise OutboxError(f"{done.registered:,} of {tasks:,} payments were registered, see {done.rejects}")
        _tell(f"registered {done.registered:,} payments by Spark", done.seconds)

    def drain(self, tasks: int) -> None:
        """Send them by Spark, beside the workers."""
        from outbox_pipeline.jobs import drain  # noqa: PLC0415 - see above
        from outbox_pipeline.settings import DrainSettings  # noqa: PLC0415 - see above

        given = {"workers": str(MEMBERS), "log_level": "error"}
        done = drain.run(self.spark, DrainSettings.read(self.of_database | given), deadline=600)
        if done.work_left:
            raise OutboxError(f"{done.pending + done.retrying:,} payments are not sent after 600 s")
        _tell(f"sent {done.published:,} by Spark, and the others by {WORKERS} workers meanwhile", done.seconds)

    def archive(self) -> None:
        """Archive what is older than a minute, and delete it from the table."""
        from outbox_pipeline.jobs import archive  # noqa: PLC0415 - see above
        from outbox_pipeline.settings import ArchiveSettings  # noqa: PLC0415 - see above

        _tell(f"waiting {ARCHIVED_AFTER:.0f} s: the archive takes nothing younger than a minute")
        time.sleep(ARCHIVED_AFTER)
        given = {"archive": str(self.output / "archive"), "window": WINDOW}
        done = archive.run(self.spark, ArchiveSettings.read(self.of_database | given), purge=True)
        _tell(f"archived {done.written:,} in {done.windows} windows, and deleted {done.deleted:,}", done.seconds)

    def replay(self) -> int:
        """Send one topic again: what was purged, out of the archive. Return how many."""
        from outbox_pipeline.jobs import replay  # noqa: PLC0415 - see above
        from outbox_pipeline.settings import ReplaySettings  # noqa: PLC0415 - see above

        given = {"archive": str(self.output / "archive"), "topic": AGAIN}
        done = replay.run(self.spark, ReplaySettings.read(self.of_database | given))
        _tell(f"replayed {done.replayed + done.registered:,} of {AGAIN} out of the archive", done.seconds)
        return done.replayed + done.registered

    def audit(self, name: str) -> "Audited":
        """Hold table and archive against what was received."""
        from outbox_pipeline.jobs import audit  # noqa: PLC0415 - see above
        from outbox_pipeline.settings import AuditSettings  # noqa: PLC0415 - see above

        given = {
            "received": str(self.received), "tasks": "both", "archive": str(self.output / "archive"),
            "until": f"{GRACE:g}s", "grace": f"{GRACE:g}", "output": str(self.output / f"{name}-audit"),
        }  # fmt: skip
        done = audit.run(self.spark, AuditSettings.read(self.of_database | given))
        _tell(
            f"{name} audit: {done.lost:,} lost, {done.pending:,} pending, {done.republished:,} published twice, "
            f"{done.unknown:,} unknown, {done.out_of_order:,} out of order, of {done.tasks:,} sendings", done.seconds
        )  # fmt: skip
        return done


def wait_for(collector: Collector, count: int) -> None:
    """Return when so many messages are collected and no more come. Raises OutboxError if they do not come."""
    began = time.monotonic()
    while (quiet := collector.quiet_since(began)) < QUIET or collector.count < count:
        collector.check()
        if quiet > PATIENCE:
            raise OutboxError(f"only {collector.count:,} of {count:,} messages came, none for {PATIENCE:g} s")
        time.sleep(0.1)
    _tell(f"collected {collector.count:,} messages")


def _tell(what: str, seconds: float | None = None) -> None:
    print(f"  {what}" + ("" if seconds is None else f" ({seconds:.0f} s)"), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="payments.demo", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--tasks", type=flag_of("--tasks", whole_number(1, 1_000_000)), default=5000, metavar="N",
        help="how many payments are to be sent (default 5000)",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FOLDER", help="where reports and files go (default a new folder)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

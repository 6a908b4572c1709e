"""A month's payments in bulk: registered, drained, collected, archived, audited and replayed, on the emulators.

python -m payments.demo --tasks 5000
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from orders import command, stage
from orders.stage import Stage

from outbox.errors import OutboxError
from outbox.table import ddl
from payments.collector import Collector, collecting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from outbox_pipeline.jobs.audit import Counts

#: Debits have the account as ordering key; of ten payments one is a debit.
TOPICS = ("debits", "credits", "statements")
#: The topic that is replayed.
AGAIN = "statements"
WORKERS = MEMBERS = 2
#: One for each relay: the emulator scans the whole table for each shard that a poll asks for.
SHARDS = WORKERS + MEMBERS
#: Seconds without a message until nothing more is expected.
QUIET = 2.0
#: Seconds for which a message may be on its way: both clocks are this machine's.
GRACE = 3.0
#: Seconds without a message until the demo gives up.
PATIENCE = 60.0
#: Seconds of a window of the archive, and until it takes one that has ended.
WINDOW, ARCHIVED_AFTER = 30, 61


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code: 0 if nothing is lost."""
    parser = argparse.ArgumentParser(prog="payments.demo", description=__doc__.splitlines()[0] if __doc__ else None)
    command.add_tasks(parser, 5000, "how many payments are to be sent")
    parser.add_argument("--output", metavar="FOLDER", help="where reports and files go (default a new folder)")

    def demonstrate_in_folder(options: argparse.Namespace) -> int:
        output = Path(options.output or tempfile.mkdtemp(prefix="payments-demo-"))
        return demonstrate(options.tasks, output)

    return command.run(parser, arguments, demonstrate_in_folder)


def demonstrate(tasks: int, output: Path) -> int:
    """Run all jobs, print the results, and return the exit code. Raises OutboxError."""
    began = time.monotonic()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutboxError(f"--output {output}: {error.strerror}") from error
    with stage.emulators(), _spark() as spark:
        made = stage.make("payments", ddl.statements(SHARDS), TOPICS, ordered=True)
        demo = Demo(spark, made, output)
        first, second, replayed = demo.play(tasks)
    lost = first["lost"] + second["lost"]
    print("\nResults. Times are the emulators' on this machine, not those of Spanner and Pub/Sub.")
    print(_summary(tasks, replayed, first, second))
    print(f"  {'elapsed':<20}{time.monotonic() - began:>8.0f} s  with the start of emulators, Spark and workers")
    print(f"The reports, to be read in a browser:\n  {first['report']}\n  {second['report']}")
    print(f"WRONG: {lost:,} tasks are lost." if lost else "Nothing is lost.")
    return command.FAILED if lost else command.DONE


@contextlib.contextmanager
def _spark() -> "Iterator[SparkSession]":
    """Run Spark in this process. First of all: gRPC and the start of Java do not go together in one process."""
    from outbox_pipeline.spark.session import session  # noqa: PLC0415 - the same
    from outbox_pipeline.spark.stack_traces import spark_errors  # noqa: PLC0415 - the packages may be missing

    spark = session("payments demo")
    try:
        with spark_errors():
            yield spark
    finally:
        with contextlib.suppress(Exception):  # Ctrl-C in a terminal ends Java, too
            spark.stop()


def payments(spark: "SparkSession", count: int) -> "DataFrame":
    """Return so many payments as rows for `register`: of a hundred accounts, whose debits keep their order."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - the packages may be missing

    number = f.col("id")
    account = f.concat(f.lit("account-"), (number / 10).cast("long") % 100)
    topic = f.when(number % 10 == 0, TOPICS[0]).when(number % 10 <= 5, TOPICS[1]).otherwise(TOPICS[2])
    payment = f.struct(number.alias("payment"), account.alias("account"), (number % 997).alias("cents"))
    return spark.range(count).select(
        topic.alias("topic"),
        f.to_json(payment).alias("data"),
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

    def play(self, tasks: int) -> "tuple[Counts, Counts, int]":
        """Do all steps; return what the two audits found, and how many tasks were replayed."""
        with collecting(self.stage.subscriptions, self.received) as collector:
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
        return first, second, replayed

    @property
    def received(self) -> Path:
        """Return the file of what was received."""
        return self.output / "received.jsonl"

    @property
    def of_database(self) -> dict[str, str]:
        """Return the settings that every job has."""
        return dict(zip(("project", "instance", "database"), self.stage.flags[1::2], strict=True))

    def register(self, tasks: int) -> None:
        """Register payments by Spark."""
        from outbox_pipeline import register  # noqa: PLC0415 - the packages may be missing

        rejects, of = str(self.output / "rejects"), self.of_database
        done = register(
            payments(self.spark, tasks), rejects=rejects, key=("payment",),
            project=of["project"], instance=of["instance"], database=of["database"],
        )  # fmt: skip
        if done.registered != tasks:
            raise OutboxError(f"{done.registered:,} of {tasks:,} payments were registered, see {done.rejects}")
        _tell(f"registered {done.registered:,} payments by Spark")

    def drain(self, tasks: int) -> None:
        """Send them by Spark, beside the workers."""
        from outbox_pipeline.jobs import drain  # noqa: PLC0415 - see above
        from publishworker.process.worker_settings import RelaySettings  # noqa: PLC0415 - see above

        given = {"log_level": "error"}
        done = drain.run(self.spark, RelaySettings.read(self.of_database | given), deadline=600)
        if done["work_left"]:
            raise OutboxError(f"{done['pending'] + done['retrying']:,} payments are not sent after 600 s")
        by_workers = max(0, tasks - done["published"])
        _tell(f"sent {done['published']:,} by Spark, and {by_workers:,} by {WORKERS} workers at the same time")

    def archive(self) -> None:
        """Archive what was sent, and delete it from the table."""
        from outbox_pipeline.job_settings import ArchiveSettings  # noqa: PLC0415 - see above
        from outbox_pipeline.jobs import archive  # noqa: PLC0415 - see above

        seconds = WINDOW - datetime.now(UTC).timestamp() % WINDOW + ARCHIVED_AFTER
        _tell(f"waiting {seconds:.0f} s: the archive takes no window that ended less than a minute ago")
        time.sleep(seconds)
        given = {"archive": str(self.output / "archive"), "window": f"{WINDOW}s"}
        done = archive.run(self.spark, ArchiveSettings.read(self.of_database | given), purge=True)
        _tell(f"archived {done['written']:,} in {done['windows']} windows, and deleted {done['deleted']:,}")

    def replay(self) -> int:
        """Send one topic again: what was deleted, out of the archive. Return how many."""
        from outbox_pipeline.job_settings import ReplaySettings  # noqa: PLC0415 - see above
        from outbox_pipeline.jobs import replay  # noqa: PLC0415 - see above

        given = {"archive": str(self.output / "archive"), "topic": AGAIN}
        done = replay.run(self.spark, ReplaySettings.read(self.of_database | given))
        replayed: int = done["replayed"] + done["registered"]
        _tell(f"replayed {replayed:,} of {AGAIN} out of the archive")
        return replayed

    def audit(self, name: str) -> "Counts":
        """Hold table and archive against what was received."""
        from outbox_pipeline.job_settings import AuditSettings  # noqa: PLC0415 - see above
        from outbox_pipeline.jobs import audit  # noqa: PLC0415 - see above

        given = {
            "received": str(self.received), "archive": str(self.output / "archive"),
            "until": f"{GRACE:g}s", "grace": f"{GRACE:g}", "output": str(self.output / f"{name}-audit"),
        }  # fmt: skip
        done = audit.run(self.spark, AuditSettings.read(self.of_database | given))
        _tell(f"{name} audit: {done['lost']:,} lost of {done['tasks']:,}")
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


def _summary(tasks: int, replayed: int, first: "Counts", second: "Counts") -> str:
    """Return what a person wants to know, of both audits."""
    lines: list[tuple[str, Callable[[Counts], int], str]] = [
        ("sendings", lambda each: each["tasks"], f"of {tasks:,} payments; {replayed:,} of them were replayed"),
        ("messages", lambda each: each["messages"], "received, each counted once"),
        ("lost", lambda each: each["lost"], "sent and not received"),
        ("still to be sent", lambda each: each["pending"] + each["arriving"], ""),
        ("late", lambda each: each["late"], "received after the grace"),
        ("published twice", lambda each: each["republished"], "for one sending"),
        ("delivered twice", lambda each: each["redelivered"], "by Pub/Sub, the same message"),
        ("altered", lambda each: each["mismatched"], "received with other data or attributes"),
        ("out of order", lambda each: each["out_of_order"], "of an ordering key"),
        ("unknown", lambda each: each["unknown"] + each["foreign"], "received, and never registered"),
    ]
    rows = [f"  {name:<20}{of(first):>8,}{of(second):>10,}  {what}".rstrip() for name, of, what in lines]
    return "\n".join([f"  {'':<20}{'first':>8}{'second':>10}  audit", *rows])


def _tell(what: str) -> None:
    print(f"  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

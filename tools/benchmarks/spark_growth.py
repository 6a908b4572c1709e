"""How the memory and the work of the archive and the audit grow with the rows, on a standalone cluster.

    python -m tools.benchmarks.spark_growth [--rows 100000 1000000 5000000]

Spark generates the tasks and the messages, so no emulator is needed. The session has the options of spark-submit. The
cluster has two executors with one core and a heap of 1 GiB each. The figures are counts and CPU time, so they do not
depend on the load of the machine.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pyspark.sql import SparkSession

from outbox.base.values import shown
from outbox.devtools.child_process import LOOPBACK
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import AuditSettings
from outbox_pipeline.jobs import audit
from outbox_pipeline.spark import session
from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.processes import children
from tools.benchmarks.generated import DAY, GRACE, UNTIL, archive, expected, receive

#: Spark writes a file of events with the metrics of each Spark task and the memory of each process.
CONF = {
    "eventLog.enabled": "true",
    "eventLog.compress": "false",
    "eventLog.rolling.enabled": "false",
    "eventLog.logStageExecutorMetrics": "true",
    "executor.processTreeMetrics.enabled": "true",
    "executor.metrics.pollingInterval": "1s",
    "driver.host": LOOPBACK,
    "ui.enabled": "false",
}
SIZES = (100_000, 1_000_000, 5_000_000)
NAME = "projects/p/instances/main/databases/generated"
HEADS = (
    "job", "rows", "CPU s", "Spark tasks", "rows of the largest Spark task", "rows of the largest stage of one task",
    "execution memory of a Spark task, MB", "spilled MB", "heap of the driver, MB", "heap of an executor, MB",
    "Python of an executor, MB",
)  # fmt: skip
#: The last two, as Spark calls them.
MEMORY = ("JVMHeapMemory", "ProcessTreePythonRSSMemory")
MEGA = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.spark_growth", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=SIZES)
    sizes = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name, cluster.running(Path(name) / "cluster") as on:
        events = Path(name) / "events"
        events.mkdir()
        conf = CONF | {"eventLog.dir": str(events)}
        words = [f"--master {on.master}", *(f"--conf spark.{key}={value}" for key, value in conf.items())]
        variables = {"PYSPARK_SUBMIT_ARGS": " ".join([*words, "pyspark-shell"]), "PYSPARK_PYTHON": sys.executable}
        with mock.patch.dict(os.environ, variables), mock.patch.object(session, "is_submitted", return_value=True):
            engine = session.session("growth")
        print("|", " | ".join(HEADS), "|\n|", " | ".join("---" for _ in HEADS), "|", flush=True)
        for size in sizes:
            folder = Path(name) / str(size)
            for job, work in {"archive": archived, "messages": receive, "audit": audited}.items():
                with used(on, engine, f"{job} {size}", events) as figures:
                    work(engine, folder, size)
                print("|", " | ".join([job, f"{size:,}", *(f"{each:,.0f}" for each in figures)]), "|", flush=True)
        engine.stop()


def archived(engine: SparkSession, folder: Path, size: int) -> None:
    archive(engine, folder, size, NAME)


def audited(engine: SparkSession, folder: Path, size: int) -> None:
    table = SimpleNamespace(name=NAME, now=lambda: UNTIL + GRACE)
    flags = {
        "project": "p", "instance": "main", "database": "generated",
        "archive": str(folder / "archive"), "received": str(folder / "received"), "grace": f"{GRACE.total_seconds():g}",
        "since": shown(DAY), "until": shown(UNTIL), "output": str(folder / "report"),
    }  # fmt: skip
    nothing = engine.createDataFrame([], schemas.SOURCE)
    with mock.patch.multiple(audit, open_table=lambda *_: table, read_tasks=lambda *_: nothing):
        done = audit.run(engine, AuditSettings.read(flags, {}))
    found = tuple(done[name] for name in ("lost", "republished", "unknown", "mismatched"))
    assert found == expected(size), done


def cpu_of(processes: Iterable[int]) -> float:
    """Return the CPU seconds of processes and of all below them."""
    family = [*processes]
    for pid in family:
        family += children(pid)
    ticks = 0
    for pid in family:
        with contextlib.suppress(FileNotFoundError):
            # utime, stime, and those of children that have ended: proc(5), fields 14 to 17
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def used(on: Cluster, engine: SparkSession, description: str, events: Path) -> Iterator[list[float]]:
    """Yield a list, which has the figures of the block when it ends."""
    context: Any = engine.sparkContext
    processes = [context._gateway.proc.pid, *(worker.process.pid for worker in on.workers)]
    context.setJobDescription(description)
    figures: list[float] = []
    before = cpu_of(processes)
    yield figures
    cpu = cpu_of(processes) - before
    ours = list(events_of(next(events.iterdir()), description))
    tasks = [event for event in ours if event["Event"] == "SparkListenerTaskEnd"]
    metrics = [event["Task Metrics"] for event in tasks]
    stages = defaultdict(list)
    for event, each in zip(tasks, metrics, strict=True):
        read = each["Input Metrics"]["Records Read"] + each["Shuffle Read Metrics"]["Total Records Read"]
        stages[event["Stage ID"]].append(read)
    peaks = [event["Executor Metrics"] for event in ours if event.get("Executor ID", "driver") != "driver"]
    jvm = context._jvm
    jvm.System.gc()
    heap = jvm.Runtime.getRuntime().totalMemory() - jvm.Runtime.getRuntime().freeMemory()
    figures += [
        cpu,
        len(tasks),
        max(map(max, stages.values())),
        max((read for read, *others in stages.values() if not others), default=0),
        max(each["Peak Execution Memory"] for each in metrics) / MEGA,
        sum(each["Disk Bytes Spilled"] for each in metrics) / MEGA,
        heap / MEGA,
        *(max((each[name] for each in peaks), default=0) / MEGA for name in MEMORY),
    ]


def events_of(log: Path, description: str) -> Iterator[dict[str, Any]]:
    """Yield the events of the stages of the Spark jobs with this description."""
    stages = set()
    for line in log.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["Event"] == "SparkListenerJobStart":
            if event["Properties"].get("spark.job.description") == description:
                stages |= set(event["Stage IDs"])
        elif event.get("Stage ID") in stages:
            yield event


if __name__ == "__main__":
    main()

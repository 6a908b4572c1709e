"""What `run` and `drain` do: read the settings, run the relay in this process, say how it ended."""

import argparse
import contextlib
import gc
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from outbox.shared import logs
from publishworker import exits
from publishworker.app import App, is_work, until_drained
from publishworker.check import check
from publishworker.heartbeat import Heartbeat
from publishworker.settings import WorkerSettings
from publishworker.stopping import stop_on_signals
from publishworker.telemetry import datadog

__all__ = ["check", "drain", "run"]


def run(options: argparse.Namespace) -> int:
    """Relay until a signal; return the exit code."""
    settings = WorkerSettings.read(vars(options))
    with stop_on_signals() as stop, _worker(settings) as worker:
        return worker.until_stopped(stop, lambda _turn: False, late=exits.FAILED)


def drain(options: argparse.Namespace) -> int:
    """Relay until a strong read finds nothing to send outside of paused topics; print what stays."""
    settings = WorkerSettings.read(vars(options))
    with stop_on_signals() as stop, _worker(settings) as worker:
        if options.deadline is not None:
            timer = threading.Timer(options.deadline, stop.set)
            timer.daemon = True
            timer.start()
        store = worker.store
        drained = until_drained(store, lambda: store.shards, settings.poll_interval)
        if (code := worker.until_stopped(stop, drained, late=exits.WORK_LEFT)) != exits.DONE:
            return code
    left = store.unsent()
    for each in left:
        print(f"{each.count} {each.state} of {each.topic}")
    if any(map(is_work, left)):
        print("not drained: stopped with work left")
        return exits.WORK_LEFT
    print("drained")
    return exits.DONE


@contextlib.contextmanager
def _worker(settings: WorkerSettings) -> Iterator[App]:
    """Configure this process for a worker, and make it. Raises NotReached."""
    logs.configure(settings.log_format, settings.log_level)
    metrics = datadog.from_environment()
    try:
        worker = App(
            settings,
            id=worker_id(),
            metrics=metrics,
            beat=Heartbeat(Path(settings.heartbeat_file)),
        )
        # What the imports have made lives as long as the process: no collection need look at it again, which took 30 ms
        # of CPU every few thousand tasks.
        gc.freeze()
        yield worker
    finally:
        metrics.stop()


def worker_id() -> str:
    """Return an id that no other process has, now or later: the host's name for people, and a random part."""
    return f"{socket.gethostname()[:46]}-{uuid.uuid4().hex[:12]}"

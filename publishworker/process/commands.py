"""`run` and `drain`: read the settings, run the relay in this process, print the result."""

import argparse
import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from outbox.admin import backlog
from outbox.admin.table import TaskTable
from outbox.program import logs
from outbox.program.settings import unknown_variables
from outbox.program.signals import handled
from outbox.program.terminal import say
from publishworker.log import ThrottledLog, log
from publishworker.process import exits
from publishworker.process.app import App, until_drained, worker_id
from publishworker.process.worker_settings import WorkerSettings
from publishworker.spanner.unsent import any_to_send
from publishworker.telemetry.clients import client
from publishworker.telemetry.metrics import Metrics


def run(options: argparse.Namespace) -> int:
    """Publish tasks until a signal; return the exit code."""
    settings = WorkerSettings.read(vars(options))
    with _worker(settings) as (worker, stop):
        return worker.until_stopped(stop, lambda _turn: False, timeout_exit_code=exits.FAILED)


def drain(options: argparse.Namespace) -> int:
    """Publish until a strong read finds no pending or retrying task that may be sent, and print what remains."""
    settings = WorkerSettings.read(vars(options))
    with _worker(settings) as (worker, stop):
        if options.deadline is not None:
            timer = threading.Timer(options.deadline, stop.set)
            timer.daemon = True
            timer.start()
        store = worker.store
        drained = until_drained(store, lambda: store.layouts[0].ids, settings.poll_interval)
        if (code := worker.until_stopped(stop, drained, timeout_exit_code=exits.WORK_LEFT)) != exits.DONE:
            return code
    work_left = any_to_send(store)
    found = backlog.read_unsent(TaskTable(store.database))
    at_least = {topic for topic, line in found.topics().items() if line.at_least}
    for (topic, state), number in sorted(found.by_topic_and_state().items()):
        say(f"{'at least ' if topic in at_least else ''}{number} {state} in topic {topic}")
    if work_left:
        why = f". The last turn failed: {worker.failure}" if worker.failure else ""
        say(f"not drained: stopped with work left{why}")
        return exits.WORK_LEFT
    if any_to_send(store, misrouted=True):
        say("not drained: a topic with tasks has an invalid route, see the log")
        return exits.WORK_LEFT
    say("drained")
    return exits.DONE


@contextlib.contextmanager
def _worker(settings: WorkerSettings) -> Iterator[tuple[App, threading.Event]]:
    """Configure this process. Yield the worker, and an event that a signal sets; until then, it ends the process."""
    logs.configure(settings.log_format, settings.log_level)
    for sentence in unknown_variables():
        log.warning("%s", sentence, extra={"action": "unknown_variable"})
    metrics = Metrics(client(settings.metrics))
    with contextlib.ExitStack() as stack:
        stack.callback(metrics.stop)
        id = worker_id()
        worker = App(
            settings,
            id=id,
            metrics=metrics,
            touch_file=heartbeat_file(Path(settings.heartbeat_file)),
        )
        collect_garbage_rarely()
        with stop_on_signals() as stop, stack.pop_all():
            yield worker, stop


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets. A second one ends the process with code 128 + signal.

    The default handlers are not enough, because a process with ID 1, as in a container, has none.
    """
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        name = signal.Signals(number).name
        log.info("%s: stopping. A second signal ends the process at once.", name, extra={"action": "stopping"})

    with handled((signal.SIGTERM, signal.SIGINT), on_signal):
        yield stop


def heartbeat_file(path: Path) -> Callable[[], None]:
    """Return a function that touches the file whose age `healthcheck` reads. A failure is logged and stops nothing."""
    throttled_log = ThrottledLog()

    def touch() -> None:
        try:
            path.touch()
        except OSError as error:
            reason = f"Heartbeat file {path} cannot be written ({error.strerror})"
            throttled_log.log("heartbeat", "", f"{reason}. `publishworker healthcheck` will fail.")

    return touch


def collect_garbage_rarely() -> None:
    """Let the garbage collector skip the objects of start-up, whose scan takes 30 ms of CPU, and run rarely."""
    gc.freeze()
    gc.set_threshold(50_000)

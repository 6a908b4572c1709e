"""Signals set an event. Work on a thread then gets a limited time to end."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from outbox.program.signals import handled

_log = logging.getLogger("publishworker")
#: Seconds between checks of the thread.
_CHECK_SECONDS = 0.2


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
        _log.info("%s: stopping. A second signal ends the process at once.", name, extra={"action": "stopping"})

    with handled((signal.SIGTERM, signal.SIGINT), on_signal):
        yield stop


def run_on_thread(
    work: Callable[[], None], stop: threading.Event, shutdown_timeout: float, on_stop: Callable[[], None]
) -> bool:
    """Call `work` on a thread; return whether it ended within `shutdown_timeout` seconds after `stop`.

    `on_stop` is called when `stop` is set, to end a pause of `work`. An exception of `work` is raised here.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="worker", daemon=True)
    thread.start()
    while thread.is_alive() and not stop.is_set():
        thread.join(_CHECK_SECONDS)
    on_stop()
    thread.join(shutdown_timeout)
    if errors:
        raise errors[0]
    return not thread.is_alive()

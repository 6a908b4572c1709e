"""Run something on a thread until it ends or a signal asks to stop, within a time limit."""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_log = logging.getLogger("publishworker")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Seconds between looks at the thread; a signal interrupts the wait at once.
_LOOK = 0.2


def run_until_stopped(work: Callable[[threading.Event], None], drain_timeout: float) -> bool:
    """Call `work(stop)` on a thread of its own; return whether it ended in time.

    SIGTERM or SIGINT sets `stop`; `work` then has `drain_timeout` seconds to return. A second signal kills: the
    handlers that were there before are back after the first. What `work` raises is raised here.
    """
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(stop)
        except BaseException as error:
            errors.append(error)

    previous: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for each, handler in previous.items():
            signal.signal(each, handler)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stop.set()
        restore()
        _log.info(
            "%s: finishing what is in flight, at most %g s; a second signal kills",
            signal.Signals(number).name, drain_timeout, extra={"action": "stopping"},
        )  # fmt: skip

    for each in _SIGNALS:
        previous[each] = signal.signal(each, on_signal)
    thread = threading.Thread(target=run, name="loop", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not stop.is_set():
            thread.join(_LOOK)
        thread.join(drain_timeout)
    finally:
        restore()
    if errors:
        raise errors[0]
    return not thread.is_alive()

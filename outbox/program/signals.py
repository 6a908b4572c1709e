"""Signals during the start of a command. Standard library only, so that a command can call this before its imports."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """During the block, call `handler` at these signals, and afterwards what was called before."""
    previous = {each: signal.signal(each, handler) for each in numbers}
    try:
        yield
    finally:
        for each, former in previous.items():
            signal.signal(each, former)


@contextlib.contextmanager
def exit_on(*numbers: signal.Signals, code: int | None = None) -> Iterator[None]:
    """During the block, let these signals end the process at once, with `code` or 128 + signal. Nothing is cleaned up.

    The default action is not enough, because process 1, as in a container, has none. An exception is not enough either,
    because Python drops an exception that is raised in a callback, and imports have such callbacks. Only the main
    thread can set handlers, so the block changes nothing on another thread.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number if code is None else code)

    with handled(numbers if threading.current_thread() is threading.main_thread() else (), end):
        yield

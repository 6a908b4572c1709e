"""The start of a program: imports at first use, optional packages, and signals. Standard library only.

A command can import this module before all others.
"""

import contextlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import FrameType
from typing import Any

from outbox.errors import OutboxError


def importer(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: the names of each module, or for "" modules of it or of its folders."""
    module_of = {name.rpartition(".")[2]: module or name for module, names in modules.items() for name in names.split()}
    own = set(modules.get("", "").split())

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{module_of[name]}")
        found = module if module_of[name] in own else getattr(module, name)
        setattr(sys.modules[package], name, found)  # later uses of the name do not call this function
        return found

    return find


def need(package: str, user: str, extra: str) -> None:
    """Raise OutboxError, which says what to install, if an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise OutboxError(f"{user} needs {package}. Install it: {install(extra)}")


def install(extra: str) -> str:
    """Return how to install an extra."""
    return f"pip install 'spanner-outbox[{extra}]' (before the first release: '/path/to/the/clone[{extra}]')"


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

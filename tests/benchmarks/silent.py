"""Processes whose report at their end does not mix with the tables on our stdout."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support import processes, relays


def started(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[processes.Process]:
    """Start `python -m module arguments`, as `tests.support.processes` does."""
    return _silent(processes.started(module, *arguments, environment=environment))


def worker(
    emulators: Emulators, database: Database, *arguments: str, **environment: str
) -> AbstractContextManager[processes.Process]:
    """Start `publishworker run` with default settings, as `tests.support.relays` does."""
    return _silent(relays.worker(emulators, database, *arguments, **environment))


def answer(module: str, *arguments: str, environment: Mapping[str, str], seconds: float) -> Any:
    """Run a process to its end and return the JSON that it prints. Raises RuntimeError with its errors."""
    with started(module, *arguments, environment=environment) as process:
        if process.wait(seconds) != 0:
            raise RuntimeError(f"{module} {' '.join(arguments)}: {process.stderr}")
        return json.loads(process.stdout)


@contextlib.contextmanager
def _silent(running: AbstractContextManager[processes.Process]) -> Iterator[processes.Process]:
    process = running.__enter__()
    try:
        yield process
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            running.__exit__(*sys.exc_info())

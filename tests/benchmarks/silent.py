"""Processes whose report at their end does not mix with the tables on our stdout."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support import processes


@contextlib.contextmanager
def started(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[processes.Process]:
    """Start `python -m module arguments`, as `tests.support.processes` does, and drop its report."""
    running = processes.started(module, *arguments, environment=environment)
    process = running.__enter__()
    try:
        yield process
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            running.__exit__(*sys.exc_info())


def answer(module: str, *arguments: str, environment: Mapping[str, str], seconds: float) -> Any:
    """Run a process to its end and return the JSON that it prints. Raises RuntimeError with its errors."""
    with started(module, *arguments, environment=environment) as process:
        if process.wait(seconds) != 0:
            raise RuntimeError(f"{module} {' '.join(arguments)}: {process.stderr}")
        return json.loads(process.stdout)

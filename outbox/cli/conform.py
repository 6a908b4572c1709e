"""`outbox conform`: compare traces of workers with the specification of the relay protocol."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from outbox.cli import flags
from outbox.errors import SettingError
from outbox.program.terminal import counted, joined, say

#: The names of steps (docs/architecture/specification.md).
STEPS = ("route", "poll", "claim", "lock", "publish", "answer", "mark", "commit", "fail", "give up")
DESCRIPTION = """\
Compare what workers did with the specification of the relay protocol. Each FILE is a trace
that `publishworker run --trace FILE` has written. Pass the files of all workers together,
because otherwise the commits of the other workers look like changes without a cause. So do
those of `publishworker drain`, which writes no trace. The exit code is 1 if a step is not
allowed. Then the first such step is printed with the states before and after it.

    outbox conform worker-1.jsonl worker-2.jsonl"""


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "conform", "compare traces of workers with the specification", DESCRIPTION, run)
    parser.add_argument("files", nargs="+", metavar="FILE", help="Traces of workers, as JSON lines.")


def run(options: argparse.Namespace) -> int:
    """Print what was compared, and the first difference; return 1 if there is one. Raises SettingError."""
    from outbox.specification.conformance import conform  # noqa: PLC0415 - only this command needs it

    try:
        found = conform(step for file in dict.fromkeys(options.files) for step in _steps(file))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingError(
            f"the steps of a worker do not fit together ({type(error).__name__}: {error}). "
            "docs/architecture/specification.md lists the members of each step"
        ) from None
    if not found.workers:
        raise SettingError("the files have no step of a worker, so nothing was compared")
    compared = f"{counted(found.workers, 'worker')}, {counted(found.transactions, 'transaction')} compared"
    say(f"{compared}, {found.skipped:,} not specified, {counted(len(found.differences), 'difference')}")
    if found.differences:
        say(joined(*found.differences[0].splitlines()))
    return int(bool(found.differences))


def _steps(file: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a trace. The last line may be incomplete, because the worker was killed."""
    for number, line in enumerate(flags.read_lines(file), 1):
        if line.endswith(b"\n"):
            try:
                step = json.loads(line)
            except (ValueError, RecursionError):
                raise SettingError(f"{file!r}, line {number:,} is not JSON") from None
            if not _is_step(step):
                raise SettingError(f"{file!r}, line {number:,} is no step of a trace")
            yield step


def _is_step(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("worker"), str)
        and isinstance(value.get("n"), int)
        and value.get("step") in STEPS
    )

"""Change many tasks: ask first, show progress, stop between two transactions, report, and print how to continue."""

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from outbox import admin
from outbox.admin import flags
from outbox.base.times import spoken
from outbox.base.values import counted
from outbox.errors import OutboxError
from outbox.program.output import named, note
from outbox.program.signals import handled
from outbox.program.terminal import Escaped, as_json, say

#: The commands ask for confirmation above this number of tasks.
CONFIRM_ABOVE = 1_000
_NEWCOMER = "because they match only since the preview. Run the command again"
#: Seconds between two lines about the progress.
PROGRESS_SECONDS = 10.0
#: Characters of the progress bar.
BAR = 30
#: What an error leaves open, for each verb of a Report.
_LAST_CHUNK = {
    "changed": "The transaction in progress changed all of its tasks or none",
    "published": "The tasks in progress may be published, and will be published again",
}


@dataclasses.dataclass(slots=True)
class Report:
    """The outcomes of all transactions together. `outbox.admin.changes.Outcome` is the outcome of one."""

    changed: int = 0
    #: What happens to the tasks.
    verb: str = "changed"
    unchanged: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)
    heads: set[str] = dataclasses.field(default_factory=set)

    def __str__(self) -> str:
        """Return text such as `1,500 tasks changed so far`."""
        return f"{counted(self.changed, 'task')} {self.verb} so far"

    @property
    def handled(self) -> int:
        """Return the number of tasks that the transactions were about."""
        return self.changed + len(self.unchanged) + len(self.missing)

    def explain(self, reasons: dict[str, str], otherwise: str) -> int:
        """Print on stderr which tasks were not changed, and why. Return 1 if one is missing or has the wrong state.

        `reasons` has the text for each state that is not an error. Other states use `otherwise`, a text with the
        placeholder {state}, and make the result 1.
        """
        for state in sorted(set(self.unchanged.values())):
            ids = [id for id, its in self.unchanged.items() if its == state]
            why = (reasons | {admin.changes.NEWCOMER: _NEWCOMER}).get(state) or otherwise.format(state=state)
            note(f"{counted(len(ids), 'task')} not {self.verb}, {why}: {named(ids)}")
        if self.missing:
            note(f"{counted(len(self.missing), 'task')} not in the table: {named(self.missing)}")
        return 1 if self.missing or set(self.unchanged.values()) - set(reasons) else 0


def carry_out(
    outcomes: "Iterator[admin.changes.Outcome]",
    continue_command: str,
    record_stop: Callable[[], None] = lambda: None,
    *,
    total: int = 0,
    verb: str = "changed",
) -> Report:
    """Run all transactions and return their outcomes. Record a stop by a signal.

    Show the progress towards about `total` tasks as a bar at a terminal, and elsewhere by a line from time to time.

    The first SIGINT or SIGTERM stops after the current transaction, a second one at once. The current transaction then
    changes all of its tasks or none. Raises OutboxError after a signal, and the errors of a transaction. Their messages
    contain the number of changed tasks and `continue_command`, the command that continues.
    """
    report = Report(verb=verb)
    with _stop_on_signals() as received, _progress(total) as show:
        try:
            for outcome in outcomes:
                report.changed += len(outcome.changed)
                report.unchanged |= outcome.unchanged
                report.missing += outcome.missing
                report.heads |= outcome.heads
                show(report)
                if outcome.warning:
                    note(outcome.warning)
                if received:
                    break
            else:
                return report
        except OutboxError as error:
            raise type(error)(
                f"{error}. {report}. {_LAST_CHUNK[verb]}. To continue, run: {continue_command}"
            ) from error
    record_stop()
    name = signal.Signals(received[0]).name
    raise OutboxError(f"stopped by {name}. {report}. To continue, run: {continue_command}")


def resume(
    table: "admin.table.TaskTable", options: argparse.Namespace, id: str, author: "admin.operations.Author"
) -> int:
    """Execute the chunks that are left of a recorded operation, and print how many tasks it changed.

    Return 1 if a task was not changed. Raises OutboxError.
    """
    outcomes = admin.continuing.resume(table, id)
    operation = admin.operations.found(table, id)
    verb = "published" if operation.operation == "resend" else "changed"
    total = (operation.selected or 0) - (operation.tasks or 0)
    report = execute(table, options, outcomes, id, author, total=total, verb=verb)
    if options.json:
        left_out = {"unchanged": report.unchanged, "missing": report.missing}
        say(as_json({"operation": id, "tasks": report.changed, **left_out}))
    else:
        say(f"{verb}: {counted(report.changed, 'task')}")
    return report.explain({}, "{state}")


def execute(
    table: "admin.table.TaskTable",
    options: argparse.Namespace,
    outcomes: "Iterator[admin.changes.Outcome]",
    id: str,
    author: "admin.operations.Author",
    *,
    is_whole: bool = True,
    **shown: Any,
) -> Report:
    """Execute the chunks of a recorded operation. Print before, and in an error, how to continue it.

    Unless the record `is_whole`, because it does not have all IDs, only the same command can continue.
    """
    again = flags.command_line("operations continue", id, **flags.place(options))
    command = again if is_whole else "the same command again"
    if shown["total"] > admin.changes.CHUNK:
        note(f"if the process is killed, continue with: {command}")
    return carry_out(outcomes, command, functools.partial(admin.operations.stop, table, id, author), **shown)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Report], None]]:
    """Yield a function that shows the progress. At a terminal, the bar is gone after the block."""
    if not (total and sys.stderr.isatty()):
        next_line = time.monotonic() + PROGRESS_SECONDS

        def show(report: Report) -> None:
            nonlocal next_line
            if time.monotonic() >= next_line:
                note(str(report))
                next_line = time.monotonic() + PROGRESS_SECONDS

        yield show
        return
    begin = time.monotonic()

    def draw(report: Report) -> None:
        part = min(report.handled / total, 1.0)
        left = (time.monotonic() - begin) * (1 / part - 1) if part else 0.0
        bar = f"[{'#' * round(part * BAR):<{BAR}}] {report.handled:,} of {total:,} tasks, {spoken(left)} left"
        say(Escaped(f"\r{bar}\x1b[K"), stream=sys.stderr, end="")

    try:
        yield draw
    finally:
        say(Escaped("\r\x1b[K"), stream=sys.stderr, end="")


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """Yield a list to which the first SIGINT or SIGTERM is appended. A second one has its usual effect."""
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        handling.close()
        os.write(sys.stderr.fileno(), b"\noutbox: stopping after the current transaction; repeat to stop at once\n")

    with contextlib.ExitStack() as handling:
        handling.enter_context(handled((signal.SIGINT, signal.SIGTERM), stop))
        yield received

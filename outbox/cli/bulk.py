"""Change many tasks: ask first, show progress, stop between two transactions, report, and print how to continue."""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from outbox import admin
from outbox.base.values import counted
from outbox.errors import OutboxError
from outbox.program.output import named, note
from outbox.program.signals import handled

#: The commands ask for confirmation above this number of tasks.
CONFIRM_ABOVE = 1_000
_NEWCOMER = "because they match only since the preview. Run the command again"
#: Seconds between two lines about the progress.
PROGRESS_SECONDS = 10.0


@dataclasses.dataclass(slots=True)
class Report:
    """The outcomes of all transactions together. `outbox.admin.changes.Outcome` is the outcome of one."""

    changed: int = 0
    unchanged: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)
    heads: set[str] = dataclasses.field(default_factory=set)

    def explain(self, reasons: dict[str, str], otherwise: str) -> int:
        """Print on stderr which tasks were not changed, and why. Return 1 if one is missing or has the wrong state.

        `reasons` has the text for each state that is not an error. Other states use `otherwise`, a text with the
        placeholder {state}, and make the result 1.
        """
        for state in sorted(set(self.unchanged.values())):
            ids = [id for id, its in self.unchanged.items() if its == state]
            why = (reasons | {admin.changes.NEWCOMER: _NEWCOMER}).get(state) or otherwise.format(state=state)
            note(f"{counted(len(ids), 'task')} not changed, {why}: {named(ids)}")
        if self.missing:
            note(f"{counted(len(self.missing), 'task')} not in the table: {named(self.missing)}")
        return 1 if self.missing or set(self.unchanged.values()) - set(reasons) else 0


def carry_out(
    outcomes: "Iterator[admin.changes.Outcome]", continue_command: str, record_stop: Callable[[], None] = lambda: None
) -> Report:
    """Run all transactions and return their outcomes. Print the progress from time to time. Record a stop by a signal.

    The first SIGINT or SIGTERM stops after the current transaction, a second one at once. The current transaction then
    changes all of its tasks or none. Raises OutboxError after a signal, and the errors of a transaction. Their messages
    contain the number of changed tasks and `continue_command`, the command that continues.
    """
    report, next_progress = Report(), time.monotonic() + PROGRESS_SECONDS
    with _stop_on_signals() as received:
        try:
            for outcome in outcomes:
                report.changed += len(outcome.changed)
                report.unchanged |= outcome.unchanged
                report.missing += outcome.missing
                report.heads |= outcome.heads
                if time.monotonic() >= next_progress:
                    note(f"{counted(report.changed, 'task')} changed so far")
                    next_progress = time.monotonic() + PROGRESS_SECONDS
                if outcome.warning:
                    note(outcome.warning)
                if received:
                    break
            else:
                return report
        except OutboxError as error:
            raise type(error)(
                f"{error}. {counted(report.changed, 'task')} changed so far. The transaction in progress changed all "
                f"of its tasks or none. To continue, run: {continue_command}"
            ) from error
    with contextlib.suppress(OutboxError):  # no task was changed yet
        record_stop()
    name = signal.Signals(received[0]).name
    raise OutboxError(
        f"stopped by {name}. {counted(report.changed, 'task')} changed so far. To continue, run: {continue_command}"
    )


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

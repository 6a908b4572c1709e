"""Changing many tasks: ask first, show progress, stop between two chunks, say what was done and where to go on."""

import contextlib
import dataclasses
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from outbox.cli.output import named, note
from outbox.errors import OutboxError, SettingError

if TYPE_CHECKING:
    from outbox.admin.changes import Count, Outcome

#: More tasks than this are changed only after a question.
UNASKED = 1_000


@dataclasses.dataclass(slots=True)
class Report:
    """What all chunks did together. Tasks that were not named may be left, or be gone: they left the selection."""

    changed: int = 0
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)

    def tell(self, done: str) -> None:
        """Print how many were `done`."""
        print(f"{done} {_tasks(self.changed)}")

    def explain(self, reasons: Mapping[str, str], otherwise: str) -> int:
        """Say on stderr which named tasks were not changed, and why; return 1 if one is not there or does not fit.

        `reasons` say of some states why a task is rightly left, `otherwise` of another `{state}` why it does not fit.
        """
        for state in sorted(set(self.left.values())):
            ids = [id for id, its in self.left.items() if its == state]
            note(f"{_tasks(len(ids))} left, {reasons.get(state) or otherwise.format(state=state)}: {named(ids)}")
        if self.missing:
            note(f"{_tasks(len(self.missing))} not in the table: {named(self.missing)}")
        return 1 if self.missing or set(self.left.values()) - set(reasons) else 0

    def so_far(self) -> str:
        """Return what was done when the work ended early."""
        return f"{_tasks(self.changed)} changed so far"


def confirm(question: str, *, yes: bool) -> None:
    """Return if `yes`, or if the person at the terminal says so. Raises SettingError, OutboxError."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingError(f"{question} Nobody can be asked here: give --yes. Nothing was changed")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise OutboxError("not confirmed: nothing was changed")


def note_size(count: "Count") -> None:
    """Say of the DML of a dry run if it is too much for one statement."""
    if count.number > UNASKED:
        note(
            "so many are beyond what one statement may change (80,000 mutations, several for each task): without "
            "--dry-run they go in portions"
        )


def carry_out(outcomes: "Iterator[Outcome]", count: "Count", go_on: str) -> Report:
    """Run the chunks to their end.

    A first SIGINT or SIGTERM ends it when the chunk in work is done, a second one at once: that chunk is either done or
    not. Raises OutboxError for a signal, and what a chunk raises: both say what was done, and `go_on`.
    """
    report = Report()
    with _stop_on_signals() as received, _progress(count) as progress:
        try:
            for outcome in outcomes:
                report.changed += len(outcome.changed)
                report.left |= outcome.left
                report.missing += outcome.missing
                progress(len(outcome.changed))
                if outcome.warning:
                    note(outcome.warning)
                if received:
                    break
            else:
                return report
        except OutboxError as error:
            raise type(error)(
                f"{error}. {report.so_far()}, beside the chunk in work, which is changed wholly or not at all; go on "
                f"with: {go_on}"
            ) from error
    raise OutboxError(f"stopped by {signal.Signals(received[0]).name}. {report.so_far()}; go on with: {go_on}")


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """Yield a list that a first SIGINT or SIGTERM makes non-empty; a second one does what it always does."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        restore()
        os.write(sys.stderr.fileno(), b"\noutbox: stopping after the chunk in work; once more stops at once\n")

    for number in before:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        restore()


@contextlib.contextmanager
def _progress(count: "Count") -> Iterator[Callable[[int], object]]:
    """Yield what moves the bar on; it is drawn on a terminal only, and only where tqdm is installed."""
    if importlib.util.find_spec("tqdm") is None:
        yield _Counter(count).add
        return
    from tqdm import tqdm  # noqa: PLC0415 - an application that imports outbox has it not

    total = None if count.at_least else count.number
    with tqdm(total=total, unit=" tasks", file=sys.stderr, disable=None) as bar:
        yield bar.update


class _Counter:
    """Progress without tqdm: a number on a terminal, nothing elsewhere."""

    def __init__(self, count: "Count") -> None:
        """Count up to `count`."""
        self._count, self._done = count, 0

    def add(self, number: int) -> None:
        """Show `number` more."""
        self._done += number
        if sys.stderr.isatty():
            print(f"\r{self._done:,} of {self._count}", end="", file=sys.stderr, flush=True)


def _tasks(number: int) -> str:
    return f"{number:,} task{'' if number == 1 else 's'}"

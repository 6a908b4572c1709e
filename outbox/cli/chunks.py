"""Changing many tasks: ask first, show progress, stop between two chunks, say what was done and where to go on."""

import contextlib
import dataclasses
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from outbox.cli.output import cell, note
from outbox.errors import OutboxError, SettingError

if TYPE_CHECKING:
    from outbox.operations.changes import Count, Outcome

#: More tasks than this are changed only after a question.
UNASKED = 1_000
#: Ids named in a sentence.
NAMES = 10


@dataclasses.dataclass(slots=True)
class Report:
    """What all chunks did together; `left` and `missing` are of ids that were given."""

    changed: int = 0
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)

    def tell(self, done: str) -> int:
        """Print how many were `done`, and on stderr what was not; return 1 if an id is not there, else 0."""
        print(f"{done} {_tasks(self.changed)}")
        for state in sorted(set(self.left.values())):
            ids = [id for id, its in self.left.items() if its == state]
            note(f"left as they are, because they are {state}: {_named(ids)}")
        if self.missing:
            note(f"not in the table: {_named(self.missing)}")
        return 1 if self.missing else 0

    def so_far(self, go_on: str) -> str:
        """Return what was done when the work ended early, and how to go on."""
        return f"{_tasks(self.changed)} changed so far, each of them wholly; go on with: {go_on}"


def confirm(question: str, *, yes: bool) -> None:
    """Return if `yes`, or if the person at the terminal says so. Raises SettingError, OutboxError."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingError(f"{question} Nobody can be asked here: give --yes. Nothing was changed")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise OutboxError("not confirmed: nothing was changed")


def carry_out(
    outcomes: "Iterator[Outcome]", count: "Count", go_on: str, each: "Callable[[Outcome], None]" = lambda _: None
) -> Report:
    """Run the chunks to their end; `each` is called after each commit.

    A first SIGINT or SIGTERM ends it when the chunk in work is done, a second one at once: that chunk is either done or
    not. Raises OutboxError for a signal, and what a chunk raises: both say what was done, and `go_on`.
    """
    report = Report()
    with _stop_on_signals() as stop, _progress(count) as progress:
        try:
            for outcome in outcomes:
                report.changed += len(outcome.changed)
                report.left |= outcome.left
                report.missing += outcome.missing
                each(outcome)
                progress(len(outcome.changed))
                if stop:
                    break
        except OutboxError as error:
            raise type(error)(f"{error}. {report.so_far(go_on)}") from error
    if stop:
        raise OutboxError(f"stopped by {signal.Signals(stop[0]).name}. {report.so_far(go_on)}")
    return report


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
        yield lambda _: None
        return
    from tqdm import tqdm  # noqa: PLC0415 - an application that imports outbox has it not

    total = None if count.at_least else count.number
    with tqdm(total=total, unit=" tasks", file=sys.stderr, disable=None) as bar:
        yield bar.update


def _tasks(number: int) -> str:
    return f"{number:,} task{'' if number == 1 else 's'}"


def _named(ids: list[str]) -> str:
    names = ", ".join(cell(id) for id in ids[:NAMES])
    return names + (f" and {len(ids) - NAMES:,} more" if len(ids) > NAMES else "")

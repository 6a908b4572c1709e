"""Change many tasks: confirm, show progress, stop between two chunks, report, and print how to continue."""

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

#: The commands ask for confirmation above this number of tasks. One DML statement could not change many more.
CONFIRM_ABOVE = 1_000


@dataclasses.dataclass(slots=True)
class Report:
    """The outcomes of all chunks. `unchanged`: states of tasks that no longer match. `missing`: IDs without a row.

    `heads`: IDs of the key heads that block unchanged tasks.
    """

    changed: int = 0
    unchanged: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)
    heads: set[str] = dataclasses.field(default_factory=set)

    def print_changed(self, done: str) -> None:
        """Print how many tasks were `done`."""
        print(f"{done} {_tasks(self.changed)}")

    def explain(self, reasons: Mapping[str, str], otherwise: str) -> int:
        """Print on stderr which tasks were not changed, and why. Return 1 if one is missing or has the wrong state.

        `reasons` has a text for each state in which a task need not be changed. `otherwise` is the text for the other
        states, with the placeholder {state}.
        """
        for state in sorted(set(self.unchanged.values())):
            ids = [id for id, its in self.unchanged.items() if its == state]
            note(f"{_tasks(len(ids))} not changed, {reasons.get(state) or otherwise.format(state=state)}: {named(ids)}")
        if self.missing:
            note(f"{_tasks(len(self.missing))} not in the table: {named(self.missing)}")
        return 1 if self.missing or set(self.unchanged.values()) - set(reasons) else 0


def confirm(question: str, *, yes: bool) -> None:
    """Return if `yes`, or if the user confirms at the terminal. Raises SettingError, OutboxError."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingError(f"{question} Not a terminal. Pass --yes to confirm. Nothing was changed")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise OutboxError("not confirmed. Nothing was changed")


def print_dry_run(count: "Count", done: str, dml: str) -> None:
    """Print how many tasks would be `done`, and the equivalent DML. Note if they are too many for one statement."""
    print(f"{count} would be {done}. Equivalent DML:\n{dml}")
    if count.number > CONFIRM_ABOVE:
        note(
            "these are too many tasks for one statement (80,000 mutations, several for each task). Without --dry-run, "
            "the command changes them in several transactions. With gcloud, use --enable-partitioned-dml"
        )


def carry_out(outcomes: "Iterator[Outcome]", count: "Count", go_on: str) -> Report:
    """Run all chunks and return their outcomes.

    The first SIGINT or SIGTERM stops after the current chunk, a second one at once. The current chunk is then changed
    as a whole or not at all. Raises OutboxError after a signal, and the errors of a chunk. Their messages contain the
    number of changed tasks and `go_on`, the command that continues.
    """
    report = Report()
    with _stop_on_signals() as received, _progress(count) as progress:
        try:
            for outcome in outcomes:
                report.changed += len(outcome.changed)
                report.unchanged |= outcome.unchanged
                report.missing += outcome.missing
                report.heads |= outcome.heads
                progress(len(outcome.changed))
                if outcome.warning:
                    note(outcome.warning)
                if received:
                    break
            else:
                return report
        except OutboxError as error:
            raise type(error)(
                f"{error}. {_tasks(report.changed)} changed so far. The transaction in progress changed all of its "
                f"tasks or none. To continue, run: {go_on}"
            ) from error
    name = signal.Signals(received[0]).name
    raise OutboxError(f"stopped by {name}. {_tasks(report.changed)} changed so far. To continue, run: {go_on}")


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """Yield a list to which the first SIGINT or SIGTERM is appended. A second one has its usual effect."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        restore()
        os.write(sys.stderr.fileno(), b"\noutbox: stopping after the current transaction; repeat to stop at once\n")

    for number in before:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        restore()


@contextlib.contextmanager
def _progress(count: "Count") -> Iterator[Callable[[int], object]]:
    """Yield a function that advances the progress bar. The bar needs a terminal and tqdm."""
    if importlib.util.find_spec("tqdm") is None:
        yield lambda _number: None
        return
    from tqdm import tqdm  # noqa: PLC0415 - optional

    total = None if count.at_least else count.number
    with tqdm(total=total, unit=" tasks", file=sys.stderr, disable=None) as bar:
        yield bar.update


def _tasks(number: int) -> str:
    return f"{number:,} task{'' if number == 1 else 's'}"

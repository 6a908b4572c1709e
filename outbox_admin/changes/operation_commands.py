"""Execute an operation on many tasks, and `outbox operations`: list the operations, and continue one.

An operation shows its progress, stops between two transactions, reports, and prints how to continue.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import outbox_admin as admin
from outbox.base.start import handled
from outbox.base.values import counted, shown, spoken
from outbox.errors import OutboxError
from outbox.program import logs
from outbox.program.settings import one_of
from outbox.program.terminal import Escaped, as_json, named, note, say, shortened, table
from outbox.table.ddl import OPERATION_NAMES
from outbox_admin import flags, value_types
from outbox_admin.change_kinds import KINDS, why_unchanged
from outbox_admin.tasks import task_flags

DESCRIPTION = """\
List the last changes, newest first, with the account, the reason, the selection and the
number of changed tasks. A change without FINISHED is still running, or ended early. A
filter is compared with about the last 16,000 changes.

    outbox operations --operation cancel --topic orders --principal jane"""
CONTINUE_DESCRIPTION = """\
Continue a retry, resend, purge, cancel or restore that was stopped or whose process is gone,
after the last tasks that are done. If another process still works on the operation, one of
them ends, and no task is changed twice.

    outbox operations continue 4f0c..."""

HEADS = ("ID", "STARTED", "FINISHED", "OPERATION", "TASKS", "PRINCIPAL", "SELECTION", "REASON")
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
    """The outcomes of all transactions together: the number of changed tasks, and why others are unchanged, by ID."""

    #: What happens to the tasks.
    verb: str
    changed: int = 0
    #: The tasks that the preview counted and that did not match any more.
    left: int = 0
    unchanged: dict[str, str] = dataclasses.field(default_factory=dict)
    heads: set[str] = dataclasses.field(default_factory=set)

    def __str__(self) -> str:
        """Return text such as `1,500 tasks changed so far`."""
        return f"{counted(self.changed, 'task')} {self.verb} so far"


def add(commands: Any) -> None:
    parser = flags.command(commands, "operations", "list who changed what, and when", DESCRIPTION, _run_operations)
    kind = one_of(*OPERATION_NAMES)
    text = "Only operations with this name: {}"
    flags.add(parser, "--operation", kind, text, metavar="NAME", choices=OPERATION_NAMES)
    flags.add(parser, "--topic", value_types.TOPIC, "Only operations whose selection names this topic", metavar="TOPIC")
    text = "Only operations by an account that contains this text, ignoring case"
    flags.add(parser, "--principal", value_types.TEXT, text, metavar="TEXT")
    flags.add(parser, "--limit", value_types.LIMIT, "Max operations: {} (default 20)", metavar="N", default=20)
    flags.switch(parser, "--json", "Print one JSON object per line instead of a table")
    actions = parser.add_subparsers(metavar="ACTION")
    continuing = flags.command(actions, "continue", "continue a stopped one", CONTINUE_DESCRIPTION, run_continue)
    flags.add(continuing, "id", value_types.ID, f"The ID of the operation. {task_flags.PREFIX_HELP}", metavar="ID")
    flags.switch(continuing, "--dry-run", "Only print the operation, and how far it is")
    # Without a default, because it would overwrite the flag before the word `continue`.
    continuing.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="Print one JSON object.")
    flags.add_reason(continuing)


def _run_operations(options: argparse.Namespace) -> None:
    task_table = flags.open_table(options)
    now = task_table.now()
    narrowing = {name: vars(options)[name] for name in ("operation", "topic", "principal")}
    latest = admin.operations.latest(task_table, options.limit + 1, at=now, **narrowing)
    operations = latest[: options.limit]
    if options.json:
        for each in operations:
            of_json = {"selection": admin.operations.parsed(each.selection), "unchanged": each.unchanged}
            say(as_json({**each._asdict(), **of_json}))
    else:
        rows = [
            [each.id, each.started_at, each.finished_at, each.operation, each.tasks, each.principal,
             shortened(each.selection), each.reason]
            for each in operations
        ]  # fmt: skip
        say(f"as of {shown(now)}", table(HEADS, rows) if rows else "No operations.")
    for each in operations if not options.json else ():
        if each.operation in KINDS and each.state(now) in ("stopped", "interrupted"):
            note(f"a {each.operation} is {each.state(now)}. To continue it, run: outbox operations continue {each.id}")
    if len(latest) > options.limit:
        note(f"there are more than {counted(options.limit, 'operation')}. Raise --limit to list older ones")


def run_continue(options: argparse.Namespace) -> int:
    """Continue an operation; return 0, or 1 if a task was not changed. Raises SettingError, NotReached, OutboxError."""
    task_table, author = flags.open_table(options), flags.author(options)
    options.id = task_flags.full_operation_id(task_table, options, options.id)
    operation = admin.execution.continued(task_table, options.id)  # before the note of a stop is cleared
    if not options.dry_run:
        logs.configure()  # a cancel logs its tasks
        admin.operations.proceed(task_table, options.id, author)
        outcomes = admin.execution.resume(task_table, options.id)
        left = (operation.selected or 0) - (operation.tasks or 0)
        return execute(task_table, options, operation.operation, outcomes, options.id, author, total=left)
    of = f" of {operation.selected:,}" if operation.selected else ""
    text = f"{operation.operation} by {operation.principal}, {operation.tasks or 0:,}{of} tasks so far"
    found = operation._asdict() | {"selection": admin.operations.parsed(operation.selection)}
    flags.answer(options, found, text, operation.selection)
    return 0


def execute(  # noqa: PLR0917 - the operation, and how to show it
    task_table: flags.Table,
    options: argparse.Namespace,
    name: str,
    outcomes: "Iterator[admin.execution.Outcome]",
    id: str,
    author: "admin.operations.Author",
    *,
    total: int,
    ids: Sequence[str] = (),
) -> int:
    """Execute the chunks of a recorded operation, and say what became of its tasks.

    Print before, and in an error, how to continue it. Unless the record has all of the given `ids`, only the same
    command can continue. Return 1 if a task was not changed.
    """
    again = flags.command_line("operations continue", id, **flags.database_flags(options))
    command = again if len(ids) <= admin.operations.RECORDED_IDS else "the same command again"
    if total > admin.selected.CHUNK:
        note(f"if the process is killed, continue with: {command}")
    stop = functools.partial(admin.operations.stop, task_table, id, author)
    report = carry_out(outcomes, command, stop, total=total, verb=KINDS[name].verb)
    numbers = Counter(report.unchanged.values()) + Counter({admin.operations.NO_LONGER_MATCHED: report.left})
    found = {"operation": id, "tasks": report.changed, "unchanged": report.unchanged, "not_changed": numbers.total()}
    flags.answer(options, found, f"{KINDS[name].done}: {counted(report.changed, 'task')}")
    if name == "cancel" and report.changed:
        note(f"to take it back, run `outbox restore {id}`")
    code = explain(options, name, numbers, report.unchanged)
    if heads := sorted(report.heads - {*ids}):
        note(f"retry the head of the ordering key, or cancel it: {named(heads)}")
    return code


def explain(
    options: argparse.Namespace, name: str, numbers: Mapping[str, int], ids: Mapping[str, str] | None = None
) -> int:
    """Print why tasks are not changed, with their `numbers`. Return 1 if a reason is an error.

    `ids` has the reason of each task after the change. A task that a preview has counted must be changed, so each
    reason is an error then.
    """
    is_of_state = vars(options).get("state") is not None
    no_error = {} if is_of_state and ids is not None else dict(KINDS[name].no_error)
    if vars(options).get("include_expired"):
        no_error.pop("expired", None)
    done = f"{'would not be' if vars(options).get('dry_run') else 'not'} {KINDS[name].verb}"
    for state, number in sorted(numbers.items()):
        names = [id for id, its in (ids or {}).items() if its == state]
        why = why_unchanged(name, state)
        if state == "expired" and name == "retry":
            why += "; pass --include-expired to send expired tasks"
        note(f"{counted(number, 'task')} {done}, {why}{': ' if names else ''}{named(names)}")
    return 1 if numbers.keys() - no_error.keys() else 0


def carry_out(
    outcomes: "Iterator[admin.execution.Outcome]",
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
    report = Report(verb)
    with _stop_on_signals() as received, _progress(total) as show:
        try:
            for outcome in outcomes:
                report.changed += len(outcome.changed)
                report.unchanged |= outcome.unchanged
                report.heads |= outcome.heads
                report.left += outcome.left
                show(report)
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
        done = report.changed + len(report.unchanged)
        part = min(done / total, 1.0)
        left = (time.monotonic() - begin) * (1 / part - 1) if part else 0.0
        bar = f"[{'#' * round(part * BAR):<{BAR}}] {done:,} of {total:,} tasks, {spoken(left)} left"
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

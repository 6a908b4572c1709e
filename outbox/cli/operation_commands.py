"""`outbox operations`: list the changes that operators made, and continue one."""

import argparse
from collections.abc import Sequence
from typing import Any

from outbox import admin
from outbox.admin import flags
from outbox.base.values import counted, shown
from outbox.cli import bulk
from outbox.program import logs
from outbox.program.settings import one_of
from outbox.program.terminal import as_json, note, say, shortened, table
from outbox.table.ddl import OPERATION_NAMES

DESCRIPTION = """\
List the last changes, newest first: retry, resend, purge, cancel, restore, pause, resume,
probe and controls of topics, reshard, replay of the pipeline, stop and continue of an
operation, and view of a message in the console. Each line has the account, the reason, the
selection and the number of changed tasks. A change without FINISHED is still running, or
ended early. A filter is compared with about the last 16,000 changes.

    outbox operations --project my-project --instance main --database shop
    outbox operations --operation cancel --topic orders --principal jane ..."""
CONTINUE_DESCRIPTION = """\
Continue a retry, resend, purge, cancel or restore that was stopped or whose process is gone,
after the last tasks that are done. `outbox operations --json` has the IDs. If another
process still works on the operation, one of them ends, and no task is changed twice.

    outbox operations continue 4f0c... --project my-project --instance main --database shop"""

HEADS = ("STARTED", "FINISHED", "OPERATION", "TASKS", "PRINCIPAL", "SELECTION", "REASON")


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "operations", "list who changed what, and when", DESCRIPTION, run)
    kind = one_of(*OPERATION_NAMES)
    text = f"Only operations with this name: {kind.allowed}"
    flags.add(parser, "--operation", kind, text, metavar="NAME", choices=OPERATION_NAMES)
    flags.add(parser, "--topic", flags.TOPIC, "Only operations whose selection names this topic", metavar="TOPIC")
    text = "Only operations by an account that contains this text, ignoring case"
    flags.add(parser, "--principal", flags.TEXT, text, metavar="TEXT")
    text = f"Max operations: {flags.LIMIT.allowed} (default 20)"
    flags.add(parser, "--limit", flags.LIMIT, text, metavar="N", default=20)
    parser.add_argument("--json", action="store_true", help="Print one JSON object per line instead of a table.")
    actions = parser.add_subparsers(metavar="ACTION")
    continuing = flags.command(actions, "continue", "continue a stopped one", CONTINUE_DESCRIPTION, run_continue)
    flags.add(continuing, "id", flags.ID, "The ID of the operation", metavar="ID")
    continuing.add_argument("--dry-run", action="store_true", help="Only print the operation, and how far it is.")
    # Without a default, because it would overwrite the flag before the word `continue`.
    continuing.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="Print one JSON object.")
    flags.add_reason(continuing)


def run(options: argparse.Namespace) -> None:
    """Print the operations. Raises SettingError, NotReached, OutboxError."""
    task_table = flags.open_table(options)
    now = task_table.now()
    narrowing = {name: vars(options)[name] for name in ("operation", "topic", "principal")}
    latest = admin.operations.latest(task_table, options.limit + 1, at=now, **narrowing)
    operations = latest[: options.limit]
    if options.json:
        for each in operations:
            parsed = {"selection": each.selection, "published": each.published or "null"}
            say(as_json(each._asdict() | {name: admin.operations.parsed(text) for name, text in parsed.items()}))
    else:
        say(f"as of {shown(now)}", _table(operations) if operations else "No operations.")
    for each in operations if not options.json else ():
        if each.operation in admin.operations.IN_CHUNKS and each.state(now) in ("stopped", "interrupted"):
            note(f"a {each.operation} is {each.state(now)}. To continue it, run: outbox operations continue {each.id}")
    if len(latest) > options.limit:
        note(f"there are more than {counted(options.limit, 'operation')}. Raise --limit to list older ones")


def run_continue(options: argparse.Namespace) -> int:
    """Continue an operation; return 0, or 1 if a task was not changed. Raises SettingError, NotReached, OutboxError."""
    task_table, author = flags.open_table(options), flags.author(options)
    operation = admin.changes.continued(task_table, options.id)  # before the note of a stop is cleared
    if not options.dry_run:
        logs.configure()  # a cancel logs its tasks
        admin.operations.proceed(task_table, options.id, author)
        outcomes = admin.changes.resume(task_table, options.id)
        left = (operation.selected or 0) - (operation.tasks or 0)
        return bulk.execute(task_table, options, operation.operation, outcomes, options.id, author, total=left)
    if options.json:
        say(as_json(operation._asdict() | {"selection": admin.operations.parsed(operation.selection)}))
        return 0
    of = f" of {operation.selected:,}" if operation.selected else ""
    say(
        f"{operation.operation} by {operation.principal}, {operation.tasks or 0:,}{of} tasks so far",
        operation.selection,
    )
    return 0


def _table(operations: "Sequence[admin.operations.Operation]") -> str:
    rows = [
        [each.started_at, each.finished_at, each.operation, each.tasks, each.principal, shortened(each.selection),
         each.reason]
        for each in operations
    ]  # fmt: skip
    return table(HEADS, rows)

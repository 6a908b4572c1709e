"""`outbox operations`: list the changes that operators made."""

import argparse
from typing import Any

from outbox import admin
from outbox.cli import flags
from outbox.cli.output import as_json, note, shortened, table
from outbox.program.terminal import counted, say

DESCRIPTION = """\
List the last changes, newest first: retry, purge, cancel, pause, resume, limit, route,
policy, apply and forget of topics, reshard, and replay of the pipeline. Each line has the
account, the reason, the selection and the number of changed tasks. A change without
FINISHED is still running, or ended early.

    outbox operations --project my-project --instance main --database shop
    outbox operations --limit 1000 --json ... | jq 'select(.operation == "cancel")'"""

HEADS = ("STARTED", "FINISHED", "OPERATION", "TASKS", "PRINCIPAL", "REASON", "SELECTION")


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "operations", "list who changed what, and when", DESCRIPTION, run)
    flags.add_limit(parser, "operations", 20)
    parser.add_argument("--json", action="store_true", help="Print one JSON object per line instead of a table.")


def run(options: argparse.Namespace) -> int:
    """Print the operations; returns 0. Raises SettingError, NotReached, OutboxError."""
    latest = admin.operations.latest(flags.open_table(options), options.limit + 1)
    operations = latest[: options.limit]
    if options.json:
        for each in operations:
            say(as_json(each._asdict() | {"selection": admin.operations.parsed(each.selection)}))
    elif operations:
        rows = [
            [
                each.started_at,
                each.finished_at,
                each.operation,
                each.tasks,
                each.principal,
                shortened(each.reason),
                shortened(each.selection),
            ]
            for each in operations
        ]
        say(table(HEADS, rows))
    else:
        say("No operations.")
    if len(latest) > options.limit:
        note(f"there are more than {counted(options.limit, 'operation')}. Raise --limit to list older ones")
    return 0

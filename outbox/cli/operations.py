"""`outbox operations`: list the changes that operators made."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from outbox.cli.flags import command, open_table
from outbox.cli.output import as_json, note, table
from outbox.shared.settings import flag_of, whole_number

if TYPE_CHECKING:
    from outbox.admin.operations import Operation

DESCRIPTION = """\
List the last changes, newest first: retry, purge, discard, pause, resume, limit, and
replay of the pipeline. Each line has the account, the selection and the number of
changed tasks. A change without an end is still running, or ended early.

    outbox operations --project my-project --instance main --database shop
    outbox operations --limit 1000 --json ... | jq 'select(.operation == "discard")'"""

LIMIT = whole_number(1, 100_000)
DEFAULT_LIMIT = 20
#: Max characters of a selection in the table. --json prints all.
CHARACTERS = 80


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = command(commands, "operations", "who changed what, and when", DESCRIPTION)
    parser.add_argument(
        "--limit", type=flag_of("--limit", LIMIT), default=DEFAULT_LIMIT, metavar="N",
        help=f"Max operations: {LIMIT.allowed} (default {DEFAULT_LIMIT}).",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object per line instead of a table.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the operations; returns 0. Raises SettingError, NotReached, OutboxError."""
    database = open_table(options)

    from outbox.admin import operations  # noqa: PLC0415 - see open_table

    found = operations.latest(database, options.limit + 1)
    listed = found[: options.limit]
    if options.json:
        for each in listed:
            print(as_json(_plain(each)))
    elif listed:
        heads = ("STARTED", "FINISHED", "OPERATION", "TASKS", "PRINCIPAL", "SELECTION")
        print(table(heads, [_cells(each) for each in listed]))
    if not found:
        print("No operations.", file=sys.stderr if options.json else sys.stdout)
    if len(found) > options.limit:
        note(f"there are more than {options.limit:,} operations. Raise --limit to list older ones")
    return 0


def _plain(each: "Operation") -> dict[str, Any]:
    return {
        "id": each.id, "operation": each.name, "started_at": each.started_at, "finished_at": each.finished_at,
        "principal": each.principal, "selection": json.loads(each.selection), "tasks": each.tasks,
    }  # fmt: skip


def _cells(each: "Operation") -> list[object]:
    selection = each.selection if len(each.selection) <= CHARACTERS else each.selection[: CHARACTERS - 3] + "..."
    return [each.started_at, each.finished_at, each.name, each.tasks, each.principal, selection]

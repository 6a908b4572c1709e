"""`outbox purge` deletes sent tasks, `outbox discard` deletes dead tasks."""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from outbox.cli import chunks
from outbox.cli.flags import TEXT, add_ids, add_topic, command, continue_command, full_ids, ids, open_table
from outbox.cli.output import escaped
from outbox.errors import OutboxError, SettingError
from outbox.shared import logs
from outbox.shared.settings import flag_of
from outbox.shared.times import MOMENT, resolved, shown
from outbox.storage.task_states import MARKS_FINAL_AFTER

PURGE_DESCRIPTION = """\
Delete only tasks that were sent before a time. The retention of the table deletes sent
tasks too, typically within three days after they reach the retention age (`outbox schema`).

    outbox purge --sent-before 30d --project my-project --instance main --database shop
    outbox purge --sent-before 7d --topic orders --dry-run ..."""
DISCARD_DESCRIPTION = """\
Delete dead tasks permanently. They are never sent. The command logs each task ID with
the reason on stderr. Tasks that were blocked by a deleted task of the same ordering key
are released.

    outbox discard 0e3c... --reason 'order was cancelled, ticket 4711' \\
        --project my-project --instance main --database shop"""

_log = logging.getLogger("outbox")


def add(commands: Any) -> None:
    """Add both commands to the subparsers `commands`."""
    purging = command(commands, "purge", "delete sent tasks", PURGE_DESCRIPTION)
    purging.add_argument(
        "--sent-before", type=flag_of("--sent-before", MOMENT), required=True, metavar="TIME",
        help=f"Delete tasks sent before this time. Allowed: {MOMENT.allowed}.",
    )  # fmt: skip
    add_topic(purging)
    purging.add_argument("--dry-run", action="store_true", help="Only print the number of tasks and equivalent DML.")
    purging.add_argument(
        "--yes", action="store_true", help=f"Skip the confirmation above {chunks.CONFIRM_ABOVE:,} tasks."
    )
    purging.set_defaults(run=run_purge)
    discarding = command(commands, "discard", "delete dead tasks permanently", DISCARD_DESCRIPTION)
    add_ids(discarding)
    discarding.add_argument(
        "--reason", type=flag_of("--reason", TEXT), required=True, metavar="TEXT", help="The reason, for the log."
    )
    discarding.add_argument("--yes", action="store_true", help="Skip the confirmation.")
    discarding.set_defaults(run=run_discard)


def run_purge(options: argparse.Namespace) -> int:
    """Delete sent tasks; returns 0. Raises SettingError, NotReached, OutboxError."""
    table = open_table(options)

    from outbox.admin import changes, statements  # noqa: PLC0415 - see open_table

    now = table.now()
    before = resolved(options.sent_before, now)
    if before > now - MARKS_FINAL_AFTER:
        raise SettingError(
            f"--sent-before {shown(before)} is less than a minute ago (database time {shown(now)}). Pass an earlier "
            "time: an at-most-once task is marked as sent shortly before it is published"
        )
    chosen = changes.TaskSelection(state="sent", topic=options.topic, until=before)
    count = changes.count(table, chosen, exact=options.dry_run)
    if options.dry_run:
        print(f"{count} would be deleted. Equivalent DML:\n{chosen.dml(statements.DELETE_DML, table.layout)}")
        chunks.note_size(count)
        return 0
    if count.number > chunks.CONFIRM_ABOVE and sys.stdin.isatty():
        chunks.confirm(f"{count} sent before {shown(before)} will be deleted.", yes=options.yes)
    go_on = continue_command("purge", options, "--yes", sent_before=shown(before))
    chunks.carry_out(changes.purge(table, chosen), count, go_on).print_changed("deleted:")
    return 0


def run_discard(options: argparse.Namespace) -> int:
    """Delete dead tasks; return 0, or 1 if one is missing or not dead. Raises SettingError, NotReached, OutboxError."""
    wanted = ids(options)
    if wanted is None:
        raise SettingError("discard: no tasks given. Pass IDs of dead tasks, or --ids-file")

    table = open_table(options)

    from outbox.admin import changes  # noqa: PLC0415 - see open_table

    wanted = full_ids(table, options, wanted)
    count = changes.count(table, changes.TaskSelection(state="dead", ids=wanted), exact=True)
    if not count.number:
        raise OutboxError(f"no dead task among the {len(wanted):,} given IDs. Nothing was deleted")
    chunks.confirm(f"{count} (dead) will be deleted permanently and never sent.", yes=options.yes)
    logs.configure()

    def log(deleted: Sequence[str], surely: bool) -> None:
        for id in deleted:
            _log.warning(
                "%s the dead task %s: %s", "discarded" if surely else "possibly discarded", escaped(id),
                escaped(options.reason),
                extra={"action": "discarded", "fields": {"task_id": id, "reason": options.reason}},
            )  # fmt: skip

    go_on = continue_command("discard", options, "--yes", reason=options.reason)
    report = chunks.carry_out(changes.discard(table, wanted, options.reason, log), count, go_on)
    report.print_changed("deleted:")
    return report.explain({}, "because they are not dead but {state}")

"""`outbox purge` deletes sent tasks, `outbox discard` deletes dead tasks."""

import argparse
import logging
import sys
from collections.abc import Iterator
from typing import Any

from outbox import admin
from outbox.cli import bulk, flags
from outbox.cli.output import escaped
from outbox.errors import OutboxError, SettingError
from outbox.shared import logs
from outbox.shared.times import MOMENT, resolved, shown
from outbox.storage.task_states import MARKS_FINAL_AFTER

PURGE_DESCRIPTION = """\
Delete tasks that were sent before a time. The retention of the table deletes sent
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
    purging = flags.command(commands, "purge", "delete sent tasks", PURGE_DESCRIPTION)
    text = "Delete tasks sent before this time. Allowed: "
    flags.add(purging, "--sent-before", MOMENT, text + MOMENT.allowed, metavar="TIME", required=True)
    flags.add_topic(purging)
    flags.add_dry_run(purging)
    purging.add_argument(
        "--yes", action="store_true", help=f"Skip the confirmation above {bulk.CONFIRM_ABOVE:,} tasks."
    )
    purging.set_defaults(run=run_purge)
    discarding = flags.command(commands, "discard", "delete dead tasks permanently", DISCARD_DESCRIPTION)
    flags.add_ids(discarding)
    flags.add(discarding, "--reason", flags.TEXT, "The reason, for the log", metavar="TEXT", required=True)
    discarding.add_argument("--yes", action="store_true", help="Skip the confirmation.")
    discarding.set_defaults(run=run_discard)


def run_purge(options: argparse.Namespace) -> int:
    """Delete sent tasks; returns 0. Raises SettingError, NotReached, OutboxError."""
    table = flags.open_table(options)
    now = table.now()
    before = resolved(options.sent_before, now)
    if before > now - MARKS_FINAL_AFTER:
        raise SettingError(
            f"--sent-before {shown(before)} is less than a minute ago (database time {shown(now)}). Pass an earlier "
            "time: an at-most-once task is marked as sent shortly before it is published"
        )
    selection = admin.changes.TaskSelection(state="sent", topic=options.topic, until=before)
    count = admin.changes.count(table, selection, exact=options.dry_run)
    if options.dry_run:
        print(f"{count} would be deleted")
        return 0
    if count.number > bulk.CONFIRM_ABOVE and sys.stdin.isatty():
        bulk.confirm(f"{count} sent before {shown(before)} will be deleted.", yes=options.yes)
    go_on = flags.continue_command(options, sent_before=shown(before))
    report = bulk.carry_out(admin.changes.purge(table, selection), go_on)
    print(f"deleted: {bulk.tasks(report.changed)}")
    return 0


def run_discard(options: argparse.Namespace) -> int:
    """Delete dead tasks; return 0, or 1 if one is missing or not dead. Raises SettingError, NotReached, OutboxError."""
    ids = flags.ids(options)
    if ids is None:
        raise SettingError("no tasks given. Pass IDs of dead tasks, or --ids-file")
    table = flags.open_table(options)
    ids = flags.full_ids(table, options.ids, ids)
    count = admin.changes.count(table, admin.changes.TaskSelection(state="dead", ids=ids), exact=True)
    if not count.number:
        raise OutboxError(f"no dead task among the {len(ids):,} given IDs. Nothing was deleted")
    bulk.confirm(f"{count} (dead) will be deleted permanently and never sent.", yes=options.yes)
    logs.configure()
    go_on = flags.continue_command(options)
    report = bulk.carry_out(_logged(admin.changes.discard(table, ids, options.reason), options.reason), go_on)
    print(f"deleted: {bulk.tasks(report.changed)}")
    return report.explain({}, "because they are not dead but {state}")


def _logged(outcomes: "Iterator[admin.changes.Outcome]", reason: str) -> "Iterator[admin.changes.Outcome]":
    """Log the deleted tasks of each transaction."""
    for outcome in outcomes:
        for id in outcome.changed:
            extra = {"action": "discarded", "fields": {"task_id": id, "reason": reason}}
            _log.warning("discarded the dead task %s: %s", escaped(id), escaped(reason), extra=extra)
        yield outcome

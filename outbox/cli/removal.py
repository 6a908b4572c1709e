"""`outbox purge` and `outbox discard`: the two commands that delete tasks, sent ones and dead ones."""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from outbox.cli import chunks
from outbox.cli.flags import TEXT, add_ids, add_topic, again, command, ids
from outbox.cli.output import escaped
from outbox.errors import OutboxError, SettingError
from outbox.shared import logs
from outbox.shared.settings import DatabaseSettings, flag_of
from outbox.shared.times import MOMENT, resolved, shown
from outbox.storage.task_states import MIN_AGE

PURGE_DESCRIPTION = """\
Delete tasks that were sent before a time, and no others. Retention does the same by
itself, typically within three days after its time (`outbox schema`).

    outbox purge --sent-before 30d --project my-project --instance main --database shop
    outbox purge --sent-before 7d --topic orders --dry-run ..."""
DISCARD_DESCRIPTION = """\
Delete dead tasks for good: they are never sent. Each is logged on stderr with its id
and the reason. What a dead task of an ordering key held back goes on.

    outbox discard 0e3c... --reason 'order was cancelled, ticket 4711' \\
        --project my-project --instance main --database shop"""

_log = logging.getLogger("outbox")


def add(commands: Any) -> None:
    """Add both commands to the subparsers `commands`."""
    purging = command(commands, "purge", "delete sent tasks", PURGE_DESCRIPTION)
    purging.add_argument(
        "--sent-before", type=flag_of("--sent-before", MOMENT), required=True, metavar="TIME",
        help=f"Delete what was sent before it. Allowed: {MOMENT.allowed}.",
    )  # fmt: skip
    add_topic(purging)
    purging.add_argument("--dry-run", action="store_true", help="Only print how many there are, and the same as DML.")
    purging.add_argument("--yes", action="store_true", help="Do not ask at a terminal, however many.")
    purging.set_defaults(run=run_purge)
    discarding = command(commands, "discard", "delete dead tasks for good", DISCARD_DESCRIPTION)
    add_ids(discarding)
    discarding.add_argument(
        "--reason", type=flag_of("--reason", TEXT), required=True, metavar="TEXT", help="Why, for the log."
    )
    discarding.add_argument("--yes", action="store_true", help="Do not ask.")
    discarding.set_defaults(run=run_discard)


def run_purge(options: argparse.Namespace) -> int:
    """Delete sent tasks; returns 0. Raises SettingError, NotReached, OutboxError."""
    settings = DatabaseSettings.read(vars(options))

    from outbox.admin import changes, statements  # noqa: PLC0415 - the same
    from outbox.admin.database import open_table  # noqa: PLC0415 - half a second, for nothing if a flag is wrong

    table = open_table(settings)
    now = table.now()
    before = resolved(options.sent_before, now)
    if before > now - MIN_AGE:
        raise SettingError(
            f"--sent-before {shown(before)} is less than a minute ago (the database has {shown(now)}): a task to be "
            "sent at most once is marked as sent before it is published"
        )
    chosen = changes.TaskSelection(state="sent", topic=options.topic, until=before)
    count = changes.count(table, chosen, exact=options.dry_run)
    if options.dry_run:
        print(f"{count} would be deleted, as by:\n{chosen.dml(statements.DELETE)}")
        chunks.note_size(count)
        return 0
    if count.number > chunks.UNASKED and sys.stdin.isatty():  # a nightly job has said what it wants
        chunks.confirm(f"{count} that were sent before {shown(before)} will be deleted.", yes=options.yes)
    go_on = again("purge", options, "--yes", sent_before=shown(before))
    chunks.carry_out(changes.purge(table, chosen), count, go_on).tell("deleted:")
    return 0


def run_discard(options: argparse.Namespace) -> int:
    """Delete dead tasks; returns 0, or 1 if an id is not dead. Raises SettingError, NotReached, OutboxError."""
    settings = DatabaseSettings.read(vars(options))
    wanted = ids(options)
    if wanted is None:
        raise SettingError("discard: which tasks? Give ids of dead ones, or --ids-file")

    from outbox.admin import changes  # noqa: PLC0415 - the same
    from outbox.admin.database import open_table  # noqa: PLC0415 - half a second, for nothing if a flag is wrong

    table = open_table(settings)
    count = changes.count(table, changes.TaskSelection(state="dead", ids=wanted), exact=True)
    if not count.number:
        raise OutboxError(f"none of the {len(wanted):,} ids is of a dead task: nothing was deleted")
    chunks.confirm(f"{count}, dead, will be deleted for good and never sent.", yes=options.yes)
    logs.configure()

    def log(deleted: Sequence[str], surely: bool) -> None:
        for id in deleted:
            _log.warning(
                "%s the dead task %s: %s", "discarded" if surely else "perhaps discarded", escaped(id),
                escaped(options.reason),
                extra={"action": "discarded", "fields": {"task_id": id, "reason": options.reason}},
            )  # fmt: skip

    go_on = again("discard", options, "--yes", reason=options.reason)
    report = chunks.carry_out(changes.discard(table, wanted, log), count, go_on)
    report.tell("deleted:")
    return report.explain({}, "not dead but {state}")

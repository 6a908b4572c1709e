"""`outbox retry`: tasks are sent again, or for the first time after they died."""

import argparse
import dataclasses
from typing import Any

from outbox.cli import chunks
from outbox.cli.flags import add_ids, add_selection, again, check_window, command, ids, selection
from outbox.errors import SettingError
from outbox.shared.settings import DatabaseSettings
from outbox.shared.times import shown

DESCRIPTION = """\
Make tasks due now: dead ones, or such as wait for their next attempt, are tried
anew; sent ones are sent again, with the same id. They share with live tasks and
keep none of them waiting. A scheduled task whose id is given goes now, too; pending
ones, and those that wait for the head of their ordering key, are left as they are.

    outbox retry 0e3c... 7f21... --project my-project --instance main --database shop
    outbox retry --state dead --topic orders --dry-run ...
    outbox retry --state sent --topic orders --since 2h ...
    outbox list --state dead --error NOT_FOUND --json ... | outbox retry --ids-file - --yes ..."""

#: A scheduled task has a time that somebody asked for, a pending one needs no retry: only by their ids.
STATES = ("dead", "sent", "retrying")
#: Why ids are left.
LEFT = {
    "pending": "because they are pending: they go by themselves",
    "deferred": "because they wait for the head of their ordering key; retry or discard that (`outbox show` names it)",
}
OUTSIDE = "{state}, but outside of --state, --topic, --since, --until or --error"


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = command(commands, "retry", "send tasks again, or dead ones at last", DESCRIPTION)
    add_ids(parser)
    add_selection(parser, *STATES)
    parser.add_argument("--dry-run", action="store_true", help="Only print how many there are, and the same as DML.")
    parser.add_argument(
        "--yes", action="store_true", help=f"Do not ask first, as is done beyond {chunks.UNASKED:,} tasks."
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Change tasks; returns 0, or 1 if a named one does not fit. Raises SettingError, NotReached, OutboxError."""
    settings = DatabaseSettings.read(vars(options))
    wanted = ids(options)
    if wanted is None and options.state is None:
        raise SettingError(f"retry: which tasks? Give ids, --ids-file, or --state with {' or '.join(STATES)}")

    from outbox.admin import changes, statements  # noqa: PLC0415 - the same
    from outbox.admin.database import open_table  # noqa: PLC0415 - half a second, for nothing if a flag is wrong

    table = open_table(settings)
    now = table.now()
    chosen = selection(options, now, wanted)
    # What is sent again meanwhile is sent later than this: it is not chosen twice, now or by the command that goes on.
    chosen = dataclasses.replace(chosen, until=min(chosen.until or now, now))
    check_window(chosen.since, chosen.until)
    count = changes.count(table, chosen, exact=options.dry_run)
    if options.dry_run:
        print(f"{count} would be sent again, as by:\n{chosen.dml(statements.RETRY)}")
        chunks.note_size(count)
        return 0
    if count.number > chunks.UNASKED:
        chunks.confirm(f"{count} will be sent again.", yes=options.yes)
    since = {} if chosen.since is None else {"since": shown(chosen.since)}
    go_on = again("retry", options, "--yes", **since, until=shown(chosen.until or now))
    report = chunks.carry_out(changes.retry(table, chosen), count, go_on)
    report.tell("will be sent again:")
    return report.explain(LEFT, OUTSIDE) if wanted else 0

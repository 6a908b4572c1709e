"""`outbox retry`: send tasks again, or dead tasks for the first time."""

import argparse
import dataclasses
from typing import Any

from outbox import admin
from outbox.cli import bulk, errors, flags
from outbox.cli.output import named, note
from outbox.errors import SettingError
from outbox.shared.settings import one_of
from outbox.shared.times import shown

DESCRIPTION = """\
Make tasks due now. Dead and retrying tasks get all their attempts again. Sent tasks are
sent again with the same ID. A scheduled task is sent now if you pass its ID. Pending
tasks and tasks blocked by the head of their ordering key are not changed. Expired tasks
are sent only with --include-expired. While new tasks wait, retried tasks get at most
half of the capacity.

    outbox retry 0e3c... 7f21... --project my-project --instance main --database shop
    outbox retry --state dead --topic orders --dry-run ...
    outbox retry --state sent --topic orders --since 2h ...
    outbox list --state dead --error NOT_FOUND --json ... | outbox retry --ids-file - --yes ..."""

#: Scheduled tasks have a time that the application chose, so they are retried only by ID. Pending ones need no retry.
STATES = ("dead", "sent", "retrying")
BY_ID_ONLY = ". Retry scheduled tasks by ID"
#: Why tasks are not changed.
NOT_CHANGED = {
    "pending": "because pending tasks need no retry",
    "expired": "because ExpiresAt has passed; --include-expired sends them anyway",
    "blocked": "because blocked tasks wait for the head of their ordering key",
}
OUTSIDE = "because they are {state} and do not match --state, --topic, --since, --until or --error"


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "retry", "send tasks again, or retry dead tasks", DESCRIPTION)
    flags.add_ids(parser)
    flags.add_selection(parser, *STATES, others=BY_ID_ONLY)
    flags.add_dry_run(parser)
    parser.add_argument(
        "--yes", action="store_true",
        help="Do not ask for confirmation. The command asks for --state without --topic, and for more than "
        f"{bulk.CONFIRM_ABOVE:,} tasks.",
    )  # fmt: skip
    parser.add_argument("--include-expired", action="store_true", help="Also send tasks whose ExpiresAt has passed.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Change tasks; return 0, or 1 if an ID does not match. Raises SettingError, NotReached, OutboxError."""
    ids = flags.ids(options)
    if ids is None and options.state is None:
        raise SettingError(f"no tasks given. Pass IDs, --ids-file, or --state with {one_of(*STATES).allowed}")
    table = flags.open_table(options)
    ids = ids and flags.full_ids(table, options.ids, ids)
    now = table.now()
    selection = flags.selection(options, now, ids)
    # A task that is sent again meanwhile has a later SentAt, so it is not selected twice, now or when continued.
    until = min(selection.until or now, now)
    selection = dataclasses.replace(selection, until=until, expired=options.include_expired)
    flags.check_window(selection.since, until)
    count = admin.changes.count(table, selection, exact=options.dry_run)
    if options.dry_run:
        print(f"{count} would be sent again")
        if not options.include_expired and options.state != "sent":
            note("expired tasks are not counted. --include-expired sends them, too")
        if not count.number and ids is None:
            flags.explain_none(table, selection, options)
        return 0
    over_topics = ids is None and options.topic is None and count.number > 0
    if over_topics and not options.yes:
        note(f"tasks by topic and reason:{errors.text(errors.of_selection(table, selection))}")
    if over_topics or count.number > bulk.CONFIRM_ABOVE:
        bulk.confirm(f"{count} will be sent again.", yes=options.yes)
    since = {} if selection.since is None else {"since": shown(selection.since)}
    go_on = flags.continue_command(options, **since, until=shown(until))
    report = bulk.carry_out(admin.changes.retry(table, selection), go_on)
    print(f"will be sent again: {bulk.tasks(report.changed)}")
    if ids:
        code = report.explain(NOT_CHANGED, OUTSIDE)
        if heads := sorted(report.heads - set(ids)):
            note(f"retry the head of the ordering key, or discard it if it is dead: {named(heads)}")
        return code
    if not report.changed:
        flags.explain_none(table, selection, options)
    return 0

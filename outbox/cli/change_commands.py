"""`outbox retry` sends tasks again, `purge` deletes tasks, `cancel` takes out unsent ones, `restore` puts them back."""

import argparse
import dataclasses
import sys
from collections import Counter
from datetime import datetime
from typing import Any

from outbox import admin
from outbox.admin import flags
from outbox.base.times import shown
from outbox.base.values import counted
from outbox.cli import bulk, error_tables
from outbox.errors import OutboxError, SettingError
from outbox.program import logs
from outbox.program.output import confirm, named, note
from outbox.program.settings import MOMENT, one_of, resolved
from outbox.program.terminal import as_json, say
from outbox.table.states import CANCELLED, CHANGED, MARKS_FINAL_AFTER

RETRY_DESCRIPTION = """\
Make tasks due now. Dead and retrying tasks get all their attempts again. Sent tasks are
sent again with the same task ID and a new message ID. Scheduled tasks are sent now.
Pending tasks and tasks blocked by the head of their ordering key are not changed.
Expired tasks are sent only with --include-expired. While new tasks wait, retried tasks
get at most half of the capacity.

    outbox retry 0e3c... 7f21... --project my-project --instance main --database shop
    outbox retry --state dead --topic orders --dry-run ...
    outbox retry --state sent --topic orders --since 2h ...
    outbox list --state dead --error NOT_FOUND --json ... | outbox retry --ids-file - --yes ..."""
PURGE_DESCRIPTION = """\
Delete tasks that were sent before a time. The retention of the table deletes sent
tasks too, typically within three days after they reach the retention age (`outbox schema`).

    outbox purge --sent-before 30d --project my-project --instance main --database shop
    outbox purge --sent-before 7d --topic orders --dry-run ...
    outbox purge --state cancelled --topic orders ..."""
CANCEL_DESCRIPTION = """\
Take unsent tasks of any state out of the table. Workers do not publish them any more.
`outbox restore` puts them back, until the retention of sent tasks deletes them.
If a worker is publishing a task, the command usually waits, and then the task is sent.
A task that is published but not marked as sent yet can be cancelled, although subscribers
receive it: the worker logs its ID (cancelled_after_publish). The command logs each task
ID with the reason on stderr. The next tasks of the same ordering keys are released.

    outbox cancel 0e3c... --reason 'order was cancelled, ticket 4711' \\
        --project my-project --instance main --database shop
    outbox cancel --state scheduled --topic reminders --dry-run --reason 'sent twice' ..."""
RESTORE_DESCRIPTION = """\
Put tasks back that `outbox cancel` or the console has cancelled: those of an operation
(`outbox operations`), or by ID. They are as they were, and those whose time has passed are
due. A task is not restored if its ID exists again. A task that a worker had published
before the cancel is restored as sent. An earlier task of an ordering key can follow later
ones that were sent meanwhile: --dry-run counts them.

    outbox restore 1f0c... --dry-run --project my-project --instance main --database shop
    outbox restore 0e3c... 7f21... --reason 'cancelled by mistake, ticket 4711' ...
    outbox restore --state cancelled --topic reminders --since 1h --json ..."""

#: What becomes of tasks.
DONE = {"retry": "due now", "purge": "deleted", "cancel": "cancelled", "restore": "restored"}
#: Why tasks are not restored.
NOT_RESTORED = {
    "exists": "because a task with the same ID exists again",
    "not_cancelled": "because they are in the table, restored before or never cancelled",
}
#: Why tasks are not changed.
NOT_CHANGED = {
    "pending": "because pending tasks need no retry",
    "expired": "because ExpiresAt has passed; pass --include-expired to send expired tasks",
    "blocked": "because blocked tasks wait for the head of their ordering key",
}
OUTSIDE = "excluded by --state, --topic, --since, --until or --error (the state is {state})"
EXCLUDED = "excluded by --topic, --since, --until or --error"


def add(commands: Any) -> None:
    """Add the four commands to the subparsers `commands`."""
    retrying = flags.command(commands, "retry", "send tasks again, or retry dead tasks", RETRY_DESCRIPTION, run_retry)
    purging = flags.command(commands, "purge", "delete sent tasks", PURGE_DESCRIPTION, run_purge)
    cancelling = flags.command(commands, "cancel", "take out unsent tasks", CANCEL_DESCRIPTION, run_cancel)
    restoring = flags.command(commands, "restore", "put cancelled tasks back", RESTORE_DESCRIPTION, run_restore)
    for parser, name in ((retrying, "retry"), (cancelling, "cancel"), (restoring, "restore")):
        flags.add_ids(parser)
        flags.add_state(parser, CHANGED[name], "Only tasks in this state")
        flags.add_narrowing(parser)
    flags.add_state(purging, CHANGED["purge"], "The tasks to delete (default sent)")
    for flag, text in (("--sent-before", "sent"), ("--cancelled-before", "cancelled (default now)")):
        flags.add(
            purging, flag, MOMENT, f"Delete tasks {text} before this time. Allowed: {MOMENT.allowed}", metavar="TIME"
        )
    flags.add(purging, "--topic", flags.TOPIC, flags.NARROWING["--topic"], metavar="TOPIC")
    asks = (
        "Do not ask for confirmation. The command asks if you pass --state without --topic, or if more than "
        f"{bulk.CONFIRM_ABOVE:,} tasks match."
    )
    skips = f"Skip the confirmation above {bulk.CONFIRM_ABOVE:,} tasks."
    for parser, text in (
        (retrying, asks),
        (purging, skips),
        (cancelling, "Skip the confirmation."),
        (restoring, skips),
    ):
        parser.add_argument("--dry-run", action="store_true", help="Only print the number of tasks.")
        parser.add_argument("--yes", action="store_true", help=text)
        allowed = f"Allowed: {MOMENT.allowed}, as long as Spanner keeps versions (version_retention_period)"
        preview = "Change only tasks that also matched at this time (default now), such as that of a dry run. "
        flags.add(parser, "--as-of", MOMENT, preview + allowed, metavar="TIME")
    retrying.add_argument("--include-expired", action="store_true", help="Also send tasks whose ExpiresAt has passed.")
    restoring.add_argument("--json", action="store_true", help="Print one JSON object.")
    for parser in (retrying, purging, restoring):
        flags.add_reason(parser)
    flags.add_reason(cancelling, ", and for the log. Required with --state")


def run_retry(options: argparse.Namespace) -> int:
    """Change tasks; return 0, or 1 if an ID does not match. Raises SettingError, NotReached, OutboxError."""
    ids = _ids(options)
    table = flags.open_table(options)
    ids = ids and flags.full_ids(table, options, ids)
    at = _preview_time(table, options)
    selection = flags.selection(options, at, ids)
    # Select only tasks before the preview. A task that this command sends again gets a later SentAt, so neither this
    # run nor its continuation selects it twice.
    until = min(selection.until or at, at)
    selection = dataclasses.replace(selection, until=until, as_of=at, include_expired=options.include_expired)
    flags.check_window(selection.since, until)
    count = admin.changes.count(table, selection, exact=options.dry_run)
    if options.dry_run:
        _say_dry(count, "become due now", at)
        return _explain_refused(table, selection) if ids else _explain_count(table, selection, options, count)
    all_topics = ids is None and options.topic is None and count.number > 0
    if all_topics and not options.yes:
        error_tables.print_selected(table, selection)
    if all_topics or count.number > bulk.CONFIRM_ABOVE:
        confirm(f"{count} will become due now.", yes=options.yes)
    report = _carry_out(table, options, selection, count)
    if ids:
        # With --include-expired, an expired task that was not changed does not match the selection.
        ignored = {"expired"} if options.include_expired else set()
        code = report.explain({state: NOT_CHANGED[state] for state in NOT_CHANGED.keys() - ignored}, OUTSIDE)
        if heads := sorted(report.heads - set(ids)):
            note(f"retry the head of the ordering key, or cancel it: {named(heads)}")
        return code
    return 0 if report.changed else _explain_count(table, selection, options, count)


def _explain_count(
    table: "admin.table.TaskTable",
    selection: "admin.changes.TaskSelection",
    options: argparse.Namespace,
    count: "admin.changes.Count",
) -> int:
    """Print how many expired tasks match, or else why no task does. Returns 0."""
    expired = 0
    if "unexpired" in selection.names:
        everything = dataclasses.replace(selection, include_expired=True)
        expired = admin.changes.count(table, everything, exact=options.dry_run).number - count.number
    if expired:
        what = "counted" if options.dry_run else "changed"
        note(f"{counted(expired, 'expired task')} not {what}. Pass --include-expired to send expired tasks, too")
    elif not count.number:
        flags.explain_none(table, selection, options)
    return 0


def _explain_refused(table: "admin.table.TaskTable", selection: "admin.changes.TaskSelection") -> int:
    """Print which of the given tasks a retry would not change. Return 1 if one is missing or has the wrong state."""
    refused = admin.changes.preview(table, selection).refused
    for state, number in refused.items():
        why = NOT_CHANGED.get(state) or ("not in the table" if state == "missing" else OUTSIDE.format(state=state))
        note(f"{counted(number, 'task')} would not be changed, {why}")
    return 1 if refused.keys() - NOT_CHANGED.keys() else 0


def run_purge(options: argparse.Namespace) -> int:
    """Delete sent or cancelled tasks; returns 0. Raises SettingError, NotReached, OutboxError."""
    state, given = options.state or "sent", {"sent": options.sent_before, CANCELLED: options.cancelled_before}
    other = CANCELLED if state == "sent" else "sent"
    if given[other] is not None:
        raise SettingError(f"--{other}-before needs --state {other}. Nothing was deleted")
    if state == "sent" and options.sent_before is None:
        raise SettingError("--sent-before is missing. Without it, all sent tasks would be deleted")
    table = flags.open_table(options)
    now = _preview_time(table, options)
    before = now if given[state] is None else resolved(given[state], now)
    if state == "sent" and before > now - MARKS_FINAL_AFTER:
        raise SettingError(
            f"--sent-before {shown(before)} is less than a minute ago (database time {shown(now)}). Pass an earlier "
            "time: an at-most-once task is marked as sent shortly before it is published"
        )
    selection = admin.changes.TaskSelection(state=state, topic=options.topic, until=before, as_of=now)
    count = admin.changes.count(table, selection, exact=options.dry_run)
    if options.dry_run:
        _say_dry(count, "be deleted", now)
        return 0
    if count.number > bulk.CONFIRM_ABOVE and sys.stdin.isatty():
        confirm(f"{count} {state} before {shown(before)} will be deleted.", yes=options.yes)
    _carry_out(table, options, selection, count)
    return 0


def run_cancel(options: argparse.Namespace) -> int:
    """Take out unsent tasks; return 0, or 1 if an ID does not match. Raises SettingError, NotReached, OutboxError."""
    ids = _ids(options)
    if ids is None and options.reason is None and not options.dry_run:
        raise SettingError("--reason is missing. It is required with --state")
    table = flags.open_table(options)
    ids = ids and flags.full_ids(table, options, ids, unasked=options.yes)
    at = _preview_time(table, options)
    selection = flags.selection(options, at, ids)
    # Only tasks from before the preview, so that neither this run nor its continuation deletes a task that is
    # registered meanwhile under an ID of the preview.
    until = min(selection.until or at, at) if ids is None else selection.until
    state = selection.state or admin.changes.ANY_UNSENT
    selection = dataclasses.replace(selection, state=state, until=until, as_of=at)
    count = admin.changes.count(table, selection, exact=options.dry_run or ids is not None)
    if not count.number and ids:
        raise OutboxError(f"no unsent task among the {counted(len(ids), 'given ID')}. Nothing was changed")
    if options.dry_run:
        _say_dry(count, "be cancelled", at)
    elif not count.number:
        say(f"{count} cancelled")
    if not count.number:
        flags.explain_none(table, selection, options)
    if not count.number or options.dry_run:
        return 0
    if ids is None and options.topic is None and not options.yes:
        error_tables.print_selected(table, selection)
    confirm(f"{count} ({selection.state}) will be cancelled and not published any more.", yes=options.yes)
    logs.configure()
    report = _carry_out(table, options, selection, count)
    return int(bool(report.unchanged)) if ids is None else report.explain({}, "because the state is {state}")


def run_restore(options: argparse.Namespace) -> int:
    """Put cancelled tasks back; return 0, or 1 if one is refused. Raises SettingError, NotReached, OutboxError."""
    ids = _ids(options)
    table = flags.open_table(options)
    operation = admin.operations.operation(table, ids[0]) if ids and len(ids) == 1 else None
    if operation is not None and operation.operation == "cancel":
        ids = None
    ids = ids and flags.full_ids(table, options, ids)
    at = _preview_time(table, options)
    selection = dataclasses.replace(flags.selection(options, at, ids), state=CANCELLED, as_of=at)
    if operation is not None and ids is None:
        since = selection.since or operation.started_at
        selection = dataclasses.replace(selection, operation=operation.id, since=since)
    if options.dry_run:
        return _preview_restore(table, options, selection)
    count = admin.changes.count(table, selection, exact=False)
    if count.number > bulk.CONFIRM_ABOVE:
        confirm(f"{count} will be restored, and published when they are due.", yes=options.yes)
    report = _carry_out(table, options, selection, count)
    if options.json:
        refused = Counter(report.unchanged.values()) | ({"missing": len(report.missing)} if report.missing else {})
        say(as_json({"dry_run": False, "tasks": report.changed, "refused": refused}))
    if not count.number and ids is None:
        note("no cancelled task matches. `outbox list --state cancelled` shows those that can be restored")
    report.explain(NOT_RESTORED, EXCLUDED)
    return int(bool(set(report.unchanged.values()) - {"not_cancelled"} or report.missing))


def _preview_restore(
    table: "admin.table.TaskTable", options: argparse.Namespace, selection: "admin.changes.TaskSelection"
) -> int:
    """Print what a restore would do. Return 1 if a task would be refused."""
    found = admin.changes.preview(table, selection, "restore")
    if options.json:
        refused, at = dict(found.refused), selection.as_of
        counts = {"tasks": found.tasks, "refused": refused, "overtaken": found.overtaken}
        say(as_json({"dry_run": True, "as_of": at, **counts}))
    elif selection.as_of:
        _say_dry(admin.changes.Count(found.tasks), "be restored", selection.as_of)
    for state, number in found.refused.items():
        why = NOT_RESTORED.get(state, "because they are not cancelled, or are excluded by the flags")
        note(f"{counted(number, 'task')} would not be restored, {why}")
    if found.overtaken:
        note(
            f"{counted(found.overtaken, 'task')} would follow later tasks of their ordering keys, which were sent since"
        )
    return int(bool(found.refused))


def _preview_time(table: "admin.table.TaskTable", options: argparse.Namespace) -> datetime:
    """Return the time as of which tasks are counted and selected: --as-of, or now. Raises SettingError."""
    now = table.now()
    at = resolved(options.as_of, now) if options.as_of is not None else now
    if at > now:
        raise SettingError(f"--as-of {shown(at)} is in the future. The database's time is {shown(now)}")
    return at


def _say_dry(count: "admin.changes.Count", effect: str, at: datetime) -> None:
    """Print what a change would do, and how to change no other tasks."""
    say(f"{count} would {effect}")
    if count.number:
        note(f"to change only tasks that are counted here, pass --as-of={shown(at)}")


def _ids(options: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the given task IDs, or None if --state selects the tasks. Raises SettingError, OutboxError."""
    ids = flags.ids(options)
    if ids is None and options.state is None:
        states = one_of(*CHANGED[options.command]).allowed
        raise SettingError(f"no tasks given. Pass IDs, --ids-file, or --state with {states}")
    return ids


def _carry_out(
    table: "admin.table.TaskTable",
    options: argparse.Namespace,
    selection: "admin.changes.TaskSelection",
    count: "admin.changes.Count",
) -> bulk.Report:
    """Change the tasks and print their number."""
    author, id = flags.author(options), admin.operations.new_id()
    outcomes = admin.changes.change(table, options.command, selection, author, id=id, selected=count.number)
    is_whole = len(selection.ids or ()) <= admin.operations.RECORDED_IDS
    report = bulk.execute(table, options, outcomes, id, author, is_whole=is_whole, total=count.number)
    if not vars(options).get("json"):
        say(f"{DONE[options.command]}: {counted(report.changed, 'task')}")
    if options.command == "cancel" and report.changed:
        note(f"to take it back, run `outbox restore {id}`")
    if selection.ids is None and options.command != "restore":  # what a restore refuses matches still
        _explain_difference(table, selection, report)
    return report


def _explain_difference(
    table: "admin.table.TaskTable", selection: "admin.changes.TaskSelection", report: bulk.Report
) -> None:
    """Print which tasks have left the selection since the preview, and how many match now."""
    report.explain({}, "because the state is {state} now")
    came = admin.changes.count(table, dataclasses.replace(selection, as_of=None), exact=False)
    if came.number:
        note(f"{came} match now, but did not at the preview, or match again. Run the command again to change them, too")

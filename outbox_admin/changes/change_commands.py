"""`outbox retry`, `resend`, `purge`, `cancel` and `restore`: change tasks, or publish them again."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import outbox_admin as admin
from outbox.base.values import counted, shown
from outbox.errors import SettingError
from outbox.program import logs
from outbox.program.settings import MOMENT, one_of, resolved
from outbox.program.terminal import CONFIRM_ABOVE, SHOWN, as_json, confirm, note, say, shortened
from outbox.program.terminal import table as tabulated
from outbox_admin import flags, value_types
from outbox_admin.change_kinds import KINDS
from outbox_admin.changes.operation_commands import execute, explain
from outbox_admin.tasks import task_flags
from outbox_admin.tasks.selections import TaskSelection

RETRY_DESCRIPTION = """\
Make tasks due now. Dead and retrying tasks get all their attempts again. Sent tasks are
sent again with the same task ID, to all subscribers. Scheduled tasks are sent now. Pending
tasks, and tasks blocked by the head of their ordering key, are not changed.

    outbox retry --state dead --topic orders --dry-run
    outbox list --state dead --error NOT_FOUND --json | \\
        outbox retry --ids-file - --yes"""
RESEND_DESCRIPTION = """\
Publish sent tasks again, but to another Pub/Sub topic, for example for one subscriber that
acknowledged by mistake. Create a topic, and a subscription of this subscriber to it. No
task changes, and no other subscription gets a message.

    outbox resend --topic orders --since 2h --to orders-billing --dry-run
    outbox resend 0e3c... 7f21... --to orders-billing"""
PURGE_DESCRIPTION = """\
Delete sent or cancelled tasks. The retention of the table deletes them, too, typically
within three days after they reach the retention age (`outbox schema`).

    outbox purge --state sent --until 7d --topic orders --dry-run
    outbox purge --state cancelled --topic orders"""
CANCEL_DESCRIPTION = """\
End unsent tasks of any state. Workers do not publish them any more. `outbox restore` makes
them unsent again, until the retention of sent tasks deletes them. A task that is published
but not marked as sent yet can be cancelled, although subscribers receive it: the worker
logs its ID (cancelled_after_publish). The next tasks of the same ordering keys are
released.

    outbox cancel 0e3c... --reason 'order was cancelled, ticket 4711'
    outbox cancel --state scheduled --topic reminders --dry-run"""
RESTORE_DESCRIPTION = """\
Put cancelled tasks back: those of an operation (`outbox operations`), or by ID. They are as
they were, and those whose time has passed are due. An earlier task of an ordering key can
follow later ones that were sent meanwhile: --dry-run counts them.

    outbox restore 1f0c... --dry-run
    outbox restore --state cancelled --topic reminders --since 1h"""

COMMANDS = {
    "retry": ("send tasks again, or retry dead tasks", RETRY_DESCRIPTION),
    "purge": ("delete sent or cancelled tasks", PURGE_DESCRIPTION),
    "cancel": ("cancel unsent tasks", CANCEL_DESCRIPTION),
    "restore": ("put cancelled tasks back", RESTORE_DESCRIPTION),
    "resend": ("publish sent tasks again to another topic", RESEND_DESCRIPTION),
}
#: When a command asks, if not only above a number of tasks.
ASKS = {
    "retry": f"asks for more than {CONFIRM_ABOVE:,} tasks, or if you pass --state without --topic",
    "cancel": "always asks",
}


def add(commands: Any) -> None:
    for name, (title, description) in COMMANDS.items():
        parser = flags.command(commands, name, title, description, run_change)
        task_flags.add_ids(parser)
        if name == "resend":
            text = "Pub/Sub topic to publish to: its ID, or projects/PROJECT/topics/TOPIC"
            flags.add(parser, "--to", value_types.TOPIC, text, metavar="TOPIC", required=True)
            flags.add(parser, "--rate", value_types.RATE, "Max tasks per second: {}", metavar="N")
            flags.switch(parser, "--force", "Also publish to the topic of the tasks")
        else:
            task_flags.add_state(parser, KINDS[name].states, "Only tasks in this state")
        task_flags.add_filters(parser, name)
        if name == "retry":
            flags.switch(parser, "--include-expired", "Also send tasks whose ExpiresAt has passed")
        flags.switch(parser, "--dry-run", "Only count the tasks by topic and error")
        asks = ASKS.get(name, f"asks for more than {CONFIRM_ABOVE:,} tasks")
        flags.switch(parser, "--yes", f"Skip the confirmation. The command {asks}")
        allowed = "Allowed: {}, as long as Spanner keeps versions (version_retention_period)"
        preview = "Change only tasks that also matched at this time (default now), such as that of a dry run. "
        flags.add(parser, "--as-of", MOMENT, preview + allowed, metavar="TIME")
        flags.switch(parser, "--json", "Print one JSON object")
        flags.add_reason(parser, ", and for the log. Required with --state" if name == "cancel" else "")


def run_change(options: argparse.Namespace) -> int:
    """Change tasks; return 0, or 1 if one is not changed. Raises SettingError, NotReached, OutboxError."""
    ids = _ids(options)
    table = flags.open_table(options)
    selection = _selection(table, options, ids)
    if options.dry_run:
        return _preview(table, options, selection)
    # A resend has a max number of tasks.
    count = admin.selected.count(table, selection, exact=options.command == "resend")
    if not count.number and selection.ids is None:
        return _preview(table, options, selection)
    if count.number:
        _confirm(table, options, selection, count)
    if options.command == "cancel":
        logs.configure()
    name, id, author = options.command, admin.operations.new_id(), flags.author(options)
    outcomes = admin.execution.change(table, name, selection, author, id=id, selected=count.number)
    code = execute(table, options, name, outcomes, id, author, total=count.number, ids=selection.ids or ())
    if selection.ids is None and KINDS[options.command].ends_match:
        with flags.noted():
            came = admin.selected.count(table, dataclasses.replace(selection, as_of=None), exact=False)
            if came.number:
                note(f"{came} match now, but not at the preview, or again. Run the command again to change them")
    return code


def _ids(options: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the given task IDs, or None if flags select the tasks. Raises SettingError, OutboxError."""
    ids, name = task_flags.ids(options), options.command
    if ids is None and name != "resend" and options.state is None:
        states = one_of(*KINDS[name].states).allowed
        raise SettingError(f"no tasks given. Pass IDs, --ids-file, or --state with {states}")
    if ids is None and name == "cancel" and options.reason is None and not options.dry_run:
        raise SettingError("--reason is missing. It is required with --state")
    if ids is None and name == "purge" and options.state == "sent" and options.until is None:
        raise SettingError("--until is missing. Without it, all sent tasks would be deleted")
    return ids


def _selection(table: flags.Table, options: argparse.Namespace, ids: tuple[str, ...] | None) -> TaskSelection:
    """Return the tasks that the flags name, as of the preview. Raises SettingError, NotReached, OutboxError."""
    name, of_cancel = options.command, None
    if name == "restore" and ids and len(ids) == 1 and not admin.lookup.beginning_with(table, ids, 1):
        of_cancel = admin.operations.operation(table, task_flags.full_operation_id(table, options, ids[0]))
    if of_cancel and of_cancel.operation == "cancel":
        ids, options.ids = None, []
    ids = ids and task_flags.full_ids(table, options, ids)
    now = table.now()
    at = now if options.as_of is None else resolved(options.as_of, now)
    if at > now:
        raise SettingError(f"--as-of {shown(at)} is in the future. The database's time is {shown(now)}")
    selection = admin.execution.bounded(name, task_flags.selection(options, at, ids), at)
    task_flags.check_window(selection.since, selection.until)
    if of_cancel and ids is None:
        since = selection.since or of_cancel.started_at
        selection = dataclasses.replace(selection, cancelled_by=of_cancel.id, since=since)
    if name == "resend":
        selection = admin.execution.resend_to(table, selection, options.to, options.rate, own=options.force)
        if unchecked := admin.editing.check_destinations(table, [selection.to], otherwise=""):
            note(unchecked)
    return selection


def _preview(table: flags.Table, options: argparse.Namespace, selection: TaskSelection) -> int:
    """Print what a dry run finds, or why there is nothing to change. Return 1 if a task would be refused."""
    found, at = admin.chunks.preview(table, selection, options.command), selection.as_of
    if options.json:
        groups = [{"topic": topic, "error": error, "tasks": number} for topic, error, number in found.groups]
        counts = {"tasks": found.tasks, "groups": groups, "refused": found.refused, "overtaken": found.overtaken}
        say(as_json({"dry_run": options.dry_run, "as_of": at, **counts}))
    elif options.dry_run:
        say(f"{counted(found.tasks, 'task')} would {_effect(options, selection)}", *_groups(found))
    else:
        say(f"{KINDS[options.command].done}: 0 tasks")
    if found.tasks and at and not options.json:
        note(f"to change only tasks that are counted here, pass --as-of={shown(at)}")
    if found.overtaken:
        note(
            f"{counted(found.overtaken, 'task')} would follow later tasks of their ordering keys, which were sent since"
        )
    if not found.tasks and not found.refused and selection.ids is None:
        task_flags.explain_none(table, selection, options)
    return explain(options, options.command, found.refused)


def _groups(found: "admin.chunks.Preview") -> Iterator[str]:
    """Yield a table of the largest groups, if there are any."""
    rows = [(number, topic, shortened(error)) for topic, error, number in found.groups[:SHOWN]]
    if rows:
        yield tabulated(("TASKS", "TOPIC", "ERROR"), rows)
    if len(found.groups) > SHOWN:
        yield "..."


def _effect(options: argparse.Namespace, selection: TaskSelection) -> str:
    return f"be published to {selection.to}" if selection.to else KINDS[options.command].effect


def _confirm(
    table: flags.Table, options: argparse.Namespace, selection: TaskSelection, count: "admin.rows.backlog.Count"
) -> None:
    """Ask before a change of many tasks, of those of all topics, and before each cancel. Raises SettingError."""
    is_of_all = selection.ids is None and selection.topic is None and options.command in ASKS
    if is_of_all and not options.yes:
        say(*_groups(admin.chunks.preview(table, selection, options.command)), stream=sys.stderr)
    if is_of_all or options.command == "cancel" or count.number > CONFIRM_ABOVE:
        confirm(f"{count} will {_effect(options, selection)}.", yes=options.yes)

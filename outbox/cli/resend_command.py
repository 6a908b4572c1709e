"""`outbox resend` publishes sent tasks again, to another Pub/Sub topic."""

import argparse
import dataclasses
from typing import Any

from outbox import admin
from outbox.admin import flags
from outbox.base.times import shown
from outbox.base.values import counted
from outbox.cli import bulk
from outbox.program.output import confirm, note, table
from outbox.program.terminal import as_json, say

DESCRIPTION = """\
Publish sent tasks again, but to another Pub/Sub topic, for example for one subscriber that
acknowledged by mistake. Create a topic, and a subscription of this subscriber to it. The
messages have the same bytes, attributes and task IDs. No task changes, and no other
subscription gets a message. The tasks of an ordering key are published in order.

    outbox resend --topic orders --since 2h --to orders-billing --dry-run \\
        --project my-project --instance main --database shop
    outbox resend --topic orders --since 2h --to orders-billing --rate 500 ...
    outbox resend 0e3c... 7f21... --to orders-billing --reason 'ticket 4711' ..."""


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "resend", "publish sent tasks again to another topic", DESCRIPTION, run)
    flags.add_ids(parser)
    flags.add_narrowing(parser, error=False)
    flags.add(parser, "--ordering-key", flags.KEY, "Only tasks with this ordering key", metavar="KEY")
    text = "Pub/Sub topic to publish to: its ID, or projects/PROJECT/topics/TOPIC"
    flags.add(parser, "--to", flags.TOPIC, text, metavar="TOPIC", required=True)
    flags.add(parser, "--rate", flags.RATE, f"Max tasks per second: {flags.RATE.allowed}", metavar="N")
    parser.add_argument("--force", action="store_true", help="Also publish to the topic of the tasks.")
    parser.add_argument("--dry-run", action="store_true", help="Only count the tasks by topic.")
    parser.add_argument("--yes", action="store_true", help=f"Skip the confirmation above {bulk.CONFIRM_ABOVE:,} tasks.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    flags.add_reason(parser)


def run(options: argparse.Namespace) -> int:
    """Publish tasks; return 0, or 1 if one was not published. Raises SettingError, NotReached, OutboxError."""
    ids = flags.ids(options)
    task_table = flags.open_table(options)
    ids = ids and flags.full_ids(task_table, options, ids, unasked=options.yes)
    now = task_table.now()
    found = flags.selection(options, now, ids)
    until = min(found.until or now, now)
    flags.check_window(found.since, until)
    found = dataclasses.replace(found, state="sent", until=until, as_of=now)
    selection = admin.resend.checked(task_table, found, options.to, options.rate, own=options.force)
    if unchecked := admin.resend.check_exists(task_table, selection):
        note(unchecked)
    preview = admin.changes.preview(task_table, selection)
    if options.dry_run or not preview.tasks:
        _say_preview(options, selection, preview)
        if not preview.tasks and ids is None:
            flags.explain_none(task_table, selection, options)
        return 1 if preview.refused else 0
    if preview.tasks > bulk.CONFIRM_ABOVE:
        confirm(f"{counted(preview.tasks, 'task')} will be published to {selection.to}.", yes=options.yes)
    id, author = admin.operations.new_id(), flags.author(options)
    admin.resend.begin(task_table, selection, author, id=id, selected=preview.tasks)
    return bulk.resume(task_table, options, id, author)


def _say_preview(
    options: argparse.Namespace, selection: "admin.resend.Resend", preview: "admin.changes.Preview"
) -> None:
    counts = {topic: number for topic, _, number in preview.groups}
    until = shown(selection.until) if selection.until else None
    if options.json:
        found = {"to": selection.to, "tasks": preview.tasks, "topics": counts, "refused": preview.refused}
        say(as_json(found | {"until": until}))
        return
    say(f"{counted(preview.tasks, 'task')} would be published to {selection.to}")
    if counts:
        say(table(("TASKS", "TOPIC"), [[number, topic] for topic, number in counts.items()]))
        note(f"to publish only tasks that are counted here, pass --until={until}")
    for state, number in preview.refused.items():
        note(f"{counted(number, 'task')} would not be published: {'not in the table' if state == 'missing' else state}")

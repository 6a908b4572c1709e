"""`outbox tail`: follow sent tasks."""

import argparse
import contextlib
import signal
import time
from datetime import timedelta
from typing import Any

from outbox import admin
from outbox.cli import flags
from outbox.cli.output import as_json, escaped, note
from outbox.errors import OutboxError
from outbox.shared.times import MOMENT, resolved, shown, spoken

DESCRIPTION = """\
Print each task when it is sent, one per line, until Ctrl-C. The tasks of an ordering key
are in the order in which they were published. The command only reads, so any number of
people can run it at once.

    outbox tail --project my-project --instance main --database shop
    outbox tail --topic orders --since 15m --json ..."""

#: Seconds between two reads, and rows of one read.
SECONDS, ROWS = 1.0, 1_000


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "tail", "follow sent tasks", DESCRIPTION)
    flags.add_topic(parser)
    text = f"Start at this time instead of now. Allowed: {MOMENT.allowed}"
    flags.add(parser, "--since", MOMENT, text, metavar="TIME")
    parser.add_argument("--json", action="store_true", help="Print one JSON object per line.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print tasks as they are sent, until a signal; returns 0. Raises SettingError, NotReached, OutboxError."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        _follow(flags.open_table(options), options)
    return 0


def _follow(database: "admin.table.TaskTable", options: argparse.Namespace) -> None:
    now = database.now()
    position = admin.tasks.Position(now if options.since is None else resolved(options.since, now))
    flags.check_window(position.sent_at, now + timedelta(microseconds=1))
    note(f"following from {shown(position.sent_at)}. Press Ctrl-C to stop")
    rows = admin.tasks.sent_after(database, position, options.topic, ROWS)
    while True:
        for row in admin.tasks.in_publish_order(rows):
            print(_line(row, options), flush=True)
        if rows:
            position = admin.tasks.Position(rows[-1]["SentAt"], rows[-1]["CreatedAt"], rows[-1]["Id"])
        if len(rows) < ROWS:
            time.sleep(SECONDS)
        rows = _next(database, position, options.topic)


def _next(
    database: "admin.table.TaskTable", position: "admin.tasks.Position", topic: str | None
) -> list[dict[str, Any]]:
    """Return the tasks sent after the position. Retry until Spanner responds."""
    failed = False
    while True:
        try:
            return admin.tasks.sent_after(database, position, topic, ROWS)
        except OutboxError as error:
            if not failed:
                note(f"{error}. Retrying; no task will be missed")
            failed = True
            time.sleep(SECONDS)


def _line(row: dict[str, Any], options: argparse.Namespace) -> str:
    if options.json:
        return as_json(
            {
                "id": row["Id"], "topic": row["Topic"], "priority": row["Priority"], "ordering_key": row["OrderingKey"],
                "created_at": row["CreatedAt"], "sent_at": row["SentAt"], "bytes": row["Bytes"],
            }
        )  # fmt: skip
    after = (row["SentAt"] - row["CreatedAt"]).total_seconds()
    key = f", key {escaped(row['OrderingKey'])}" if row["OrderingKey"] else ""
    return (
        f"{shown(row['SentAt'])} {escaped(row['Topic'])} {escaped(row['Id'])} priority {row['Priority']}, "
        f"{row['Bytes']:,} bytes, {spoken(after)} after its commit{key}"
    )

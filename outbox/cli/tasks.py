"""`outbox list`, `show` and `tail`: list tasks, show one with its message, follow sent tasks."""

import argparse
import base64
import codecs
import contextlib
import json
import signal
import sys
import time
import unicodedata
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from outbox.cli import errors, flags
from outbox.cli.output import as_json, cell, escaped, note, table
from outbox.errors import OutboxError
from outbox.shared.settings import flag_of, whole_number
from outbox.shared.times import MOMENT, resolved, shown, spoken
from outbox.storage.task_states import NEVER, STATES

if TYPE_CHECKING:
    from outbox.admin.table import TaskTable
    from outbox.admin.tasks import Position, Task

LIST_DESCRIPTION = """\
List the tasks of one state, or all unsent tasks. Pending tasks are sorted by priority
and age, as workers select them, sent tasks by SentAt, newest first, and other tasks by
the time at which they will be due. --json prints one object per line.

    outbox list --state dead --project my-project --instance main --database shop
    outbox list --state sent --topic orders --since 2h --until 1h ...
    outbox list --state retrying --error NOT_FOUND --json ... | jq .id"""
SHOW_DESCRIPTION = """\
Show one task with every column, and the message that subscribers receive.

    outbox show 0e3c... --project my-project --instance main --database shop
    outbox show 0e3c... --raw ... > message.bin"""
TAIL_DESCRIPTION = """\
Print each task when it is sent, one per line, until Ctrl-C. The command only reads, so
any number of people can run it at once.

    outbox tail --project my-project --instance main --database shop
    outbox tail --topic orders --since 15m --json ..."""

LIMIT = whole_number(1, 100_000)
DEFAULT_LIMIT = 100
#: Bytes of a message's data that `show` prints. `--raw` writes all.
SHOWN_BYTES = 64 * 1024
#: Seconds between two reads of `tail`, and rows of one read.
TAIL_SECONDS, TAIL_ROWS = 1.0, 1_000


def add(commands: Any) -> None:
    """Add the three commands to the subparsers `commands`."""
    listing = flags.command(commands, "list", "list the tasks of a state", LIST_DESCRIPTION)
    flags.add_selection(listing, *STATES)
    listing.add_argument(
        "--limit", type=flag_of("--limit", LIMIT), default=DEFAULT_LIMIT, metavar="N",
        help=f"Max tasks: {LIMIT.allowed} (default {DEFAULT_LIMIT}).",
    )  # fmt: skip
    listing.add_argument("--json", action="store_true", help="Print one JSON object per line instead of a table.")
    listing.set_defaults(run=run_list)
    showing = flags.command(commands, "show", "show one task with its message", SHOW_DESCRIPTION)
    showing.add_argument(
        "ids", nargs=1, type=flag_of("ID", flags.ID), metavar="ID", help=f"Task ID, or {flags.PREFIX_HELP}."
    )
    form = showing.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="Print one JSON object. Binary data is in base64.")
    form.add_argument("--raw", action="store_true", help="Write only the bytes of the message data.")
    showing.set_defaults(run=run_show)
    tailing = flags.command(commands, "tail", "follow sent tasks", TAIL_DESCRIPTION)
    flags.add_topic(tailing)
    tailing.add_argument(
        "--since", type=flag_of("--since", MOMENT), metavar="TIME",
        help=f"Start at this time instead of now. Allowed: {MOMENT.allowed}.",
    )  # fmt: skip
    tailing.add_argument("--json", action="store_true", help="Print one JSON object per line.")
    tailing.set_defaults(run=run_tail)


def run_list(options: argparse.Namespace) -> int:
    """Print tasks; returns 0. Raises SettingError, NotReached, OutboxError."""
    database = flags.open_table(options)

    from outbox.admin import tasks  # noqa: PLC0415 - see open_table

    chosen = flags.selection(options, database.now())
    found = tasks.listed(database, chosen, options.limit + 1)
    shown_tasks = found[: options.limit]
    if options.json:
        for task in shown_tasks:
            print(as_json(_plain(task)))
    elif shown_tasks:
        print(_table(shown_tasks))
        groups = errors.groups(shown_tasks)
        if any(group["tasks"] > 1 for group in groups):
            print(errors.text(groups))
    if not found:
        print("No matching tasks.", file=sys.stderr if options.json else sys.stdout)
        flags.explain_none(database, chosen, options)
    if len(found) > options.limit:
        note(f"more than {options.limit:,} tasks match. Raise --limit, or use --topic, --since, --until or --error")
    return 0


def _table(tasks: "list[Task]") -> str:
    columns: dict[str, list[object]] = {
        "ID": [task.columns["Id"] for task in tasks],
        "TOPIC": [task.columns["Topic"] for task in tasks],
        "PRIORITY": [task.columns["Priority"] for task in tasks],
        "STATE": [task.state for task in tasks],
        "CREATED": [task.columns["CreatedAt"] for task in tasks],
        "AVAILABLE": [_available(task.columns["AvailableAt"]) for task in tasks],
        "SENT": [task.columns["SentAt"] for task in tasks],
        "ATTEMPTS": [task.columns["Attempts"] or None for task in tasks],
        "KEY": [task.columns["OrderingKey"] for task in tasks],
        "ERROR": [errors.shortened(task.columns["LastError"]) for task in tasks],
    }
    used = {head: values for head, values in columns.items() if any(value is not None for value in values)}
    return table(list(used), zip(*used.values(), strict=True))


def _available(time: datetime | None) -> datetime | None:
    return None if time is None or time >= NEVER else time


def run_show(options: argparse.Namespace) -> int:
    """Print a task; returns 0. Raises SettingError, NotReached, and OutboxError if there is no such task."""
    database = flags.open_table(options)

    from outbox.admin import tasks  # noqa: PLC0415 - see open_table
    from outbox.message import parsed  # noqa: PLC0415 - see open_table

    [id] = flags.full_ids(database, options, options.ids)
    task = tasks.task(database, id)
    if task is None:
        raise OutboxError(
            f"task {id!r} does not exist. Either its transaction was not committed, or the task was deleted: "
            "after it was sent (retention, `outbox purge`), or when it was dead (`outbox discard`)"
        )
    message = parsed(task.columns["Data"])
    data = task.columns["Data"] if message is None else message.data
    if message is None:
        note("Data is not a serialized google.pubsub.v1.PubsubMessage. The bytes of the column are shown")
    if options.raw:
        sys.stdout.buffer.write(data)
    elif options.json:
        attributes = {} if message is None else dict(message.attributes)
        print(as_json(_plain(task) | {"message": {"attributes": attributes, **_json_data(data)}}))
    else:
        print("\n".join(_lines(task, message, data)))
    return 0


def _plain(task: "Task") -> dict[str, Any]:
    names = {
        "Id": "id", "Topic": "topic", "Priority": "priority", "OrderingKey": "ordering_key", "CreatedAt": "created_at",
        "AvailableAt": "available_at", "ExpiresAt": "expires_at", "Attempts": "attempts", "LastError": "last_error",
        "SentAt": "sent_at", "Bytes": "bytes", "Shard": "shard", "Sequence": "sequence", "AtMostOnce": "at_most_once",
    }  # fmt: skip
    columns = {names[name]: value for name, value in task.columns.items() if name in names}
    return {"id": columns.pop("id"), "state": task.state, **columns}


def _json_data(data: bytes) -> dict[str, str]:
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}


def _lines(task: "Task", message: Any | None, data: bytes) -> Iterator[str]:
    columns = {"Id": task.columns["Id"], "State": task.state, **task.columns}
    del columns["Data"]
    for name, value in columns.items():
        never = " (never)" if name == "AvailableAt" and value is not None and value >= NEVER else ""
        yield f"{name:<12} {'NULL' if value is None else cell(value)}{never}"
    if message is not None:
        yield "Attributes" if message.attributes else "Attributes   none"
        for key, value in sorted(message.attributes.items()):
            yield f"  {escaped(key)} = {escaped(value)}"
    yield from _data_lines(data)


def _data_lines(data: bytes) -> Iterator[str]:
    kind, lines = _readable(data[:SHOWN_BYTES], whole=len(data) <= SHOWN_BYTES)
    yield f"Data         {len(data):,} bytes{', ' + kind if data else ''}"
    for line in lines:
        yield f"  {line}"
    if len(data) > SHOWN_BYTES:
        yield f"  ... {len(data) - SHOWN_BYTES:,} more bytes: --raw writes all"


def _readable(data: bytes, *, whole: bool) -> tuple[str, list[str]]:
    """Return the kind of the data (JSON, text or hex), and the lines that show it."""
    try:
        # SHOWN_BYTES may cut the last character.
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
    except UnicodeDecodeError:
        text = "\0"
    if any(unicodedata.category(each) == "Cc" and each not in "\n\r\t" for each in text):
        return "hex", [data[start : start + 32].hex(" ") for start in range(0, len(data), 32)]
    try:
        pretty = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "text", [escaped(line) for line in text.expandtabs().splitlines()]
    return "JSON", [escaped(line) for line in pretty.splitlines()]


def run_tail(options: argparse.Namespace) -> int:
    """Print tasks as they are sent, until a signal; returns 0. Raises SettingError, NotReached, OutboxError."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        _follow(flags.open_table(options), options)
    return 0


def _follow(database: "TaskTable", options: argparse.Namespace) -> None:
    from outbox.admin import tasks  # noqa: PLC0415 - see open_table

    now = database.now()
    position = tasks.Position(now if options.since is None else resolved(options.since, now))
    flags.check_window(position.sent_at, now + timedelta(microseconds=1))
    note(f"following from {shown(position.sent_at)}. Press Ctrl-C to stop")
    rows = tasks.sent_after(database, position, options.topic, TAIL_ROWS)
    while True:
        for row in rows:
            print(_sent_line(row, options), flush=True)
            position = tasks.Position(row["SentAt"], row["Id"])
        if len(rows) < TAIL_ROWS:
            time.sleep(TAIL_SECONDS)
        rows = _next(database, position, options.topic)


def _next(database: "TaskTable", position: "Position", topic: str | None) -> list[dict[str, Any]]:
    """Return the tasks sent after the position. Retry until Spanner responds."""
    from outbox.admin import tasks  # noqa: PLC0415 - see open_table

    failed = False
    while True:
        try:
            return tasks.sent_after(database, position, topic, TAIL_ROWS)
        except OutboxError as error:
            if not failed:
                note(f"{error}. Retrying; no task will be missed")
            failed = True
            time.sleep(TAIL_SECONDS)


def _sent_line(row: dict[str, Any], options: argparse.Namespace) -> str:
    after = (row["SentAt"] - row["CreatedAt"]).total_seconds()
    if options.json:
        return as_json(
            {
                "id": row["Id"], "topic": row["Topic"], "priority": row["Priority"], "ordering_key": row["OrderingKey"],
                "created_at": row["CreatedAt"], "sent_at": row["SentAt"], "bytes": row["Bytes"],
            }
        )  # fmt: skip
    key = f", key {escaped(row['OrderingKey'])}" if row["OrderingKey"] else ""
    return (
        f"{shown(row['SentAt'])} {escaped(row['Topic'])} {escaped(row['Id'])} priority {row['Priority']}, "
        f"{row['Bytes']:,} bytes, {spoken(after)} after its commit{key}"
    )

"""`outbox list`, `show` and `tail`: list tasks, show one with its message, or follow sent tasks."""

import argparse
import base64
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

import outbox_admin as admin
from outbox.base.schedules import FOLLOW
from outbox.base.start import exit_on
from outbox.base.values import counted, shown, spoken
from outbox.errors import OutboxError, PositionExpired
from outbox.program.settings import MOMENT, resolved
from outbox.program.terminal import (
    SHOWN,
    Escaped,
    as_json,
    by_field,
    cell,
    escaped,
    joined,
    note,
    say,
    shortened,
    table,
    write,
)
from outbox.table.states import CANCELLED, LEFT_TO_SEND, STATES, UNSENT, is_dead
from outbox_admin import flags, value_types
from outbox_admin.tasks import task_flags
from outbox_admin.tasks.message_text import readable
from outbox_admin.tasks.selections import FILTERS, TaskSelection

LIST_DESCRIPTION = """\
List the tasks of some states, or all unsent tasks, sorted by SentAt, or CreatedAt of unsent
tasks. Tasks that are sent or registered meanwhile do not shift the pages.

Of each shard, topic and state, the command sorts the 10,000 tasks that workers would send
first, or fewer if there are many topics. With a filter besides --topic it sorts up to
1,000,000 tasks of each state. It says so if there are more.

    outbox list --state sent --topic orders --since 2h --until 1h
    outbox list --state retrying --error NOT_FOUND --json | jq .id"""
SHOW_DESCRIPTION = """\
Show one task with every column, and the message that subscribers receive.

    outbox show 0e3c...
    outbox show 0e3c... --raw > message.bin"""
TAIL_DESCRIPTION = """\
Print each task when it is sent, one per line, until Ctrl-C. The tasks of an ordering key
are in the order in which they were published.

    outbox tail --topic orders --since 15m --json"""

#: The states in which LastError is the reason for the state.
FAILING = ("dead", "retrying")
#: The columns that `tail --json` prints.
SENT_FIELDS = ("Id", "Topic", "Priority", "OrderingKey", "CreatedAt", "SentAt", "Bytes")


def add(commands: Any) -> None:
    listing = flags.command(commands, "list", "list the tasks of a state", LIST_DESCRIPTION, _run_list)
    text = "Only tasks in this state. The flag may be repeated"
    task_flags.add_state(listing, STATES, text, action="append", dest="states", default=[])
    task_flags.add_filters(listing, "list")
    order = listing.add_mutually_exclusive_group()
    text = "Sort the newest tasks first. This is the default with --state sent or cancelled alone"
    flags.switch(order, "--newest", text, default=None)
    order.add_argument("--oldest", dest="newest", action="store_false", help="Sort the oldest tasks first.")
    flags.add(listing, "--after", value_types.TEXT, "Continue the list. The command prints CURSOR", metavar="CURSOR")
    flags.add(listing, "--limit", value_types.LIMIT, "Max tasks: {} (default 100)", metavar="N", default=100)
    flags.switch(listing, "--json", "Print one JSON object per line instead of a table")
    showing = flags.command(commands, "show", "show one task with its message", SHOW_DESCRIPTION, _run_show)
    flags.add(showing, "ids", value_types.ID, f"Task ID. {task_flags.PREFIX_HELP}", metavar="ID", nargs=1)
    form = showing.add_mutually_exclusive_group()
    flags.switch(form, "--json", "Print one JSON object. Binary data is in base64")
    flags.switch(form, "--raw", "Write only the bytes of the message data")
    tailing = flags.command(commands, "tail", "follow sent tasks", TAIL_DESCRIPTION, _run_tail)
    flags.add(tailing, "--topic", value_types.TOPIC, FILTERS["topic"].help, metavar="TOPIC")
    flags.add(tailing, "--since", MOMENT, "Start at this time instead of now. Allowed: {}", metavar="TIME")
    flags.switch(tailing, "--json", "Print one JSON object per line")


def _run_list(options: argparse.Namespace) -> None:
    task_table, states = flags.open_table(options), options.states or UNSENT
    selection = task_flags.selection(options, task_table.now())
    newest = options.states in (["sent"], [CANCELLED]) if options.newest is None else options.newest
    page = admin.lookup.find(task_table, states, selection, newest=newest, after=options.after, limit=options.limit)
    if options.json:
        for task in page.tasks:
            say(as_json(_fields(task)))
    else:
        say(f"as of {shown(page.as_of)}", *_tables(page.tasks))
    if not page.tasks:
        say("No matching tasks.", stream=sys.stderr if options.json else sys.stdout)
        task_flags.explain_none(task_table, selection, options)
    _note_holds(task_table, page.tasks, page.as_of)
    if page.next:
        note(f"more tasks match. Add --after {page.next} for the next page, or raise --limit")
    if not page.whole:
        note("not all tasks were compared. Use a filter, such as --topic or --since, to see others")


def _note_holds(task_table: flags.Table, tasks: "Sequence[admin.lookup.Task]", at: datetime) -> None:
    """Print for each topic with due tasks why none of them is published now."""
    topics = sorted({task.columns["Topic"] for task in tasks if task.state in LEFT_TO_SEND})
    with flags.noted():
        controls = task_table.controls() if topics else {}
        workers = admin.rows.workers.live(task_table, at) if topics else []
        for topic in topics:
            if why := admin.problems.why_waiting(workers, topic, at, controls.get(topic)):
                note(f"due tasks of {escaped(topic)} wait: {escaped(why)}")


def _tables(tasks: "Sequence[admin.lookup.Task]") -> Iterator[str]:
    """Yield the table, and the errors if several tasks have the same."""
    if tasks:
        yield _table(tasks)
    counts = admin.lookup.count_errors([task for task in tasks if task.state in FAILING and task.columns["LastError"]])
    if any(count.tasks > 1 for count in counts):
        yield from ("", error_table(counts))


def _table(tasks: "Sequence[admin.lookup.Task]") -> str:
    columns: dict[str, list[object]] = {
        "ID": [task.columns["Id"] for task in tasks],
        "TOPIC": [task.columns["Topic"] for task in tasks],
        "PRIORITY": [task.columns["Priority"] for task in tasks],
        "STATE": [task.state for task in tasks],
        "CREATED": [task.columns["CreatedAt"] for task in tasks],
        "AVAILABLE": [None if is_dead(at) else at for at in (task.columns["AvailableAt"] for task in tasks)],
        "SENT": [task.columns["SentAt"] if task.state != CANCELLED else None for task in tasks],
        "CANCELLED": [task.columns["SentAt"] if task.state == CANCELLED else None for task in tasks],
        "BY": [task.columns["CancelledBy"] for task in tasks],
        "ATTEMPTS": [task.columns["Attempts"] or None for task in tasks],
        "KEY": [task.columns["OrderingKey"] for task in tasks],
        "BLOCKED BY": [task.columns["BlockedBy"] if task.state == "blocked" else None for task in tasks],
        "ERROR": [shortened(task.columns["LastError"]) for task in tasks],
    }
    used = {head: values for head, values in columns.items() if any(value is not None for value in values)}
    return table(list(used), zip(*used.values(), strict=True))


def _run_show(options: argparse.Namespace) -> None:
    task_table = flags.open_table(options)
    [id] = task_flags.full_ids(task_table, options, options.ids)
    task = admin.lookup.task(task_table, id)
    if task is None:
        why = (
            ". Either its transaction was not committed, or the task was deleted after it was sent or cancelled "
            "(retention, `outbox purge`)"
        )
        # `full_ids` has said that a shorter prefix is too short.
        raise OutboxError(f"task {id!r} does not exist{why if len(id) >= task_flags.MIN_PREFIX else ''}")
    message = task.message
    data = task.columns["Data"] if message is None else message.data
    as_retried = TaskSelection(ids=(id,))
    if task.state == "blocked" and admin.selected.count(task_table, as_retried, exact=True).number:
        note(f"task {escaped(task.columns['BlockedBy'])} no longer blocks this task. `outbox retry` sends it now")
    _note_holds(task_table, [task], task.as_of)
    if task.state == CANCELLED:
        by = escaped(task.columns["CancelledBy"])
        note(f"the task was cancelled by {by}. `outbox restore {escaped(id)}` puts it back")
    if message is None:
        note("Data is not a serialized google.pubsub.v1.PubsubMessage. The bytes of the column are shown")
    if options.raw:
        write(data, sys.stdout)
    elif options.json:
        attributes = {} if message is None else dict(message.attributes)
        message_fields = {"attributes": attributes, **_json_data(data)}
        say(as_json({"as_of": task.as_of} | _fields(task) | {"message": message_fields}))
    else:
        say(f"as of {shown(task.as_of)}", *_lines(task, message, data))


def _fields(task: "admin.lookup.Task") -> dict[str, Any]:
    """Return the fields of a task for JSON: the columns except Data, and the state."""
    columns = by_field(task.columns)
    columns.pop("data", None)
    return {"id": columns.pop("id"), "state": task.state, **columns}


def _json_data(data: bytes) -> dict[str, str]:
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}


def _lines(task: "admin.lookup.Task", message: Any | None, data: bytes) -> Iterator[str]:
    columns = {"Id": task.columns["Id"], "State": task.state, **task.columns}
    del columns["Data"]
    for name, value in columns.items():
        never = " (never)" if name == "AvailableAt" and is_dead(value) else ""
        yield f"{name:<12} {'NULL' if value is None else cell(value)}{never}"
    if message is not None:
        yield "Attributes" if message.attributes else "Attributes   none"
        for key, value in sorted(message.attributes.items()):
            yield f"  {key} = {value}"
    yield from _data_lines(data)


def _data_lines(data: bytes) -> Iterator[str]:
    kind, lines, more = readable(data)
    yield f"Data         {counted(len(data), 'byte')}{', ' + kind if data else ''}"
    for line in lines:
        yield f"  {line}"
    if more:
        yield f"  ... {counted(more, 'more byte')}: --raw writes all"


def _run_tail(options: argparse.Namespace) -> None:
    with exit_on(signal.SIGTERM, signal.SIGINT, code=0):
        _follow(flags.open_table(options), options)


def _follow(task_table: flags.Table, options: argparse.Namespace) -> None:
    from outbox.reading import Position, SentTasks  # noqa: PLC0415 - imports the clients

    now = task_table.now()
    since = now if options.since is None else resolved(options.since, now)
    task_flags.check_window(since, now + timedelta(microseconds=1))
    note(f"following from {shown(since)}. Press Ctrl-C to stop")
    sent = SentTasks(task_table, Position(since), options.topic)
    for page in follow(sent.page, FOLLOW.first, "; no task will be missed"):
        for row in page.rows:
            say(_sent_line(row, options))
        sent.position = page.end
        if not page.more:
            time.sleep(FOLLOW.first)


def _sent_line(row: dict[str, Any], options: argparse.Namespace) -> str:
    if options.json:
        return as_json(by_field({name: row[name] for name in SENT_FIELDS}))
    after = (row["SentAt"] - row["CreatedAt"]).total_seconds()
    key = f", key {row['OrderingKey']}" if row["OrderingKey"] else ""
    return (
        f"{shown(row['SentAt'])} {row['Topic']} {row['Id']} priority {row['Priority']}, "
        f"{counted(row['Bytes'], 'byte')}, sent {spoken(after)} after registration{key}"
    )


T = TypeVar("T")


def follow(read: Callable[[], T], seconds: float, remark: str = "") -> Iterator[T]:
    """Yield what `read` returns, again and again. After a success it may fail, and is called every `seconds`.

    Raises PositionExpired, and what the first call raises, because that is probably permanent, such as a missing table.
    """
    succeeded, noted = False, ""
    while True:
        try:
            found = read()
        except admin.rows.task_table.LayoutChanged:
            continue
        except OutboxError as error:
            if not succeeded or isinstance(error, PositionExpired):
                raise
            if str(error) != noted:
                noted = str(error)
                note(f"{error}. Retrying{remark}")
            time.sleep(seconds)
        else:
            succeeded, noted = True, ""
            yield found


def error_table(counts: "Sequence[admin.lookup.ErrorCount]") -> Escaped:
    """Return a table of the first SHOWN counts."""
    rows = [
        [f">= {each.tasks:,}" if each.at_least else each.tasks, each.state, each.of, shortened(each.error)]
        for each in counts[:SHOWN]
    ]
    others = [f"... and {len(counts) - SHOWN:,} more"] if len(counts) > SHOWN else []
    cut = [admin.lookup.OF_PART] if any(each.at_least for each in counts) else []
    return joined(table(("TASKS", "STATE", "TOPICS", "ERROR"), rows), *others, *cut)

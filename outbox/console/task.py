"""One task: its columns in words, its time line, its place in its ordering key, and its message for the role data."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from opentelemetry.trace import format_trace_id
from starlette.responses import Response

from outbox import admin, tracing
from outbox.admin.changes import TaskSelection
from outbox.admin.tasks import Task
from outbox.cli.tasks import SHOWN_BYTES, readable
from outbox.console.acting import ACTIONS
from outbox.console.operations import latest
from outbox.console.refusals import Refused
from outbox.console.rendering import at, render
from outbox.console.roles import Role
from outbox.console.visits import Visit, action, page
from outbox.errors import OutboxError
from outbox.program.terminal import counted
from outbox.program.times import spoken
from outbox.table.states import is_dead

#: Unsent tasks of an ordering key that are read to find the place of one of them.
KEY_TASKS = 1_000
#: Characters of an attribute that are shown. A program that bypasses the library can register longer ones.
ATTRIBUTE_CHARACTERS = 2_000
SENTENCES = {
    "pending": "Ready or due: a worker publishes it as soon as it can.",
    "retrying": "An attempt failed. A worker publishes it again when it is due.",
    "scheduled": "Due later, as the application asked.",
    "blocked": "Waits for the head of its ordering key.",
    "dead": "Not retried automatically. The last error says why.",
    "sent": "Published and marked. A subscriber may have processed it.",
}


def show(visit: Visit) -> Response:
    """Show the task `id` without its message."""
    id, now = visit.query.get("id", ""), visit.table.now()
    task = _found(admin.tasks.task(visit.table, id, data=False))
    columns = task.columns
    return render(
        visit,
        "task.html",
        task=task,
        sentence=SENTENCES[task.state],
        words=dict(_words(columns, now)),
        line=sorted(_time_line(visit, task), key=lambda event: event[0]),
        place=_place(visit, task) if columns["OrderingKey"] and task.state != "sent" else None,
        actions=[each for each in ACTIONS if task.state in each.states],
        command=visit.command("show", columns["Id"]),
        read_at=now,
    )


def _found(task: Task | None) -> Task:
    if task is None:
        advice = "Its transaction was not committed, or it was deleted: after it was sent, or by a cancel."
        raise Refused(404, "There is no task with this ID", advice)
    return task


def _words(columns: Mapping[str, Any], now: datetime) -> Iterator[tuple[str, str]]:
    """Yield the columns in words, each with its label."""
    yield "Priority", f"{columns['Priority']:,}"
    yield "Registered", _time(columns["CreatedAt"], now)
    if columns["SentAt"]:
        yield "Sent", f"{_time(columns['SentAt'], now)}, {counted(columns['TimesSent'], 'time')} in all"
    elif columns["AvailableAt"] and not is_dead(columns["AvailableAt"]):
        yield "Due", _time(columns["AvailableAt"], now)
    if columns["ExpiresAt"]:
        yield "Expires", _time(columns["ExpiresAt"], now)
    yield "Failed attempts", f"{columns['Attempts']:,}"
    yield "Size", counted(columns["Bytes"], "byte")
    yield "Delivery", "at most once" if columns["AtMostOnce"] else "at least once"
    yield "Shard", str(columns["Shard"])


def _time(time: datetime, now: datetime) -> str:
    seconds = (now - time).total_seconds()
    return f"{at(time)}, {f'{spoken(seconds)} ago' if seconds >= 0 else f'in {spoken(-seconds)}'}"


def _time_line(visit: Visit, task: Task) -> Iterator[tuple[datetime, str, str | None]]:
    """Yield what happened when, and the ID of an operation. The table has no times of failed attempts."""
    columns = task.columns
    yield columns["CreatedAt"], "registered", None
    reading = visit.shared(latest).value
    for operation in reading.operations if reading else ():
        if operation.started_at >= columns["CreatedAt"] and (relation := _relation(operation.selection, columns)):
            yield operation.started_at, f"{relation}{operation.operation} by {operation.principal}", operation.id
    later = columns["AvailableAt"]
    if columns["SentAt"]:
        yield columns["SentAt"], "sent", None
    elif later and not is_dead(later):
        yield later, "due", None
    if columns["ExpiresAt"] and not columns["SentAt"]:
        yield columns["ExpiresAt"], "expires", None


def _relation(selection: str, columns: Mapping[str, Any]) -> str:
    """Return how an operation concerns a task: empty if it does not."""
    try:
        found = TaskSelection.recorded(selection)
    except OutboxError:
        return ""
    if found.ids is not None:
        return "changed: " if columns["Id"] in found.ids else ""
    of_topic = found.topic in (None, columns["Topic"]) and found.ordering_key in (None, columns["OrderingKey"])
    before = found.until is None or columns["CreatedAt"] < found.until
    return "perhaps changed: " if found.state and of_topic and before else ""


def _place(visit: Visit, task: Task) -> dict[str, Any]:
    """Return the number of the task among the unsent tasks of its key, or None for a later one, and the key's head."""
    ids = admin.tasks.unsent_of_key(visit.table, task, KEY_TASKS)
    id = task.columns["Id"]
    head = admin.tasks.task(visit.table, ids[0], data=False) if ids and ids[0] != id else None
    number = ids.index(id) + 1 if id in ids else None
    return {"number": number, "head": head, "most": KEY_TASKS}


def show_data(visit: Visit) -> Response:
    """Record that the person looks at the message of the task `id`, and then show it."""
    id = visit.query.get("id", "")
    _found(admin.tasks.task(visit.table, id, data=False))
    admin.operations.viewed(visit.table, id, visit.author())
    task = _found(admin.tasks.task(visit.table, id))
    message = task.message
    given = {} if message is None else dict(message.attributes)
    whole = task.columns["Data"] if message is None else message.data
    attributes, data = visit.console.redact(task.columns["Topic"], given, whole)
    kind, lines = readable(data[:SHOWN_BYTES], whole=len(data) <= SHOWN_BYTES)
    return render(
        visit,
        "message.html",
        task=task,
        is_message=message is not None,
        attributes={name: value[:ATTRIBUTE_CHARACTERS] for name, value in sorted(attributes.items())},
        kind=kind,
        lines=lines,
        size=len(data),
        more=max(0, len(data) - SHOWN_BYTES),
        trace=_trace(visit, attributes),
        command=visit.command("show", task.columns["Id"]),
    )


def _trace(visit: Visit, attributes: Mapping[str, str]) -> dict[str, str] | None:
    """Return the ID of the trace in which the task was registered, and its address in Cloud Trace."""
    span = tracing.span_of(attributes)
    if span is None:
        return None
    id, project = format_trace_id(span.trace_id), visit.table.name.split("/")[1]
    return {"id": id, "address": f"https://console.cloud.google.com/traces/explorer;traceId={id}?project={project}"}


ROUTES = (page("/task", show), action("/task/message", show_data, Role.DATA))

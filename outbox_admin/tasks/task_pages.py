"""Tasks: those of a state that match a filter, those that the search finds, and one with its time line and message."""

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from opentelemetry.trace import format_trace_id
from starlette.responses import RedirectResponse, Response

from outbox import observing
from outbox.base.values import counted
from outbox.errors import OutboxError
from outbox.registration import APPLICATION
from outbox.table.states import CANCELLED, is_dead
from outbox_admin import operations
from outbox_admin.operations import Operation
from outbox_admin.tasks import lookup
from outbox_admin.tasks.lookup import Task
from outbox_admin.tasks.message_text import readable
from outbox_admin.tasks.selections import FILTERS, TaskSelection
from outbox_admin.tasks.task_filters import command_of, selection_of
from outbox_admin.tasks.task_flags import MIN_PREFIX
from outbox_admin.web.roles import Refused, Role
from outbox_admin.web.visits import Route, Visit, Work, render

#: Tasks on one page, and max results of each kind of a search.
PAGE, RESULTS = 50, 20
#: The orders of a list.
ORDERS = ("newest", "oldest")
#: How old a sent task is at most in a list that follows them. So the list reads a bounded part of the table.
FOLLOWED = timedelta(minutes=10)
#: The state that a person looks for who names none.
DEFAULT_STATE = "dead"
#: Unsent tasks of an ordering key that are read to find the place of one of them.
KEY_TASKS = 1_000
#: The states of tasks that have no place in their ordering key.
OUT_OF_KEY = ("sent", CANCELLED)


def show(visit: Visit) -> Response:
    """Show a page of the tasks that match the address, or only the filter if it has a wrong value."""
    query, selection = visit.query, None
    try:
        selection = selection_of(query, visit.console.table.now())
    except Refused as problem:
        visit = dataclasses.replace(visit, problem=problem)
    state = (selection and selection.state) or DEFAULT_STATE
    order = next((each for each in ORDERS if each == query.get("order")), "newest")
    is_followed = state == "sent" and order == "newest" and bool(query.get("follow"))
    page = command = None
    if selection:
        if is_followed:
            since = visit.console.table.now() - FOLLOWED
            selection = dataclasses.replace(selection, since=max(since, selection.since or since), until=None)
        listed = dataclasses.replace(selection, include_expired=True)
        after, newest = query.get("after") or None, order == "newest"
        page = lookup.find(visit.console.table, [state], listed, newest=newest, after=after, limit=PAGE)
        shown = dataclasses.replace(selection, state=state, ids=None, include_expired=True)
        command = command_of(visit, "list", shown, **{order: True, "limit": PAGE})
    response = render(
        visit,
        "tasks/tasks",
        page=page,
        state=state,
        order=order,
        is_followed=is_followed,
        fields=FILTERS,
        filters={name: query[name] for name in FILTERS if query.get(name)},
        actions=[each for each in visit.console.actions if state in each.states],
        command=command,
    )
    response.status_code = visit.problem.status if visit.problem else 200
    return response


def search(visit: Visit) -> Response:
    """Show the tasks that `q` may mean, or open the only one. The search by key takes long, so an ID comes first."""
    text = visit.query.get("q", "").strip()
    if text and lookup.task(visit.console.table, text, data=False):
        return RedirectResponse(visit.link("/task", id=text), 303)
    found = lookup.beginning_with(visit.console.table, [text], RESULTS).get(text, []) if text else []
    ids = found if len(text) >= MIN_PREFIX else []
    # Sent tasks of a key are not read, because there may be millions.
    of_key = TaskSelection(ordering_key=text)
    keyed = lookup.find(visit.console.table, selection=of_key, limit=RESULTS).tasks if text else []
    topics = visit.reading.value.topics(text)[:RESULTS] if text and visit.reading.value else []
    if len(ids) == 1 and not keyed and not topics:
        return RedirectResponse(visit.link("/task", id=ids[0]), 303)
    return render(visit, "tasks/search", text=text, ids=ids, keyed=keyed, topics=topics, most=RESULTS)


def show_one(visit: Visit) -> Response:
    """Show the task `id` without its message."""
    task, status = _found(visit), visit.reading.value
    columns, of_key = task.columns, list[Task]()
    if columns["OrderingKey"] and task.state not in OUT_OF_KEY:
        selection = TaskSelection(topic=columns["Topic"], ordering_key=columns["OrderingKey"])
        of_key = lookup.find(visit.console.table, selection=selection, limit=KEY_TASKS).tasks
    return render(
        visit,
        "tasks/task",
        task=task,
        line=_time_line(task, status.operations if status else ()),
        of_key=of_key,
        actions=[each for each in visit.console.actions if each.suits(task)],
        command=visit.command("show", columns["Id"]),
    )


def _found(visit: Visit, *, data: bool = False) -> Task:
    task = lookup.task(visit.console.table, visit.query.get("id", ""), data=data)
    if task is None:
        advice = "Its transaction was not committed, or it was deleted after it was sent or cancelled."
        raise Refused(404, "There is no task with this ID", advice)
    return task


def _time_line(task: Task, operations: Iterable[Operation]) -> list[tuple[datetime | None, str, str | None]]:
    """Return what happened when, and the ID of an operation. The table has no times of failed attempts."""
    columns, number = task.columns, task.columns["Attempts"]
    by, events = columns["CancelledBy"], {"CreatedAt": "registered", "DueAt": "first due", "ExpiresAt": "expires"}
    # At the end of a deferral, a worker reads the head. It does not publish the task.
    next_one = "the head of its key is checked again" if columns["BlockedBy"] else f"attempt {number + 1:,} is due"
    events |= {"AvailableAt": next_one if columns["BlockedBy"] or number else "due"}
    names = [*events] if not columns["SentAt"] else ["CreatedAt"]
    line: list[tuple[datetime, str, str | None]] = [
        (columns[name], events[name], None)
        for name in names
        if columns[name] and not is_dead(columns[name]) and (name != "DueAt" or columns[name] != columns["CreatedAt"])
    ]
    how = "sent" if by is None else "cancelled" if by != APPLICATION else "cancelled by an application"
    if columns["SentAt"]:
        line.append((columns["SentAt"], how, None if by == APPLICATION else by))
    # A view changes nothing, and a task that was purged is gone.
    retries = [each for each in operations if each.operation == "retry" and each.started_at >= columns["CreatedAt"]]
    relations = ((each, _relation(each, columns)) for each in retries)
    changes = [(each.started_at, f"{what}: retry by {each.principal}", each.id) for each, what in relations if what]
    line = sorted([*line, *changes], key=lambda event: event[0])
    later = (at for at, (time, what, _) in enumerate(line) if time > task.as_of or what in (next_one, how))
    place = next(later, len(line))
    failed = [(None, f"{counted(number, 'attempt')} failed, at times that the table does not have", None)]
    return [*line[:place], *(failed if number > 0 else []), *line[place:]]


def _relation(operation: Operation, columns: Mapping[str, Any]) -> str:
    """Return how a retry concerns a task: empty if it does not."""
    try:
        found = TaskSelection.recorded(operation.selection)
    except OutboxError:
        return ""
    if found.ids is not None:
        return "changed" if columns["Id"] in found.ids else ""
    of_topic = found.topic in (None, columns["Topic"]) and found.ordering_key in (None, columns["OrderingKey"])
    before = found.until is None or columns["CreatedAt"] < found.until
    # A task that it has changed is sent later, or not at all.
    was_unsent = columns["SentAt"] is None or columns["SentAt"] >= operation.started_at
    return "perhaps changed" if found.state and of_topic and before and was_unsent else ""


def show_data(visit: Visit) -> Response:
    """Record that the person looks at the message of the task `id`, and then show it."""
    task = _found(visit, data=True)
    ended = {"FinishedAt": COMMIT_TIMESTAMP}
    operations.begin(visit.console.table, "view", {"ids": [task.columns["Id"]]}, visit.author(), **ended)
    attributes, data = _message(visit, task)
    kind, lines, more = readable(data)
    return render(
        visit,
        "tasks/message",
        task=task,
        is_message=attributes is not None,
        attributes=attributes or {},
        kind=kind,
        lines=lines,
        size=len(data),
        more=more,
        trace=format_trace_id(span.trace_id) if (span := observing.span_of(attributes or {})) else None,
    )


def _message(visit: Visit, task: Task) -> tuple[Mapping[str, str] | None, bytes]:
    """Return the attributes, or None if there is no message, and the data."""
    redact, message = visit.console.redact, task.message
    given = {} if message is None else dict(message.attributes)
    data = task.columns["Data"] if message is None else message.data
    attributes, data = redact(task.columns["Topic"], given, data) if redact else (given, data)
    return None if message is None else attributes, data


ROUTES = (
    Route("/tasks", show),
    Route("/search", search),
    Route("/task", show_one, work=Work.LIGHT),
    Route("/task/message", show_data, Role.DATA, "POST", Work.MESSAGE, "/task"),
)

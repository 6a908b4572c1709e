"""Retry, cancel or purge selected tasks, or all that match a filter: first what would happen, then an operation.

The form of the first page has the previewed number, the time up to which tasks are selected, and the ID of the
operation. So an operation never selects tasks that the person cannot have seen, and a form that is sent twice begins
one operation.
"""

import dataclasses
import re
import uuid
from collections.abc import Callable
from datetime import datetime

from starlette.responses import Response

from outbox import admin
from outbox.admin.changes import ANY_UNSENT, TaskSelection
from outbox.cli.changes import RETRY_STATES
from outbox.console import selections
from outbox.console.refusals import Refused
from outbox.console.rendering import render
from outbox.console.roles import Role
from outbox.console.visits import Route, Visit, action, page
from outbox.program.terminal import counted
from outbox.table.states import MARKS_FINAL_AFTER, UNSENT


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """What a person may do with tasks. `anything` is the state of selected IDs if the address names none."""

    name: str
    role: Role
    states: tuple[str, ...]
    anything: str | None
    effect: str

    @property
    def is_destructive(self) -> bool:
        """Tell whether the person types the number of tasks."""
        return self.role is Role.DESTROYER


ACTIONS = (
    Action("retry", Role.OPERATOR, RETRY_STATES, None, "become due now, with all their attempts"),
    Action("cancel", Role.DESTROYER, UNSENT, ANY_UNSENT, "are deleted permanently and never sent"),
    Action("purge", Role.DESTROYER, ("sent",), "sent", "are deleted, so that they cannot be sent again"),
)
#: Why tasks are not changed, by state. For other states, it is the state itself.
REASONS = {
    "expired": "ExpiresAt has passed",
    "pending": "a pending task needs no retry",
    "blocked": "a blocked task waits for the head of its ordering key",
    "missing": "not in the table",
}


def _selection(acted: Action, visit: Visit) -> TaskSelection:
    """Return the tasks of the address. None of them is newer than the page. Raises SettingError, Refused."""
    now = visit.table.now()
    found = selections.read(visit.query, now)
    if found.state not in (*acted.states, *([None] if found.ids else [])):
        raise Refused(
            400, f"{acted.name} is not for these tasks", f"It is for tasks that are {', '.join(acted.states)}."
        )
    expired = found.include_expired or acted.name != "retry"
    state = found.state or acted.anything
    return dataclasses.replace(found, state=state, until=_until(acted, found, now), include_expired=expired)


def _until(acted: Action, found: TaskSelection, now: datetime) -> datetime:
    # An at-most-once task is marked as sent shortly before it is published.
    newest = now - MARKS_FINAL_AFTER if acted.name == "purge" else now
    return min(found.until or newest, newest)


def _preview(acted: Action) -> Callable[[Visit], Response]:
    def preview(visit: Visit) -> Response:
        selection = _selection(acted, visit)
        found = admin.changes.preview(visit.table, selection)
        return render(
            visit,
            "acting.html",
            acted=acted,
            title=f"{acted.name.capitalize()} {counted(found.tasks, 'task')}",
            selection=selection,
            found=found,
            reasons=REASONS,
            query=_address(selection) | {"count": found.tasks, "operation": uuid.uuid4()},
            with_expired=_address(selection) | {"expired": 1},
            paused={topic for topic, control in admin.topics.controls(visit.table).items() if control.Paused},
            command=selections.command(visit, acted.name, selection, reason="TEXT"),
        )

    return preview


def _address(selection: TaskSelection) -> dict[str, object]:
    """Return the query that `_selection` reads as the same selection."""
    return selections.address(selection) | ({"state": None} if selection.state == ANY_UNSENT else {})


def _begin(acted: Action) -> Callable[[Visit], Response]:
    def begin(visit: Visit) -> Response:
        selection, count, id = _selection(acted, visit), _count(visit), _operation(visit)
        author = visit.author(required=acted.is_destructive or selection.ids is None)
        if acted.is_destructive:
            visit.check_typed(count)
            _check_not_more(visit, selection, count)
        # Otherwise the form was sent twice, or the ID is that of an operation for which the person may lack the role.
        if admin.changes.begin(visit.table, acted.name, selection, author, id=id, selected=count):
            visit.console.running.start(id)
        visit.changed()
        return visit.redirect("/operation", id=id)

    return begin


def _check_not_more(visit: Visit, selection: TaskSelection, count: int) -> None:
    now = admin.changes.count(visit.table, selection, exact=True).number
    if now > count:
        found = f"{counted(now, 'task')} match now, and {count:,} when you looked."
        raise Refused(409, "More tasks match than you have seen", f"{found} Nothing was changed. Look again.")


def _count(visit: Visit) -> int:
    """Return the number of the preview. Raises Refused."""
    text = visit.query.get("count", "")
    if not re.fullmatch("[1-9][0-9]{0,17}", text):
        raise Refused(400, "There is nothing to do", "Go back, and select tasks.")
    return int(text)


def _operation(visit: Visit) -> str:
    try:
        return str(uuid.UUID(visit.query.get("operation", "")))
    except ValueError:
        raise Refused(400, "This form is not complete", "Go back, and look at the selection again.") from None


def _routes(acted: Action) -> tuple[Route, Route]:
    path = f"/tasks/{acted.name}"
    return page(path, _preview(acted), acted.role), action(path, _begin(acted), acted.role)


ROUTES = tuple(route for acted in ACTIONS for route in _routes(acted))

"""Who changed what, when and why. An operation of many tasks can be stopped, and continued by this console."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from starlette.responses import Response

from outbox import admin
from outbox.admin.operations import Operation
from outbox.admin.table import TaskTable
from outbox.console.acting import ACTIONS
from outbox.console.refusals import Refused
from outbox.console.rendering import render
from outbox.console.roles import Role
from outbox.console.visits import Visit, action, page
from outbox.program.terminal import listed

#: Operations that the pages know.
LATEST = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Latest:
    """The operations that the pages know, newest first, as they were at a time."""

    as_of: datetime
    operations: Sequence[Operation]


def latest(table: TaskTable) -> Latest:
    """Return the latest operations. Raises NotReached, OutboxError."""
    now = table.now()
    return Latest(now, admin.operations.latest(table, LATEST, at=now))


def show(visit: Visit) -> Response:
    """Show the latest operations."""
    reading = visit.shared(latest)
    lines = [_line(visit, each, reading.value.as_of) for each in reading.value.operations] if reading.value else []
    return render(
        visit, "operations.html", latest=reading, lines=lines, command=visit.command("operations", limit=LATEST)
    )


def _line(visit: Visit, operation: Operation, now: datetime) -> dict[str, Any]:
    """Return what the pages show of an operation."""
    state = operation.state(now)
    done, selected = operation.tasks or 0, operation.selected or 0
    return {
        "operation": operation,
        "state": "running" if state == "interrupted" and operation.id in visit.console.running else state,
        "is_here": operation.id in visit.console.running,
        "error": visit.console.running.error(operation.id),
        "selection": described(operation),
        "percent": min(100, 100 * done // selected) if selected else None,
    }


def described(operation: Operation) -> str:
    """Return the column Selection in words: each name with its value, and few of many IDs."""
    found = admin.operations.parsed(operation.selection)
    if not isinstance(found, dict):
        return str(found)
    if operation.operation != "retry":
        found.pop("include_expired", None)  # only a retry depends on it
    ids = found.pop("ids") if isinstance(found.get("ids"), list) else []
    words = [
        f"{name.replace('_', ' ')} {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in found.items()
    ]
    return ", ".join(([f"IDs {listed(map(str, ids))}"] if ids else []) + words)


def show_one(visit: Visit) -> Response:
    """Show one operation, and the forms to stop or continue it."""
    operation, now = _found(visit)
    acted = next((each for each in ACTIONS if each.name == operation.operation), None)
    line = _line(visit, operation, now)
    return render(visit, "operation.html", **line, acted=acted, read_at=now, command=visit.command("operations"))


def _found(visit: Visit) -> tuple[Operation, datetime]:
    """Return the operation `id`, and as of when: of the shared read, or else from its row."""
    id, reading = visit.query.get("id", ""), visit.shared(latest).value
    operation = next((each for each in reading.operations if each.id == id), None) if reading else None
    if operation and reading:
        return operation, reading.as_of
    now, row = visit.table.now(), admin.operations.operation(visit.table, id)
    if row is None:
        raise Refused(404, "There is no operation with this ID", "Open it from the list of operations.")
    return row, now


def _stop(visit: Visit) -> Response:
    admin.operations.stop(visit.table, _found(visit)[0].id, visit.author())
    return _shown(visit)


def _continue(name: str) -> Callable[[Visit], Response]:
    """Return the handler for operations of one name. Its route has the role that a new one needs."""

    def proceed(visit: Visit) -> Response:
        operation, _ = _found(visit)
        if operation.operation != name:
            raise Refused(400, f"This operation is no {name}", "Open it from the list of operations.")
        admin.operations.proceed(visit.table, operation.id, visit.author())
        visit.console.running.start(operation.id)
        return _shown(visit)

    return proceed


def _shown(visit: Visit) -> Response:
    visit.changed()
    return visit.redirect("/operation", id=visit.query["id"])


ROUTES = (
    page("/operations", show),
    page("/operation", show_one),
    action("/operation/stop", _stop, Role.OPERATOR),
    *(action(f"/operation/continue-{each.name}", _continue(each.name), each.role) for each in ACTIONS),
)

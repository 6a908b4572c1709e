"""One operation: who changed what, when and why. An operation of many tasks can be stopped, and continued here."""

from collections.abc import Callable
from datetime import datetime

from starlette.responses import Response

from outbox import admin
from outbox.admin.operations import Operation
from outbox.console.acting import ACTIONS
from outbox.console.rendering import render
from outbox.console.roles import Role
from outbox.console.visits import Refused, Route, Visit, action


def show(visit: Visit) -> Response:
    """Show one operation, and the forms to stop or continue it."""
    operation, now = _found(visit)
    acted = next((each for each in ACTIONS if each.name == operation.operation), None)
    return render(visit, "operation.html", operation=operation, acted=acted, read_at=now)


def _found(visit: Visit) -> tuple[Operation, datetime]:
    """Return the operation `id`, and as of when: of the shared read, or else from its row."""
    id, status = visit.query.get("id", ""), visit.console.status.get().value
    if status and (operation := next((each for each in status.operations if each.id == id), None)):
        return operation, status.backlog.as_of
    now, row = visit.table.now(), admin.operations.operation(visit.table, id)
    if row is None:
        raise Refused(404, "There is no operation with this ID", "Open it from the list of operations.")
    return row, now


def _stop(visit: Visit) -> Response:
    id = _found(visit)[0].id
    admin.operations.stop(visit.table, id, visit.author())
    return visit.redirect("/operation", id=id)


def _continue(name: str) -> Callable[[Visit], Response]:
    """Return the handler for operations of one name. Its route has the role that a new one needs."""

    def proceed(visit: Visit) -> Response:
        operation, _ = _found(visit)
        if operation.operation != name:
            raise Refused(400, f"This operation is no {name}", "Open it from the list of operations.")
        admin.operations.proceed(visit.table, operation.id, visit.author())
        visit.console.running.start(operation.id)
        return visit.redirect("/operation", id=operation.id)

    return proceed


ROUTES = (
    Route("/operation", show),
    action("/operation/stop", _stop, Role.OPERATOR),
    *(action(f"/operation/continue-{each.name}", _continue(each.name), each.role) for each in ACTIONS),
)

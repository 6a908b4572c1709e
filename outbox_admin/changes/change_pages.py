"""Change tasks that an address selects, by IDs or by a filter: first what would happen, then an operation.

The form of the first page has the previewed number, the time of the preview, and the ID of the operation. So an
operation changes only tasks that the person has seen, and a form that is sent twice begins one operation. The page of
an operation says who changed what, when and why. There it is stopped and continued.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from datetime import datetime
from functools import partial

from starlette.responses import Response

from outbox.base.values import shown
from outbox.errors import NotReached, OutboxError
from outbox.program.settings import MOMENT, matching, resolved, whole_number
from outbox_admin import operations, value_types
from outbox_admin.advice import HOPELESS, is_hopeless
from outbox_admin.change_kinds import KINDS, why_unchanged
from outbox_admin.changes import chunks, execution
from outbox_admin.operations import Operation
from outbox_admin.tasks import selected
from outbox_admin.tasks.lookup import Task
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.tasks.task_filters import address_of, command_of, selection_of
from outbox_admin.topics import editing
from outbox_admin.web.roles import Refused, Role
from outbox_admin.web.visits import Route, Visit, Work, by_fields, checked, render

PREVIEWED = whole_number(1, 2**63 - 1)
OPERATION_ID = matching("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "the ID of an operation")


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """What a person may do with tasks."""

    name: str
    role: Role

    @property
    def states(self) -> tuple[str, ...]:
        return KINDS[self.name].states

    def suits(self, task: Task) -> bool:
        return task.state in self.states and not (self.name == "retry" and is_hopeless(task.columns["LastError"]))

    def routes(self) -> Iterator[Route]:
        """Yield the page that shows what would happen, and the forms that begin it and continue it."""
        path = f"/tasks/{self.name}"
        yield Route(path, self._preview, self.role, work=_work, page="/tasks")
        yield Route(path, self._begin, self.role, "POST", _work, path)
        yield Route(f"/operation/continue-{self.name}", self._continue, self.role, "POST", Work.URGENT, "/operation")

    def _preview(self, visit: Visit) -> Response:
        now = visit.console.table.now()
        selection = self._selection(visit, now)
        found = chunks.preview(visit.console.table, selection, self.name, chunks.PAGE_IDS)
        return render(
            visit,
            "changes/acting",
            acted=self,
            kind=KINDS[self.name],
            why_unchanged=why_unchanged,
            selection=selection,
            found=found,
            hopeless=HOPELESS if self.name == "retry" and any(is_hopeless(each[1]) for each in found.groups) else (),
            query=address_of(selection) | {"as_of": shown(now)},
            # After a failure that may have begun it, the form must not begin another one.
            operation=(visit.problem and visit.query.get("operation")) or operations.new_id(),
            command=command_of(visit, self.name, selection, reason="TEXT"),
        )

    def _begin(self, visit: Visit) -> Response:
        count = PREVIEWED.value(visit.query.get("count", ""), "count")
        selection = self._selection(visit, _preview_time(visit))
        id = OPERATION_ID.value(visit.query.get("operation", ""), "operation")
        is_destructive = self.role is Role.DESTROYER
        author = visit.author(required=is_destructive or selection.ids is None)
        if is_destructive:
            _check_typed(visit, count)
        # It also fails if Spanner no longer keeps the versions of the preview.
        seen = selected.count(visit.console.table, selection, exact=is_destructive)
        if is_destructive and seen.number != count:
            raise Refused(400, "The number is not that of the preview", "Open the preview again.")
        selection = _resent(visit, selection) if self.name == "resend" else selection
        _, is_new = execution.begin(visit.console.table, self.name, selection, author, id=id, selected=count)
        # Otherwise the form was sent twice, or the ID is that of an operation for which the person may lack the role.
        if is_new:
            visit.console.running.start(id)
        return visit.redirect("/operation", id=id)

    def _continue(self, visit: Visit) -> Response:
        operation = _row(visit)
        if _acted(operation) != self:
            raise Refused(400, "This operation cannot be continued here", "Run its command or its job again.")
        execution.continued(visit.console.table, operation.id)
        operations.proceed(visit.console.table, operation.id, visit.author())
        visit.console.running.start(operation.id)
        return visit.redirect("/operation", id=operation.id)

    def _selection(self, visit: Visit, at: datetime) -> TaskSelection:
        """Return the tasks of the address as of `at`, and none that is newer. Raises SettingError, OutboxError."""
        if visit.query.get("selected") and not visit.query.get("id"):
            raise Refused(400, "No task is selected", "Check the tasks, or act on all that match.")
        return execution.bounded(self.name, selection_of(visit.query, at), at)


def _work(visit: Visit) -> Work:
    """Single tasks do not wait until all that match some filter are counted."""
    return Work.URGENT if visit.query.get("id") else Work.SCAN


def _preview_time(visit: Visit) -> datetime:
    """Return the time of the preview, which is in the form. Raises SettingError, Refused."""
    now = visit.console.table.now()
    if (at := resolved(MOMENT.value(visit.query.get("as_of", ""), "as_of"), now)) > now:
        raise Refused(400, "The time of the preview is in the future", "Open the preview again.")
    return at


def _check_typed(visit: Visit, count: int) -> None:
    if re.sub(r"[\s,._']", "", visit.form.get("typed", "")) != str(count):
        advice = f"You saw {count:,}. Look at the number below, and type it."
        raise Refused(409, "The typed number is not the number of tasks", advice, "typed")


def _resent(visit: Visit, selection: TaskSelection) -> TaskSelection:
    """Return what is published where. The form also has the topic to publish to, and the rate."""
    table, rate = visit.console.table, visit.form.get("rate", "").strip()
    most = checked(value_types.RATE, rate, "rate") if rate else None
    try:
        to, own = visit.form.get("to", "").strip(), "force" in visit.form
        selection = execution.resend_to(table, selection, to, most, own=own)
        editing.check_destinations(table, [selection.to], otherwise="")
    except NotReached:
        raise
    except OutboxError as error:
        raise Refused(400, "The topic cannot be used", by_fields(error), "to") from None
    return selection


ACTIONS = (
    Action("retry", Role.OPERATOR),
    Action("resend", Role.OPERATOR),
    Action("cancel", Role.DESTROYER),
    Action("restore", Role.OPERATOR),
    Action("purge", Role.DESTROYER),
)


def show(visit: Visit) -> Response:
    """Show one operation, and the forms to stop or continue it."""
    operation, now = _found(visit)
    matching = None  # the address of the tasks that match now, also those that did not at the preview
    with contextlib.suppress(OutboxError):
        selection = TaskSelection.recorded(operation.selection)
        if selection.state and not selection.ids:
            matching = visit.link("/tasks", **address_of(selection))
    return render(
        visit, "changes/operation", operation=operation, acted=_acted(operation), read_at=now, matching=matching
    )


def _acted(operation: Operation) -> Action | None:
    """Return what is stopped and continued here, or None. The purge of an archive is a job, and has no chunks."""
    return next((each for each in ACTIONS if each.name == operation.operation and operation.seen_at), None)


def _found(visit: Visit) -> tuple[Operation, datetime]:
    """Return the operation `id`, and as of when: of the shared read, or from its row if that read is old."""
    id, status = visit.query.get("id", ""), visit.reading.value if visit.reading.is_current else None
    if status and (operation := next((each for each in status.operations if each.id == id), None)):
        return operation, status.backlog.as_of
    return _row(visit), visit.console.table.now()


def _row(visit: Visit) -> Operation:
    if (row := operations.operation(visit.console.table, visit.query.get("id", ""))) is None:
        raise Refused(404, "There is no operation with this ID", "Open it from the list of operations.")
    return row


def _stop(visit: Visit) -> Response:
    operation = _row(visit)
    if not _acted(operation):
        raise Refused(400, "This operation cannot be stopped here", "Stop the process that runs it.")
    operations.stop(visit.console.table, operation.id, visit.author())
    return visit.redirect("/operation", id=operation.id)


ROUTES = (
    Route("/operations", partial(render, template="changes/operations"), work=Work.LIGHT),
    Route("/operation", show, work=Work.LIGHT),
    Route("/operation/stop", _stop, Role.OPERATOR, "POST", Work.URGENT, "/operation"),
    *(route for each in ACTIONS for route in each.routes()),
)

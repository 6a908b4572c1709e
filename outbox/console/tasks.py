"""The tasks of a state, in pages. Some of them, or all that match the filter, can be retried, cancelled or purged."""

import dataclasses

from starlette.responses import Response

from outbox import admin
from outbox.console import selections
from outbox.console.acting import ACTIONS
from outbox.console.rendering import render
from outbox.console.visits import Visit, page
from outbox.table.states import STATES

#: Tasks on one page.
PAGE = 50
#: The state that a person looks for who names none.
DEFAULT_STATE = "dead"


def show(visit: Visit) -> Response:
    """Show a page of the tasks that match the address."""
    query = visit.query
    selection = selections.read(query, visit.table.now())
    state, order = selection.state or DEFAULT_STATE, "oldest" if query.get("order") == "oldest" else "newest"
    found = admin.tasks.find(
        visit.table, [state], selection, newest=order == "newest", after=query.get("after") or None, limit=PAGE
    )
    filters = {name: query[name] for name in selections.FILTERS if query.get(name)}
    return render(
        visit,
        "tasks.html",
        page=found,
        state=state,
        order=order,
        states=STATES,
        filters=filters,
        labels=selections.FILTERS,
        actions=[action for action in ACTIONS if state in action.states],
        command=selections.command(
            visit, "list", dataclasses.replace(selection, state=state), **{order: True, "limit": PAGE}
        ),
    )


ROUTES = (page("/tasks", show),)

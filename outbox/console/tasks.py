"""Lists of tasks: those of a state that match a filter, and those that the search finds."""

import dataclasses

from starlette.responses import RedirectResponse, Response

from outbox import admin
from outbox.admin.changes import TaskSelection
from outbox.cli.flags import MAX_ID_CHARACTERS, MIN_PREFIX
from outbox.console import selections
from outbox.console.acting import ACTIONS
from outbox.console.rendering import render
from outbox.console.visits import Route, Visit

#: Tasks on one page, and max results of each kind of a search.
PAGE, RESULTS = 50, 20
#: The state that a person looks for who names none.
DEFAULT_STATE = "dead"


def show(visit: Visit) -> Response:
    """Show a page of the tasks that match the address."""
    query = visit.query
    selection = dataclasses.replace(selections.read(query, visit.table.now()), include_expired=True)
    state, order = selection.state or DEFAULT_STATE, "oldest" if query.get("order") == "oldest" else "newest"
    found = admin.tasks.find(
        visit.table, [state], selection, newest=order == "newest", after=query.get("after") or None, limit=PAGE
    )
    shown = dataclasses.replace(selection, state=state)
    return render(
        visit,
        "tasks.html",
        page=found,
        state=state,
        order=order,
        filters={name: query[name] for name in selections.FILTERS if query.get(name)},
        labels=selections.FILTERS,
        actions=[action for action in ACTIONS if state in action.states],
        command=selections.command(visit, "list", shown, **{order: True, "limit": PAGE}),
    )


def search(visit: Visit) -> Response:
    """Show the tasks that `q` may mean, or open the only one."""
    text = visit.query.get("q", "").strip()
    ids = _ids(visit, text)
    # Sent tasks of a key are not read, because there may be millions.
    of_key = TaskSelection(ordering_key=text)
    keyed = admin.tasks.find(visit.table, selection=of_key, limit=RESULTS).tasks if text else []
    if ids == [text] or (len(ids) == 1 and not keyed):
        return RedirectResponse(visit.link("/task", id=ids[0]), 303)
    return render(visit, "search.html", text=text, ids=ids, keyed=keyed, most=RESULTS)


def _ids(visit: Visit, text: str) -> list[str]:
    """Return the first IDs that begin with a text, the ID itself first."""
    if not 0 < len(text) <= MAX_ID_CHARACTERS:
        return []
    ids = admin.tasks.beginning_with(visit.table, [text], RESULTS).get(text, [])
    return ids if len(text) >= MIN_PREFIX else [id for id in ids if id == text]


ROUTES = (Route("/tasks", show), Route("/search", search))

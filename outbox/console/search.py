"""One box for a task ID, its first characters, or an ordering key."""

import re

from starlette.responses import Response

from outbox import admin
from outbox.admin.changes import TaskSelection
from outbox.cli.flags import MAX_ID_CHARACTERS, MIN_PREFIX
from outbox.console.rendering import render
from outbox.console.visits import Visit, page

#: Max results of each kind.
RESULTS = 20
_TRACE = re.compile(r"[0-9a-f]{32}")


def show(visit: Visit) -> Response:
    """Show what matches `q`, or open the only task that does."""
    text = visit.query.get("q", "").strip()
    ids = _ids(visit, text)
    keyed = _keyed(visit, text) if text else []
    if ids == [text] or (len(ids) == 1 and not keyed):
        return visit.redirect("/task", id=ids[0])
    is_trace = bool(_TRACE.fullmatch(text.lower()))
    return render(visit, "search.html", text=text, ids=ids, keyed=keyed, is_trace=is_trace, most=RESULTS)


def _ids(visit: Visit, text: str) -> list[str]:
    """Return the first IDs that begin with a text, the ID itself first."""
    if not MIN_PREFIX <= len(text) <= MAX_ID_CHARACTERS:
        return [text] if 0 < len(text) < MIN_PREFIX and admin.tasks.task(visit.table, text, data=False) else []
    return admin.tasks.beginning_with(visit.table, [text], RESULTS).get(text, [])


def _keyed(visit: Visit, text: str) -> list[admin.tasks.Task]:
    """Return the first unsent tasks of an ordering key. Sent ones are not read, because there may be millions."""
    return admin.tasks.find(visit.table, selection=TaskSelection(ordering_key=text), limit=RESULTS).tasks


ROUTES = (page("/search", show),)

"""The filter of the pages: the selection in an address, and the command that selects the same tasks."""

import re
from datetime import datetime
from typing import Any

from starlette.datastructures import QueryParams

from outbox.base.values import shown
from outbox.errors import SettingError
from outbox.program.settings import MOMENT, one_of, resolved
from outbox.table.states import STATES
from outbox_admin.tasks.selections import FILTERS, TaskSelection
from outbox_admin.tasks.task_flags import check_window
from outbox_admin.value_types import ID
from outbox_admin.web.roles import Refused
from outbox_admin.web.visits import Visit, by_fields, checked

#: A time as people type it, which is in UTC as all times of the console.
_TYPED = re.compile(r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d(?::\d\d)?))?( ?UTC)?", re.ASCII)


def selection_of(query: QueryParams, now: datetime) -> TaskSelection:
    """Return the selection of an address. Relative times count from `now`. Raises Refused."""
    state = checked(one_of(*STATES), query["state"], "state") if query.get("state") else None
    given = {name: _value(name, query[name], now) for name in FILTERS if query.get(name)}
    try:
        check_window(given.get("since"), given.get("until", now))
    except SettingError as error:
        raise Refused(400, "The filter matches no task", by_fields(error), "since") from None
    ids = tuple(dict.fromkeys(checked(ID, id, "id") for id in query.getlist("id")))
    return TaskSelection(state=state, ids=ids or None, include_expired=bool(query.get("expired")), **given)


def _value(name: str, text: str, now: datetime) -> Any:
    if (kind := FILTERS[name].kind) is not MOMENT:
        return checked(kind, text, name)
    return resolved(checked(kind, _with_offset(text.strip()), name), now)


def _with_offset(text: str) -> str:
    typed = _TYPED.fullmatch(text)
    return f"{typed[1]}T{typed[2] or '00:00'}Z" if typed else text


def address_of(selection: TaskSelection) -> dict[str, Any]:
    """Return the query of the address of a selection, with absolute times."""
    values = selection.values.items()
    given = {name: shown(value) if isinstance(value, datetime) else value for name, value in values}
    more = {"id": list(selection.ids or ()), "expired": int(selection.include_expired) or None}
    return given | more | {"state": selection.state if selection.state in STATES else None}


def command_of(visit: Visit, name: str, selection: TaskSelection, **more: object) -> str | None:
    """Return the command that acts on the same tasks, or None if it does not have all filters of the selection."""
    query, filters, arguments = address_of(selection), {*selection.values}, list(selection.ids or ())
    if of_cancel := name == "restore" and selection.cancelled_by:
        filters, arguments = filters - {"cancelled_by"}, [of_cancel]
    if any(name not in FILTERS[each].commands for each in filters) or (name == "list" and arguments):
        return None
    given: dict[str, object] = {each: query[each] for each in FILTERS if each in filters}
    if name == "resend":
        given["to"] = "TOPIC"
    elif not of_cancel:
        given["state"] = query["state"]
    if name == "retry":
        given["include_expired"] = selection.include_expired
    return visit.command(name, *arguments, **given, **more)

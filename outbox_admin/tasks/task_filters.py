"""The filter of the pages: the selection in an address, and the command that selects the same tasks."""

import re
from datetime import datetime
from typing import Any

from starlette.datastructures import QueryParams

from outbox.base.values import shown
from outbox.errors import SettingError
from outbox.program.settings import MOMENT, one_of, resolved
from outbox.table.states import STATES
from outbox_admin import flags
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.web.roles import Refused
from outbox_admin.web.visits import Visit, checked

#: The reasons of errors after which no retry can succeed, because they are about the message.
HOPELESS = ("undecodable", "too_large")
#: The texts of a filter: the name in the address, the field of a TaskSelection, and its allowed values.
TEXTS = {
    "state": ("state", one_of(*STATES)),
    "topic": ("topic", flags.TOPIC),
    "error": ("error", flags.TEXT),
    "key": ("ordering_key", flags.KEY),
    "prefix": ("id_prefix", flags.ID),
    "by": ("operation", flags.ID),
}
TIMES = ("since", "until")
#: A time as people type it, which is in UTC as all times of the console.
_TYPED = re.compile(r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d(?::\d\d)?))?( ?UTC)?", re.ASCII)
#: The fields that a person fills in.
FILTERS = ("topic", *TIMES, "error", "key", "prefix", "by")
#: The filters that a command has no flag for.
_LACKING = dict.fromkeys(("retry", "cancel", "purge"), ("key", "prefix", "by")) | {
    "list": ("key", "prefix", "by", "id"),
    "restore": ("key", "prefix"),
    "resend": ("error", "prefix", "by"),
}


def selection_of(query: QueryParams, now: datetime) -> TaskSelection:
    """Return the selection of an address. Relative times count from `now`. Raises Refused."""
    texts = {field: checked(kind, query[name], name) for name, (field, kind) in TEXTS.items() if query.get(name)}
    times: dict[str, Any] = {
        name: resolved(checked(MOMENT, _with_offset(query[name].strip()), name), now)
        for name in TIMES
        if query.get(name)
    }
    try:
        flags.check_window(times.get("since"), times.get("until", now))
    except SettingError as error:
        raise Refused(400, "The filter matches no task", str(error).removeprefix("--"), "since") from None
    ids = tuple(dict.fromkeys(checked(flags.ID, id, "id") for id in query.getlist("id")))
    return TaskSelection(**texts, **times, ids=ids or None, include_expired=bool(query.get("expired")))


def _with_offset(text: str) -> str:
    typed = _TYPED.fullmatch(text)
    return f"{typed[1]}T{typed[2] or '00:00'}Z" if typed else text


def address_of(selection: TaskSelection) -> dict[str, Any]:
    """Return the query of the address of a selection, with absolute times."""
    query = {name: getattr(selection, field) for name, (field, _) in TEXTS.items()}
    times = {name: shown(time) if (time := getattr(selection, name)) else None for name in TIMES}
    more = {"id": list(selection.ids or ()), "expired": int(selection.include_expired) or None}
    return query | times | more | ({} if selection.state in STATES else {"state": None})


def command_of(visit: Visit, name: str, selection: TaskSelection, **more: object) -> str | None:
    """Return the command that acts on the same tasks, or None, because no command has all filters of the console."""
    query = address_of(selection)
    if any(query[each] for each in _LACKING[name]):
        return None
    flags: dict[str, object] = {each: query[each] for each in ("state", "topic", "error", *TIMES)}
    if name == "resend":
        flags |= {"state": None, "ordering_key": query["key"], "to": "TOPIC"}
    elif query["by"]:
        flags["state"] = None
    if name == "retry":
        flags["include_expired"] = selection.include_expired
    return visit.command(name, *([query["by"]] if query["by"] else query["id"]), **flags, **more)


def is_hopeless(error: str | None) -> bool:
    """Tell whether no retry after this error can succeed."""
    return (error or "").partition(":")[0] in HOPELESS

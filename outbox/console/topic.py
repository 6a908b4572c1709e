"""One topic: its tasks by state, its circuit, and its controls with the forms that change them."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from starlette.responses import Response

from outbox import admin
from outbox.cli.topics import LIMITS, POLICY, TOPIC_NAME, described
from outbox.console.rendering import render
from outbox.console.roles import Role
from outbox.console.visits import Refused, Route, Visit
from outbox.program.settings import SettingType
from outbox.program.times import MOMENT, shown

#: A worker reads the topic controls at least this often.
APPLIED_WITHIN = timedelta(seconds=10)
#: The field of a route, as LIMITS and POLICY have theirs.
ROUTE = {"--to": ("PublishTo", TOPIC_NAME, "The Pub/Sub topic that gets the messages. The console cannot check it.")}
#: Returns the values to write, by column, for the fields of a form.
Values = Callable[[Mapping[str, str]], dict[str, Any]]


def show(visit: Visit) -> Response:
    """Show the topic `name`, and after a change which workers have applied it."""
    written = _written(visit.query.get("written", ""))
    forms = {"described": described, "limits": LIMITS, "policy": POLICY, "route": ROUTE}
    return render(visit, "topic.html", topic=_topic(visit), written=written, within=APPLIED_WITHIN, **forms)


def _topic(visit: Visit) -> str:
    if "name" not in visit.query:
        raise Refused(404, "The address names no topic", "Open a topic from the overview.")
    return visit.query["name"]


def _written(text: str) -> datetime | None:
    """Return the time in the address after a change."""
    try:
        time = MOMENT.parse(text)
    except ValueError:
        return None
    return time if isinstance(time, datetime) else None


def _change(operation: str, values: Values) -> Route:
    """Return the route of a form, which writes what `values` returns."""

    def change(visit: Visit) -> Response:
        topic = _topic(visit)
        admin.topics.change(visit.table, operation, [topic], values(visit.form), visit.author())
        return visit.redirect("/topic", name=topic, written=shown(visit.table.now()))

    return Route(f"/topic/{operation}", change, Role.OPERATOR, "POST")


def _typed(flags: Mapping[str, tuple[str, SettingType, str]]) -> Values:
    """Return the reader of a form that has a field for each flag. Empty fields keep their values."""

    def values(form: Mapping[str, str]) -> dict[str, Any]:
        if form.get("off"):
            return {column: None for column, _, _ in flags.values()}
        typed = {flag: form.get(flag[2:], "").strip() for flag in flags}
        found = {column: kind.value(typed[flag], flag) for flag, (column, kind, _) in flags.items() if typed[flag]}
        if not found:
            raise Refused(400, "The form is empty", "Go back and fill in a field, or choose to remove all values.")
        return found

    return values


ROUTES = (
    Route("/topic", show),
    _change("pause", lambda _form: {"Paused": True}),
    _change("resume", lambda _form: {"Paused": False}),
    _change("limit", _typed(LIMITS)),
    _change("policy", _typed(POLICY)),
    _change("route", _typed(ROUTE)),
)

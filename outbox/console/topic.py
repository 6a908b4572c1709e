"""One topic: its tasks by state, its circuit, and its controls with the forms that change them."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from starlette.responses import Response

from outbox import admin
from outbox.cli.topics import LIMITS, POLICY, TOPIC_NAME, Value, described
from outbox.console.roles import Role
from outbox.console.visits import Refused, Route, Visit, Work, checked, render
from outbox.errors import SettingError
from outbox.program.times import MOMENT, shown

#: A worker reads the topic controls at least this often.
APPLIED_WITHIN = timedelta(seconds=10)
#: The field of a route, as LIMITS and POLICY have theirs.
ROUTE = {
    "--to": Value("PublishTo", TOPIC_NAME, "The Pub/Sub topic that gets the messages. The console cannot check it.", "")
}
#: The forms: those without a field, and those with fields.
SWITCHES: Mapping[str, dict[str, Any]] = {"pause": {"Paused": True}, "resume": {"Paused": False}}
FORMS = {"limit": LIMITS, "policy": POLICY, "route": ROUTE}


def show(visit: Visit) -> Response:
    """Show the topic `name`, and after a change which workers have applied it."""
    written = _written(visit.query.get("written", ""))
    more = {"described": described, "forms": FORMS, "within": APPLIED_WITHIN}
    return render(visit, "topic", topic=_topic(visit), written=written, **more)


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


def _change(visit: Visit) -> Response:
    topic, operation = _topic(visit), visit.path.removeprefix("/topic/")
    values = SWITCHES.get(operation) or _typed(FORMS[operation], visit.form)
    try:
        admin.topics.change(visit.console.table, operation, [topic], values, visit.author())
    except SettingError as error:
        fields = (flag[2:] for flag, each in FORMS.get(operation, {}).items() if each.column in str(error))
        raise Refused(400, "The topic was not changed", str(error), next(fields, "")) from None
    return visit.redirect("/topic", name=topic, written=shown(visit.console.table.now()))


def _typed(flags: Mapping[str, Value], form: Mapping[str, str]) -> dict[str, Any]:
    """Return the values to write, by column. Empty fields keep their values."""
    typed = {flag: form.get(flag[2:], "").strip() for flag in flags}
    if form.get("off"):
        if any(typed.values()):
            raise Refused(400, "The form sets and removes values", "Clear the fields, or the checkbox.", "off")
        return {each.column: None for each in flags.values()}
    found = {each.column: checked(each.kind, typed[flag], flag[2:]) for flag, each in flags.items() if typed[flag]}
    if not found:
        raise Refused(400, "The form is empty", "Fill in a field, or choose to remove all values.")
    return found


ROUTES = (
    Route("/topic", show, work=Work.LIGHT),
    *(Route(f"/topic/{name}", _change, Role.OPERATOR, "POST", Work.LIGHT, "/topic") for name in (*SWITCHES, *FORMS)),
)

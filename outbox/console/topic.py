"""One topic: its tasks by state, its circuit, and its controls with the forms that change them."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from starlette.responses import Response

from outbox import admin
from outbox.cli.topics import LIMITS, ORDERED, POLICY, TOPIC_NAME, Value, joined_controls
from outbox.console.roles import Role
from outbox.console.visits import Refused, Route, Visit, Work, checked, render
from outbox.errors import SettingError
from outbox.program.times import MOMENT, shown

#: A worker reads the topic controls at least this often.
APPLIED_WITHIN = timedelta(seconds=10)
#: The field of a route, as LIMITS and POLICY have theirs.
ROUTE = {"--to": Value("PublishTo", TOPIC_NAME, "The Pub/Sub topic that gets the messages.", "")}
#: The forms: those without a field, and those with fields.
SWITCHES: Mapping[str, dict[str, Any]] = {"pause": {"Paused": True}, "resume": {"Paused": False}}
FORMS = {"limit": LIMITS, "policy": POLICY, "route": ROUTE, "ask-for-route": ROUTE}


def show(visit: Visit) -> Response:
    """Show the topic `name`, and after a change which workers have applied it."""
    written = _written(visit.query.get("written", ""))
    more = {"joined_controls": joined_controls, "forms": FORMS, "within": APPLIED_WITHIN}
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
    table, topic, operation = visit.console.table, _known(visit), visit.path.removeprefix("/topic/")
    is_route = operation == "route"
    values = SWITCHES.get(operation) or _typed(FORMS[operation], visit.query if is_route else visit.form)
    if values.get("PublishTo"):
        admin.topics.check_destination(table, values["PublishTo"])
    try:
        admin.topics.change(table, operation, [topic], values, visit.author(required=is_route))
    except SettingError as error:
        fields = (flag[2:] for flag, each in FORMS.get(operation, {}).items() if each.column in str(error))
        raise Refused(400, "The topic was not changed", str(error), next(fields, "")) from None
    return visit.redirect("/topic", name=topic, written=shown(table.now()))


def _ask_for_route(visit: Visit) -> Response:
    """Show the preview of the form. The address of the topic is no field, because a browser would change some names."""
    values = _typed(ROUTE, visit.form)
    return visit.redirect(
        "/topic/route", name=_topic(visit), to=values["PublishTo"], off=None if values["PublishTo"] else 1
    )


def _preview_route(visit: Visit) -> Response:
    """Show what a route would do, after the same checks as those of the command."""
    table, topic, values = visit.console.table, _known(visit), _typed(ROUTE, visit.query)
    to = values["PublishTo"]
    unchecked = admin.topics.check_destination(table, to) if to else None
    admin.topics.change(table, "route", [topic], values, dry_run=True)
    unsent = admin.changes.count_unsent(table, topic, exact=False)
    more = {"to": to, "unsent": unsent, "unchecked": unchecked, "ordered": ORDERED}
    return render(visit, "routing", topic=topic, **more)


def _known(visit: Visit) -> str:
    """Return the topic of a change. Raises Refused if it is unknown, because its row would stay for good."""
    topic = _topic(visit)
    if admin.topics.unknown(visit.console.table, [topic]):
        advice = (
            "It has no control, no unsent task, and none sent in the last minute. Check the name, or use the command."
        )
        raise Refused(400, f"Unknown topic {topic!r:.100}", advice)
    return topic


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
    Route("/topic/route", _preview_route, Role.OPERATOR),
    Route("/topic/route", _change, Role.OPERATOR, "POST"),
    Route("/topic/ask-for-route", _ask_for_route, Role.OPERATOR, "POST", Work.LIGHT, "/topic"),
    *(
        Route(f"/topic/{name}", _change, Role.OPERATOR, "POST", page="/topic")
        for name in ("limit", "policy", *SWITCHES)
    ),
)

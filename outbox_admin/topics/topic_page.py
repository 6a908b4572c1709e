"""One topic: its tasks by state, its circuit, and its controls with the forms that change them."""

import contextlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from starlette.datastructures import QueryParams
from starlette.responses import RedirectResponse, Response

from outbox.base.values import shown
from outbox.errors import NotReached, OutboxError, SettingError
from outbox.table.controls import CONTROL_NAMES, VALUES, TopicControls, described
from outbox_admin import operations
from outbox_admin.operations import Operation
from outbox_admin.topics import editing
from outbox_admin.web.roles import Refused, Role
from outbox_admin.web.visits import Route, Visit, Work, by_fields, checked, render

#: A worker reads the topic controls at least this often.
APPLIED_WITHIN = timedelta(seconds=10)
#: The forms without fields.
SWITCHES = ("pause", "resume", "probe")


def show(visit: Visit) -> Response:
    """Show the topic `name`, and after a change which workers have applied it."""
    topic = _topic(visit)
    more: dict[str, Any] = {"described": described, "fields": CONTROL_NAMES, "values": VALUES, "within": APPLIED_WITHIN}
    checked_at = _time(visit.query.get("exists", ""))
    more |= {"control": _control(visit, topic), "changed": _last_change(visit, topic)}
    return render(visit, "topics/topic", topic=topic, checked_at=checked_at, **more)


def _control(visit: Visit, topic: str) -> TopicControls | None:
    """Return the controls. Old figures would offer what was just done, so then the table is asked."""
    if not visit.reading.is_current:
        with contextlib.suppress(OutboxError):
            return visit.console.table.controls().get(topic)
    return visit.reading.value.controls.get(topic) if visit.reading.value else None


def _time(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else None


def _last_change(visit: Visit, topic: str) -> Operation | None:
    """Return the last of the recent operations that changed the controls of a topic."""
    figures = visit.reading.value
    recent: Sequence[Operation] = figures.operations if figures else ()
    for each in recent:
        match operations.parsed(each.selection):
            case {"topics": dict(topics)} if topic in topics:
                return each
    return None


def _topic(visit: Visit) -> str:
    if "name" not in visit.query:
        raise Refused(404, "The address names no topic", "Open a topic from the overview.")
    return visit.query["name"]


def _switch(visit: Visit) -> Response:
    editing.switch(visit.console.table, visit.path.removeprefix("/topic/"), [_known(visit)], visit.author())
    return _changed(visit)


def _ask(visit: Visit) -> Response:
    """Show the preview of the form. The name of the topic is no field, because a browser would change some names."""
    _preview(visit, visit.form)
    fields = {name: visit.form.get(name) for name in CONTROL_NAMES}
    query = {"name": _topic(visit), **fields, "unset": visit.form.getlist("unset")}
    return RedirectResponse(visit.link("/topic/controls", **query), 303)  # nothing has changed yet


def _show_preview(visit: Visit) -> Response:
    topic, values, preview = _preview(visit, visit.query)
    texts = {name: visit.query[name].strip() for name, field in CONTROL_NAMES.items() if values.get(field) is not None}
    removed = [name for name, field in CONTROL_NAMES.items() if field in values and name not in texts]
    commands = [
        *([visit.command("topics set", topic, **texts, reason="TEXT")] if texts else []),
        *([visit.command("topics unset", topic, *removed, reason="TEXT")] if removed else []),
    ]
    more = {"preview": preview, "to": values.get("publish_to"), "ordered": editing.ORDERED, "described": described}
    return render(
        visit,
        "topics/controls",
        topic=topic,
        query={"name": topic, **texts, "unset": removed},
        commands=commands,
        **more,
    )


def _write(visit: Visit) -> Response:
    topic, values, preview = _preview(visit, visit.query)
    author = visit.author(required=preview.unsent is not None)
    editing.change(visit.console.table, "controls", [topic], values, author)
    return _changed(visit)


def _check(visit: Visit) -> Response:
    """Ask Pub/Sub whether the topic, or that of its route, exists. Nothing is changed or recorded."""
    table, topic = visit.console.table, _topic(visit)
    control = table.controls().get(topic)
    try:
        unchecked = editing.check_destinations(table, [(control and control.publish_to) or topic], otherwise="")
    except NotReached:
        raise
    except OutboxError as error:
        raise Refused(400, "The topic cannot be used", str(error)) from None
    if unchecked:
        raise Refused(400, "It is unknown whether the topic exists", unchecked)
    return visit.redirect("/topic", name=topic, exists=shown(table.now()))


def _unset(visit: Visit) -> Response:
    editing.change(visit.console.table, "controls", [_topic(visit)], None, visit.author(required=True))
    return _changed(visit)


def _changed(visit: Visit) -> Response:
    return visit.redirect("/topic", name=_topic(visit))


def _preview(visit: Visit, given: QueryParams) -> tuple[str, dict[str, Any], editing.ControlsPreview]:
    """Return the topic, the values and their preview, after the checks of the command."""
    topic, values = _known(visit), _typed(given)
    try:
        return topic, values, editing.preview(visit.console.table, [topic], values, exact=False)
    except SettingError as error:
        names = (name for name in CONTROL_NAMES if f"--{name} " in str(error))
        raise Refused(400, "The topic was not changed", by_fields(error), next(names, "")) from None


def _known(visit: Visit) -> str:
    """Return the topic of a change. Raises Refused if it is unknown, because its row would stay for good."""
    topic = _topic(visit)
    if editing.unknown(visit.console.table, [topic]):
        advice = (
            "It has no control, no unsent task, and none sent in the last minute. Check the name, or use the command."
        )
        raise Refused(400, f"Unknown topic {topic!r:.100}", advice)
    return topic


def _typed(given: QueryParams) -> dict[str, Any]:
    """Return the values to write, by field. Empty fields keep their values."""
    texts = {name: text for name in CONTROL_NAMES if (text := given.get(name, "").strip())}
    removed = CONTROL_NAMES.keys() & given.getlist("unset")
    if both := texts.keys() & removed:
        raise Refused(400, "The form sets and removes a value", "Clear the field, or the checkbox.", min(both))
    if not texts and not removed:
        raise Refused(400, "The form is empty", "Fill in a field, or choose a value to remove.")
    values = {
        CONTROL_NAMES[name]: checked(VALUES[CONTROL_NAMES[name]].kind, text, name) for name, text in texts.items()
    }
    return values | {CONTROL_NAMES[name]: None for name in removed}


ROUTES = (
    Route("/topic", show, work=Work.LIGHT),
    Route("/topic/ask", _ask, Role.OPERATOR, "POST", Work.URGENT, "/topic"),
    Route("/topic/controls", _show_preview, Role.OPERATOR, work=Work.URGENT),
    Route("/topic/controls", _write, Role.OPERATOR, "POST", Work.URGENT, "/topic/controls"),
    Route("/topic/check", _check, Role.OPERATOR, "POST", page="/topic"),
    Route("/topic/unset", _unset, Role.OPERATOR, "POST", Work.URGENT, "/topic"),
    *(Route(f"/topic/{name}", _switch, Role.OPERATOR, "POST", Work.URGENT, "/topic") for name in SWITCHES),
)

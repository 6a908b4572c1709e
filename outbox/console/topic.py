"""One topic: its tasks by state, its circuit, and its controls with the forms that change them."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from starlette.responses import Response

from outbox import admin
from outbox.admin.backlog import Backlog
from outbox.cli.topics import LIMITS, POLICY, TOPIC_NAME, described
from outbox.console.charts import sparkline
from outbox.console.refusals import Refused
from outbox.console.rendering import render
from outbox.console.roles import Role
from outbox.console.task import SENTENCES
from outbox.console.visits import Visit, action, page
from outbox.program.settings import SettingType
from outbox.program.times import MOMENT, resolved, shown

#: A worker reads the topic controls at least this often.
APPLIED_WITHIN = timedelta(seconds=10)
#: Returns the values to write, by column, for the fields of a form.
Values = Callable[[Mapping[str, str]], dict[str, Any]]


def show(visit: Visit) -> Response:
    """Show the topic `name`, and after a change which workers have applied it."""
    topic, status = _topic(visit), visit.status().value
    found: dict[str, Any] = {}
    if status:
        backlog, control = status.backlog, status.controls.get(topic)
        found = {
            "line": backlog.topics().get(topic),
            "control": control,
            "described": described(control),
            "circuit": next((each for each in status.circuits if each.topic == topic), None),
            "sparkline": sparkline(visit.console.history.of(topic, backlog.as_of)),
            "applied": _applied(visit.query.get("written", ""), backlog),
        }
    forms = {"limits": LIMITS, "policy": POLICY, "commands": _commands(visit, topic)}
    return render(visit, "topic.html", topic=topic, states=SENTENCES, **forms, **found)


def _topic(visit: Visit) -> str:
    if "name" not in visit.query:
        raise Refused(404, "The address names no topic", "Open a topic from the overview.")
    return visit.query["name"]


def _applied(written: str, backlog: Backlog) -> dict[str, Any] | None:
    """Return when the change was written, and how many workers have sent a heartbeat since they must know it."""
    try:
        at = resolved(MOMENT.parse(written), backlog.as_of)
    except ValueError:
        return None
    knowing = [worker for worker in backlog.workers if worker.seen_at >= at + APPLIED_WITHIN]
    return {"at": at, "workers": len(knowing)}


def _commands(visit: Visit, topic: str) -> dict[str, str]:
    """Return the equivalent command of each form, with capitals in place of what a person types."""
    numbers = {name: {flag[2:]: "N" for flag in of} for name, of in (("limit", LIMITS), ("policy", POLICY))}
    return {
        **{name: visit.command(name, topic, reason="TEXT") for name in ("pause", "resume")},
        **{name: visit.command(name, topic, **given, reason="TEXT") for name, given in numbers.items()},
        "route": visit.command("route", topic, to="TOPIC", reason="TEXT"),
    }


def _change(operation: str, values: Values) -> Callable[[Visit], Response]:
    """Return the handler of a form, which writes what `values` returns."""

    def change(visit: Visit) -> Response:
        topic = _topic(visit)
        admin.topics.change(visit.table, operation, [topic], values(visit.form), visit.author())
        visit.changed()
        return visit.redirect("/topic", name=topic, written=shown(visit.table.now()))

    return change


def _numbers(flags: Mapping[str, tuple[str, SettingType, str]]) -> Values:
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


def _route(form: Mapping[str, str]) -> dict[str, Any]:
    to = form.get("to", "").strip()
    return {"PublishTo": None if form.get("off") else TOPIC_NAME.value(to, "--to")}


ROUTES = (
    page("/topic", show),
    action("/topic/pause", _change("pause", lambda _form: {"Paused": True}), Role.OPERATOR),
    action("/topic/resume", _change("resume", lambda _form: {"Paused": False}), Role.OPERATOR),
    action("/topic/limit", _change("limit", _numbers(LIMITS)), Role.OPERATOR),
    action("/topic/policy", _change("policy", _numbers(POLICY)), Role.OPERATOR),
    action("/topic/route", _change("route", _route), Role.OPERATOR),
)

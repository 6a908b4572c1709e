"""Pages from templates. Every text is escaped, for HTML by Jinja2 and for control characters by `_visible`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, Response

from outbox.console.health import health
from outbox.console.refusals import Refused
from outbox.console.roles import Role
from outbox.console.runbook import advice
from outbox.console.visits import Visit
from outbox.program.terminal import escaped
from outbox.program.times import spoken

#: The pages in the navigation.
NAVIGATION = (
    ("/", "Overview"),
    ("/tasks", "Tasks"),
    ("/blocked", "Blocked keys"),
    ("/workers", "Workers"),
    ("/operations", "Operations"),
)


def _visible(value: Any) -> Any:
    """Return a text without control characters, and a number with separators."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return escaped(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value


def at(time: datetime) -> str:
    """Return a time as the pages show it."""
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("outbox.console"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "spoken": spoken,
        "time": at,
        "clock": lambda time: f"{time:%H:%M:%S}",
    }
    # The value of a form field, which the browser sends back: with its control characters.
    environment.filters["exact"] = escape
    environment.globals |= {"Role": Role, "advice": advice, "NAVIGATION": NAVIGATION}
    return environment


_ENVIRONMENT = _environment()


def render(visit: Visit, template: str, **values: Any) -> Response:
    """Return a page. `values` are the names that its template uses."""
    reading = visit.status()
    common = {"visit": visit, "link": visit.link, "reading": reading, "status": reading.value}
    return _answer(template, 200, common | {"health": health(reading)} | values)


def render_refusal(refused: Refused, prefix: str) -> Response:
    """Return the page of a refusal. It reads nothing, because the person may not see anything."""
    return _answer("refused.html", refused.status, {"refused": refused, "prefix": prefix})


def _answer(template: str, code: int, values: Mapping[str, Any]) -> Response:
    return HTMLResponse(_ENVIRONMENT.get_template(template).render(values), code)

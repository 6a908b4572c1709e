"""Pages from templates. Every text is escaped, for HTML by Jinja2 and for control characters by `_visible`."""

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, Response

from outbox import admin
from outbox.admin.operations import Operation
from outbox.cli.workers import runs
from outbox.console.readings import HEADS, OPERATIONS, sparkline
from outbox.console.roles import Role
from outbox.console.visits import Visit
from outbox.program.terminal import cell, counted, listed
from outbox.program.times import spoken


def _visible(value: Any) -> Any:
    """Return a value as a table of the commands shows it: without control characters, and a number with separators."""
    return value if isinstance(value, Markup) else cell(value)


def described(operation: Operation) -> str:
    """Return the column Selection in words: each name with its value, and few of many IDs."""
    found = admin.operations.parsed(operation.selection)
    if not isinstance(found, dict):
        return str(found)
    if operation.operation != "retry":
        found.pop("include_expired", None)  # only a retry depends on it
    if isinstance(found.get("ids"), list):
        found["ids"] = listed(map(str, found["ids"]))
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


_ENVIRONMENT = Environment(
    loader=PackageLoader("outbox.console"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_visible,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters.update(
    spoken=spoken,
    time=lambda time: f"{time:%Y-%m-%d %H:%M:%S} UTC",
    clock=lambda time: f"{time:%H:%M:%S} UTC",
    described=described,
    runs=runs,
    # The value of a form field, which the browser sends back: with its control characters.
    exact=escape,
)
_ENVIRONMENT.globals |= {"Role": Role, "admin": admin, "counted": counted, "sparkline": sparkline}
_ENVIRONMENT.globals |= {"HEADS": HEADS, "OPERATIONS": OPERATIONS}


def render(visit: Visit, template: str, **values: Any) -> Response:
    """Return a page. `values` are the names that its template uses besides those of every page."""
    reading = visit.console.status.get()
    return answer(template, visit=visit, link=visit.link, reading=reading, status=reading.value, **values)


def answer(template: str, code: int = 200, **values: Any) -> Response:
    """Return a template with these values alone."""
    return HTMLResponse(_ENVIRONMENT.get_template(f"{template}.html").render(values), code)

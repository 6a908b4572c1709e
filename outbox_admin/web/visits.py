"""How a page is written: a function from a Visit to a response, and a Route that says who may call it.

- Paths are fixed, and all state of a page is in its query: IDs and topics may contain slashes or be `..`.
- A handler runs on a thread. It calls functions of its subject with `visit.console.table`, and has no SQL of its own.
- What a page fetches again comes from `visit.reading`, so that all tabs share one read. Only sent tasks that a
  person follows do not.
- A handler raises Refused, or lets an OutboxError pass. Both become a page. If the route names the page of its form,
  this page is shown again, with what the person typed.
- A page is a GET with the role VIEWER. What changes or records something is a POST with another role, which `Access`
  checks before the handler runs. It ends with `visit.redirect`.
- The template is beside the page and extends web/base.html. Every text in it is escaped, for HTML by Jinja2 and for
  control characters by `_visible`. Its block `live` is fetched again while the tab is visible; forms are in the block
  `still`, so that a refresh never changes what a person types or is about to click.

What all tabs share is read at most every few seconds, and not if no tab asks. So a hundred open tabs cost Spanner what
one costs. No page waits until it is read, also not after an action. While Spanner is slow or cannot be reached, the
last figures stay, with their age and the error.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.datastructures import QueryParams
from starlette.responses import HTMLResponse, RedirectResponse, Response

from outbox.base.values import counted, listed, spoken
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import SettingType
from outbox.program.terminal import cell
from outbox.rows.task_table import TaskTable
from outbox.table.states import LEFT_TO_SEND
from outbox_admin import operations
from outbox_admin.flags import command_line
from outbox_admin.operations import Author, Operation
from outbox_admin.value_types import TEXT
from outbox_admin.web.roles import Refused, Role

#: Seconds for which one read serves all tabs. A visible tab asks as often.
FRESH_SECONDS = 5.0
#: How long a page waits for a read that it has begun, and the age from which on it says that its figures are old. What
#: an idle worker says in its heartbeat is up to 21 s old in any figures.
PATIENCE_SECONDS, LATE_SECONDS = 1.0, 25.0
_log = logging.getLogger("outbox")
#: Returns the attributes and the data of a message as people may see them. The first argument is the topic.
Redact = Callable[[str, Mapping[str, str], bytes], tuple[Mapping[str, str], bytes]]


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The last figures, how many seconds ago their read began, and the error of a later read, if it failed.

    `written` is the time of the last action of this console, unless the figures include it.
    """

    #: A `Figures` of status/status_pages.py, which is above this module.
    value: Any
    age: float
    error: str | None = None
    written: datetime | None = None

    @property
    def is_current(self) -> bool:
        """Tell whether rows that are read now say nothing newer, or cannot be read."""
        return bool(self.error) or not (self.age > 2 * FRESH_SECONDS or self.written)


class Shared:
    """Figures that are read again when they are asked for and old. Used by all threads. `read` gets the last ones.

    It is read on a thread of its own, because a read may take as long as Spanner is slow, and no page waits for that.
    """

    def __init__(self, read: Callable[[Any], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._ended.set()
        self._value: object = None
        self._error: str | None = None
        self._began_at = self._tried_at = float("-inf")
        self._is_due = True
        self._written: datetime | None = None

    def get(self) -> Reading:
        """Return the last value. The page that begins a read waits a moment, and without a value each page does."""
        with self._lock:
            begins = self._ended.is_set() and (self._is_due or self._clock() - self._tried_at >= FRESH_SECONDS)
            if begins:  # if no thread can be started, the page fails, and the next one tries again
                threading.Thread(target=self._read_again, daemon=True).start()
                self._ended.clear()  # the thread needs the lock before it ends
                self._is_due = False
        if begins or self._value is None:
            self._ended.wait(PATIENCE_SECONDS)
        return Reading(self._value, self._clock() - self._began_at, self._error, self._written)

    def forget(self) -> None:
        """Let the next `get` read again, because an action has changed what it shows."""
        with self._lock:
            self._is_due, self._written = True, datetime.now(UTC)

    def _read_again(self) -> None:
        began_at, written, value, error = self._clock(), self._written, self._value, None
        try:
            value = self._read(value)
        except Exception as failure:
            error = str(failure)
            if not isinstance(failure, OutboxError):
                _log.exception("the figures could not be read")
        with self._lock:
            self._value, self._error, self._tried_at = value, error, self._clock()
            if not error:
                # Another action may have been written since the read began.
                self._began_at, self._written = began_at, None if self._written is written else self._written
            self._ended.set()


def checked(kind: SettingType, text: str, field: str) -> Any:
    """Return the value of a field of a form. Raises Refused."""
    try:
        return kind.value(text, field)
    except SettingError as error:
        advice = str(error).removeprefix(f"{field}: ")
        # The page shows it beside the label of the field. The name of a field is for programs.
        raise Refused(400, "A field has a wrong value", advice, field) from None


def by_fields(error: OutboxError) -> str:
    """Return the text of an error as a page says it: a field has the name of its flag, and a checkbox stands for force.

    A command, which is between backticks, keeps its flags.
    """
    return re.sub(r"(`[^`]*`)|, or (?:pass )?--force|--(?=[a-z])", lambda found: found[1] or "", str(error))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """What all visits share."""

    table: TaskTable
    #: The `Running` of changes/running.py, and what people may do with tasks: each an `Action` of
    #: changes/change_pages.py. Both are above this module.
    running: Any
    status: Shared
    actions: Sequence[Any]
    #: The roles that the flags of the command allow.
    allowed: frozenset[Role]
    is_production: bool
    redact: Redact | None
    #: Where the documentation is, or an empty text.
    docs_url: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visit:
    """One request of a person who holds the role of its route."""

    console: Console
    person: str
    roles: frozenset[Role]
    #: The path below `prefix`, and what follows it.
    path: str
    prefix: str = ""
    query: QueryParams = dataclasses.field(default_factory=QueryParams)
    form: QueryParams = dataclasses.field(default_factory=QueryParams)
    #: After a form was refused: the path that it was sent to, and why. The visit is then of the form's page.
    sent_to: str = ""
    problem: Refused | None = None

    @functools.cached_property
    def reading(self) -> Reading:
        """Return the shared figures, which are the same for the whole page."""
        return self.console.status.get()

    def link(self, path: str, /, **query: object) -> str:
        """Return the address of a page. Values that are None or empty are left out, except a `name` or an `id`."""
        given = {name: value for name, value in query.items() if value not in (None, "") or name in ("id", "name")}
        return f"{self.prefix}{path}{'?' if given else ''}{urlencode(given, doseq=True, errors='replace')}"

    def redirect(self, path: str, /, **query: object) -> Response:
        """Return the answer to an action: the browser gets this page, with new figures."""
        self.console.status.forget()
        return RedirectResponse(self.link(path, **query), 303)

    def author(self, *, required: bool = False) -> Author:
        """Return the person, and the reason of the form. Raises Refused if a required reason is missing."""
        reason = self.form.get("reason", "").strip()
        if required and not reason:
            raise Refused(400, "A reason is required", "Write why. The record of operations keeps it.", "reason")
        return Author(self.person, checked(TEXT, reason, "reason") if reason else None)

    def command(self, name: str, *arguments: object, **given: object) -> str:
        """Return the `outbox` command that does the same. Flags whose `given` values are None or False are left out."""
        _, project, _, instance, _, database = self.console.table.name.split("/")
        return command_line(name, *arguments, project=project, instance=instance, database=database, **given)


Handler = Callable[[Visit], Response]


class Work(enum.Enum):
    """What a handler takes. `Access` bounds how many of each kind work at a time."""

    LIGHT = enum.auto()  # a page of the shared figures, or of single rows
    URGENT = enum.auto()  # a change of single rows, and its preview
    SCAN = enum.auto()  # up to a minute of Spanner
    MESSAGE = enum.auto()  # the memory of a large message


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """A path, by default of a page, and the role that it needs."""

    path: str
    handler: Handler
    role: Role = Role.VIEWER
    method: str = "GET"
    #: Or how it follows from the visit.
    work: Work | Callable[[Visit], Work] = Work.SCAN
    #: The path of the page with the form that is sent here.
    page: str = ""

    def __post_init__(self) -> None:
        if self.method != "GET" and self.role is Role.VIEWER:
            raise ValueError(f"{self.path}: a viewer changes nothing")


def _visible(value: Any) -> Any:
    """Return a value as a table of the commands shows it: without control characters, and a number with separators."""
    return value if isinstance(value, Markup) else cell(value)


def described(operation: Operation) -> str:
    """Return the column Selection in words: each name with its value, and few of many IDs."""
    found = operations.parsed(operation.selection)
    if not isinstance(found, dict):
        return str(found)
    if operation.operation != "retry":
        found.pop("include_expired", None)  # only a retry depends on it
    if isinstance(found.get("ids"), list):
        found["ids"] = listed(map(str, found["ids"]))
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


_STATIC = {file.name: file.read_bytes() for file in (resources.files("outbox_admin.web") / "static").iterdir()}
#: The path of each file that pages load, and its content. A new content has a new path.
FILES = {name: f"/static/{hashlib.sha256(content).hexdigest()[:16]}/{name}" for name, content in _STATIC.items()}
CONTENTS = {FILES[name]: content for name, content in _STATIC.items()}

#: Each subject adds what its templates call.
ENVIRONMENT = Environment(
    loader=PackageLoader("outbox_admin", "."),  # templates are beside their pages
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_visible,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters.update(
    spoken=spoken,
    time=lambda time: f"{time.year:04}-{time:%m-%d %H:%M:%S} UTC",
    hour=lambda time: f"{time:%H:%M}",
    iso=lambda time: f"{time.year:04}-{time:%m-%dT%H:%M:%SZ}",
    described=described,
    # The value of a form field, which the browser sends back: with its control characters.
    exact=escape,
    is_changed=lambda value: re.search(r"[\0\r\n]", value) is not None,
)
ENVIRONMENT.globals |= {"Role": Role, "counted": counted, "FILES": FILES, "LEFT_TO_SEND": LEFT_TO_SEND}
ENVIRONMENT.globals |= {"FRESH_SECONDS": FRESH_SECONDS, "LATE_SECONDS": LATE_SECONDS}


def render(visit: Visit, template: str, **values: Any) -> Response:
    """Return a page. `values` are the names that its template uses besides those of every page."""
    more: dict[str, Any] = {"reading": visit.reading, "status": visit.reading.value}
    return answer(template, visit=visit, link=visit.link, **more, **values)


def answer(template: str, code: int = 200, **values: Any) -> Response:
    """Return a template with these values alone."""
    return HTMLResponse(ENVIRONMENT.get_template(f"{template}.html").render(values), code)

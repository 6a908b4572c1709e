"""How a page is written: a function from a Visit to a response, and a route that says who may call it.

    def show(visit: Visit) -> Response:
        task = admin.tasks.task(visit.table, visit.query.get("id", ""))
        if task is None:
            raise Refused(404, "There is no task with this ID", "It may have been deleted.")
        return render(visit, "task.html", task=task)

    def cancel(visit: Visit) -> Response:
        author = visit.author()                          # the person and the reason of the form
        visit.check_typed(count)                         # a destructive action: the person typed the number
        ...
        return visit.redirect("/operations", id=id)      # 303, so that reloading repeats nothing

    ROUTES = (page("/task", show), action("/task/cancel", cancel, Role.DESTROYER))

`application.routes` lists the ROUTES of all modules. The rules:

- Paths are fixed, and all state of a page is in its query: IDs and topics may contain slashes or be `..`. A link is
  written `link("/task", id=task.id)`, in Python and in templates.
- A handler runs on a thread. It calls `outbox.admin` with `visit.table`, and has no SQL of its own.
- What a page fetches again is read with `visit.shared(read)`, so that all tabs share one read. An action ends with
  `visit.changed()`.
- It raises Refused, or lets an OutboxError pass. Both become a page.
- A page is a GET with the role VIEWER. Anything that changes or records something is a POST with another role.
  `Access` checks the role before the handler runs. `visit.may(role)` only decides what a page shows.
- The template extends base.html. Its block `live` is fetched again while the tab is visible; forms are in the block
  `still`, so that a refresh never clears what a person types. A form is the macro `action` of forms.html.
- `rendering.render` gives templates `visit`, `link`, `health`, `reading` (the shared Reading) and `status` (its value).
"""

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.responses import RedirectResponse, Response

from outbox.admin.operations import Author
from outbox.admin.table import TaskTable
from outbox.console.readings import History, Reading, SharedReads, Status
from outbox.console.refusals import Refused
from outbox.console.roles import Role
from outbox.console.running import Running

T = TypeVar("T")

#: Max characters of a reason, as in `--reason`.
MAX_REASON = 1_000
#: Returns the attributes and the data of a message as people may see them. The first argument is the topic.
Redact = Callable[[str, Mapping[str, str], bytes], tuple[Mapping[str, str], bytes]]


def unredacted(_topic: str, attributes: Mapping[str, str], data: bytes) -> tuple[Mapping[str, str], bytes]:
    """Return everything."""
    return attributes, data


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """What all visits share."""

    table: TaskTable
    running: Running
    reads: SharedReads
    history: History = dataclasses.field(default_factory=History)
    #: Whether the command was started with `--allow-actions`, for pages that explain why an action is missing.
    allow_actions: bool = False
    show_data: bool = False
    production: str = ""
    redact: Redact = unredacted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def table(self) -> TaskTable:
        """Return the table of the console."""
        return self.console.table

    def shared(self, read: Callable[[TaskTable], T]) -> Reading[T]:
        """Return what `read` returns for the table. All tabs share it."""
        return self.console.reads.get(read)

    def status(self) -> Reading[Status]:
        """Return the figures of the overview, from which all pages take the health sentence."""
        return self.shared(self.console.history.read)

    def changed(self) -> None:
        """Say that an action has changed something, so that the next page shows it."""
        self.console.reads.forget()

    @property
    def is_production(self) -> bool:
        """Tell whether the header is red."""
        return self.console.production != "" and self.console.production in self.table.name

    @property
    def here(self) -> str:
        """Return the address of this page with all its state."""
        return f"{self.prefix}{self.path}{'?' if self.query else ''}{self.query}"

    def link(self, path: str, **query: object) -> str:
        """Return the address of a page. Values that are None or empty are left out, except a `name` or an `id`."""
        given = {name: value for name, value in query.items() if value not in (None, "") or name in ("id", "name")}
        return f"{self.prefix}{path}{'?' if given else ''}{urlencode(given, doseq=True)}"

    def redirect(self, path: str, **query: object) -> Response:
        """Return the answer to an action: the browser gets this page."""
        return RedirectResponse(self.link(path, **query), 303)

    def may(self, role: Role) -> bool:
        """Tell whether the person holds a role."""
        return role in self.roles

    def author(self, *, required: bool = False) -> Author:
        """Return the person, and the reason of the form. Raises Refused if a required reason is missing."""
        reason = self.form.get("reason", "").strip()[:MAX_REASON]
        if required and not reason:
            raise Refused(400, "A reason is required", "Go back and write why. The record of operations keeps it.")
        return Author(self.person, reason or None)

    def check_typed(self, count: int) -> None:
        """Raise Refused unless the form's field `typed` has this count, with or without separators."""
        typed = re.sub(r"[\s,._']", "", self.form.get("typed", ""))
        if typed != str(count):
            advice = f"Go back and type {count:,}. If the number changed meanwhile, look at the selection again."
            raise Refused(409, "The typed number is not the number of tasks", advice)

    def command(self, *words: object, **flags: object) -> str:
        """Return the `outbox` command that does the same, quoted for a shell. `flags` that are None are left out.

        A flag that is True has no value. Values join their flag, so that one that begins with a dash is no flag.
        """
        given = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in (self._database() | flags).items()
            if value not in (None, False)
        ]
        command, *arguments = map(str, words)
        return shlex.join(["outbox", *command.split(), *given, *(["--", *arguments] if arguments else [])])

    def _database(self) -> dict[str, object]:
        _, project, _, instance, _, database = self.table.name.split("/")
        return {"project": project, "instance": instance, "database": database}


Handler = Callable[[Visit], Response]


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, and the role that it needs. Without a role, no identity is needed either."""

    method: str
    path: str
    handler: Handler
    role: Role | None


def page(path: str, handler: Handler, role: Role | None = Role.VIEWER) -> Route:
    """Return the route of a page, which changes nothing."""
    return Route("GET", path, handler, role)


def action(path: str, handler: Handler, role: Role) -> Route:
    """Return the route of a form, which changes or records something."""
    if role is Role.VIEWER:
        raise ValueError(f"{path}: a viewer changes nothing")
    return Route("POST", path, handler, role)

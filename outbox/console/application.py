"""The console as an ASGI application."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from google.cloud.spanner_v1.database import Database
from starlette.responses import FileResponse, PlainTextResponse, Response

from outbox.admin.table import TaskTable
from outbox.console import operations, tasks, topic
from outbox.console.access import Access
from outbox.console.identity import Identify
from outbox.console.readings import Shared, read_status
from outbox.console.roles import ACTIONS, EVERYTHING, VIEWERS, Role, Roles
from outbox.console.running import Running
from outbox.console.visits import Console, Redact, Route, Visit, render

#: The host names to which a console on this machine answers.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
TAG = "outbox-console"
#: The pages that show nothing but the shared figures.
FIGURES = {"/": "overview", "/blocked": "blocked", "/workers": "workers", "/operations": "operations"}
_STATIC = Path(__file__).with_name("static")


def app(
    database: Database,
    *,
    identify: Identify | None = None,
    roles: Roles | None = None,
    allow_actions: bool = False,
    show_data: bool = False,
    allowed_hosts: Sequence[str] = LOOPBACK_HOSTS,
    path_prefix: str = "",
    production: str = "",
    redact: Redact = lambda _topic, attributes, data: (attributes, data),
) -> Access:
    """Return the console of a database as an ASGI application, to serve or to mount.

    `identify` returns the name of the person who sends a request: `Iap`, `Header`, or a function of your own that asks
    the session of your application. Without it, everyone who reaches the console acts as the account of its
    credentials, and `roles` default to all. With it, they default to the viewer. `allow_actions` and `show_data` are
    needed besides. The header is red if the full name of the database contains `production`. `redact` changes what
    people see of a message.

    Raises NotReached, SchemaDiffers.
    """
    table = TaskTable(database, TAG)
    console = Console(
        table=table,
        running=Running(table),
        status=Shared(partial(read_status, table)),
        allowed=frozenset({Role.VIEWER, *(ACTIONS if allow_actions else ()), *([Role.DATA] if show_data else ())}),
        is_production=production != "" and production in table.name,
        redact=redact,
    )
    return Access(
        console=console,
        routes=routes(),
        identify=identify or (lambda _request: table.principal),
        roles=roles or (VIEWERS if identify else EVERYTHING),
        allowed_hosts=allowed_hosts,
        path_prefix=path_prefix,
    )


def routes() -> list[Route]:
    """Return all routes of the console."""
    pages = [Route(path, partial(render, template=name, actions=operations.ACTIONS)) for path, name in FIGURES.items()]
    static = [Route(f"/static/{file.name}", partial(_file, path=file)) for file in _STATIC.iterdir()]
    others = (route for module in (topic, tasks, operations) for route in module.ROUTES)
    # It does not ask Spanner, because no restart of the console ends an outage of Spanner.
    healthz = Route("/healthz", lambda _visit: PlainTextResponse("ok\n"), role=None)
    return [healthz, *static, *pages, *others]


def _file(_visit: Visit, *, path: Path) -> Response:
    return FileResponse(path)

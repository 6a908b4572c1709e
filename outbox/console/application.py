"""The console as an ASGI application."""

from collections.abc import Mapping, Sequence
from importlib import resources

from google.cloud.spanner_v1.database import Database
from starlette.responses import PlainTextResponse, Response

from outbox.admin.table import TaskTable
from outbox.console import acting, blocked, operations, overview, search, task, tasks, topic, workers
from outbox.console.access import Access
from outbox.console.identity import Identify
from outbox.console.readings import SharedReads
from outbox.console.roles import EVERYTHING, VIEWERS, Roles
from outbox.console.running import Running
from outbox.console.visits import Console, Handler, Redact, Route, Visit, page, unredacted

#: The host names to which a console on this machine answers.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
TAG = "outbox-console"
_TYPES = {"css": "text/css", "js": "text/javascript"}


class ConsoleTable(TaskTable):
    """The table, with one tag for all reads of the console, so that Spanner's statistics show what it costs."""

    def query(self, statement: str, tag: str, *values: object, **options: object) -> list[list[object]]:
        """Return the rows of one statement."""
        return super().query(statement, TAG, *values, **options)  # type: ignore[arg-type]  # passed on as they are


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
    redact: Redact = unredacted,
) -> Access:
    """Return the console of a database as an ASGI application, to serve or to mount.

    `identify` returns the name of the person who sends a request: `Iap`, `Header`, or a function of your own that asks
    the session of your application. Without it, everyone who reaches the console acts as the account of its
    credentials, and `roles` default to all. With it, they default to the viewer. `allow_actions` and `show_data` are
    needed besides. The header is red if the full name of the database contains `production`. `redact` changes what
    people see of a message.

    Raises NotReached, SchemaDiffers.
    """
    table = ConsoleTable(database)
    roles = roles or (VIEWERS if identify else EVERYTHING)
    console = Console(
        table=table,
        running=Running(table),
        reads=SharedReads(table),
        redact=redact,
        allow_actions=allow_actions,
        show_data=show_data,
        production=production,
    )
    return Access(
        console,
        routes(),
        identify=identify or (lambda _request: table.principal),
        roles=roles.without(actions=allow_actions, data=show_data),
        allowed_hosts=allowed_hosts,
        path_prefix=path_prefix,
    )


def routes() -> list[Route]:
    """Return all routes of the console."""
    static = [page(f"/static/{name}", handler) for name, handler in _static_files().items()]
    pages = (overview, topic, tasks, acting, task, blocked, workers, operations, search)
    return [page("/healthz", _healthz, role=None), *static, *(route for each in pages for route in each.ROUTES)]


def _healthz(_visit: Visit) -> Response:
    """Tell that the process answers. It does not ask Spanner, whose outage no restart of the console ends."""
    return PlainTextResponse("ok\n")


def _static_files() -> Mapping[str, Handler]:
    folder = resources.files("outbox.console") / "static"
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    return {name: _static(content, _TYPES[name.rpartition(".")[2]]) for name, content in files.items()}


def _static(content: bytes, media_type: str) -> Handler:
    return lambda _visit: Response(content, media_type=media_type)

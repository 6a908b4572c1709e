"""The console as one ASGI application: the pages of all subjects."""

from collections.abc import Sequence
from functools import partial

from google.cloud.spanner_v1.database import Database
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from outbox.errors import SettingError
from outbox.rows.task_table import TaskTable
from outbox_admin.changes import change_pages
from outbox_admin.changes.running import Running
from outbox_admin.status import status_pages
from outbox_admin.tasks import task_pages
from outbox_admin.topics import topic_page
from outbox_admin.web.application import Access
from outbox_admin.web.console_settings import DOCS_URL, HOSTS, PATH, TEXT
from outbox_admin.web.roles import CHANGING, EVERYTHING, VIEWERS, Header, Iap, Identify, Role, Roles, RolesFile
from outbox_admin.web.visits import Console, Redact, Route, Shared, Visit, Work

__all__ = ["Header", "Iap", "app"]

#: The host names to which a console on this machine answers.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def app(
    database: Database,
    *,
    identify: Identify | None = None,
    roles: Roles | RolesFile | None = None,
    allow_actions: bool = False,
    show_data: bool = False,
    allowed_hosts: Sequence[str] = LOOPBACK_HOSTS,
    path_prefix: str = "",
    production: str = "",
    docs_url: str = "",
    redact: Redact | None = None,
) -> "Access":
    """Return the console of a database as an ASGI application, to serve or to mount.

    `identify` returns the name of the person who sends a request: `Iap`, `Header`, or a function of your own that asks
    the session of your application. Without it, everyone who reaches the console acts as the account of its
    credentials, and `roles` default to all. With it, they default to the viewer. `allow_actions` and `show_data` are
    needed besides. The header is red if the full name of the database contains `production`. Links to the documentation
    begin with `docs_url`, and without it there are none. `redact` changes what people see of a message. It gets the
    whole message. Without it, the console reads only the parts that it shows.

    Raises SettingError if the command would refuse the same value, NotReached, SchemaDiffers.
    """
    # A text is also a sequence of texts: its characters.
    hosts = HOSTS.value(allowed_hosts if isinstance(allowed_hosts, str) else ",".join(allowed_hosts), "allowed_hosts")
    path_prefix, production = PATH.value(path_prefix, "path_prefix"), TEXT.value(production, "production")
    docs_url = DOCS_URL.value(docs_url, "docs_url")
    pages = routes()
    if path_prefix and (same := [each.path for each in pages if f"{each.path}/".startswith(f"{path_prefix}/")]):
        raise SettingError(
            f"the path prefix {path_prefix} is also the beginning of a page's path, {same[0]}. Choose another prefix, "
            "because a proxy may remove it"
        )
    table = TaskTable(database, "outbox-console")
    console = Console(
        table=table,
        running=Running(table),
        status=Shared(partial(status_pages.read, table)),
        actions=change_pages.ACTIONS,
        allowed=frozenset({Role.VIEWER, *(CHANGING if allow_actions else ()), *([Role.DATA] if show_data else ())}),
        is_production=production != "" and production in table.name,
        redact=redact,
        docs_url=docs_url,
    )
    return Access(
        console=console,
        routes=pages,
        identify=identify or (lambda _request: table.principal),
        roles=roles or (VIEWERS if identify else EVERYTHING),
        allowed_hosts=hosts,
        path_prefix=path_prefix,
    )


def routes() -> list[Route]:
    # A page asks for it before it sends a form: a proxy in front may have ended the session of the person.
    signed_in = Route("/signed-in", lambda _visit: PlainTextResponse("ok\n"), work=Work.LIGHT)
    subjects = (status_pages, topic_page, task_pages, change_pages)
    found = [signed_in, *(route for subject in subjects for route in subject.ROUTES)]
    answered = {route.path for route in found if route.method == "GET"}
    forms = [route for route in found if route.page and route.path not in answered]
    # The address of a refused form, or of one that a proxy has interrupted by its login, is opened again.
    return [*found, *(Route(each.path, partial(_open, page=each.page), work=Work.LIGHT) for each in forms)]


def _open(visit: Visit, *, page: str) -> Response:
    return RedirectResponse(f"{visit.prefix}{page}?{visit.query}", 303)

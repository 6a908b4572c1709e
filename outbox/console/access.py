"""The only way into the console: every request passes these checks, in this order, before a handler runs.

1. `Host` is one of the allowed hosts, so no other site can point its own name at the console (DNS rebinding).
2. A request that is neither GET nor HEAD comes from a page of the console: `Sec-Fetch-Site` is `same-origin` or, if a
   browser sends none (an old one, or any without TLS), the host of `Origin` is `Host`. There is no token and no cookie.
3. The route exists. Only a route without a role, such as /healthz, needs no identity.
4. The request has an identity.
5. The person holds the role of the route.

docs/security.md says against whom. Every answer has the same headers.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outbox.console.identity import Identify
from outbox.console.roles import Role, Roles
from outbox.console.visits import Console, Refused, Route, Visit, answer
from outbox.errors import NotReached, OutboxError
from outbox.program.settings import host_and_port

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    # With no-referrer, a browser sends `Origin: null` with a form, and no Sec-Fetch-Site to a host without TLS.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
#: Max bytes of a form: a thousand selected tasks with the longest IDs need less.
MAX_FORM = 256 * 1024
_SAFE = ("GET", "HEAD")
_RELOAD = "Go back, reload the page and try again."
_log = logging.getLogger("outbox")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The ASGI application of the console."""

    console: Console
    routes: Sequence[Route]
    identify: Identify
    roles: Roles
    allowed_hosts: Sequence[str]
    path_prefix: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"the console answers HTTP only, not {scope['type']}")
        prefix = scope.get("root_path", "") + self.path_prefix
        try:
            response = await self._answer(Request(scope, receive), prefix)
        except Exception as error:
            refused = _refused(error, scope["path"])
            response = answer("refused", refused.status, refused=refused, prefix=prefix)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    async def _answer(self, request: Request, prefix: str) -> Response:
        self._check_host(request)
        _check_origin(request)
        path = _path(request, prefix)
        route = self._route(request.method, path)
        person = await run_in_threadpool(self.identify, request) if route.role else ""
        if route.role and not person:
            raise Refused(403, "The request has no identity", "Sign in where the console gets the names of people.")
        roles = self.roles.of(person) & self.console.allowed if route.role else frozenset[Role]()
        self._check_role(route, person, roles)
        visit = Visit(
            console=self.console, person=person, roles=roles, path=path, prefix=prefix,
            query=request.query_params, form=await _form(request),
        )  # fmt: skip
        return await run_in_threadpool(route.handler, visit)

    def _check_host(self, request: Request) -> None:
        with contextlib.suppress(ValueError):
            if host_and_port(request.headers.get("host", ""))[0].lower() in self.allowed_hosts:
                return
        advice = "Open it under a name of --allowed-hosts, or add this one there."
        raise Refused(403, "The console does not answer to this host name", advice)

    def _route(self, method: str, path: str) -> Route:
        methods = {route.method: route for route in self.routes if route.path == path}
        if not methods:
            raise Refused(404, "There is no such page", "Open the overview, or search for a task ID.")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise Refused(405, f"This page does not answer to {method}", f"It answers to {' and '.join(methods)}.")
        return route

    def _check_role(self, route: Route, person: str, roles: frozenset[Role]) -> None:
        if not route.role or route.role in roles:
            return
        advice = f"Ask for {person} to be added to the role {route.role} in the file of --roles."
        if route.role not in self.console.allowed:
            advice = f"The console was started without {route.role.flag}. Use the command, or a console with the flag."
        raise Refused(403, f"This needs the role {route.role}", advice)


def _check_origin(request: Request) -> None:
    """Raise Refused if another site's page may have sent the request."""
    host, site = request.headers["host"], request.headers.get("sec-fetch-site")
    if request.method in _SAFE or site == "same-origin":
        return
    if site is not None or request.headers.get("origin") not in (f"http://{host}", f"https://{host}"):
        raise Refused(403, "The request does not come from a page of the console", _RELOAD)


def _path(request: Request, prefix: str) -> str:
    """Return the path below the prefix. A proxy may also have removed the prefix."""
    path: str = request.scope["path"]
    return (path.removeprefix(prefix) or "/") if path == prefix or path.startswith(f"{prefix}/") else path


async def _form(request: Request) -> QueryParams:
    """Return the fields of a urlencoded form. Raises Refused."""
    if request.method in _SAFE:
        return QueryParams()
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise Refused(415, "This is not a form of the console", _RELOAD)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM:
            raise Refused(413, "The form is too large", "Select fewer tasks, or all that match a filter.")
    return QueryParams(bytes(body).decode(errors="replace"))


def _refused(error: Exception, path: str) -> Refused:
    """Return what the page of an error says, and log the error."""
    if not isinstance(error, Refused | OutboxError):
        _log.error("the page %s failed", path, exc_info=error)
        return Refused(500, "The page failed", "The log of the console has the reason. Reload the page.")
    _log.info("refused: %s", f"{error}: {error.__cause__}" if error.__cause__ else error)
    if isinstance(error, NotReached):
        return Refused(503, "Spanner did not answer", f"{error}. Reload the page.")
    return error if isinstance(error, Refused) else Refused(400, "This was refused", str(error))

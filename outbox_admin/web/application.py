"""The console as an ASGI application. Every request passes these checks, in this order, before a handler runs.

1. /healthz answers at once. The health check of a balancer has neither a name of the console nor an identity.
2. `Host` is one of the allowed hosts, so no other site can point its own name at the console (DNS rebinding).
3. A request that is neither GET nor HEAD comes from a page of the console: `Sec-Fetch-Site` is `same-origin` or, if a
   browser sends none (an old one, or any without TLS), the host of `Origin` is `Host`. There is no token and no cookie.
   Any other request that another site's page sends is the navigation of a tab, as when a person follows a link.
4. The route exists, and the request has an identity.
5. The person holds the role of the route.
6. The handler gets one of a few places of its kind. What is urgent never waits for a list. A page that gets none says
   so, and no browser loads it again by itself, because it would then wait in front of other people.

docs/security.md says against whom. Every answer has the same headers.
"""

import contextlib
import dataclasses
import logging
import mimetypes
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from urllib.parse import parse_qsl

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from outbox.base.values import counted
from outbox.errors import NotReached, OutboxError
from outbox.program.settings import host_name
from outbox_admin.web.roles import Identify, Refused, Role, Roles, RolesFile
from outbox_admin.web.visits import CONTENTS, Console, Route, Visit, Work, answer, by_fields

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    # With no-referrer, a browser sends `Origin: null` with a form, and no Sec-Fetch-Site to a host without TLS.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    # The script of a page takes an answer without it for that of a proxy, such as a page to sign in.
    "Outbox-Console": "1",
}
#: Handlers that work at a time. Together they leave some of the server's 40 threads free for identities.
PLACES: Mapping[Work, int] = {Work.LIGHT: 16, Work.URGENT: 8, Work.SCAN: 8, Work.MESSAGE: 1}
#: How long a request waits for a place, how often it tries, and when a page that got none asks again.
WAIT_SECONDS, TRY_SECONDS, RETRY_SECONDS = 5.0, 0.02, 30
#: Seconds in which the views of a page by a person are one line: a visible tab reads its page every five seconds.
VIEW_SECONDS = 600.0
#: Max bytes of a form: a thousand selected tasks with the longest IDs need less.
MAX_FORM = 256 * 1024
_SAFE = ("GET", "HEAD")
#: The name of the person in the scope of a request, for the log.
_PERSON = "outbox.console.person"
_RELOAD = "Go back, reload the page and try again."
_log = logging.getLogger("outbox")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The ASGI application of the console."""

    console: Console
    routes: Sequence[Route]
    identify: Identify
    roles: Roles | RolesFile
    allowed_hosts: Sequence[str]
    path_prefix: str
    _places: Mapping[Work, threading.Semaphore] = dataclasses.field(
        init=False, default_factory=lambda: {work: threading.Semaphore(number) for work, number in PLACES.items()}
    )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            return await WebSocketClose()(scope, receive, send)
        if scope["type"] != "http":
            raise RuntimeError(f"the console answers HTTP only, not {scope['type']}")
        request, prefix = Request(scope, receive), scope.get("root_path", "") + self.path_prefix
        try:
            response = await self._answer(request, prefix)
        except ClientDisconnect:
            _log.info("the client left before its form had arrived: %s", _trace(request))
            return None
        except Exception as error:
            refused = _refused(error, request)
            response = answer("web/refused", refused.status, refused=refused, prefix=prefix)
            if refused.wait:
                response.headers["Retry-After"] = str(RETRY_SECONDS)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        # A page of tables has a sixth of its size then. It has no secret that its size could tell.
        return await GZipMiddleware(response, minimum_size=1_000, compresslevel=5)(scope, receive, send)

    async def _answer(self, request: Request, prefix: str) -> Response:
        path = _path(request, prefix)
        # It does not ask Spanner, because no restart of the console ends an outage of Spanner.
        if path == "/healthz" and request.method in _SAFE:
            return PlainTextResponse("ok\n")
        self._check_host(request)
        _check_origin(request)
        if path in CONTENTS and request.method in _SAFE:
            cached = {"Cache-Control": "max-age=31536000, immutable"}
            return Response(CONTENTS[path], headers=cached, media_type=mimetypes.guess_type(path)[0])
        route = self._route(request.method, path)
        person = await run_in_threadpool(self.identify, request)
        if not person:
            raise Refused(403, "The request has no identity", "Sign in where the console gets the names of people.")
        request.scope[_PERSON] = person
        roles = self.roles.of(person) & self.console.allowed
        self._check_role(route, person, roles)
        visit = Visit(
            console=self.console, person=person, roles=roles, path=path, prefix=prefix,
            query=_decoded(request.query_params), form=await _form(request),
        )  # fmt: skip
        if request.method in _SAFE:
            _log_view(person, _trace(request), time.monotonic() // VIEW_SECONDS)
        else:
            _log.info("%s: %s", person, _trace(request))
        try:
            return await self._handled(route, visit)
        except (Refused, OutboxError) as error:
            return await self._stay(request, route, visit, error)

    async def _handled(self, route: Route, visit: Visit) -> Response:
        """Wait for a place without a thread, and call the handler. Raises Refused if there is no place."""
        work = route.work if isinstance(route.work, Work) else route.work(visit)
        places, until = self._places[work], time.monotonic() + WAIT_SECONDS
        while not places.acquire(blocking=False):
            if time.monotonic() > until:
                raise Refused(
                    503,
                    f"The console is busy: {counted(PLACES[work], 'request')} of this kind work already",
                    "Try again in a minute. A narrower filter reads less.",
                    wait=True,
                )
            await anyio.sleep(TRY_SECONDS)
        try:
            return await run_in_threadpool(route.handler, visit)
        finally:
            places.release()

    async def _stay(self, request: Request, route: Route, visit: Visit, error: Exception) -> Response:
        """Return the page of a refused form, with what was typed. Without such a page, raise the error."""
        if not route.page or (request.method in _SAFE and isinstance(error, Refused) and error.wait):
            raise error
        refused = _refused(error, request)
        visit = dataclasses.replace(visit, path=route.page, sent_to=visit.path, problem=refused)
        try:
            response = await self._handled(self._route("GET", route.page), visit)
        except (Refused, OutboxError):
            raise error from None
        response.status_code = refused.status
        return response

    def _check_host(self, request: Request) -> None:
        with contextlib.suppress(ValueError):
            if host_name(request.headers.get("host", "")) in self.allowed_hosts:
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
        if route.role in roles:
            return
        advice = f"Ask for {person} to be added to the role {route.role} in the file of --roles."
        if route.role not in self.console.allowed:
            advice = f"The console was started without {route.role.flag}. Use the command, or a console with the flag."
        raise Refused(403, f"This needs the role {route.role}", advice)


@lru_cache(maxsize=1_000)
def _log_view(person: str, trace: str, _period: float) -> None:
    _log.info("%s: %s", person, trace)


def _check_origin(request: Request) -> None:
    """Raise Refused if another site's page may have sent the request, except for a navigation."""
    sent = request.headers
    # `none`: the person typed the address. An old browser, or any without TLS, sends no such header.
    site, advice = sent.get("sec-fetch-site"), _RELOAD
    if request.method in _SAFE:
        # A browser opens the page in a tab, and does not load it in advance.
        kind = sent.get("sec-fetch-mode"), sent.get("sec-fetch-dest")
        is_navigation = kind == ("navigate", "document") and "prefetch" not in sent.get("sec-purpose", "")
        is_own, advice = site in (None, "none") or is_navigation, "Open the page in a tab of its own."
    else:
        is_own = site is None and sent.get("origin") in (f"http://{sent['host']}", f"https://{sent['host']}")
    if site != "same-origin" and not is_own:
        raise Refused(403, "The request does not come from a page of the console", advice)


def _path(request: Request, prefix: str) -> str:
    """Return the path below the prefix. A proxy may also have removed the prefix."""
    path: str = request.scope["path"]
    return (path.removeprefix(prefix) or "/") if path == prefix or path.startswith(f"{prefix}/") else path


def _decoded(query: QueryParams) -> QueryParams:
    """Return a query in which each `exact` is replaced by the query that it contains.

    A browser changes line breaks and NUL in the fields of a form, so values that may have them are encoded twice.
    """
    pairs: list[tuple[str, str]] = []
    for name, value in query.multi_items():
        pairs += parse_qsl(value, keep_blank_values=True) if name == "exact" else [(name, value)]
    return QueryParams(pairs)


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


def _trace(request: Request) -> str:
    """Return what was asked for, and from where. X-Forwarded-For may be forged, unless a proxy sets it."""
    address, forwarded = request.client.host if request.client else "no address", request.headers.get("x-forwarded-for")
    query = f"?{request.url.query}" if request.url.query else ""
    behind = f", X-Forwarded-For {forwarded[:200]}" if forwarded else ""
    return f"{request.method} {request.scope['path'] + query:.500} from {address}{behind}"


def _refused(error: Exception, request: Request) -> Refused:
    """Return what the page of an error says, and log the error with who asked for what."""
    trace = f"{request.scope.get(_PERSON) or 'a person without identity'}: {_trace(request)}"
    if not isinstance(error, Refused | OutboxError):
        _log.error("the page failed for %s", trace, exc_info=error)
        return Refused(500, "The page failed", "The log of the console has the reason. Reload the page.")
    _log.info("refused %s: %s", trace, f"{error}: {error.__cause__}" if error.__cause__ else error)
    if isinstance(error, NotReached):
        return Refused(503, "Spanner did not answer", f"{by_fields(error)}. Reload the page.")
    return error if isinstance(error, Refused) else Refused(400, "This was refused", by_fields(error))

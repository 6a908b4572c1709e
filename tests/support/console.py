"""The console without Spanner: routes whose handlers only record that they ran, and a client in its own origin."""

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message

from outbox.console.access import Access
from outbox.console.application import LOOPBACK_HOSTS, files
from outbox.console.identity import Identify
from outbox.console.readings import Shared
from outbox.console.roles import EVERYTHING, Role, Roles
from outbox.console.running import Running
from outbox.console.visits import Console, Route, Visit

ORIGIN = "http://localhost"
#: What a browser sends with a form of the console.
SAME = {"Sec-Fetch-Site": "same-origin", "Content-Type": "application/x-www-form-urlencoded"}
DATABASE = "projects/p/instances/i/databases/d"


def bare_console(**values: Any) -> Console:
    """Return a console whose table has only a name."""
    table = mock.Mock()
    table.name = DATABASE
    usual: dict[str, Any] = {"allowed": frozenset(Role), "is_production": False, "redact": mock.Mock()}
    usual |= {"status": Shared(mock.Mock())}
    return Console(table=table, running=Running(table), **usual | values)


def recording(routes: Sequence[Route]) -> tuple[list[Route], list[Visit]]:
    """Return the routes with handlers that only add their visit to the list."""
    visits: list[Visit] = []

    def handler(visit: Visit) -> Response:
        visits.append(visit)
        return PlainTextResponse("done")

    return [dataclasses.replace(each, handler=handler) for each in routes], visits


async def asked(app: ASGIApp, path: str, *received: Message) -> tuple[int, dict[str, str], str]:
    """Return the answer to one request in this event loop: status, headers and body. With `received`, it is a POST."""
    sent: list[Message] = []
    remaining = [*received]

    async def receive() -> Message:
        return remaining.pop(0) if remaining else {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    pairs = {"host": "localhost"} | SAME
    scope = {
        "type": "http", "method": "POST" if received else "GET", "path": path, "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in pairs.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    if not sent:
        return 0, {}, ""
    given = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], given, b"".join(each["body"] for each in sent[1:]).decode()


def client(
    routes: Sequence[Route],
    *,
    identify: Identify = lambda _request: "ann",
    roles: Roles = EVERYTHING,
    prefix: str = "",
    **values: Any,
) -> TestClient:
    """Return a client of these routes."""
    access = Access(
        console=bare_console(**values), routes=routes, files=files(), identify=identify, roles=roles,
        allowed_hosts=LOOPBACK_HOSTS, path_prefix=prefix,
    )  # fmt: skip
    return TestClient(access, base_url=ORIGIN, follow_redirects=False)

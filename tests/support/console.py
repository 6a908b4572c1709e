"""The console without Spanner: routes whose handlers only record that they ran, and a client in its own origin."""

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient

from outbox.console.access import Access
from outbox.console.application import LOOPBACK_HOSTS
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
        console=bare_console(**values), routes=routes, identify=identify, roles=roles, allowed_hosts=LOOPBACK_HOSTS,
        path_prefix=prefix,
    )  # fmt: skip
    return TestClient(access, base_url=ORIGIN, follow_redirects=False)

"""The console in its own origin: without Spanner, where handlers only record that they ran, and on the emulator."""

import dataclasses
import html
import itertools
import json
import re
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import pytest
from google.cloud.spanner_v1.database import Database
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message

from outbox.errors import NotReached
from outbox.program.terminal import SHOWN
from outbox.rows.backlog import Backlog, Line
from outbox.rows.task_table import TaskTable
from outbox.rows.workers import MINUTES, SeenWorker
from outbox_admin import console as console_
from outbox_admin import operations
from outbox_admin.changes.running import Running
from outbox_admin.console import LOOPBACK_HOSTS
from outbox_admin.operations import Operation
from outbox_admin.status.last_hour import History, Seen
from outbox_admin.status.problems import Problem, Remedy
from outbox_admin.status.status_pages import Figures
from outbox_admin.web.application import Access
from outbox_admin.web.roles import EVERYTHING, Identify, Role, Roles
from outbox_admin.web.visits import Console, Route, Shared, Visit
from tests.support.operations import opened
from tests.support.waiting import eventually

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
    return Console(table=table, running=Running(table), actions=(), **usual | values)


def recording(routes: Sequence[Route]) -> tuple[list[Route], list[Visit]]:
    """Return the routes with handlers that only add their visit to the list."""
    visits: list[Visit] = []

    def handler(visit: Visit) -> Response:
        visits.append(visit)
        return PlainTextResponse("done")

    return [dataclasses.replace(each, handler=handler) for each in routes], visits


async def asked(app: ASGIApp, path: str, *received: Message, query: str = "") -> tuple[int, dict[str, str], str]:
    """Return the answer to one request in this event loop: status, headers and body. With `received`, it is a POST."""
    sent: list[Message] = []
    remaining = [*received]

    async def receive() -> Message:
        return remaining.pop(0) if remaining else {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    pairs = {"host": "localhost"} | SAME
    scope = {
        "type": "http", "method": "POST" if received else "GET", "path": path, "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in pairs.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    if not sent:
        return 0, {}, ""
    given = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], given, b"".join(each["body"] for each in sent[1:]).decode()


def bare_access(
    routes: Sequence[Route], console: Console, *, identify: Identify, roles: Roles = EVERYTHING, prefix: str = ""
) -> Access:
    return Access(
        console=console, routes=routes, identify=identify, roles=roles, allowed_hosts=LOOPBACK_HOSTS, path_prefix=prefix
    )


def client(
    routes: Sequence[Route],
    *,
    identify: Identify = lambda _request: "ann",
    roles: Roles = EVERYTHING,
    prefix: str = "",
    **values: Any,
) -> TestClient:
    """Return a client of these routes."""
    access = bare_access(routes, bare_console(**values), identify=identify, roles=roles, prefix=prefix)
    return TestClient(access, base_url=ORIGIN, follow_redirects=False)


def console(
    database: Database, *, person: str = "jane@example.com", roles: Roles = EVERYTHING, **more: Any
) -> TestClient:
    app = console_.app(
        opened(database), identify=lambda _request: person, roles=roles, allow_actions=True, show_data=True, **more
    )
    return TestClient(app, base_url=ORIGIN, follow_redirects=False)


def text(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def form_of(page: str, path: str) -> str:
    """Return the address of the form on a page that is sent to `path`."""
    [address] = [html.unescape(each) for each in re.findall(r'method="post" action="([^"]+)"', page) if path in each]
    return address


def begun(client: TestClient, path: str, **form: str) -> str:
    """Preview, fill in the form, and return the ID of the operation."""
    page = client.get(path)
    assert page.status_code == 200, page.text
    answer = client.post(form_of(page.text, urlsplit(path).path), data={"reason": "why", **form}, headers=SAME)
    assert answer.status_code == 303, answer.text
    return parse_qs(urlsplit(answer.headers["location"]).query)["id"][0]


def finished(table: TaskTable, id: str) -> operations.Operation:
    def find() -> operations.Operation | None:
        found = operations.operation(table, id)
        return found if found and found.finished_at else None

    ended = eventually(find)
    assert ended
    return ended


class Outage:
    """Requests fail while `away` is set. It is set before the transaction with the number `begins_with`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, begins_with: int = 0) -> None:
        self.away, self.begins_with = threading.Event(), begins_with
        self._numbers = itertools.count(1)
        for name in ("query", "transact"):
            monkeypatch.setattr(TaskTable, name, self._failing(name, getattr(TaskTable, name)))

    def _failing(self, name: str, original: Any) -> Any:
        def request(table: TaskTable, *arguments: Any, **more: Any) -> Any:
            if name == "transact" and next(self._numbers) == self.begins_with:
                self.away.set()
            if self.away.is_set():
                raise NotReached("Spanner did not answer: a test")
            return original(table, *arguments, **more)

        return request


NOW = datetime(2026, 11, 26, 12, 7, 30, tzinfo=UTC)


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def history(*workers: SeenWorker, gone: dict[str, datetime] | None = None) -> History:
    return History(NOW, {each.id: Seen(each, (gone or {}).get(each.id)) for each in workers}, {})


def worker(id: str = "a", started: float = 300, version: str = "1", **found: Any) -> SeenWorker:
    minute = int(NOW.timestamp() // 60)
    return SeenWorker(id, 1.0, ago(started), NOW, {"version": version, "history": {"minute": minute, **found}})


OVERVIEW = Remedy("Topics", "/", {}, "topics")


def operation(minutes: float, name: str = "pause", selection: Any = None, tasks: int | None = None) -> Operation:
    text = json.dumps(selection or {"topics": {"orders": {}}})
    return Operation("id", name, ago(minutes), None, "ann", text, tasks, None, None, None, None)


def crowded() -> Figures:
    """Return the figures of 200 topics and 40 workers, with as many problems and operations as pages show."""
    values = [n * 37 % 900 for n in range(MINUTES)]
    names = ("published", "failed", "p95", "pending", "unsent", "oldest")
    ring = dict.fromkeys(names, values)
    topics_of = [{f"topic-{n + 40 * m:03}": ring for m in range(5)} for n in range(40)]
    workers = [worker(f"publishworker-{n:040}", all=ring, topics=topics_of[n]) for n in range(40)]
    lines = [Line(f"topic-{n:03}", pending=n, registered_last_minute=9, sent_last_minute=9) for n in range(200)]
    backlog = Backlog(NOW, workers, lines)
    return Figures(
        backlog=backlog, history=history(*workers), controls={}, orphans=[], errors=(), blocked=(),
        operations=[operation(n) for n in range(30)], reshard=None,
        problems=[Problem("late", each.topic, True, f"{each.topic} is late", OVERVIEW) for each in lines[:SHOWN]],
    )  # fmt: skip

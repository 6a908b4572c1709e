"""Millions of tasks or operations do not slow a page: each page reads bounded parts of an index, or single rows."""

import math
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database
from starlette.testclient import TestClient

from outbox import admin
from outbox.admin import backlog
from outbox.admin.changes import TaskSelection
from outbox.admin.operations import Author
from outbox.admin.table import TaskTable
from outbox.console import application
from outbox.console.application import routes
from outbox.console.roles import EVERYTHING
from outbox.table.states import STATES
from tests.support.console import ORIGIN
from tests.support.operations import CALLS, OF_STATES, insert, opened, row
from tests.support.spanner import record_requests
from tests.support.statements import scans, unbounded

ID = "00000000-0000-0000-0000-000000000001"
FILTERS = ("topic=orders", "key=k", "error=x", "prefix=pen", "since=9d&until=1s", "topic=orders&order=oldest")
BOUNDED = (
    "/", "/signed-in", "/topic?name=orders", "/topic/controls?name=orders&rate=5&burst=5", "/blocked",
    "/workers", "/operations", f"/operation?id={ID}", "/tasks",
    "/task?id=head", "/task?id=keyed", "/search", "/search?q=head", "/search?q=k", "/search?q=pending",
    "/tasks/retry?id=head&id=keyed", "/tasks/cancel?id=head", "/tasks/purge?id=sent0",
    *(f"/tasks?state={state}" for state in STATES),
    *(f"/tasks?state={state}&{more}" for state in STATES[:-1] for more in FILTERS), "/tasks?state=sent&order=oldest",
    "/tasks?state=sent&follow=1", "/tasks?state=dead&order=attempts",
)  # fmt: skip
#: They read all tasks that match: the person must see the exact number before an action.
EXACT = (
    "/topic/controls?name=orders&unset=route",
    "/tasks/retry?state=dead",
    "/tasks/cancel?state=pending",
    "/tasks/purge?state=sent",
)
#: They read the sent tasks of growing windows of time until they have found enough.
WINDOWS = tuple(f"/tasks?state=sent&{more}" for more in FILTERS if more.startswith(("topic", "error", "prefix")))


def fill(database: Database) -> None:
    """Insert tasks of each state, and an operation."""
    rows = [row(f"{state}{n}", **each) for state, found in OF_STATES.items() for n, each in enumerate(found)]
    insert(database, [*rows, row("head", OrderingKey="k"), row("keyed", OrderingKey="k")])
    table = TaskTable(opened(database))
    admin.changes.begin(table, "retry", TaskSelection(state="dead"), Author("jane"), id=ID, selected=1)


@pytest.mark.extended
def test_every_page_is_about_a_bounded_part_of_the_table(database: Database) -> None:
    fill(database)
    with database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ("Topic", "PublishTo"), [("orders", "orders-v2")])
    watched = opened(database)
    requests = record_requests(watched, *CALLS)
    app = application.app(watched, identify=lambda _: "ann", roles=EVERYTHING, allow_actions=True)
    caller = TestClient(app, base_url=ORIGIN)
    pages = {route.path for route in routes() if route.method == "GET"}
    forms = {route.path for route in routes() if route.page}  # opened again, they lead to their pages
    assert pages - forms == {path.partition("?")[0] for path in BOUNDED + EXACT} - forms
    for path in (*BOUNDED, *EXACT, *WINDOWS):
        requests.clear()
        assert caller.get(path).status_code == 200, path
        parts = {part for name, request in requests for part in unbounded_of(name, request, is_exact=path in EXACT)}
        assert bool(parts) == (path not in BOUNDED), (path, parts)


def unbounded_of(name: str, request: Any, *, is_exact: bool) -> list[str]:
    """Return the parts of a request that read an unbounded part of the table. None reads all of it."""
    if name in ("read", "streaming_read"):
        assert not request.key_set.all_ or request.table == "AsynchronousTaskTopics"
        return []
    if not hasattr(request, "sql"):
        return []
    assert scans(request.sql) == []
    values = {key: request.params[key] for key in request.params} if request.params else {}
    ranges = math.prod(len(values.get(key, "1")) for key in ("shards", "topics"))
    for key in {"limit", "ceiling"} & values.keys():
        # A list joins the rows of all ranges.
        most = backlog.MAX_TOTAL / (ranges if key == "ceiling" else 1)
        assert int(values[key]) <= (math.inf if is_exact else most), (key, values[key])
    return unbounded(request.sql)

"""A console that is killed in the middle of a retry, and the next one, which continues."""

import contextlib
import html
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import parse_qs, urlsplit

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.admin import operations
from outbox.admin.table import TaskTable
from outbox.devtools.emulators import Emulators
from outbox.table.states import NEVER
from tests.support import processes
from tests.support.commands import Commands
from tests.support.console import SAME
from tests.support.operations import insert, opened, row
from tests.support.spanner import query
from tests.support.waiting import eventually

#: Tasks that the test writes in one commit.
WRITTEN = 500
#: Max seconds for an answer, and for the whole retry, of an emulator that reads all rows for each range.
ANSWER_SECONDS, RETRY_SECONDS = 300, 3_000


class Console:
    """A console as a process of its own, and a browser in its own origin."""

    def __init__(self, process: processes.Process) -> None:
        process.wait_for_text("http://")
        self.process = process
        [self._port] = re.findall(r"http://127\.0\.0\.1:(\d+)", process.stdout)

    def get(self, path: str) -> str:
        return self._answer("GET", path)[1]

    def send(self, page: str, path: str, body: str = "") -> str:
        """Send the form of a page, and return the ID of the operation that the answer leads to."""
        forms = re.findall(r'method="post" action="([^"]+)"', page)
        [address] = [html.unescape(form) for form in forms if path in form]
        return parse_qs(urlsplit(self._answer("POST", address, body)[0]).query)["id"][0]

    def _answer(self, method: str, path: str, body: str = "") -> tuple[str, str]:
        with contextlib.closing(HTTPConnection("127.0.0.1", int(self._port), timeout=ANSWER_SECONDS)) as connection:
            connection.request(method, path, body, SAME)
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status in (200, 303), text
            return answer.headers.get("Location", ""), text


@contextlib.contextmanager
def console(emulators: Emulators, database: Database) -> Iterator[Console]:
    environment = Commands(emulators, database).environment
    arguments = ("console", "--bind", "127.0.0.1:0", "--allow-actions")
    with processes.started("outbox", *arguments, environment=environment) as process:
        yield Console(process)


@pytest.mark.extended
@pytest.mark.timeout(3_600)
def test_a_console_continues_the_retry_of_one_that_was_killed(
    emulators: Emulators, database: Database, long: bool
) -> None:
    """No task is left out. The tasks that it had retried are dead again meanwhile, and are not retried twice."""
    number = 50_000 if long else 5_000
    insert(database, (row(f"{n:05}", AvailableAt=NEVER, Attempts=9, LastError="not_found") for n in range(number)))
    table = TaskTable(opened(database))
    with console(emulators, database) as first:
        id = first.send(first.get("/tasks/retry?state=dead"), "/tasks/retry", "reason=the+topic+exists")
        eventually(lambda: (found := operations.operation(table, id)) and found.tasks, seconds=ANSWER_SECONDS)
        first.process.child.kill()
        first.process.child.wait(10)
    retried = [id for (id,) in query(database, "SELECT Id FROM AsynchronousTasks WHERE Attempts = 0")]
    assert 0 < len(retried) < number
    for start in range(0, len(retried), WRITTEN):
        rows = [(id, NEVER, 1) for id in retried[start : start + WRITTEN]]
        with database.batch() as batch:
            batch.update("AsynchronousTasks", ("Id", "AvailableAt", "Attempts"), rows)

    with console(emulators, database) as second:
        page = second.get(f"/operation?id={id}")
        assert f"{len(retried):,} of {number:,}" in page
        assert second.send(page, "/operation/continue-retry") == id
        finished = eventually(
            lambda: (found := operations.operation(table, id)) and found.finished_at, seconds=RETRY_SECONDS
        )
        assert finished
        assert f"{number:,} of {number:,} in the preview" in second.get(f"/operation?id={id}")
    dead = [id for (id,) in query(database, "SELECT Id FROM AsynchronousTasks WHERE Attempts != 0")]
    assert sorted(dead) == sorted(retried)

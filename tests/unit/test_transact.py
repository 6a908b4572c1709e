"""Requests of the Spanner client: the time limit of a read, failed locks, and the rollback of a failed transaction."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from google.api_core.exceptions import Aborted, DeadlineExceeded, InvalidArgument, RetryError, ServiceUnavailable
from google.auth.exceptions import TransportError

from outbox import aio
from outbox.table.connection import Deadline
from outbox.table.layouts import Layout
from outbox.table.transactions import transact
from publishworker.spanner.store import SpannerStore
from publishworker.spanner.write_errors import NotWritten


class Transaction:
    def __init__(self, error: Exception | None = None) -> None:
        self.rollbacks = 0
        self._error = error

    def rollback(self) -> None:
        self.rollbacks += 1
        if self._error:
            raise self._error


class Database:
    """Runs the function like the client, and then fails the commit if there is an error."""

    def __init__(self, transaction: Transaction, commit_error: Exception | None = None) -> None:
        self._transaction, self._commit_error = transaction, commit_error
        self.options: dict[str, Any] = {}

    def run_in_transaction(self, function: Callable[[Any], Any], **options: Any) -> Any:
        self.options = options
        result = function(self._transaction)
        if self._commit_error:
            raise self._commit_error
        return result


def failing(error: Exception) -> Callable[[Any], None]:
    def work(_transaction: Any) -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "rollbacks"),
    [(InvalidArgument("refused"), 1), (ServiceUnavailable("the outcome is unknown"), 0), (Aborted("again"), 0)],
)
def test_only_a_refused_commit_is_rolled_back(error: Exception, rollbacks: int) -> None:
    """A commit without an answer may still be executed."""
    transaction = Transaction()
    with pytest.raises(type(error)):
        transact(Database(transaction, error), lambda _begun: None)
    assert transaction.rollbacks == rollbacks


def test_a_rollback_that_fails_does_not_hide_the_error() -> None:
    transaction = Transaction(ServiceUnavailable("no answer"))
    with pytest.raises(InvalidArgument):
        transact(Database(transaction), failing(InvalidArgument("first")))
    assert transaction.rollbacks == 1


def test_a_second_cancel_does_not_cut_the_rollback_short() -> None:
    """Of an asyncio task: AnyIO cancels until the task ends, and an event loop that stops cancels once more."""
    steps: list[str] = []

    class AsyncDatabase:
        async def run_in_transaction(self, function: Callable[[Any], Any]) -> None:
            try:
                await function(None)
            except Exception:
                for _ in range(5):  # like a request
                    await asyncio.sleep(0)
                steps.append("rolled back")
                raise

    async def work(_transaction: Any) -> None:
        steps.append("begun")
        await asyncio.Event().wait()

    async def main() -> bool:
        task = asyncio.ensure_future(aio.run_in_transaction(AsyncDatabase(), work))
        while not task.done():
            await asyncio.sleep(0)
            if steps:
                task.cancel()
        return task.cancelled()

    assert asyncio.run(main())
    assert steps == ["begun", "rolled back"]


def test_a_deadline_includes_all_restarts_of_a_stream() -> None:
    """The client restarts a broken stream with the full timeout; the deadline passes only the time that remains."""
    now, seen = [0.0], []
    deadline = Deadline(10, lambda: now[0])

    def note(timeout: float) -> None:
        seen.append(timeout)

    call = deadline(note)
    call()
    now[0] = 9.999
    call()
    now[0] = 10.0
    with pytest.raises(DeadlineExceeded):
        call()
    with pytest.raises(DeadlineExceeded):
        deadline(note)()
    assert seen == [10.0, pytest.approx(0.001)]


class Away:
    """A database whose statements fail."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run_in_transaction(self, work: Callable[[Any], Any], **_options: Any) -> Any:
        return work(self)

    def execute_sql(self, *_: Any, **_options: Any) -> None:
        raise self.error

    def rollback(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("a lock"), RetryError("no answer", None), TransportError("no token")]
)
def test_a_lock_query_that_fails_has_written_nothing(error: Exception) -> None:
    """Also after an abort. Otherwise at-most-once tasks would count as perhaps lost, although they are sent later."""
    store = SpannerStore(Away(error), Layout(10))  # type: ignore[arg-type]  # a fake
    with pytest.raises(NotWritten):
        store.claim(["a"], lambda _rows, _now: {})

"""The store of the relay: what an error of the lock query proves."""

from collections.abc import Callable
from typing import Any

import pytest
from google.api_core.exceptions import DeadlineExceeded, RetryError
from google.auth.exceptions import TransportError

from outbox.table.layouts import Layout
from publishworker.spanner.store import SpannerStore
from publishworker.spanner.write_errors import NotWritten


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

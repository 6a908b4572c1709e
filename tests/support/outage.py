"""A Spanner that does not answer the functions of operators."""

import itertools
import threading
from typing import Any

import pytest

from outbox.admin.table import TaskTable
from outbox.errors import NotReached


class Outage:
    """Requests fail while `away` is set. It is set before the transaction with the number `begins_with`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, begins_with: int = 0) -> None:
        self.away, self.begins_with = threading.Event(), begins_with
        self._numbers = itertools.count(1)
        for name in ("query", "read", "transact"):
            monkeypatch.setattr(TaskTable, name, self._failing(name, getattr(TaskTable, name)))

    def _failing(self, name: str, original: Any) -> Any:
        def request(table: TaskTable, *arguments: Any, **more: Any) -> Any:
            if name == "transact" and next(self._numbers) == self.begins_with:
                self.away.set()
            if self.away.is_set():
                raise NotReached("Spanner did not answer: a test")
            return original(table, *arguments, **more)

        return request

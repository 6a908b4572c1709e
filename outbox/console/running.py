"""The threads that execute the operations of this console.

Each chunk of an operation is a transaction that also moves the operation's position (`outbox.admin.changes`). So a
thread may die with the console at any time: the next console continues after the last chunk.
"""

import logging
import threading
import time

from outbox import admin
from outbox.admin.operations import NotContinued
from outbox.admin.table import TaskTable
from outbox.base.schedules import OPERATION
from outbox.errors import NotReached, OutboxError
from outbox.program.terminal import escaped

_log = logging.getLogger("outbox")


class Running:
    """One thread for each operation that this console executes."""

    def __init__(self, table: TaskTable) -> None:
        self._table = table
        #: Why the last chunk of an operation failed in this console.
        self.errors: dict[str, str] = {}
        self.ids: set[str] = set()

    def start(self, id: str) -> None:
        """Execute an operation on a thread of its own, which ends with the console."""
        if id not in self.ids:
            self.ids.add(id)
            threading.Thread(target=self._execute, args=(id,), name=f"operation {id}", daemon=True).start()

    def _execute(self, id: str) -> None:
        try:
            while self._is_to_be_repeated(id):
                time.sleep(OPERATION.first)
        finally:
            self.ids.discard(id)

    def _is_to_be_repeated(self, id: str) -> bool:
        """Execute chunks. Return True if Spanner could not be reached, so that the next one is tried later."""
        try:
            for outcome in admin.changes.resume(self._table, id):
                self.errors.pop(id, None)
                for task, why in outcome.unchanged.items():
                    _log.warning("operation %s left out the task %s: %s", id, escaped(task), escaped(why))
        except OutboxError as error:
            if not isinstance(error, NotContinued):
                self.errors[id] = str(error)
                _log.warning("operation %s: %s", id, error)
            return isinstance(error, NotReached)
        return False

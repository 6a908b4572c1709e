"""The operations that this console executes, each on a thread of its own."""

import logging
import threading
import time

from outbox.base.schedules import OPERATION
from outbox.errors import NotReached, OutboxError
from outbox.program.terminal import escaped
from outbox.rows.task_table import TaskTable
from outbox_admin.changes import execution
from outbox_admin.operations import NotContinued

_log = logging.getLogger("outbox")


class Running:
    """One thread for each operation that this console executes.

    Each chunk of an operation is a transaction that also moves the operation's position (`execution`). So a
    thread may die with the console at any time: the next console continues after the last chunk.
    """

    def __init__(self, table: TaskTable) -> None:
        self._table = table
        #: Why the last chunk of an operation failed in this console.
        self.errors: dict[str, str] = {}
        self.ids: set[str] = set()

    def start(self, id: str) -> None:
        """Execute an operation on a thread of its own, which ends with the console."""
        if id not in self.ids:
            thread = threading.Thread(target=self._execute, args=(id,), name=f"operation {id}", daemon=True)
            self.ids.add(id)
            try:
                thread.start()
            except RuntimeError as error:
                self.ids.discard(id)  # so that a person can continue it
                self.errors[id] = f"It has no thread: {error}. Raise the limit of processes, and continue it"
                _log.warning("operation %s: %s", id, self.errors[id])

    def _execute(self, id: str) -> None:
        try:
            while self._is_to_be_repeated(id):
                time.sleep(OPERATION.first)
        finally:
            self.ids.discard(id)

    def _is_to_be_repeated(self, id: str) -> bool:
        """Execute chunks. Return True if Spanner could not be reached, so that the next one is tried later."""
        try:
            for outcome in execution.resume(self._table, id):
                self.errors.pop(id, None)
                for task, why in outcome.unchanged.items():
                    _log.warning("operation %s left out the task %s: %s", id, escaped(task), escaped(why))
        except OutboxError as error:
            if not isinstance(error, NotContinued):
                self.errors[id] = str(error)
                _log.warning("operation %s: %s", id, error)
            return isinstance(error, NotReached)
        return False

"""What all tabs share: one read of the outbox, and the threads that execute operations.

The outbox is read at most every few seconds, and not if no tab asks. So a hundred open tabs cost Spanner what one
costs. While Spanner cannot be reached, the last figures stay, with their age and the error.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from outbox import admin
from outbox.admin import status
from outbox.admin.history import History
from outbox.admin.operations import NotContinued, Operation
from outbox.admin.table import TaskTable
from outbox.base.schedules import OPERATION
from outbox.errors import NotReached, OutboxError
from outbox.program.terminal import escaped

#: Seconds for which one read serves all tabs. A visible tab asks as often.
FRESH_SECONDS = 5.0
#: Max heads of blocked keys, and max operations.
HEADS = OPERATIONS = 100
_log = logging.getLogger("outbox")


@dataclasses.dataclass(frozen=True, slots=True)
class Status(status.Status):
    """What `outbox status`, `workers` and `operations` print, read together."""

    history: History
    operations: Sequence[Operation]

    def topics(self) -> list[str]:
        """Return the topics: first those with a problem, then those with most unsent tasks, and then by name."""
        lines, bad = self.backlog.topics(), {each.topic for each in self.problems}

        def rank(topic: str) -> tuple[bool, bool, int, str]:
            line = lines.get(topic)
            return topic not in bad, not (line and line.dead + line.blocked), -(line.unsent if line else 0), topic

        return sorted({*lines, *self.controls}, key=rank)


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The last status that was read, how many seconds ago, and the error of a later attempt, if there was one."""

    value: Status | None
    age: float
    error: str | None = None


class Shared:
    """A status that is read again when it is asked for and old. Used by all threads. `read` gets the last one."""

    def __init__(self, read: Callable[[Status | None], Status], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._reading = threading.Lock()
        self._value: Status | None = None
        self._error: str | None = None
        self._read_at = self._tried_at = float("-inf")
        #: The number of actions, and how many of them were done before the last read began.
        self._actions, self._included = 0, -1

    def get(self) -> Reading:
        """Return the value. While another thread reads it, return the last one, or wait if an action is not in it."""
        if self._is_old() and self._reading.acquire(blocking=self._included < self._actions):
            try:
                if self._is_old():
                    self._read_again()
            finally:
                self._reading.release()
        return Reading(self._value, self._clock() - self._read_at, self._error)

    def forget(self) -> None:
        """Let the next `get` read again, because an action has changed what it shows."""
        self._actions += 1

    def _is_old(self) -> bool:
        return self._included < self._actions or self._clock() - self._tried_at >= FRESH_SECONDS

    def _read_again(self) -> None:
        actions = self._actions
        try:
            self._value, self._error = self._read(self._value), None
            self._read_at = self._clock()
        except OutboxError as error:
            self._error = str(error)
        self._included, self._tried_at = actions, self._clock()


def read_status(table: TaskTable, last: Status | None) -> Status:
    """Read what the pages show without a selection. Raises NotReached, OutboxError."""
    backlog = admin.backlog.read(table)
    found = status.read(table, backlog, HEADS)
    return Status(
        **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
        history=admin.history.read(table, backlog, last.history if last else None),
        operations=admin.operations.latest(table, OPERATIONS, views=False, at=backlog.as_of),
    )


class Running:
    """One thread for each operation that this console executes.

    Each chunk of an operation is a transaction that also moves the operation's position (`outbox.admin.changes`). So a
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

"""The record of changes: one row of AsynchronousTaskOperations for each change that an operator makes."""

import dataclasses
import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox.admin import statements
from outbox.admin.table import TaskTable, Transaction
from outbox.errors import OutboxError
from outbox.shared.times import shown
from outbox.storage.ddl import OPERATIONS

#: Max task IDs that the record of a selection contains.
RECORDED_IDS = 1_000
_TAG = "outbox-operations"


class Operation(NamedTuple):
    """A row. `finished_at` is None while the change runs, or if it ended early. `selection` is JSON."""

    id: str
    name: str
    started_at: datetime
    finished_at: datetime | None
    principal: str | None
    selection: str
    tasks: int | None


def latest(table: TaskTable, limit: int) -> list[Operation]:
    """Return the last `limit` operations, newest first. Raises NotReached, OutboxError."""
    return [Operation(*row) for row in table.query(statements.LATEST_OPERATIONS, _TAG, {"limit": limit})]


def record(transaction: Transaction, principal: str, name: str, selection: Mapping[str, Any]) -> None:
    """Buffer the row of a change that concerns no tasks, and needs only this transaction: pause, resume or limit."""
    columns = ("OperationId", "Operation", "StartedAt", "FinishedAt", "Principal", "Selection")
    row = (str(uuid.uuid4()), name, COMMIT_TIMESTAMP, COMMIT_TIMESTAMP, principal, as_json(selection))
    transaction.insert(OPERATIONS, columns, [row])


def as_json(selection: Mapping[str, Any]) -> str:
    """Return a selection as the column Selection stores it: without empty values, and with at most RECORDED_IDS IDs."""
    values = {name: value for name, value in selection.items() if value is not None}
    ids: Sequence[str] = values.get("ids", ())
    if len(ids) > RECORDED_IDS:
        values |= {"ids": ids[:RECORDED_IDS], "more_ids": len(ids) - RECORDED_IDS}
    return json.dumps(values, ensure_ascii=False, default=shown)


@dataclasses.dataclass(slots=True)
class ChunkedRecord:
    """The row of a change in chunks. Each chunk's transaction writes how many tasks have been changed so far."""

    table: TaskTable
    name: str
    selection: Mapping[str, Any]
    tasks: int = 0
    id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))

    def add(self, transaction: Transaction, tasks: int) -> None:
        """Buffer the insert of the row, or later the update of Tasks. After the commit, call `committed`."""
        if self.tasks:
            transaction.update(OPERATIONS, ("OperationId", "Tasks"), [(self.id, self.tasks + tasks)])
            return
        columns = ("OperationId", "Operation", "StartedAt", "Principal", "Selection", "Tasks")
        selection = as_json(self.selection)
        row = (self.id, self.name, COMMIT_TIMESTAMP, self.table.principal, selection, tasks)
        transaction.insert(OPERATIONS, columns, [row])

    def committed(self, tasks: int) -> None:
        """Remember that a chunk has changed `tasks`."""
        self.tasks += tasks

    def finish(self) -> str | None:
        """Set FinishedAt if there is a row. Return a warning if that failed."""
        columns, row = ("OperationId", "FinishedAt"), (self.id, COMMIT_TIMESTAMP)
        try:
            if self.tasks:
                self.table.transact(_TAG, lambda transaction: transaction.update(OPERATIONS, columns, [row]))
        except OutboxError as error:
            return f"all tasks are changed, but operation {self.id} is not recorded as finished: {error}"
        return None

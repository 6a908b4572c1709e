"""The operations that are executed in chunks: retry, resend, purge, cancel and restore."""

from collections.abc import Iterator

from outbox.admin import changes, operations, resend
from outbox.admin.changes import Outcome, TaskSelection
from outbox.admin.operations import Operation
from outbox.admin.table import TaskTable


def check(table: TaskTable, id: str) -> Operation:
    """Return a recorded operation. Raises OutboxError if it cannot be continued."""
    is_resend = operations.found(table, id).operation == "resend"
    read = resend.Resend.recorded if is_resend else TaskSelection.recorded
    operation, selection, progress = operations.begun(table, id, operations.IN_CHUNKS, read)
    operations.next_chunk(progress.position, changes.shard_column(table, selection))
    return operation


def resume(table: TaskTable, id: str) -> Iterator[Outcome]:
    """Return the chunks of a recorded operation that are not executed yet; each is executed when it is asked for.

    Raises OutboxError if no operation has this ID, or if it has no chunks.
    """
    if operations.found(table, id).operation == "resend":
        return resend.resume(table, id)
    return changes.resume(table, id)

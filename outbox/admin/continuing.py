"""The operations that are made in chunks: retry, resend, purge, cancel and restore."""

from collections.abc import Iterator

from outbox.admin import changes, operations, resend
from outbox.admin.changes import Outcome
from outbox.admin.table import TaskTable


def resume(table: TaskTable, id: str) -> Iterator[Outcome]:
    """Return the chunks of a recorded operation that are not executed yet; each is executed when it is asked for.

    Raises OutboxError if no operation has this ID, or if it has no chunks.
    """
    if operations.found(table, id).operation == "resend":
        return resend.resume(table, id)
    return changes.resume(table, id)

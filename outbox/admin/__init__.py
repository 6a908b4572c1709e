"""What the operators' commands do with a database.

A module is imported when it is first used, because the Spanner client takes half a second to import. `outbox --help`
and a wrong flag need no client.
"""

from typing import TYPE_CHECKING

from outbox.base.lazy import importer

if TYPE_CHECKING:
    from outbox.admin import (
        backlog,
        changes,
        error_groups,
        history,
        operations,
        problems,
        resend,
        reshard,
        table,
        tasks,
        topics,
        workers,
    )

__all__ = [
    "backlog",
    "changes",
    "error_groups",
    "history",
    "operations",
    "problems",
    "resend",
    "reshard",
    "table",
    "tasks",
    "topics",
    "workers",
]
__getattr__ = importer(__name__, {"": " ".join(__all__)})

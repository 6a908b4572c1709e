"""What the operators' commands do with a database.

A module is imported when it is first used, because the Spanner client takes half a second to import. `outbox --help`
and a wrong flag need no client.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.admin import backlog, changes, operations, reshard, table, tasks, topics

__all__ = ["backlog", "changes", "operations", "reshard", "table", "tasks", "topics"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

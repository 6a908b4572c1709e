"""What operators use: the `outbox` command and the console, cut by subject.

A module is imported when it is first used, because the Spanner client takes half a second to import. `outbox --help`
and a wrong flag need no client. So a command writes `admin.lookup.find`, and pages import what they need.
"""

from typing import TYPE_CHECKING

from outbox import rows
from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox_admin import operations, verify
    from outbox_admin.changes import chunks, execution
    from outbox_admin.schema import reshard
    from outbox_admin.status import last_hour, live_workers, problems
    from outbox_admin.tasks import lookup, selected
    from outbox_admin.topics import editing

__all__ = [
    "chunks", "editing", "execution", "last_hour", "live_workers", "lookup", "operations", "problems", "reshard",
    "rows", "selected", "verify",
]  # fmt: skip
__getattr__ = importer(
    __name__,
    {
        "": "operations verify changes.chunks changes.execution schema.reshard status.last_hour status.live_workers "
        "status.problems tasks.lookup tasks.selected topics.editing"
    },
)

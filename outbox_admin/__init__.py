"""What operators use: the `outbox` command and the console, cut by subject.

A module is imported when it is first used, because the Spanner client takes half a second to import. `outbox --help`
and a wrong flag need no client. So a command writes `admin.tasks.lookup.find`, and pages import what they need.
"""

from typing import TYPE_CHECKING

from outbox import rows
from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox_admin import changes, operations, schema, status, tasks, topics

__all__ = ["changes", "operations", "rows", "schema", "status", "tasks", "topics"]
__getattr__ = importer(__name__, {"": "changes operations schema status tasks topics"})

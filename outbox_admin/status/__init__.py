"""What waits, and why: problems, the last hour, workers.

Modules are imported when they are first used.
"""

from typing import TYPE_CHECKING

from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox_admin.status import last_hour, live_workers, problems  # noqa: F401 - for the types of those that use the package

__getattr__ = importer(__name__, {"": "last_hour live_workers problems"})

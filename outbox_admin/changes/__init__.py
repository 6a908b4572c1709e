"""Changes of tasks: retry, resend, purge, cancel and restore.

Modules are imported when they are first used.
"""

from typing import TYPE_CHECKING

from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox_admin.changes import chunks, execution  # noqa: F401 - for the types of those that use the package

__getattr__ = importer(__name__, {"": "chunks execution"})

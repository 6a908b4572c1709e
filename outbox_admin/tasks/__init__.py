"""Which tasks: a selection and its filters, a list, one task with its message.

Modules are imported when they are first used.
"""

from typing import TYPE_CHECKING

from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox_admin.tasks import lookup, selected, selections  # noqa: F401 - for the types of those that use the package

__getattr__ = importer(__name__, {"": "lookup selected selections"})

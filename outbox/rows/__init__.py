"""What workers, readers, operators and Spark read of the tables. Modules are imported when they are first used."""

from typing import TYPE_CHECKING

from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox.rows import backlog, task_table, workers  # noqa: F401 - for the types of those that use the package

__getattr__ = importer(__name__, {"": "backlog task_table workers"})

"""What the operators' commands do with a database.

A module is imported when it is first used, because the Spanner client takes half a second to import. `outbox --help`
and a wrong flag need no client.
"""

from typing import TYPE_CHECKING

from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox.admin import (  # noqa: F401 - for the types of those that use the package
        backlog,
        changes,
        history,
        operations,
        reshard,
        selections,
        status,
        table,
        tasks,
        topics,
        workers,
    )

__getattr__ = importer(
    __name__, {"": "backlog changes history operations reshard selections status table tasks topics workers"}
)

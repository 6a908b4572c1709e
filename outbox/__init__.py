"""Transactional outbox for Cloud Spanner and Pub/Sub: what an application imports.

    task_id = outbox.register(transaction, "orders", message)

adds one insert to the caller's Spanner transaction. The message is sent by `publishworker`, a process of its own,
if and only if that transaction commits: at least once, always with the same id.

The first use of `outbox.register` imports the clients. `from outbox import register` imports them at startup.
"""

from typing import TYPE_CHECKING

from outbox.base.start import importer

if TYPE_CHECKING:
    from outbox._version import __version__
    from outbox.cancelling import cancel
    from outbox.errors import (
        InvalidConsumer,
        InvalidMessage,
        InvalidTransaction,
        MissingTaskId,
        OutboxError,
        PositionExpired,
    )
    from outbox.message import TASK_ID_ATTRIBUTE, Message
    from outbox.observing import Recorder, set_metrics
    from outbox.reading import Reader, SentTask, reader
    from outbox.registration import Priority, Task, register, register_many, register_once
    from outbox.table.transactions import SupportsCancel, SupportsInsert, SupportsReadInsert
else:
    # The names are imported when they are first used, because the clients take half a second to import, and `outbox
    # --help` does not need them. Type checkers do not see this function: it would give every name the type Any.
    __getattr__ = importer(
        __name__,
        {
            "_version": "__version__",
            "errors": "InvalidConsumer InvalidMessage InvalidTransaction MissingTaskId OutboxError PositionExpired",
            "message": "Message TASK_ID_ATTRIBUTE",
            "reading": "Reader SentTask reader",
            "cancelling": "cancel",
            "registration": "Priority Task register register_many register_once",
            "observing": "Recorder set_metrics",
            "table.transactions": "SupportsCancel SupportsInsert SupportsReadInsert",
        },
    )

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "TASK_ID_ATTRIBUTE", "InvalidConsumer", "InvalidMessage", "InvalidTransaction", "Message", "MissingTaskId",
    "OutboxError", "PositionExpired", "Priority", "Reader", "Recorder", "SentTask", "SupportsCancel", "SupportsInsert",
    "SupportsReadInsert", "Task", "__version__", "cancel", "reader", "register", "register_many", "register_once",
    "set_metrics",
]  # fmt: skip

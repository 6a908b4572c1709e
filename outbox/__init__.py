"""Transactional outbox for Cloud Spanner and Pub/Sub: what an application imports.

    task_id = outbox.register(transaction, "orders", message)

adds one insert to the caller's Spanner transaction. The message is sent by `publishworker`, a process of its own,
if and only if that transaction commits: at least once, always with the same id.
"""

from outbox._version import __version__
from outbox.errors import InvalidMessage, OutboxError
from outbox.message import TASK_ID_ATTRIBUTE
from outbox.registration import Priority, register, register_once
from outbox.shared.metric_recorder import Recorder, set_metrics

__all__ = [
    "TASK_ID_ATTRIBUTE",
    "InvalidMessage",
    "OutboxError",
    "Priority",
    "Recorder",
    "__version__",
    "register",
    "register_once",
    "set_metrics",
]

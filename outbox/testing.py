"""A fake transaction for an application's unit tests: which tasks were registered, without Spanner.

transaction = RecordingTransaction()
place_order(transaction, ...)
[task] = transaction.tasks
assert task.topic == "orders"
"""

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from google.cloud.spanner_v1 import KeySet
from google.pubsub_v1.types import PubsubMessage


@dataclass(frozen=True, slots=True)
class RegisteredTask:
    """One registered task."""

    id: str
    topic: str
    message: Any  # a google.pubsub_v1.types.PubsubMessage
    priority: int
    ordering_key: str
    available_at: datetime | None
    expires_at: datetime | None
    at_most_once: bool


class RecordingTransaction:
    """Records inserts like a Spanner Transaction, Batch or MutationGroup.

    `inserts` has all of them as (table, columns, rows). `tasks` has those of `outbox.register` and `register_once`, in
    order.
    """

    def __init__(self, task_ids: Collection[str] = ()) -> None:
        """Begin without inserts. For `register_once`, tasks with these `task_ids` exist already."""
        self.inserts: list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]] = []
        self._task_ids = frozenset(task_ids)

    def insert(self, table: str, columns: Sequence[str], values: Sequence[Sequence[Any]]) -> None:
        """Record one insert."""
        self.inserts.append((table, tuple(columns), [tuple(row) for row in values]))

    def read(self, table: str, columns: Sequence[str], keyset: KeySet, **_options: object) -> list[list[str]]:
        """Answer the read of `register_once`, which also finds this transaction's tasks. No other read works."""
        if (table, tuple(columns)) != ("AsynchronousTasks", ("Id",)):
            raise NotImplementedError(f"{type(self).__name__} has no rows of {table}. Use an emulator")
        there = self._task_ids | {task.id for task in self.tasks}
        return [[id] for [id] in keyset.keys if id in there]

    @property
    def tasks(self) -> list[RegisteredTask]:
        """Return the registered tasks."""
        return [
            _task(dict(zip(columns, row, strict=True)))
            for table, columns, rows in self.inserts
            if table == "AsynchronousTasks"
            for row in rows
        ]


def _task(row: dict[str, Any]) -> RegisteredTask:
    return RegisteredTask(
        id=row["Id"],
        topic=row["Topic"],
        message=PubsubMessage.deserialize(base64.b64decode(row["Data"])),
        priority=row["Priority"],
        ordering_key=row["OrderingKey"] or "",
        available_at=row["AvailableAt"],
        expires_at=row["ExpiresAt"],
        at_most_once=row["AtMostOnce"],
    )

"""Pauses and limits of topics, and the topics that a database has.

A topic is a value of the column Topic. Tasks are only read from the index.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.cloud.spanner_v1 import KeySet

from outbox.admin import statements
from outbox.admin.operations import record
from outbox.admin.table import TaskTable, Transaction

_TABLE = "AsynchronousTaskTopics"
_TAG = "outbox-topics"


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """The pause and the limits of one topic. None means no limit."""

    Paused: bool = False
    RatePerSecond: float | None = None
    Burst: int | None = None
    MaxInFlight: int | None = None


_COLUMNS = tuple(field.name for field in dataclasses.fields(Control))


class TopicTable:
    """AsynchronousTaskTopics, and the topics of unsent tasks. Every method raises NotReached or OutboxError."""

    def __init__(self, table: TaskTable) -> None:
        """Use the database of `table`."""
        self.table = table

    def rows(self, topics: Iterable[str]) -> set[str]:
        """Return the `topics` that have a row."""
        keys = KeySet(keys=[[topic] for topic in topics])
        return {topic for (topic,) in self.table.read(_TABLE, ("Topic",), keys, _TAG)}

    def waiting(self, topics: Iterable[str]) -> set[str]:
        """Return the `topics` that have an unsent task: ready, due, scheduled or dead."""
        values = {"topics": list(topics), "shards": list(self.table.shards)}
        return {topic for (topic,) in self.table.query(statements.WAITING_TOPICS, _TAG, values)}

    def unknown(self, topics: Iterable[str]) -> list[str]:
        """Return the `topics` that have neither a row nor an unsent task."""
        known = self.rows(topics) | self.waiting(topics)
        return [topic for topic in topics if topic not in known]

    def controls(self) -> dict[str, Control]:
        """Return all rows by topic."""
        return {topic: Control(*row) for topic, *row in self.table.query(statements.CONTROLS, _TAG)}

    def change(self, operation: str, topics: Sequence[str], values: Mapping[str, Any]) -> dict[str, Control]:
        """Write `values`, by column, to the rows of all `topics` in one transaction, and return the new rows.

        Missing rows are created. Columns that are not in `values` keep their values. The transaction also records the
        `operation`: pause, resume or limit.
        """
        principal = self.table.principal

        def work(transaction: Transaction) -> dict[str, Control]:
            rows = transaction.read(_TABLE, ("Topic", *_COLUMNS), KeySet(keys=[[topic] for topic in topics]))
            before = {topic: Control(*row) for topic, *row in rows}
            after = {topic: dataclasses.replace(before.get(topic, Control()), **values) for topic in topics}
            # All columns, so that the result does not depend on the treatment of omitted ones.
            written = [(topic, *dataclasses.astuple(control)) for topic, control in after.items()]
            transaction.insert_or_update(_TABLE, ("Topic", *_COLUMNS), written)
            record(transaction, principal, operation, {"topics": list(topics), "values": dict(values)})
            return after

        return self.table.transact(_TAG, work)

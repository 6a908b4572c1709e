"""Pauses and limits of topics, and the topics that a database has.

A topic is a value of the column Topic. Tasks are only read from the index. Each function raises NotReached or
OutboxError.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.admin import operations, statements
from outbox.admin.operations import UNNAMED, Author
from outbox.admin.table import TaskTable, Transaction
from outbox.table.statements import CONTROLS

_TABLE = "AsynchronousTaskTopics"
_TAG = "outbox-topics"


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """The pause and the limits of one topic, by column. None means no limit."""

    Paused: bool = False
    RatePerSecond: float | None = None
    Burst: int | None = None
    MaxInFlight: int | None = None


_COLUMNS = ("Topic", *(field.name for field in dataclasses.fields(Control)))


def controls(table: TaskTable) -> dict[str, Control]:
    """Return all rows by topic."""
    return {topic: Control(*row) for topic, *row in table.query(CONTROLS, _TAG)}


def waiting(table: TaskTable, topics: Iterable[str]) -> set[str]:
    """Return the `topics` that have an unsent task: ready, due, scheduled or dead."""
    values = {"topics": list(topics), "shards": list(table.shards)}
    return {topic for (topic,) in table.query(statements.TOPICS_WITH_UNSENT, _TAG, values)}


def unknown(table: TaskTable, topics: Iterable[str]) -> list[str]:
    """Return the `topics` that have neither a row nor an unsent task."""
    known = controls(table).keys() | waiting(table, topics)
    return [topic for topic in topics if topic not in known]


def change(
    table: TaskTable, operation: str, topics: Sequence[str], values: Mapping[str, Any], author: Author = UNNAMED
) -> dict[str, Control]:
    """Write `values`, by column, to the rows of all `topics` in one transaction, and return the new rows.

    Missing rows are created. Columns that are not in `values` keep their values. The transaction also records the
    `operation`: pause, resume or limit.
    """

    def work(transaction: Transaction) -> dict[str, Control]:
        rows = transaction.read(_TABLE, _COLUMNS, KeySet(keys=[[topic] for topic in topics]))
        before = {topic: Control(*row) for topic, *row in rows}
        after = {topic: dataclasses.replace(before.get(topic, Control()), **values) for topic in topics}
        # All columns, so that the result does not depend on the treatment of omitted ones.
        written = [(topic, *dataclasses.astuple(control)) for topic, control in after.items()]
        transaction.insert_or_update(_TABLE, _COLUMNS, written)
        selection = {"topics": list(topics), "values": dict(values)}
        operations.record(transaction, table, operation, selection, author, FinishedAt=COMMIT_TIMESTAMP)
        return after

    return table.transact(_TAG, work)

"""A Spanner transaction that records what an application writes, and an assertion about registered tasks."""

import base64
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partialmethod
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.transaction import Transaction
from google.cloud.spanner_v1.types import ExecuteBatchDmlResponse
from google.pubsub_v1.types import PubsubMessage

from outbox.base.values import plain
from outbox.message import TASK_ID_ATTRIBUTE, RawPubsubMessage
from outbox.registration import COLUMNS, TABLE
from outbox.table.shared_sql import LOCK_UNSENT
from outbox.table.transactions import check_database

#: How many tasks a failure lists, and how many bytes of each.
_MAX_TASKS, _MAX_BYTES = 20, 100


@dataclass(frozen=True, slots=True)
class RegisteredTask:
    """One registered task. `message` has the task ID in its attributes, and the times are aware."""

    id: str
    topic: str
    message: PubsubMessage
    priority: int
    ordering_key: str
    available_at: datetime | None
    expires_at: datetime | None
    at_most_once: bool


class Mutation(NamedTuple):
    """One mutation: `method` is "insert", "update", "insert_or_update", "replace" or "delete"."""

    method: str
    table: str
    columns: tuple[str, ...]
    values: Any  # the rows, as a list of tuples; of a delete the KeySet


class Statement(NamedTuple):
    """One DML statement."""

    sql: str
    params: dict[str, Any]


class RecordingTransaction(Transaction):
    """A Spanner Transaction without a database, for unit tests.

    `mutations` and `statements` have what the application wrote and executed, in order. `inserts` has the inserts as
    (table, columns, rows), `tasks` those of `outbox.register` and `register_once`. Reads and queries, except those
    of `outbox` itself, raise LookupError.
    """

    def __init__(self, task_ids: Iterable[str] = ()) -> None:
        """Tasks with `task_ids` exist already: unsent for `cancel`, and processed for `process_once`."""
        super().__init__(_NoSession())  # type: ignore[no-untyped-call]  # the client has no types
        self.mutations: list[Mutation] = []
        self.statements: list[Statement] = []
        self._task_ids = frozenset(task_ids)

    @property
    def inserts(self) -> list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]]:
        """Return the inserts as (table, columns, rows)."""
        return [each[1:] for each in self.mutations if each.method == "insert"]

    @property
    def tasks(self) -> list[RegisteredTask]:
        """Return the registered tasks."""
        inserted = [(columns, row) for table, columns, rows in self.inserts if table == TABLE for row in rows]
        return [task_of(dict(zip(columns, row, strict=True))) for columns, row in inserted]

    def _write(self, method: str, table: str, columns: Sequence[str], values: Iterable[Sequence[Any]]) -> None:
        rows = [tuple(row) for row in values]
        getattr(Transaction, method)(self, table, columns, rows)  # refuses values that the client cannot send
        self.mutations.append(Mutation(method, table, tuple(columns), rows))

    insert = partialmethod(_write, "insert")
    update = partialmethod(_write, "update")
    insert_or_update = partialmethod(_write, "insert_or_update")
    replace = partialmethod(_write, "replace")

    def delete(self, table: str, keyset: KeySet) -> None:
        """Record a delete."""
        Transaction.delete(self, table, keyset)  # refuses what is no KeySet
        self.mutations.append(Mutation("delete", table, (), keyset))

    def read(self, *arguments: Any, **options: Any) -> list[list[Any]]:
        """Return the keys of tasks that exist, for `register_once` and `process_once`. Otherwise LookupError."""
        call = _call(Transaction.read, arguments, options)
        if call["table"] not in (TABLE, "ProcessedTasks"):
            raise LookupError(f"RecordingTransaction has no rows of {call['table']}: use a database of the emulator")
        return [list(key) for key in call["keyset"].keys if key[-1] in self._task_ids]

    def execute_sql(self, *arguments: Any, **options: Any) -> list[list[Any]]:
        """Return whether a task exists and is unsent, for `outbox.cancel`. Otherwise LookupError."""
        call = _call(Transaction.execute_sql, arguments, options)
        if call["sql"] != LOCK_UNSENT:
            raise LookupError("RecordingTransaction runs no queries: use a database of the emulator")
        return [[call["params"]["id"] in self._task_ids, None]]

    def execute_update(self, *arguments: Any, **options: Any) -> int:
        """Record a DML statement, and return 1 as its number of rows. The parameters are those of the client."""
        call = _call(Transaction.execute_update, arguments, options)
        # Refuses values that the client cannot send.
        self._make_params_pb(call["params"], None)  # type: ignore[no-untyped-call]  # the client has no types
        self.statements.append(Statement(call["dml"], dict(call["params"] or {})))
        return 1

    def batch_update(self, *arguments: Any, **options: Any) -> tuple[Any, list[int]]:
        """Record DML statements, and return the status OK and 1 for each. The parameters are those of the client."""
        statements = _call(Transaction.batch_update, arguments, options)["statements"]
        triples = [(each, None, None) if isinstance(each, str) else each for each in statements]
        counts = [self.execute_update(dml, params, types) for dml, params, types in triples]
        return ExecuteBatchDmlResponse().status, counts


def _call(method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by their names in a method of the client. Raises TypeError, like the method."""
    bound = inspect.signature(method).bind(None, *arguments, **options)
    bound.apply_defaults()
    return bound.arguments


class _NoSession:
    """Where the methods of the real Transaction that need a database fail."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"RecordingTransaction has no session, and so no {name!r}: use a database of the emulator")


def task_of(row: Mapping[str, Any]) -> RegisteredTask:
    """Return the task in a row of AsynchronousTasks, as the client takes and returns it."""
    return RegisteredTask(
        id=row["Id"],
        topic=row["Topic"],
        message=PubsubMessage.wrap(RawPubsubMessage.FromString(base64.b64decode(row["Data"]))),
        priority=row["Priority"],
        ordering_key=row.get("OrderingKey") or "",
        available_at=row.get("AvailableAt"),
        expires_at=row.get("ExpiresAt"),
        at_most_once=row.get("AtMostOnce", False),
    )


def assert_registered(
    transaction: RecordingTransaction | Database,
    *,
    topic: str | None = None,
    attributes: Mapping[str, str] | None = None,
    times: int = 1,
) -> list[RegisteredTask]:
    """Assert that `times` tasks are registered, and return them in the order of their registration.

    Args:
        transaction: the fake, or a database, whose whole table is read, with the tasks that are already sent.
        topic: as it was registered. Default: any topic.
        attributes: each task has all of these, and may have others.
        times: the exact number of tasks.

    Raises:
        AssertionError: another number of tasks is registered. Its message lists the registered tasks.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    if isinstance(transaction, RecordingTransaction):
        tasks = transaction.tasks
    else:
        check_database(transaction, ", or a RecordingTransaction")
        with transaction.snapshot() as snapshot:
            rows = [dict(zip(COLUMNS, row, strict=True)) for row in snapshot.read(TABLE, COLUMNS, KeySet(all_=True))]
        rows.sort(key=lambda row: (row["CreatedAt"], row["Sequence"] or 0, row["Id"]))
        tasks = [task_of(row) for row in rows]
    wanted = {plain(name): plain(value) for name, value in (attributes or {}).items()}
    of_topic = [task for task in tasks if topic in (None, task.topic)]
    matching = [task for task in of_topic if wanted.items() <= dict(task.message.attributes).items()]
    if len(matching) != times:
        asked = f"topic={topic!r}, attributes={attributes!r}; expected {times!r}"
        lines = [f"{len(matching)} of {len(tasks)} registered tasks match {asked}. Registered:"]
        lines += map(_line, tasks[:_MAX_TASKS])
        if len(tasks) > _MAX_TASKS:
            lines.append(f"and {len(tasks) - _MAX_TASKS} more")
        raise AssertionError("\n  ".join(lines))
    return matching


def _line(task: RegisteredTask) -> str:
    attributes = {name: value for name, value in task.message.attributes.items() if name != TASK_ID_ATTRIBUTE}
    return f"{task.topic} {attributes} {task.message.data[:_MAX_BYTES]!r} (task {task.id})"

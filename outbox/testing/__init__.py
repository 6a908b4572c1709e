"""For the tests of an application: which tasks were registered, and deliveries and aborts as they happen in production.

    transaction = RecordingTransaction()
    place_order(transaction, "order-1", 1999)
    assert_registered(transaction, topic="orders", attributes={"kind": "placed"})

`outbox.testing.faults` has the aborts. The pytest plugin `publishworker.testing` has the emulators and a relay.
"""

import base64
import inspect
import logging
import queue
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partialmethod
from random import Random
from typing import Any, NamedTuple

from google.api_core.exceptions import AlreadyExists, InvalidArgument
from google.cloud.pubsub_v1.subscriber._protocol.requests import AckRequest, ModAckRequest
from google.cloud.pubsub_v1.subscriber.message import Message
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.transaction import Transaction
from google.cloud.spanner_v1.types import ExecuteBatchDmlResponse
from google.pubsub_v1.types import PubsubMessage

from outbox.base.values import check_finished, class_name, listed, plain
from outbox.message import TASK_ID_ATTRIBUTE, RawPubsubMessage, check_task_id
from outbox.registration import TASK_COLUMNS
from outbox.table.own_transactions import check_database
from outbox.table.shared_sql import LOCK_UNSENT
from outbox.table.states import TASKS_TABLE

__all__ = [
    "Mutation", "RecordingTransaction", "RedeliveringSubscriber", "RegisteredTask", "Statement", "assert_registered",
]  # fmt: skip
#: How many tasks a failure lists, and how many bytes of each.
_MAX_TASKS, _MAX_BYTES = 20, 100
#: How often a message is delivered before its acknowledgement is given up.
MAX_DELIVERIES = 10


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
        given = [task_ids] if isinstance(task_ids, str) else [*task_ids]
        self._task_ids = frozenset(map(check_task_id, given))
        self._existing = {*self._task_ids}  # and those that it inserts

    @property
    def inserts(self) -> list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]]:
        """Return the inserts as (table, columns, rows)."""
        return [each[1:] for each in self.mutations if each.method == "insert"]

    @property
    def tasks(self) -> list[RegisteredTask]:
        """Return the registered tasks."""
        inserted = [(columns, row) for table, columns, rows in self.inserts if table == TASKS_TABLE for row in rows]
        return [task_of(dict(zip(columns, row, strict=True))) for columns, row in inserted]

    def _write(self, method: str, table: str, columns: Sequence[str], values: Iterable[Sequence[Any]]) -> None:
        rows = [tuple(row) for row in values]
        getattr(Transaction, method)(self, table, columns, rows)  # refuses values that the client cannot send
        for row in rows:  # what Spanner would refuse in the commit
            if len(row) != len(columns):
                raise InvalidArgument(f"{table}: {len(row)} values for the {len(columns)} columns {listed(columns)}")
            if method == "insert" and table == TASKS_TABLE:
                if (id := row[columns.index("Id")]) in self._existing:
                    raise AlreadyExists(f"Row [{id}] in table {TASKS_TABLE} already exists")
                self._existing.add(id)
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
        if call["table"] not in (TASKS_TABLE, "ProcessedTasks"):
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
            rows = [
                dict(zip(TASK_COLUMNS, row, strict=True))
                for row in snapshot.read(TASKS_TABLE, TASK_COLUMNS, KeySet(all_=True))
            ]
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


class RedeliveringSubscriber:
    """Delivers each message at least twice and in random order. Within an ordering key the order is kept.

    RedeliveringSubscriber(published("orders")).deliver(take_from_stock)
    """

    def __init__(self, messages: Iterable[PubsubMessage], *, seed: int = 0) -> None:
        """Take the messages, those of an ordering key in their order. Each seed gives another order.

        TypeError: they are not PubsubMessages.
        """
        #: Messages that stay in order, by their ordering key; a message without a key is alone.
        self._lanes: dict[str | int, list[PubsubMessage]] = {}
        for number, each in enumerate(messages if isinstance(messages, Iterable) else [messages]):
            if not isinstance(each, PubsubMessage):
                raise TypeError(f'messages has {class_name(each)}. Pass PubsubMessages, as from published("orders")')
            self._lanes.setdefault(each.ordering_key or number, []).append(each)
        self._random = Random(seed)  # noqa: S311 - an order that can be repeated, and no secret

    def deliver(self, callback: Callable[[Message], object]) -> None:
        """Call `callback` with one delivery after the other, as a streaming pull does, until all are acknowledged.

        After a negative acknowledgement, or none, the message is delivered again, and those behind it with the same key
        wait. After the last message of a key, all of its messages are delivered once more. An exception of the callback
        is raised here.

        Raises:
            AssertionError: there is no message, or one was delivered ten times and not acknowledged. It names the last
                error that the inbox has logged, or says that the callback does not acknowledge.
            TypeError: the callback has returned, but its work is not finished: it is a coroutine function, for example.
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        if not self._lanes:
            raise AssertionError(
                "there is no message to deliver. Call outbox_relay.drain() first, and check the name of the topic"
            )
        log, failures = logging.getLogger("outbox"), _Failures()
        log.addFilter(failures)
        try:
            self._deliver_all(callback, failures)
        finally:
            log.removeFilter(failures)

    def _deliver_all(self, callback: Callable[[Message], object], failures: "_Failures") -> None:
        __tracebackhide__ = True
        waiting = {lane: [*messages, *messages] for lane, messages in self._lanes.items()}
        refused: Counter[str | int] = Counter()
        while waiting:
            lane = self._random.choice([*waiting])
            message, failures.last = waiting[lane][0], None
            answer = _deliver(message, callback)
            if answer is AckRequest:
                del waiting[lane][0], refused[lane]
                if not waiting[lane]:
                    del waiting[lane]
                continue
            refused[lane] += 1
            if refused[lane] == MAX_DELIVERIES:
                cause = f". The last one failed: {failures.last!r}" if failures.last else ""
                if not answer:
                    cause = ". The callback calls neither ack nor nack: pass the inbox.Handler, not its process"
                raise AssertionError(
                    f"message {message.message_id!r} with the attributes {dict(message.attributes)} was not "
                    f"acknowledged in {MAX_DELIVERIES} deliveries{cause}"
                ) from failures.last


class _Failures(logging.Filter):
    """Keeps the last error that was logged."""

    last: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        for each in record.args or ():
            self.last = each if isinstance(each, BaseException) else self.last
        return True


def _deliver(message: PubsubMessage, callback: Callable[[Message], object]) -> type | None:
    """Return the class of the callback's answer, such as AckRequest, or None if it gives none."""
    requests: queue.Queue[Any] = queue.Queue()
    result = callback(Message(PubsubMessage.pb(message), "test", 0, requests))
    answers = [each for each in requests.queue if not isinstance(each, ModAckRequest)]  # a longer deadline is no answer
    if not answers:
        check_finished(result, "the callback")
        return None
    return type(answers[0])

"""Register a task inside the caller's own Spanner transaction."""

import base64
import contextlib
import enum
import inspect
import itertools
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.transaction import Transaction

from outbox import message as messages
from outbox.errors import InvalidMessage, InvalidTransaction
from outbox.shared.metric_recorder import count_registered
from outbox.storage.connection import retry_and_timeout
from outbox.storage.task_states import NEVER

TABLE = "AsynchronousTasks"
#: The columns that a registration writes. The others have defaults or are generated.
COLUMNS = (
    "Id",
    "Topic",
    "Data",
    "Priority",
    "OrderingKey",
    "Sequence",
    "CreatedAt",
    "AvailableAt",
    "ExpiresAt",
    "AtMostOnce",
)

#: Seconds for the read of `register_once` or of the inbox, also while another transaction holds the lock. Without a
#: limit of our own, the client repeats the read without a pause while Spanner is unavailable.
READ_SECONDS = 30.0

#: Maps the module of a DB-API driver to the module of outbox.ext that its users must call.
_DRIVERS = {"google.cloud.sqlalchemy_spanner": "sqlalchemy", "django_spanner": "django"}

_sequence = itertools.count(1)
#: For each transaction, the task IDs and inbox rows that it has inserted. A read does not see the buffered mutations of
#: its own transaction. After ABORTED the client calls the function again with a new Transaction, so each attempt
#: begins with none.
_given: WeakKeyDictionary[object, set[Hashable]] = WeakKeyDictionary()


class Priority(enum.IntEnum):
    """Three named priorities. Any int64 is accepted, and higher ones go first."""

    LOW = 0
    NORMAL = 50
    HIGH = 100


class SupportsInsert(Protocol):
    """Accepts an insert: a Spanner Transaction, Batch, MutationGroup or AsyncTransaction, or a test's fake of one."""

    def insert(self, table: str, columns: Sequence[str], values: Sequence[tuple[Any, ...]], /) -> object:
        """Add one insert."""


class SupportsReadInsert(SupportsInsert, Protocol):
    """Accepts reads and inserts: a Spanner Transaction, or a test's fake of one."""

    def read(
        self, table: str, columns: Sequence[str], keyset: KeySet, /, *, request_options: Any, retry: Any, timeout: Any
    ) -> Iterable[Sequence[Any]]:
        """Return the rows of `keyset`."""


def register(
    transaction: SupportsInsert,
    topic: str,
    message: messages.Message,
    attributes: Mapping[str, str] | None = None,
    *,
    priority: int = Priority.NORMAL,
    ordering_key: str = "",
    available_at: datetime | None = None,
    expires_at: datetime | None = None,
    at_most_once: bool = False,
    task_id: str | None = None,
) -> str:
    """Add one task to `transaction` and return its ID.

    Adds exactly one insert. Reads nothing, opens nothing, sends nothing. The relay publishes the message after the
    transaction has committed, at least once, with the ID in the attribute `asynchronous_task_id`.

    Args:
        transaction: a Spanner Transaction, Batch (`database.batch()`) or MutationGroup.
        topic: topic ID in the worker's project, or projects/PROJECT/topics/TOPIC.
        message: bytes, a PubsubMessage (proto-plus or plain), or another protobuf message, which becomes the data.
        attributes: added to those of the message. An attribute with another value there raises InvalidMessage.
        priority: an int64; higher ones go first.
        ordering_key: tasks of one topic and key are published in the order of their commits; "" is no key.
        available_at: do not publish before this timezone-aware time.
        expires_at: do not publish after this timezone-aware time.
        at_most_once: prefer a loss to a duplicate; not together with an ordering key.
        task_id: 1 to 64 characters; a second insert of the same ID fails the commit with AlreadyExists. Default: a
            random UUID. Never use a rising number, because the ID leads the primary key
            (https://cloud.google.com/spanner/docs/schema-design#primary-key-prevent-hotspots).

    Raises:
        InvalidMessage: Pub/Sub or the table would refuse the task. Nothing was added to the transaction.
        InvalidTransaction: `transaction` belongs to a DB-API connection, which would drop the insert after an abort.
        TypeError: `transaction` or `message` has another type than those above.
    """
    insert = _insert(transaction, "register")
    given = task_id is not None
    if task_id is None:
        task_id = str(uuid.uuid4())
    row = task_row(
        topic, message, attributes, task_id=task_id, priority=priority, ordering_key=ordering_key,
        available_at=available_at, expires_at=expires_at, at_most_once=at_most_once,
    )  # fmt: skip
    insert(TABLE, COLUMNS, [row])
    if given:
        remember(transaction, task_id)
    count_registered(topic)
    return task_id


def register_once(
    transaction: SupportsReadInsert,
    topic: str,
    message: messages.Message,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str,
    priority: int = Priority.NORMAL,
    ordering_key: str = "",
    available_at: datetime | None = None,
    expires_at: datetime | None = None,
    at_most_once: bool = False,
) -> bool:
    """Register the task unless a row with `task_id` exists, sent or not; return whether it was registered.

    Reads one row by its key, which is one request and locks that ID for the transaction: of two concurrent
    transactions, one gets True, and the other runs again and gets False. An ID is free again when its row is deleted,
    for example by the retention. An ID that the same transaction has registered counts as existing.

    Call it before any DML that writes PENDING_COMMIT_TIMESTAMP() to the table, because Spanner then refuses reads of
    the table in the same transaction (https://cloud.google.com/spanner/docs/commit-timestamp). `register` uses no DML.

    Args:
        transaction: the Spanner Transaction that `database.run_in_transaction` passes to its function.
        topic: see `register`.
        message: checked even if the task exists.
        attributes: see `register`.
        task_id: a hash of the business key, such as a uuid5; never a rising number.
        priority: see `register`.
        ordering_key: see `register`.
        available_at: see `register`.
        expires_at: see `register`.
        at_most_once: see `register`.

    Raises:
        InvalidMessage: like `register`, before anything is read.
        InvalidTransaction: like `register`.
        TypeError: `transaction` cannot read (a Batch, a MutationGroup) or cannot write, or `message` has a wrong type.
        RetryError, DeadlineExceeded: of google.api_core. Spanner was unavailable, or another transaction held the
            row, for 30 s.
    """
    read, insert = read_and_insert(transaction, "register_once")
    refuse_replayed(transaction, "register_once")
    row = task_row(
        topic, message, attributes, task_id=task_id, priority=priority, ordering_key=ordering_key,
        available_at=available_at, expires_at=expires_at, at_most_once=at_most_once,
    )  # fmt: skip
    if is_given(transaction, task_id):
        return False
    options = {"request_options": {"request_tag": "outbox-register-once"}, **retry_and_timeout(READ_SECONDS)}
    # Read to the end, because until then the client blocks the next statement of the transaction.
    if list(read(TABLE, ("Id",), KeySet(keys=[[task_id]]), **options)):
        return False
    insert(TABLE, COLUMNS, [row])
    remember(transaction, task_id)
    count_registered(topic)
    return True


@dataclass(frozen=True, slots=True)
class Task:
    """One task for `register_many`. The fields are the arguments of `register`."""

    topic: str
    message: messages.Message
    attributes: Mapping[str, str] | None = None
    _: KW_ONLY
    priority: int = Priority.NORMAL
    ordering_key: str = ""
    available_at: datetime | None = None
    expires_at: datetime | None = None
    at_most_once: bool = False
    task_id: str | None = None


def register_many(transaction: SupportsInsert, tasks: Iterable[Task]) -> list[str]:
    """Add all tasks to `transaction` in one insert and return their IDs in the same order.

    Does what `register` does for each task, for less than half of the CPU. No task is added if one of them is refused.

    Args:
        transaction: see `register`.
        tasks: may be empty. Spanner limits a commit to 80,000 mutations, where each column and each index entry of a
            task counts, so a few thousand tasks fit (https://cloud.google.com/spanner/quotas#limits-for).

    Raises:
        InvalidMessage: like `register`, or two tasks have the same `task_id`. The message begins with the index of the
            task. Nothing was added to the transaction.
        InvalidTransaction: like `register`.
        TypeError: like `register`. If a task's message has a wrong type, the text begins with the index of the task.
    """
    insert = _insert(transaction, "register_many")
    rows, given = task_rows(tasks)
    if not rows:
        return []  # Spanner refuses an insert without rows
    # Each value costs CPU in the client and counts as a mutation, so columns with only their default are left out.
    used = [n for n in range(len(COLUMNS)) if any(row[n] is not None and row[n] is not False for row in rows)]
    insert(TABLE, [COLUMNS[n] for n in used], [tuple([row[n] for n in used]) for row in rows])
    for task_id in given:
        remember(transaction, task_id)
    count_rows(rows)
    return [row[0] for row in rows]


def _insert(transaction: object, function: str) -> Callable[..., object]:
    insert: object = getattr(transaction, "insert", None)
    if not callable(insert):
        raise TypeError(
            f"transaction is {type(transaction).__name__}. It must be a Spanner Transaction, Batch or MutationGroup. "
            f"With SQLAlchemy, Django or DB-API use {function} of outbox.ext.sqlalchemy, .django or .dbapi"
        )
    refuse_replayed(transaction, function)
    return insert


def read_and_insert(transaction: object, function: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the methods `read` and `insert` of a Spanner Transaction. Raises TypeError for another type."""
    read, insert = getattr(transaction, "read", None), getattr(transaction, "insert", None)
    # The client's AsyncTransaction inserts like the others, but its read must be awaited.
    if callable(read) and callable(insert) and not inspect.iscoroutinefunction(read):
        return read, insert
    raise TypeError(
        f"transaction is {type(transaction).__name__}. It must be a Spanner Transaction, because {function} reads "
        "before it inserts: call it in a function given to database.run_in_transaction"
        + (
            ", or use register. For the transaction of an AsyncClient, await outbox.aio.register_once"
            if function == "register_once"
            else ""
        )
    )


def refuse_replayed(transaction: object, function: str) -> None:
    """Refuse a transaction that a DB-API connection replays after ABORTED. A replay drops mutations."""
    # The transaction of `run_in_transaction` has both attributes, that of `session.transaction()` has neither, and that
    # of DB-API has only `isolation_level`.
    if (
        "google.cloud.spanner_dbapi" in sys.modules
        and isinstance(transaction, Transaction)
        and "isolation_level" in vars(transaction)
        and "read_lock_mode" not in vars(transaction)
    ):
        modules = [ext for module, ext in _DRIVERS.items() if module in sys.modules] or ["dbapi"]
        raise InvalidTransaction(
            "transaction belongs to a DB-API connection, such as that of SQLAlchemy or Django. After an abort the "
            "connection replays its statements but not this insert, so it would be lost. Use "
            + " or ".join(f"outbox.ext.{module}.{function}" for module in modules)
        )


def remember(transaction: object, id: Hashable) -> None:
    """Remember an ID that `transaction` has inserted."""
    with contextlib.suppress(TypeError):  # a test's fake that has no weak reference or no hash
        _given.setdefault(transaction, set()).add(id)


def is_given(transaction: object, id: Hashable) -> bool:
    """Tell whether `transaction` has inserted this ID."""
    with contextlib.suppress(TypeError):
        return id in _given.get(transaction, ())
    return False


def task_row(
    topic: str,
    message: object,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str,
    priority: int = Priority.NORMAL,
    ordering_key: str = "",
    available_at: datetime | None = None,
    expires_at: datetime | None = None,
    at_most_once: bool = False,
) -> tuple[Any, ...]:
    """Return the row in the order of COLUMNS. Raises InvalidMessage; TypeError for the type of `message`."""
    messages.check_task_id(task_id)
    messages.check_topic(topic)
    _check_priority(priority)
    _check_times(available_at, expires_at)
    data, key = messages.build(message, topic=topic, attributes=attributes, ordering_key=ordering_key, task_id=task_id)
    if not isinstance(at_most_once, bool):
        raise InvalidMessage(f"at_most_once is {type(at_most_once).__name__}. It must be a bool")
    if at_most_once and key:
        raise InvalidMessage("at_most_once and an ordering key exclude each other: a lost message would leave a gap")
    return (
        task_id,
        topic,
        base64.b64encode(data),  # the client sends BYTES unchanged, but Spanner expects base64
        int(priority),
        key or None,
        next(_sequence),
        COMMIT_TIMESTAMP,
        available_at,
        expires_at,
        at_most_once,
    )


def count_rows(rows: Iterable[tuple[Any, ...]]) -> None:
    """Count the tasks in the metrics."""
    for topic, count in Counter(row[1] for row in rows).items():
        count_registered(topic, count)


def task_rows(tasks: Iterable[Task]) -> tuple[list[tuple[Any, ...]], Collection[str]]:
    """Return the rows and the IDs that callers gave. Raises like `register_many`."""
    rows: list[tuple[Any, ...]] = []
    given: dict[str, int] = {}
    for index, task in enumerate(tasks):
        try:
            row = task_row(
                task.topic, task.message, task.attributes,
                task_id=str(uuid.uuid4()) if task.task_id is None else task.task_id, priority=task.priority,
                ordering_key=task.ordering_key, available_at=task.available_at, expires_at=task.expires_at,
                at_most_once=task.at_most_once,
            )  # fmt: skip
        except (InvalidMessage, TypeError) as error:
            raise type(error)(f"tasks[{index}]: {error}") from error
        rows.append(row)
        if task.task_id is not None and (first := given.setdefault(task.task_id, index)) != index:
            raise InvalidMessage(f"tasks[{index}]: task_id {task.task_id!r} is also that of tasks[{first}]")
    return rows, given


def _check_priority(priority: int) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidMessage(f"priority is {type(priority).__name__}. It must be an int")
    if not -(2**63) <= priority < 2**63:
        shown = str(priority) if priority.bit_length() <= 64 else f"of {priority.bit_length()} bits"
        raise InvalidMessage(f"priority {shown} is outside of int64")


def _check_times(available_at: datetime | None, expires_at: datetime | None) -> None:
    for name, time in (("available_at", available_at), ("expires_at", expires_at)):
        if time is None:
            continue
        if not isinstance(time, datetime):
            raise InvalidMessage(f"{name} is {type(time).__name__}. It must be an aware datetime")
        if time.utcoffset() is None:
            raise InvalidMessage(f"{name} {time} has no time zone; give one, such as datetime.now(UTC) + ...")
        try:
            time.astimezone(UTC)
        except OverflowError:
            raise InvalidMessage(f"{name} {time} is outside of the years 1 to 9999 in UTC") from None
    if available_at is not None and available_at >= NEVER:
        raise InvalidMessage(f"available_at {available_at} is not before {NEVER}")
    if available_at is not None and expires_at is not None and expires_at <= available_at:
        raise InvalidMessage(f"expires_at {expires_at} is not after available_at {available_at}")

"""Watch what a function of the caller does with a transaction that commits for it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from google.cloud.spanner_v1.transaction import Transaction

from outbox.errors import InvalidTransaction
from outbox.table.transactions import ANY_TABLE, Savepoint

#: What the SQL of `execute_sql` has if it may change rows. A query may have it, too.
_DML = re.compile(r"\b(insert|update|delete)\b")
#: The table of tasks, in lower case, because Spanner compares names so.
_TASKS = "asynchronoustasks"
#: The reads of the library. They remember what it has inserted.
_OWN_READS = ("outbox-register-once", "outbox-process-once")


class Watch:
    """Whether the function, for one message of a batch, does what needs a transaction of its own."""

    def begin(self, transaction: Transaction) -> Savepoint:
        """Begin with the next message."""
        self.has_dml = self.reads_stale = False
        self._savepoint = Savepoint(transaction)
        return self._savepoint

    def read(self, table: str, *_arguments: Any, request_options: Any = None, **_options: Any) -> None:
        """Note a read. It does not see the mutations of its transaction."""
        is_ours = isinstance(request_options, dict) and request_options.get("request_tag") in _OWN_READS
        self.reads_stale |= not is_ours and not self._savepoint.tables().isdisjoint({table.lower(), ANY_TABLE})

    def query(self, *arguments: object, sql: object = "", **_options: object) -> None:
        """Note a query, or DML with THEN RETURN."""
        text = str(arguments[0] if arguments else sql).lower()
        self.has_dml |= bool(_DML.search(text))
        self._execute(text)

    def change(self, *arguments: object, **options: object) -> None:
        """Note DML."""
        self.has_dml = True
        self._execute(f"{arguments[:1]} {options}".lower())

    def _execute(self, text: str) -> None:
        """Note a statement. It may read any table, also by a view, but tasks only by name."""
        unread = set() if _TASKS in text else {_TASKS}
        self.reads_stale |= not self._savepoint.tables() <= unread


@contextmanager
def watched(transaction: Any) -> Iterator[Watch]:
    """Watch the requests of the block."""
    watch = Watch()

    def watching(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            note(*arguments, **options)
            return method(*arguments, **options)

        return call

    changes = dict.fromkeys(("execute_update", "batch_update"), watch.change)
    notes = {"read": watch.read, "execute_sql": watch.query, **changes}
    with _replaced(transaction, {name: watching(getattr(transaction, name), note) for name, note in notes.items()}):
        yield watch


def uncommitted(transaction: Transaction) -> AbstractContextManager[None]:
    """Refuse `commit` and `rollback` in the block. A commit would lose later writes, a rollback all writes."""
    return _refusing(
        transaction,
        ("commit", "rollback"),
        "the function has called commit or rollback of its transaction. Return instead, and the transaction is "
        "committed; raise an exception, and it is rolled back",
    )


def unsettled(message: object) -> AbstractContextManager[None]:
    """Refuse `ack` and `nack` in the block. If the function then fails, Pub/Sub would not redeliver the message."""
    return _refusing(
        message,
        ("ack", "ack_with_response", "nack", "nack_with_response"),
        "the function has called ack or nack of its message. Return instead, and the message is acknowledged after "
        "the commit; raise an exception, and it is redelivered",
    )


def _refusing(target: object, names: Sequence[str], reason: str) -> AbstractContextManager[None]:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise InvalidTransaction(reason)

    return _replaced(target, dict.fromkeys(names, refuse))


@contextmanager
def _replaced(target: object, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods in the block, on this object only."""
    attributes = getattr(target, "__dict__", {})  # the message of a push request has none, and no such methods
    own = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]  # uncovers the methods of the class
        attributes.update(own)

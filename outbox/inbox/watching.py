"""Watch what a function of the caller does with a transaction that commits for it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from google.cloud.spanner_v1.transaction import Transaction

from outbox.errors import InvalidTransaction
from outbox.table.transactions import ANY_TABLE, Savepoint

#: What a statement has that may change rows. A query may have it, too.
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

    def execute(self, *statements: object, **options: object) -> None:
        """Note a statement. It may read any table, also by a view, but tasks only by name."""
        text = f"{statements[:1]} {[options.get(name) for name in ('sql', 'dml', 'statements')]}".lower()
        self.has_dml |= bool(_DML.search(text))
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

    notes = {"read": watch.read, **dict.fromkeys(("execute_sql", "execute_update", "batch_update"), watch.execute)}
    for name, note in notes.items():
        setattr(transaction, name, watching(getattr(transaction, name), note))
    try:
        yield watch
    finally:
        for name in notes:
            delattr(transaction, name)


@contextmanager
def uncommitted(transaction: Transaction) -> Iterator[None]:
    """Refuse `commit` and `rollback` in the block. A commit would lose later writes, a rollback all writes."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise InvalidTransaction(
            "the function has called commit or rollback of its transaction. Return instead, and the transaction is "
            "committed; raise an exception, and it is rolled back"
        )

    transaction.commit = transaction.rollback = refuse  # type: ignore[method-assign]  # on this object only
    try:
        yield
    finally:
        del transaction.commit, transaction.rollback  # uncovers the methods of the class

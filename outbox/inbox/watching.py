"""Refuse what a function must not do with a transaction that is committed for it, and with its messages."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from google.cloud.spanner_v1.transaction import Transaction

from outbox.errors import InvalidTransaction


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


@contextmanager
def _refusing(target: object, names: Sequence[str], reason: str) -> Iterator[None]:
    """Replace methods in the block, on this object only."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise InvalidTransaction(reason)

    attributes = getattr(target, "__dict__", {})  # the message of a push request has none, and no such methods
    own = {name: attributes[name] for name in names if name in attributes}
    attributes.update(dict.fromkeys(names, refuse))
    try:
        yield
    finally:
        for name in names:
            del attributes[name]  # uncovers the methods of the class
        attributes.update(own)

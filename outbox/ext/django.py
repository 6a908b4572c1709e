"""Register and process tasks in the transactions of Django (`django-google-spanner`)."""

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from django.db import DEFAULT_DB_ALIAS
from django.db.transaction import get_connection

from outbox.errors import InvalidTransaction
from outbox.ext import dbapi
from outbox.inbox import Key, ReceivedMessage
from outbox.message import Message
from outbox.registration import Options, Task


def register(
    topic: str,
    message: Message,
    attributes: Mapping[str, str] | None = None,
    *,
    using: str = DEFAULT_DB_ALIAS,
    task_id: str | None = None,
    **options: Unpack[Options],
) -> str:
    """Insert one task in the atomic block of the database `using` and return its ID.

    See `outbox.ext.dbapi.register`.

    Args:
        topic: see `outbox.register`.
        message: see `outbox.register`.
        attributes: see `outbox.register`.
        using: the alias of a Spanner database in Django's settings.
        task_id: see `outbox.register`.
        options: the other arguments of `outbox.register`.

    Raises:
        InvalidMessage: see `outbox.register`.
        InvalidTransaction: the database has no atomic block, or the block cannot hold a task.
        IntegrityError: Django's; a task with this `task_id` exists.
        TypeError: `message` has another type, or the database is not Spanner.
    """
    wrapper = _atomic(using)
    with wrapper.wrap_database_errors:
        return dbapi.register(wrapper.connection, topic, message, attributes, task_id=task_id, **options)


def register_once(
    topic: str,
    message: Message,
    attributes: Mapping[str, str] | None = None,
    *,
    using: str = DEFAULT_DB_ALIAS,
    task_id: str,
    **options: Unpack[Options],
) -> bool:
    """Insert the task unless a row with `task_id` exists; return whether it was inserted.

    See `outbox.ext.dbapi.register_once`.

    Raises:
        InvalidMessage: see `outbox.register`.
        InvalidTransaction: see `register`.
        OperationalError: Django's; the answer was lost. Roll back.
        TypeError: see `register`.
    """
    wrapper = _atomic(using)
    with wrapper.wrap_database_errors:
        return dbapi.register_once(wrapper.connection, topic, message, attributes, task_id=task_id, **options)


def register_many(tasks: Iterable[Task], *, using: str = DEFAULT_DB_ALIAS) -> list[str]:
    """Insert all tasks in the open transaction and return their IDs in the same order.

    See `outbox.ext.dbapi.register_many`.

    Raises:
        InvalidMessage: see `outbox.register_many`.
        InvalidTransaction: see `register`.
        IntegrityError: Django's; a task with one of the IDs exists.
        TypeError: see `register`.
    """
    wrapper = _atomic(using)
    with wrapper.wrap_database_errors:
        return dbapi.register_many(wrapper.connection, tasks)


def process_once(
    message: ReceivedMessage, *, consumer: str, key: Key = "task_id", using: str = DEFAULT_DB_ALIAS
) -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    See `outbox.ext.dbapi.process_once`.

    Raises:
        MissingTaskId: see `outbox.inbox.process_once`.
        InvalidConsumer: the name of the consumer.
        InvalidTransaction: see `register`, or the transaction has a record already.
        NotReached: the database has no table ProcessedTasks.
        OperationalError: Django's; the answer was lost. Roll back.
        TypeError: see `register`.
    """
    wrapper = _atomic(using)
    with wrapper.wrap_database_errors:
        return dbapi.process_once(wrapper.connection, message, consumer=consumer, key=key)


def _atomic(using: str) -> Any:
    """Return Django's wrapper of the connection. Raises InvalidTransaction."""
    wrapper = get_connection(using)
    if not wrapper.in_atomic_block:
        raise InvalidTransaction(
            f"database {using!r} has no atomic block, so the task would be committed alone. Register in `with "
            "transaction.atomic():`"
        )
    if wrapper.needs_rollback:
        raise InvalidTransaction(f"the atomic block of database {using!r} has failed and will be rolled back")
    return wrapper

"""Register, cancel and process tasks in the transactions of Django (`django-google-spanner`).

`using` is the alias of a Spanner database in Django's settings. Errors of the driver become those of `django.db`.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
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

    See `outbox.ext.dbapi.register`. InvalidTransaction is also raised if there is no atomic block, or it has failed.
    TypeError: `using` names another kind of database.
    """
    with _atomic(using) as connection:
        return dbapi.register(connection, topic, message, attributes, task_id=task_id, **options)


def register_once(
    topic: str,
    message: Message,
    attributes: Mapping[str, str] | None = None,
    *,
    using: str = DEFAULT_DB_ALIAS,
    task_id: str,
    **options: Unpack[Options],
) -> bool:
    """Insert the task unless a row with `task_id` exists; return whether. See `outbox.ext.dbapi.register_once`."""
    with _atomic(using) as connection:
        return dbapi.register_once(connection, topic, message, attributes, task_id=task_id, **options)


def register_many(tasks: Collection[Task], *, using: str = DEFAULT_DB_ALIAS) -> list[str]:
    """Insert all tasks in the atomic block and return their IDs. See `outbox.ext.dbapi.register_many`."""
    with _atomic(using) as connection:
        return dbapi.register_many(connection, tasks)


def process_once(
    message: ReceivedMessage, *, consumer: str, key: Key = "task_id", using: str = DEFAULT_DB_ALIAS
) -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    See `outbox.ext.dbapi.process_once`. Change your own rows if it returns True, and acknowledge the message after the
    block.
    """
    with _atomic(using) as connection:
        return dbapi.process_once(connection, message, consumer=consumer, key=key)


def cancel(task_id: str, *, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Delete an unsent task in the atomic block, and return whether it did. See `outbox.ext.dbapi.cancel`."""
    with _atomic(using) as connection:
        return dbapi.cancel(connection, task_id)


@contextmanager
def _atomic(using: str) -> Iterator[Any]:
    """Yield the DB-API connection, and translate the driver's errors to Django's. Raises InvalidTransaction."""
    wrapper = get_connection(using)
    if not wrapper.in_atomic_block:
        raise InvalidTransaction(
            f"database {using!r} has no atomic block, so the task would be committed alone. Register in `with "
            "transaction.atomic():`"
        )
    if wrapper.needs_rollback:
        raise InvalidTransaction(f"the atomic block of database {using!r} has failed and will be rolled back")
    with wrapper.wrap_database_errors:
        yield wrapper.connection

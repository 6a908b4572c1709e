"""Register, cancel and process tasks in the transactions of Django (`django-google-spanner`).

`using` is the alias of a Spanner database in Django's settings. Errors of the driver become those of `django.db`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

from django.db import DEFAULT_DB_ALIAS
from django.db.transaction import atomic, get_connection

from outbox import registration
from outbox.errors import InvalidTransaction
from outbox.ext import dbapi
from outbox.ext.dbapi import T
from outbox.inbox import Key, ReceivedMessage
from outbox.inbox.once import record_with
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
    with _statements(using) as statements:
        return registration.register(statements, topic, message, attributes, task_id=task_id, **options)


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
    task = Task(topic, message, attributes, task_id=task_id, **options)
    with _statements(using) as statements:
        return registration.register_with(statements.insert_once, task)


def register_many(tasks: Collection[Task], *, using: str = DEFAULT_DB_ALIAS) -> list[str]:
    """Insert all tasks in the atomic block and return their IDs. See `outbox.ext.dbapi.register_many`."""
    with _statements(using) as statements:
        return registration.register_many(statements, tasks)


def process_once(
    message: ReceivedMessage, *, consumer: str, key: Key = "task_id", using: str = DEFAULT_DB_ALIAS
) -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    See `outbox.ext.dbapi.process_once`. Change your own rows if it returns True, and acknowledge the message after the
    block.
    """
    with _statements(using) as statements:
        return record_with(statements.insert_once, message, consumer, key)


def cancel(task_id: str, *, using: str = DEFAULT_DB_ALIAS) -> bool:
    """Take an unsent task out in the atomic block, and return whether it did. See `outbox.ext.dbapi.cancel`."""
    with _statements(using) as statements:
        return statements.cancel(task_id)


def run_in_transaction(function: Callable[..., T], *arguments: Any, using: str = DEFAULT_DB_ALIAS) -> T:
    """Call `function(*arguments)` in an atomic block, and return its result; after a failed replay, do it again.

    See `outbox.ext.dbapi.run_in_transaction`. RuntimeError: it is called in another atomic block.
    """

    def attempt() -> T:
        with atomic(using, durable=True):
            return dbapi.call(function, *arguments)

    return dbapi.repeat(attempt)


@contextmanager
def _statements(using: str) -> Iterator[dbapi.Statements]:
    """Yield the statements, on Django's cursors, and translate the driver's errors. Raises InvalidTransaction."""
    wrapper = get_connection(using)
    if not wrapper.in_atomic_block:
        raise InvalidTransaction(
            f"database {using!r} has no atomic block, so the task would be committed alone. Register in `with "
            "transaction.atomic():`"
        )
    if wrapper.needs_rollback:
        raise InvalidTransaction(f"the atomic block of database {using!r} has failed and will be rolled back")
    with wrapper.wrap_database_errors:
        yield dbapi.Statements(wrapper.connection, dbapi.on_cursors(wrapper.cursor))

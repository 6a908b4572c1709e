"""Register, cancel and process tasks in the transactions of SQLAlchemy (`sqlalchemy-spanner`).

SQLAlchemy executes their statements, so it logs them (`echo`) and passes them to events. Errors of the driver become
those of `sqlalchemy.exc`, such as IntegrityError.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack
from weakref import proxy

from google.cloud.spanner_dbapi.exceptions import Error
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import registration
from outbox.base.values import class_name
from outbox.errors import InvalidTransaction
from outbox.ext import dbapi
from outbox.ext.dbapi import T
from outbox.inbox import Key, ReceivedMessage
from outbox.inbox.once import record_with
from outbox.message import Message
from outbox.registration import Options, Task

AnySession = Session | scoped_session[Any] | Connection


def register(
    session: AnySession,
    topic: str,
    message: Message,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str | None = None,
    **options: Unpack[Options],
) -> str:
    """Insert one task in the open transaction of a session or connection and return its ID.

    See `outbox.ext.dbapi.register`. InvalidTransaction is also raised if no transaction is open, or it has failed. A
    session with several engines needs `session.connection(bind_arguments=...)`.
    """
    with _statements(session) as statements:
        return registration.register(statements, topic, message, attributes, task_id=task_id, **options)


def register_once(
    session: AnySession,
    topic: str,
    message: Message,
    attributes: Mapping[str, str] | None = None,
    *,
    task_id: str,
    **options: Unpack[Options],
) -> bool:
    """Insert the task unless a row with `task_id` exists; return whether. See `outbox.ext.dbapi.register_once`."""
    task = Task(topic, message, attributes, task_id=task_id, **options)
    with _statements(session) as statements:
        return registration.register_with(statements.insert_once, task)


def register_many(session: AnySession, tasks: Collection[Task]) -> list[str]:
    """Insert all tasks in the open transaction and return their IDs. See `outbox.ext.dbapi.register_many`."""
    with _statements(session) as statements:
        return registration.register_many(statements, tasks)


def process_once(session: AnySession, message: ReceivedMessage, *, consumer: str, key: Key = "task_id") -> bool:
    """Record the task of `message` as processed, and return whether this is the first time.

    See `outbox.ext.dbapi.process_once`. Change your own rows if it returns True, and acknowledge the message after the
    commit.
    """
    with _statements(session) as statements:
        return record_with(statements.insert_once, message, consumer, key)


def cancel(session: AnySession, task_id: str) -> bool:
    """Take an unsent task out in the open transaction, and return whether it did. See `outbox.ext.dbapi.cancel`."""
    with _statements(session) as statements:
        return statements.cancel(task_id)


def run_in_transaction(bind: Engine | sessionmaker[Any], function: Callable[..., T], *arguments: Any) -> T:
    """Call `function(session, *arguments)` in a transaction, commit, and return its result.

    After a failed replay, do all of it again with a new session. See `outbox.ext.dbapi.run_in_transaction`. An Engine
    gets sessions whose objects stay readable after the commit. TypeError: `bind` is something else.
    """
    if not isinstance(bind, Engine | sessionmaker):
        raise TypeError(
            f"bind is {class_name(bind)}. It must be an Engine, as from sqlalchemy.create_engine, or a sessionmaker. "
            "With a Database of the Spanner client use its own run_in_transaction"
        )
    new = bind if isinstance(bind, sessionmaker) else sessionmaker(bind, expire_on_commit=False)

    def attempt() -> T:
        with new.begin() as session:
            return dbapi.call(function, session, *arguments)

    return dbapi.repeat(attempt)


@contextmanager
def _statements(session: object) -> Iterator[dbapi.Statements]:
    """Yield the statements, and translate the driver's errors to SQLAlchemy's."""
    connection = _connection(session)
    of_driver: Any = connection.connection.dbapi_connection
    weak = proxy(connection)  # the driver's connection keeps `execute`, and an abandoned one must return to its pool

    def execute(sql: str, values: Mapping[str, Any] | None) -> Any:
        return weak.exec_driver_sql(sql, values)

    try:
        yield dbapi.Statements(of_driver, execute)
    except Error as error:
        raise DBAPIError.instance(None, None, error, Error) from error.__cause__


def _connection(session: object) -> Connection:
    """Return the connection. Raises InvalidTransaction, or TypeError for another type."""
    if isinstance(session, scoped_session):
        session = session()
    if isinstance(session, Session):
        if not session.is_active:
            raise InvalidTransaction("the session's transaction has failed. Call session.rollback() first")
        _check_open(session, "session")
        session = session.connection()
    if not isinstance(session, Connection):
        raise TypeError(f"session is {class_name(session)}. It must be a Session or a Connection of SQLAlchemy")
    if session.closed or session.invalidated:
        raise InvalidTransaction("the connection is closed or invalidated. Register before you close it")
    _check_open(session, "connection")
    # The driver applies these options only when SQLAlchemy executes a statement.
    if session.get_execution_options().get("read_only"):
        raise InvalidTransaction("the connection has the execution option read_only. Use one without it")
    return session


def _check_open(session: Session | Connection, name: str) -> None:
    if not session.in_transaction():
        raise InvalidTransaction(
            f"the {name} has no open transaction, so the task might never be committed. Register in `with "
            f"{name}.begin():`, or after the first statement"
        )

"""`outbox.register` and the transactions that DB-API connections replay. Without a server, on real client objects."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from google.cloud.spanner_dbapi import Connection
from google.cloud.spanner_v1.session import Session
from google.cloud.spanner_v1.transaction import Transaction

import outbox
from tests.support import spanner


@pytest.fixture
def session() -> Session:
    created = Session(spanner.client("host:1").instance("instance").database("database"))
    created._session_id = "session"
    return created


def of_driver(session: Session, **variables: Any) -> Transaction:
    """Return the transaction that a DB-API connection begins."""
    connection = Connection(session._database._instance, session._database, **variables)
    connection._session = session
    return connection.transaction_checkout()


def register(transaction: Any) -> None:
    outbox.register(transaction, "orders", b"")


def register_once(transaction: Any) -> None:
    outbox.register_once(transaction, "orders", b"", task_id="t")


def register_many(transaction: Any) -> None:
    outbox.register_many(transaction, [outbox.Task("orders", b"")])


@pytest.mark.parametrize("call", [register, register_once, register_many])
def test_the_transaction_of_a_driver_is_refused(session: Session, call: Callable[[Any], None]) -> None:
    """The sentence names the functions for the drivers. Nothing is buffered, nothing sent."""
    for transaction in (of_driver(session), of_driver(session, isolation_level=2, transaction_tag="tag")):
        with pytest.raises(outbox.InvalidTransaction, match="so it would be lost") as caught:
            call(transaction)
        assert str(caught.value).endswith(f" Use {call.__name__} of outbox.ext.sqlalchemy, .django or .dbapi")
        assert isinstance(caught.value, ValueError)
        assert transaction._mutations == []


def test_other_transactions_are_accepted(session: Session) -> None:
    """That of `run_in_transaction`, and one that the application began itself, with options as well."""

    def work(transaction: Transaction) -> None:
        register(transaction)
        accepted.append(transaction)
        raise LookupError

    accepted: list[Transaction] = []
    for options in ({}, {"isolation_level": 2, "read_lock_mode": 2}):
        with pytest.raises(LookupError):
            session.run_in_transaction(work, **options)
    explicit = session.transaction()
    register(explicit)
    assert [len(each._mutations) for each in (*accepted, explicit)] == [1, 1, 1]


def test_nothing_is_refused_if_the_driver_is_not_loaded(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    transaction = of_driver(session)
    monkeypatch.delitem(sys.modules, "google.cloud.spanner_dbapi")
    register(transaction)
    assert len(transaction._mutations) == 1

"""`outbox.register` and `register_once` in real Spanner transactions: one commit, byte-exact, rolled back together."""

import functools
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from google.api_core.exceptions import AlreadyExists
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database

import outbox
from tests.support.drivers import aborting
from tests.support.spanner import query

ORDERS = """
CREATE TABLE Orders (
  Id STRING(36) NOT NULL, WrittenAt TIMESTAMP OPTIONS (allow_commit_timestamp=true)
) PRIMARY KEY (Id)"""


def ids(database: Database) -> list[str]:
    return [id for [id] in query(database, "SELECT Id FROM AsynchronousTasks ORDER BY Id")]


def in_transaction(database: Database, work: Callable[[Any], Any]) -> Any:
    return database.run_in_transaction(work)


def in_batch(database: Database, work: Callable[[Any], Any]) -> Any:
    with database.batch() as batch:
        return work(batch)


def once(transaction: Any, task_id: str = "t") -> bool:
    return outbox.register_once(transaction, "orders", b"data", task_id=task_id)


def test_business_row_and_task_have_one_commit(own_database: Database) -> None:  # OUT-LOSS-1
    """CreatedAt is the time of the caller's own commit (A03). Nothing is readable before (A01), or registered after."""
    own_database.update_ddl([ORDERS]).result(30)
    available, expires = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), datetime(2041, 1, 1, tzinfo=UTC)

    ended: list[Any] = []

    def work(transaction: Any, **more: Any) -> str:
        ended.append(transaction)
        before = ids(own_database)
        transaction.insert("Orders", ("Id", "WrittenAt"), [(str(len(before)), COMMIT_TIMESTAMP)])
        id = outbox.register(transaction, "orders", b"data", {"a": "b"}, priority=7, available_at=available, **more)
        assert ids(own_database) == before
        return id

    keyed = in_transaction(own_database, functools.partial(work, ordering_key="k"))
    once_at_most = in_batch(own_database, functools.partial(work, expires_at=expires, at_most_once=True))
    columns = "Id, Topic, Priority, AvailableAt, OrderingKey, ExpiresAt, AtMostOnce, Attempts, SentAt, CreatedAt"
    [first], [second] = query(own_database, "SELECT WrittenAt FROM Orders ORDER BY Id")
    assert query(own_database, f"SELECT {columns} FROM AsynchronousTasks ORDER BY CreatedAt") == [
        [keyed, "orders", 7, available, "k", None, False, 0, None, first],
        [once_at_most, "orders", 7, available, None, expires, True, 0, None, second],
    ]
    for transaction in ended:
        with pytest.raises(outbox.InvalidTransaction, match="was committed or rolled back before"):
            outbox.register(transaction, "orders", b"")


def test_an_aborted_transaction_registers_one_task(database: Database) -> None:
    """The function runs again, and one row is committed (A10); the first attempt's tasks are forgotten."""
    attempts: list[str] = []

    def work(transaction: Any) -> None:
        attempts.append(outbox.register(transaction, "orders", b"data"))
        assert once(transaction)

    with aborting(lambda call: call == "commit" and len(attempts) == 1):
        in_transaction(database, work)
    assert len(attempts) > 1  # the emulator may abort further ones
    assert ids(database) == sorted([attempts[-1], "t"])


def test_a_given_id_makes_the_registration_idempotent(database: Database) -> None:
    """The second insert of the same id fails the caller's commit: AlreadyExists, which names the table."""

    def work(transaction: Any) -> None:
        transaction.insert_or_update("AsynchronousTaskTopics", ("Topic",), [("effect",)])
        outbox.register(transaction, "orders", b"", task_id="t")

    in_transaction(database, once)
    with pytest.raises(AlreadyExists, match="AsynchronousTasks"):
        in_transaction(database, work)
    assert query(database, "SELECT Topic FROM AsynchronousTaskTopics") == []
    assert ids(database) == ["t"]


def test_ids_spread_evenly_over_the_shards(database: Database) -> None:
    """Chi-square (A09). `MOD(ABS(..))` would overflow for the smallest of the 2^64 hashes."""
    [[expression]] = query(
        database,
        "SELECT GENERATION_EXPRESSION FROM INFORMATION_SCHEMA.COLUMNS "
        "WHERE TABLE_NAME = 'AsynchronousTasks' AND COLUMN_NAME = 'Shard'",
    )
    hashed = "FARM_FINGERPRINT(COALESCE(OrderingKey, Id))"
    assert hashed in expression
    assert query(database, f"SELECT {expression.replace(hashed, str(-(2**63)))}") == [[8]]
    each_id = "(SELECT Id, CAST(NULL AS STRING) AS OrderingKey FROM UNNEST(@ids) AS Id)"
    drawn = [str(uuid.uuid4()) for _ in range(10_000)]
    counts = dict(query(database, f"SELECT {expression}, COUNT(*) FROM {each_id} GROUP BY 1", ids=drawn))
    assert counts.keys() == set(range(10))
    # 9 degrees of freedom, 0.01 %.
    assert sum((count - 1_000) ** 2 / 1_000 for count in counts.values()) < 33.7


def test_register_once_registers_in_the_first_transaction_only(database: Database) -> None:
    """The later transaction commits its other writes. Sent or not, the row counts until it is deleted."""

    def again(transaction: Any) -> bool:
        transaction.insert("AsynchronousTaskTopics", ("Topic",), [("effect",)])
        return once(transaction)

    assert in_transaction(database, once) is True
    assert in_transaction(database, again) is False
    assert ids(database) == ["t"]
    assert query(database, "SELECT Topic FROM AsynchronousTaskTopics") == [["effect"]]
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), [("t", COMMIT_TIMESTAMP)])
    assert in_transaction(database, once) is False
    with database.batch() as batch:
        batch.delete("AsynchronousTasks", KeySet(keys=[["t"]]))
    assert in_transaction(database, once) is True


def test_register_once_twice_in_one_transaction_registers_once(database: Database) -> None:
    """A read does not return buffered inserts, yet the second call returns False, also after plain `register`."""

    def work(transaction: Any) -> list[Any]:
        outbox.register(transaction, "orders", b"", task_id="plain")
        first = once(transaction)
        one = list(transaction.execute_sql("SELECT 1"))
        return [first, one, once(transaction), once(transaction, "plain"), once(transaction, "other")]

    assert in_transaction(database, work) == [True, [[1]], False, False, True]
    assert ids(database) == ["other", "plain", "t"]


def test_one_of_two_concurrent_transactions_registers(database: Database) -> None:
    """Another one commits the same id after our read: ours is aborted, runs again and sees it."""
    ours: list[bool] = []
    others: list[bool] = []

    def work(transaction: Any) -> None:
        ours.append(once(transaction))
        if len(ours) == 1:
            others.append(pool.submit(in_transaction, database, once).result())

    def all_of_them() -> list[bool]:
        return [in_transaction(database, functools.partial(once, task_id=f"t{n}")) for n in range(5)]

    with ThreadPoolExecutor(2) as pool:
        in_transaction(database, work)
        assert others == [True]
        assert (ours[0], ours[-1]) == (True, False)
        assert ids(database) == ["t"]
        first, second = (pool.submit(all_of_them) for _ in range(2))
        answers = list(zip(first.result(), second.result(), strict=True))
    assert all(sorted(pair) == [False, True] for pair in answers), answers
    assert len(ids(database)) == 6

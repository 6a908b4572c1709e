"""`outbox.register` and `register_once` in real Spanner transactions: one commit, byte-exact, rolled back together."""

import base64
import functools
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from google.api_core.exceptions import Aborted, AlreadyExists, GoogleAPICallError
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import outbox
from outbox.message import RawPubsubMessage
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
    """CreatedAt is the time of the caller's own commit (A03); before it nothing is readable (A01)."""
    own_database.update_ddl([ORDERS]).result(30)
    available, expires = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), datetime(2041, 1, 1, tzinfo=UTC)

    def work(transaction: Any, **more: Any) -> str:
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


@pytest.mark.parametrize("run", [in_transaction, in_batch])
def test_a_rolled_back_transaction_leaves_no_task(database: Database, run: Callable[..., Any]) -> None:
    """The caller's exception rolls its tasks back (A02), and the next transaction registers."""

    def work(transaction: Any) -> None:
        outbox.register(transaction, "orders", b"data")
        if run is in_transaction:
            assert once(transaction)
        raise LookupError

    with pytest.raises(LookupError):
        run(database, work)
    assert ids(database) == []
    assert in_transaction(database, once) is True


def test_a_transaction_that_has_ended_is_refused(database: Database) -> None:
    """The client sets the attributes that say so."""
    ended: list[Any] = []

    def work(transaction: Any) -> None:
        outbox.register(transaction, "orders", b"")
        ended.append(transaction)

    def fail(transaction: Any) -> None:
        work(transaction)
        raise LookupError

    in_transaction(database, work)
    in_batch(database, work)
    with pytest.raises(LookupError):
        in_transaction(database, fail)
    for transaction in ended:
        with pytest.raises(outbox.InvalidTransaction, match="was committed or rolled back before"):
            outbox.register(transaction, "orders", b"")
    assert (len(ended), len(ids(database))) == (3, 2)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.binary(max_size=300), min_size=1, max_size=5),
    st.dictionaries(st.text("abc\0ü", min_size=1, max_size=9), st.text(max_size=99)),
)
def test_bytes_and_attributes_round_trip(database: Database, bodies: list[bytes], attributes: dict[str, str]) -> None:
    """Byte-exact, whatever the bytes look like (A06)."""
    written = {}
    with database.batch() as batch:
        for body in [*bodies, b"hell", b"x" * 200, b"\x00\xff"]:
            written[outbox.register(batch, "orders", body, attributes)] = body
    for id, data, size in query(database, "SELECT Id, Data, Bytes FROM AsynchronousTasks"):
        if id in written:
            raw = base64.b64decode(data)
            message = RawPubsubMessage.FromString(raw)
            assert message.data == written[id]
            assert dict(message.attributes) == {**attributes, outbox.TASK_ID_ATTRIBUTE: id}
            assert size == len(raw)


class _Cause:
    """The part of an ABORTED that the client reads."""

    def trailing_metadata(self) -> tuple[()]:
        return ()


def test_an_aborted_transaction_registers_one_task(database: Database) -> None:
    """The function runs again, and one row is committed (A10); the first attempt's tasks are forgotten."""
    attempts: list[str] = []

    def work(transaction: Any) -> None:
        list(transaction.execute_sql("SELECT COUNT(*) FROM AsynchronousTasks"))
        attempts.append(outbox.register(transaction, "orders", b"data"))
        assert once(transaction)
        if len(attempts) == 1:
            raise Aborted("aborted", errors=[_Cause()])

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
    rows = query(database, f"SELECT {expression}, COUNT(*) FROM {each_id} GROUP BY 1", ids=drawn)
    assert is_even(dict(rows), 10_000)
    for _ in range(5):
        with database.batch() as batch:
            for _ in range(100):
                outbox.register(batch, "orders", b"")
    assert is_even(dict(query(database, "SELECT Shard, COUNT(*) FROM AsynchronousTasks GROUP BY Shard")), 500)


def is_even(counts: dict[int, int], total: int) -> bool:
    """Return whether ten shards share `total` evenly: chi-square, 9 degrees of freedom, 0.01 %."""
    assert set(counts) <= set(range(10))
    expected = total / 10
    return sum((counts.get(shard, 0) - expected) ** 2 / expected for shard in range(10)) < 33.7


def test_tasks_of_one_ordering_key_share_a_shard(database: Database) -> None:
    """The shard is of the key if there is one; the table refuses an empty key, another writer's mistake."""
    with database.batch() as batch:
        for n in range(8):
            outbox.register(batch, "orders", b"", ordering_key="k", task_id=f"t{n}")
    assert len(query(database, "SELECT DISTINCT Shard FROM AsynchronousTasks")) == 1
    columns = ("Id", "Topic", "Data", "Priority", "CreatedAt", "OrderingKey")
    with pytest.raises(GoogleAPICallError, match="AsynchronousTasksOrderingKey"), database.batch() as batch:
        batch.insert("AsynchronousTasks", columns, [("1", "orders", b"", 0, COMMIT_TIMESTAMP, "")])


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

"""`outbox.register` in real Spanner transactions: one commit, byte-exact, rolled back with its caller."""

import base64
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from google.api_core.exceptions import AlreadyExists
from google.cloud.spanner_v1 import param_types
from google.cloud.spanner_v1.database import Database
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import outbox
from outbox.message import RawPubsubMessage

ORDERS = """
CREATE TABLE Orders (
  Id STRING(36) NOT NULL, WrittenAt TIMESTAMP OPTIONS (allow_commit_timestamp=true)
) PRIMARY KEY (Id)"""


def query(database: Database, sql: str) -> list[list[Any]]:
    """Return the rows of a strong read."""
    with database.snapshot() as snapshot:
        return [list(row) for row in snapshot.execute_sql(sql)]


def in_transaction(database: Database, work: Callable[[Any], Any]) -> Any:
    """Run `work` in a read-write transaction."""
    return database.run_in_transaction(work, default_retry_delay=0.02)


def in_batch(database: Database, work: Callable[[Any], Any]) -> Any:
    """Run `work` in a batch of blind writes."""
    with database.batch() as batch:
        return work(batch)


@pytest.mark.parametrize("run", [in_transaction, in_batch])
def test_business_row_and_task_have_one_commit(database: Database, run: Callable[..., Any]) -> None:
    """CreatedAt is the commit timestamp of the caller's own transaction (A03)."""
    from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

    database.update_ddl([ORDERS]).result(30)

    def work(transaction: Any) -> str:
        transaction.insert("Orders", ("Id", "WrittenAt"), [("1", COMMIT_TIMESTAMP)])
        return outbox.register(transaction, "orders", b"data", {"a": "b"}, ordering_key="k", priority=7)

    task_id = run(database, work)
    [[id, topic, priority, key, created_at, sent_at]] = query(
        database, "SELECT Id, Topic, Priority, OrderingKey, CreatedAt, SentAt FROM AsynchronousTasks"
    )
    [[at]] = query(database, "SELECT WrittenAt FROM Orders")
    assert (id, topic, priority, key, sent_at) == (task_id, "orders", 7, "k", None)
    assert created_at == at


def test_nothing_is_readable_until_the_commit(database: Database) -> None:
    """Register only buffers (A01)."""

    def work(transaction: Any) -> None:
        outbox.register(transaction, "orders", b"data")
        assert query(database, "SELECT Id FROM AsynchronousTasks") == []

    in_transaction(database, work)
    assert len(query(database, "SELECT Id FROM AsynchronousTasks")) == 1


@pytest.mark.parametrize("run", [in_transaction, in_batch])
def test_a_rolled_back_transaction_leaves_no_task(database: Database, run: Callable[..., Any]) -> None:
    """The caller's exception takes its tasks along (A02)."""

    def work(transaction: Any) -> None:
        outbox.register(transaction, "orders", b"data")
        raise LookupError

    with pytest.raises(LookupError):
        run(database, work)
    assert query(database, "SELECT Id FROM AsynchronousTasks") == []


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_a_run_again_after_an_abort_leaves_one_task(database: Database) -> None:
    """Another transaction takes the lock first; the function runs again, one row is committed (A10)."""
    runs = []

    def work(transaction: Any) -> None:
        list(transaction.execute_sql("SELECT COUNT(*) FROM AsynchronousTasks"))
        runs.append(outbox.register(transaction, "orders", b"data"))
        if len(runs) == 1:
            transaction._transaction_id = b"gone"  # the commit meets a transaction that is no more
            from google.api_core.exceptions import Aborted

            raise Aborted("aborted", errors=[_Cause()])

    in_transaction(database, work)
    assert len(runs) == 2
    assert query(database, "SELECT Id FROM AsynchronousTasks") == [[runs[1]]]


class _Cause:
    """What the client looks at in an ABORTED."""

    def trailing_metadata(self) -> tuple[()]:
        """No delay is asked for."""
        return ()


def test_a_given_id_makes_the_registration_idempotent(database: Database) -> None:
    """The second insert of the same id fails the caller's commit."""
    in_transaction(database, lambda transaction: outbox.register(transaction, "orders", b"1", task_id="order-1"))
    with pytest.raises(AlreadyExists):
        in_transaction(database, lambda transaction: outbox.register(transaction, "orders", b"2", task_id="order-1"))
    assert len(query(database, "SELECT Id FROM AsynchronousTasks")) == 1


def test_times_reach_their_columns(database: Database) -> None:
    """To the microsecond."""
    available, expires = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), datetime(2041, 1, 1, tzinfo=UTC)
    with database.batch() as batch:
        outbox.register(batch, "orders", b"", available_at=available, expires_at=expires, at_most_once=True)
    assert query(database, "SELECT AvailableAt, ExpiresAt, AtMostOnce, Attempts FROM AsynchronousTasks") == [
        [available, expires, True, 0]
    ]


def test_ids_spread_evenly_over_the_shards(database: Database) -> None:
    """Chi-square over ten shards: of 10,000 random ids by the table's own expression, and of 500 stored rows (A09)."""
    [[expression]] = query(
        database,
        "SELECT GENERATION_EXPRESSION FROM INFORMATION_SCHEMA.COLUMNS "
        "WHERE TABLE_NAME = 'AsynchronousTasks' AND COLUMN_NAME = 'Shard'",
    )
    with database.snapshot() as snapshot:
        rows = snapshot.execute_sql(
            f"SELECT {expression}, COUNT(*) "
            "FROM (SELECT Id, CAST(NULL AS STRING) AS OrderingKey FROM UNNEST(@ids) AS Id) GROUP BY 1",
            params={"ids": [str(uuid.uuid4()) for _ in range(10_000)]},
            param_types={"ids": param_types.Array(param_types.STRING)},
        )
        assert is_even(dict(rows), 10_000)
    for _ in range(10):
        with database.batch() as batch:
            for _ in range(50):
                outbox.register(batch, "orders", b"")
    assert is_even(dict(query(database, "SELECT Shard, COUNT(*) FROM AsynchronousTasks GROUP BY Shard")), 500)


def is_even(counts: dict[int, int], total: int) -> bool:
    """Tell whether ten shards share `total` evenly: chi-square, 9 degrees of freedom, 0.01 %."""
    assert set(counts) <= set(range(10))
    expected = total / 10
    return sum((counts.get(shard, 0) - expected) ** 2 / expected for shard in range(10)) < 33.7


def test_tasks_of_one_ordering_key_share_a_shard(database: Database) -> None:
    """The shard is of the key where there is one."""
    with database.batch() as batch:
        for n in range(8):
            outbox.register(batch, "orders", b"", ordering_key="k", task_id=f"t{n}")
    assert len(query(database, "SELECT DISTINCT Shard FROM AsynchronousTasks")) == 1


def test_an_empty_ordering_key_cannot_be_stored(database: Database) -> None:
    """Another writer's mistake is refused by the table."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

    with pytest.raises(GoogleAPICallError, match="AsynchronousTasksOrderingKey"), database.batch() as batch:
        batch.insert(
            "AsynchronousTasks",
            ("Id", "Topic", "Data", "Priority", "CreatedAt", "OrderingKey"),
            [("1", "orders", b"", 0, COMMIT_TIMESTAMP, "")],
        )

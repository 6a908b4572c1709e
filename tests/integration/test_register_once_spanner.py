"""`outbox.register_once` in real Spanner transactions: what is there, what is buffered, and two callers at once."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from google.api_core.exceptions import Aborted, AlreadyExists
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.cloud.spanner_v1.database import Database

import outbox


def ids(database: Database) -> list[str]:
    """Return the ids of all tasks."""
    with database.snapshot() as snapshot:
        return [id for (id,) in snapshot.read("AsynchronousTasks", ("Id",), KeySet(all_=True))]


def in_transaction(database: Database, work: Callable[[Any], Any]) -> Any:
    """Run `work` in a read-write transaction."""
    return database.run_in_transaction(work, default_retry_delay=0.02)


def once(transaction: Any, task_id: str = "t") -> bool:
    """Register a task of the topic `orders`."""
    return outbox.register_once(transaction, "orders", b"data", task_id=task_id)


def test_the_first_transaction_registers_and_later_ones_do_not(database: Database) -> None:
    """Nothing fails: the later transaction commits what else it did."""

    def again(transaction: Any) -> bool:
        transaction.insert("AsynchronousTaskTopics", ("Topic",), [("effect",)])
        return once(transaction)

    assert in_transaction(database, once) is True
    assert in_transaction(database, again) is False
    assert ids(database) == ["t"]
    with database.snapshot() as snapshot:
        assert list(snapshot.read("AsynchronousTaskTopics", ("Topic",), KeySet(all_=True))) == [["effect"]]


def test_a_sent_task_is_there_until_its_row_is_deleted(database: Database) -> None:
    """Sent or not, the row counts; after the retention the id is new."""
    in_transaction(database, once)
    with database.batch() as batch:
        batch.update("AsynchronousTasks", ("Id", "SentAt"), [("t", COMMIT_TIMESTAMP)])
    assert in_transaction(database, once) is False
    with database.batch() as batch:
        batch.delete("AsynchronousTasks", KeySet(keys=[["t"]]))
    assert in_transaction(database, once) is True


def test_once_and_again_in_one_transaction(database: Database) -> None:
    """A read does not see what is buffered, and yet the second call says False and the commit succeeds."""
    assert in_transaction(database, lambda transaction: [once(transaction), once(transaction)]) == [True, False]
    assert ids(database) == ["t"]


def test_registered_before_in_the_same_transaction(database: Database) -> None:
    """By plain `register`; another id is no matter."""

    def work(transaction: Any) -> list[bool]:
        outbox.register(transaction, "orders", b"", task_id="t")
        return [once(transaction), once(transaction, "other")]

    assert in_transaction(database, work) == [False, True]
    assert ids(database) == ["other", "t"]


def test_a_rolled_back_registration_is_not_there(database: Database) -> None:
    """The caller's exception takes it along, and the next transaction registers."""

    def work(transaction: Any) -> None:
        assert once(transaction)
        raise LookupError

    with pytest.raises(LookupError):
        in_transaction(database, work)
    assert ids(database) == []
    assert in_transaction(database, once) is True


def test_a_run_again_after_an_abort_begins_afresh(database: Database) -> None:
    """What the aborted run registered is not there; the second run registers it."""
    answers = []

    def work(transaction: Any) -> None:
        answers.append(once(transaction))
        if len(answers) == 1:
            raise Aborted("aborted", errors=[_Cause()])

    in_transaction(database, work)
    assert answers == [True, True]
    assert ids(database) == ["t"]


class _Cause:
    """What the client looks at in an ABORTED."""

    def trailing_metadata(self) -> tuple[()]:
        """No delay is asked for."""
        return ()


def test_of_two_transactions_at_once_one_registers(database: Database) -> None:
    """Another one commits the same id after our read: ours is aborted, runs again and sees it."""
    ours: list[bool] = []
    others: list[bool] = []

    def work(transaction: Any) -> None:
        ours.append(once(transaction))
        if len(ours) == 1:
            others.append(pool.submit(in_transaction, database, once).result())

    with ThreadPoolExecutor(1) as pool:
        in_transaction(database, work)
    assert others == [True]
    assert (ours[0], ours[-1]) == (True, False)
    assert ids(database) == ["t"]


def test_two_threads_that_repeat_the_same_operations(database: Database) -> None:
    """Each of five ids is registered by one of them, whatever the interleaving."""

    def all_of_them() -> list[bool]:
        return [in_transaction(database, functools.partial(once, task_id=f"t{n}")) for n in range(5)]

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(all_of_them) for _ in range(2))
        answers = list(zip(first.result(), second.result(), strict=True))
    assert all(sorted(pair) == [False, True] for pair in answers), answers
    assert len(ids(database)) == 5


def test_plain_register_fails_the_second_commit(database: Database) -> None:
    """For comparison: AlreadyExists, which names the table, and nothing of the second transaction stays."""

    def work(transaction: Any) -> None:
        transaction.insert_or_update("AsynchronousTaskTopics", ("Topic",), [("effect",)])
        outbox.register(transaction, "orders", b"", task_id="t")

    in_transaction(database, once)
    with pytest.raises(AlreadyExists, match="AsynchronousTasks"):
        in_transaction(database, work)
    with database.snapshot() as snapshot:
        assert list(snapshot.read("AsynchronousTaskTopics", ("Topic",), KeySet(all_=True))) == []


def test_it_may_come_between_other_statements(database: Database) -> None:
    """Its result is read to the end, so the next statement does not wait for it."""

    def work(transaction: Any) -> list[Any]:
        return [once(transaction), list(transaction.execute_sql("SELECT 1")), once(transaction, "other")]

    assert in_transaction(database, work) == [True, [[1]], True]

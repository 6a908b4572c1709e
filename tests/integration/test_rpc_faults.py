"""The faults of the trials on the emulator: each does to a Commit what its name says, once."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from google.api_core.exceptions import AlreadyExists
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.emulators import Emulators
from tests.support import spanner
from tests.support.proxy import Proxy
from tests.support.relays import unsent
from tests.support.rpc import Fault, Faulty


@pytest.fixture
def faulty(emulators: Emulators) -> Iterator[Faulty]:
    """A network before the emulator."""
    with Proxy(emulators.spanner_host) as network, Faulty(emulators.spanner_host, network) as made:
        yield made


@pytest.mark.parametrize(
    ("fault", "runs"), [(Fault.LOST, 1), (Fault.UNANSWERED, 1), (Fault.REFUSED, 1), (Fault.ABORTED, 2)]
)
def test_one_commit_fails(faulty: Faulty, database: Database, fault: Fault, runs: int) -> None:
    """The client asks again, or runs the transaction again; the row is there once."""
    faults = iter([fault])
    ran: list[str] = []
    remote: Any = spanner.instance(faulty.network.address).database(database.database_id)

    def work(transaction: Any) -> None:
        list(transaction.execute_sql("SELECT 1"))  # so that there is a transaction to roll back
        ran.append(outbox.register(transaction, "orders", b"x"))

    with faulty.failing(lambda method: next(faults, None) if method == "Commit" else None), suppress(AlreadyExists):
        remote.run_in_transaction(work, default_retry_delay=0.02)
    assert faulty.seen["Commit", fault] == 1
    assert len(ran) == runs
    assert unsent(database) == [ran[-1]]


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.UNANSWERED])
def test_a_lost_answer_is_of_a_call_that_was_made(faulty: Faulty, database: Database, fault: Fault) -> None:
    """While the client still asks, the row is there."""
    remote: Any = spanner.instance(faulty.network.address).database(database.database_id)
    seen: list[list[str]] = []

    def lose_first(method: str) -> Fault | None:
        if method != "Commit":
            return None
        seen.append(unsent(database))
        return fault if len(seen) == 1 else None

    with faulty.failing(lose_first), suppress(AlreadyExists), remote.batch() as batch:
        id = outbox.register(batch, "orders", b"x")
    assert seen[:2] == [[], [id]]

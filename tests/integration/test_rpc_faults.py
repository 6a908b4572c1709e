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
    ("fault", "attempts"), [(Fault.LOST, 1), (Fault.UNANSWERED, 1), (Fault.REFUSED, 1), (Fault.ABORTED, 2)]
)
def test_one_commit_fails(faulty: Faulty, database: Database, fault: Fault, attempts: int) -> None:
    """The client asks again, or runs the transaction again; the row is inserted once.

    A lost answer is of a call that was made: the row is there when the client asks again.
    """
    ran: list[str] = []
    seen: list[list[str]] = []
    remote: Any = spanner.instance(faulty.network.address).database(database.database_id)

    def fail_first(method: str) -> Fault | None:
        if method != "Commit":
            return None
        seen.append(unsent(database))
        return fault if len(seen) == 1 else None

    def work(transaction: Any) -> None:
        list(transaction.execute_sql("SELECT 1"))  # so that there is a transaction to roll back
        ran.append(outbox.register(transaction, "orders", b"x"))

    with faulty.failing(fail_first), suppress(AlreadyExists):
        remote.run_in_transaction(work, default_retry_delay=0.02)
    assert faulty.seen["Commit", fault] == 1
    assert len(ran) == attempts
    assert unsent(database) == [ran[-1]]
    assert seen[:2] == [[], ran if fault in (Fault.LOST, Fault.UNANSWERED) else []]

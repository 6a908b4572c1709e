"""For the tests of an application: which tasks were registered, and deliveries and aborts as they happen in production.

    transaction = RecordingTransaction()
    place_order(transaction, "order-1", 1999)
    assert_registered(transaction, topic="orders", attributes={"kind": "placed"})

`outbox.testing.faults` has the aborts. The pytest plugin `publishworker.testing` has the emulators and a relay.
"""

from outbox.testing.recording import Mutation, RecordingTransaction, RegisteredTask, Statement, assert_registered
from outbox.testing.subscriber import RedeliveringSubscriber

__all__ = [
    "Mutation", "RecordingTransaction", "RedeliveringSubscriber", "RegisteredTask", "Statement", "assert_registered",
]  # fmt: skip

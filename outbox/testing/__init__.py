"""For the tests of an application: which tasks were registered, and deliveries and aborts as they happen in production.

    transaction = RecordingTransaction()
    place_order(transaction, "order-1", 1999)
    assert_registered(transaction, topic="orders", attributes={"kind": "placed"})

`outbox.testing.faults` has the aborts. The pytest plugin `publishworker.testing` has the emulators and a relay. The
first use of a name imports the clients, as in `outbox`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.testing.assertions import assert_registered
    from outbox.testing.fakes import Mutation, RecordingTransaction, RegisteredTask, Statement
    from outbox.testing.subscriber import RedeliveringSubscriber
else:
    _MODULES = {"assert_registered": "assertions", "RedeliveringSubscriber": "subscriber"}

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"outbox.testing.{_MODULES.get(name, 'fakes')}")
        value = globals()[name] = getattr(module, name)
        return value


__all__ = [
    "Mutation",
    "RecordingTransaction",
    "RedeliveringSubscriber",
    "RegisteredTask",
    "Statement",
    "assert_registered",
]

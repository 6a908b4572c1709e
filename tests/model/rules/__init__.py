"""The rules of the protocol, each with a fault of the code that breaks it: for `python -m tests.model.seeded`."""

from tests.model.rules import order, sending, taking

FAULTS = (*taking.FAULTS, *sending.FAULTS, *order.FAULTS)

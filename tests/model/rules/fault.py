"""One rule of the protocol, and how to break it."""

from dataclasses import dataclass

TURN, SPANNER = "publishworker/turn/", "publishworker/spanner/"

#: Tests that see what goes to Spanner, for what no model of it shows.
ON_SPANNER = (
    "tests/contract/test_store.py",
    "tests/integration/test_rpc_sequence.py",
    "tests/acceptance/test_worker.py",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule, and the text of a file that is replaced to break it."""

    rule: str
    file: str
    old: str
    new: str
    #: Where to look for it, if not in all tests that need no emulator.
    tests: tuple[str, ...] = ()

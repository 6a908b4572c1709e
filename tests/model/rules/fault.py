"""One rule of the protocol, and how to break it."""

from dataclasses import dataclass
from pathlib import PurePath

TURN, SPANNER = "publishworker/turn/", "publishworker/spanner/"

#: The tests of the part that a file is, without emulators where its rules can be seen without.
TESTS = {
    "fleet.py": ("unit/test_fleet.py",),
    "sampling.py": ("unit/test_sampling.py", "unit/test_isolation.py"),
    "fairness.py": ("unit/test_fairness.py", "unit/test_shares.py"),
    "relay.py": ("unit/test_relay.py", "unit/test_pipeline.py", "unit/test_ordering.py"),
    "ordering.py": ("unit/test_ordering.py", "unit/test_fronts.py", "unit/test_parking.py", "unit/test_relay.py"),
    "claims.py": ("unit/test_claims.py", "unit/test_relay.py", "unit/test_at_most_once.py", "unit/test_parking.py"),
    "delivery.py": (
        "unit/test_delivery.py",
        "unit/test_relay.py",
        "unit/test_at_most_once.py",
        "unit/test_parking.py",
        "unit/test_failing.py",
    ),
    "retries.py": ("unit/test_retries.py", "unit/test_failing.py"),
    "task.py": ("unit/test_small_parts.py", "unit/test_claims.py"),
    "doubts.py": ("unit/test_small_parts.py", "unit/test_relay.py"),
    "breakers.py": ("unit/test_breakers.py", "unit/test_failing.py"),
    "publisher.py": ("unit/test_publisher.py", "unit/test_publisher_order.py"),
    "messages.py": ("unit/test_publisher.py", "unit/test_publisher_order.py"),
    "rows.py": ("unit/test_rows.py",),
    "sql.py": ("contract/test_store.py", "integration/test_rpc_sequence.py"),
    "store.py": ("contract/test_claims.py", "contract/test_store.py"),
    "worker.py": ("unit/test_worker.py",),
    "stopping.py": ("unit/test_worker.py", "acceptance/test_worker.py"),
}
#: What the random histories do not have: shards, windows, priorities, times of polls, processes, Spanner.
NOT_IN_HISTORIES = {
    "fleet.py",
    "sampling.py",
    "fairness.py",
    "rows.py",
    "sql.py",
    "store.py",
    "worker.py",
    "stopping.py",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule, and the text of a file that is replaced to break it."""

    rule: str
    file: str
    old: str
    new: str

    @property
    def tests(self) -> tuple[str, ...]:
        """Return the tests of the broken part."""
        return tuple(f"tests/{each}" for each in TESTS[PurePath(self.file).name])

    @property
    def in_histories(self) -> bool:
        """Tell whether the random histories could notice it."""
        return PurePath(self.file).name not in NOT_IN_HISTORIES

"""What workers of the simulation do is allowed by the specification, transaction by transaction."""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.simulation.seeded_faults import DEFECTS
from tests.simulation.world import Plan, World
from tests.specification.conformance import Comparison, compared

#: The specification has neither at-most-once tasks nor expiry.
WITHOUT = {"once": 0.0, "lifetimes": (None,)}


def played(seeds: Iterator[int]) -> Iterator[tuple[int, Comparison]]:
    """Play histories by seed."""
    for seed in seeds:
        with compared() as comparison:
            World(dataclasses.replace(Plan.of(seed), **WITHOUT)).play(limit=120.0)  # type: ignore[arg-type]
        yield seed, comparison


@pytest.mark.parametrize(
    ("first", "seconds"),
    [(0, 4.0), pytest.param(1_000, 120.0, marks=[pytest.mark.long("many histories"), pytest.mark.timeout(3600)])],
)
def test_every_transaction_is_allowed_by_the_specification(first: int, seconds: float) -> None:
    """The first difference is printed with both states."""
    end, histories, transactions = time.process_time() + seconds, 0, 0
    for seed, found in played(itertools.count(first)):
        assert not found.differences, f"seed {seed}: {found.differences[0]}"
        histories, transactions = histories + 1, transactions + found.transactions
        if time.process_time() > end:
            break
    print(f"{histories} histories, {transactions:,} transactions")
    assert transactions > 100


@pytest.mark.parametrize(
    "defect",
    [
        "SentAt is read again under the lock",
        "a transaction attempt remembers outcomes",
        "only published tasks are marked",
        "deferred tasks are released",
    ],
)
def test_a_defect_of_the_relay_is_not_allowed(defect: str) -> None:
    owner, name, make = DEFECTS[defect]
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        assert any(found.differences for _, found in played(iter(range(20))))

"""The stores on which every scenario of the store's contract runs."""

import pytest

from tests.simulation.harness import SimulatedHarness
from tests.support.store_harness import FakeHarness, Harness, SpannerHarness


@pytest.fixture(params=["fake", "simulated", "spanner"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return _harness(request, "database")


@pytest.fixture(params=["fake", "simulated", "spanner"])
def own_harness(request: pytest.FixtureRequest) -> Harness:
    """The same for a test that changes the schema."""
    return _harness(request, "own_database")


def _harness(request: pytest.FixtureRequest, database: str) -> Harness:
    match request.param:
        case "fake":
            return FakeHarness()
        case "simulated":
            return SimulatedHarness()
    return SpannerHarness(request.getfixturevalue(database))

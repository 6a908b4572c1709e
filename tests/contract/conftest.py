"""The stores on which every scenario of the store's contract runs."""

import pytest

from tests.simulation.harness import SimulatedHarness
from tests.support.store_harness import FakeHarness, Harness, SpannerHarness


@pytest.fixture(params=["fake", "simulated", "spanner"])
def harness(request: pytest.FixtureRequest) -> Harness:
    match request.param:
        case "fake":
            return FakeHarness()
        case "simulated":
            return SimulatedHarness()
    return SpannerHarness(request.getfixturevalue("database"))

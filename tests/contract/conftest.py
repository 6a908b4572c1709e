"""The two stores on which every scenario of the store's contract runs."""

import pytest

from tests.support.store_harness import FakeHarness, Harness, SpannerHarness


@pytest.fixture(params=["fake", "spanner"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return FakeHarness() if request.param == "fake" else SpannerHarness(request.getfixturevalue("database"))

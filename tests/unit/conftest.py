"""Fixtures that several of these files share."""

from collections.abc import Iterator

import pytest

from tests.support.parts import Bench, SlowPublisher


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def slow() -> Iterator[SlowPublisher]:
    publisher = SlowPublisher("orders", "invoices")
    yield publisher
    publisher.release.set()

"""Fixtures that several of these files share."""

from collections.abc import Iterator

import pytest

from publishworker.pubsub.publisher import PubSubPublisher
from tests.support.relay_bench import Bench, SlowPublisher
from tests.support.rpc import PubSubServer, publisher_to


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def slow() -> Iterator[SlowPublisher]:
    publisher = SlowPublisher("orders", "invoices")
    yield publisher
    publisher.release.set()


@pytest.fixture
def server() -> Iterator[PubSubServer]:
    """A server in Pub/Sub's place that accepts everything until a test changes that."""
    with PubSubServer() as running:
        yield running


@pytest.fixture
def publisher(server: PubSubServer) -> PubSubPublisher:
    return publisher_to(server.address)

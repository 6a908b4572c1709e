"""Fixtures that several of these files share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import outbox
from tests.support.relay_bench import Bench


@pytest.fixture
def bench() -> Bench:
    """A fresh bench."""
    return Bench()


@pytest.fixture
def set_metrics() -> Iterator[Callable[[Any], None]]:
    """`outbox.set_metrics`, for this test only."""
    yield outbox.set_metrics
    outbox.set_metrics(None)

"""What several of these files have in common."""

import pytest

from tests.support.relay_bench import Bench


@pytest.fixture
def bench() -> Bench:
    """A fresh bench."""
    return Bench()

"""The benchmarks run: a tiny round of some sections, so that they do not rot. No figure is judged."""

import pytest

from outbox.devtools.emulators import Emulators
from tests.support.processes import run


@pytest.mark.emulator_only("the benchmarks create its instance")
@pytest.mark.extended
def test_a_tiny_round_prints_its_tables(emulators: Emulators) -> None:
    """The relay in the process itself, in one of its own, and behind the counting proxy."""
    arguments = ("--quick", "--rounds", "1", "--only", "throughput", "costs", "memory")
    finished = run("tools.benchmarks", *arguments, environment=emulators.environment(), seconds=60)
    assert finished.code == 0
    for text in ("Costs per task", "claim", "requests/1,000 tasks ", "backlog of 1,000"):
        assert text in finished.stdout

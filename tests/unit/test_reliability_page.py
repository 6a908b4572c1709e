"""The page of the trials: every scenario says what it promises, and the page is what was kept."""

import json
from pathlib import Path

import pytest

from tests.chaos import page

SCENARIOS = sorted(page.SCENARIOS.glob("test_*.py"))


def test_there_are_scenarios() -> None:
    """At least as many as were asked for."""
    assert len(SCENARIOS) >= 20


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda file: file.stem)
def test_a_scenario_says_what_happens_and_what_is_promised(scenario: Path) -> None:
    """The page shows both."""
    does, promised = page.promise(scenario.name)
    assert does.endswith((".", ":"))
    assert "nothing lost" in promised


def test_the_page_is_written_from_what_is_kept() -> None:
    """Nobody has edited it; what is not measured anew stays."""
    assert page.PAGE.read_text(encoding="utf-8") == page.text(json.loads(page.KEPT.read_text(encoding="utf-8")))

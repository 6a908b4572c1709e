"""The page of the trials: every scenario has a description and a promise, and the page is that of the results."""

import json

from tests.chaos import page

SCENARIOS = sorted(page.SCENARIOS.glob("test_*.py"))


def test_a_scenario_says_what_happens_and_what_is_promised() -> None:
    """The page shows both."""
    assert len(SCENARIOS) >= 20
    for scenario in SCENARIOS:
        does, promised = page.promise(scenario.name)
        assert does.endswith((".", ":")), scenario
        assert "nothing lost" in promised, scenario


def test_the_page_is_written_from_what_is_kept() -> None:
    """It is not edited by hand; the results of scenarios that did not run again stay."""
    assert page.PAGE.read_text(encoding="utf-8") == page.text(json.loads(page.KEPT.read_text(encoding="utf-8")))

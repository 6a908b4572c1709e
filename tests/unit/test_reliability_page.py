"""The page of the fault scenarios: each has a title and a promise, and the page is written from the results."""

import json

from tests.faults import page


def test_a_scenario_has_a_title_and_a_promise() -> None:
    """The page shows both."""
    scenarios = page.scenarios()
    assert len(scenarios) >= 29
    assert all(each.title.endswith(".") and "No task is lost" in each.promise for each in scenarios.values())


def test_the_page_is_written_from_what_is_kept() -> None:
    """It is never edited. The results of scenarios that did not run again stay."""
    assert page.PAGE.read_text(encoding="utf-8") == page.text(json.loads(page.KEPT.read_text(encoding="utf-8")))

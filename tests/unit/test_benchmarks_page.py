"""The benchmarks' page shows the results as they were saved."""

from pathlib import Path

import pytest

from tests.benchmarks import page, results
from tests.benchmarks.latency import percentile
from tests.benchmarks.results import Bar, Plot, Section

RAN = dict.fromkeys(("date", "seconds", "command", "rounds", "commit", "machine", "load before", "versions"), "x")


@pytest.fixture
def section() -> Section:
    """A section with a gap in its table."""
    samples = [("relay", "tasks/s", 1000.0), ("relay", "tasks/s", 3000.0), ("relay", "tasks/s", 1500.0)]
    return Section(
        "Speed",
        results.figures([*samples, ("naive", "tasks/s", 47.123), ("relay", "us", 0.5)]),
        [Bar("relay / naive", 31.8, 30, at_least=True), Bar("us", 0.5, 0.4, at_least=False)],
        "- Here and now.",
        "Nothing.",
        Plot(["tasks/s"], log=True),
        {**RAN, "emulators": "none"},
    )


def test_what_is_saved_is_what_is_loaded(section: Section, tmp_path: Path) -> None:
    """Sections may run apart, because the page is written from the saved results."""
    file = tmp_path / "results.json"
    assert results.load(file) == {}
    results.save({"speed": section}, file)
    assert results.load(file) == {"speed": section}


def test_the_page_has_all_of_a_section(section: Section, tmp_path: Path) -> None:
    """The table has medians with their range, one value alone, and an empty cell; a bar says if it is reached."""
    assert page.grid(section.figures) == (
        ["", "tasks/s", "us"],
        [["relay", "1,500 (1,000-3,000)", "0.5"], ["naive", "47.1", ""]],
    )
    assert [bar.reached for bar in section.bars] == [True, False]
    shown = page.text(section)
    assert "relay / naive: 31.8, bar >= 30, reached" in shown
    assert "us: 0.5, bar <= 0.4, **not reached**" in shown
    page.write({"speed": section}, tmp_path / "benchmarks.md")
    written = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    for part in ("## Speed", "| naive | 47.1 |  |", "benchmarks/speed.png", "- Here and now.", "Transfers: Nothing."):
        assert part in written
    assert (tmp_path / "benchmarks" / "speed.png").stat().st_size > 1000


def test_the_page_in_docs_is_that_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are not edited by hand."""
    monkeypatch.setattr(page, "draw", lambda _name, _section, file: file)
    page.write(results.load(), tmp_path / "benchmarks.md")
    assert page.PAGE.read_text(encoding="utf-8") == (tmp_path / "benchmarks.md").read_text(encoding="utf-8")


def test_percentiles_are_values_that_were_measured() -> None:
    """No interpolation between few values."""
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (50, 95, 99)] == [2.0, 4.0, 4.0]
    assert percentile([7.0], 50) == 7.0

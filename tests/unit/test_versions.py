"""The table that `make test-versions` writes."""

from tests.support.versions import HEADER, PAGE, RUNS, with_row


def test_a_run_replaces_its_own_row_and_keeps_the_others() -> None:
    """Rows have the order of the runs, whichever ran last, and the rest of the page stays."""
    page = f"before\n\n{HEADER}\n|---|---|\n| newest | old |\n\nafter\n"
    page = with_row(with_row(page, "| oldest | first |"), "| newest | new |")
    assert page == f"before\n\n{HEADER}\n|---|---|\n| oldest | first |\n| newest | new |\n\nafter\n"


def test_the_page_has_rows_without_failures() -> None:
    """A version with failures is not supported, so its bound must change."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition(HEADER)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n\n")[0].splitlines()[2:]]
    assert [row[0] for row in rows] == [name for name in RUNS if name in {row[0] for row in rows}]
    assert len(rows) >= 3
    assert {row[HEADER.split(" | ").index("failed")] for row in rows} == {"0"}

"""The list of faults is about the code that there is, and the page is about the list."""

from pathlib import Path

import pytest

from tests.model.rules import FAULTS
from tests.model.rules.fault import Fault
from tests.model.seeded import PAGE, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule)
def test_each_rule_can_be_broken(fault: Fault) -> None:
    """What is replaced is there, once; so are the tests of the broken part."""
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert [each for each in fault.tests if not (ROOT / each).is_file()] == []


def test_the_page_has_every_rule_and_each_was_noticed() -> None:
    """After a change of the list: `python -m tests.model.seeded`."""
    rows = [line.split(" | ") for line in Path(PAGE).read_text().splitlines() if line.startswith("| ")][1:]
    assert [row[0].removeprefix("| ") for row in rows] == [fault.rule for fault in FAULTS]
    assert [row[0] for row in rows if row[1] != "yes" and row[2].startswith("`-`")] == []

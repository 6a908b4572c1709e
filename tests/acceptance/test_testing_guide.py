"""The guide "Test your service" as written: its files in an empty folder, then pytest."""

import re
from pathlib import Path

import pytest

from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT, started

PAGE = (ROOT / "docs/guide/testing.md").read_text(encoding="utf-8")


def write_files(folder: Path) -> None:
    for text in re.findall(r"^```(?:python|sql|ini)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        name = re.findall(r"\A(?:#|--) ([\w.]+)", text)[0]
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(text)


@pytest.mark.parametrize(("inbox", "code", "says"), [(True, 0, "5 passed"), (False, 1, "1 failed")])
def test_the_tests_of_the_page_pass_and_notice_a_missing_inbox(
    inbox: bool, code: int, says: str, emulators: Emulators, tmp_path: Path
) -> None:
    write_files(tmp_path)
    shop = tmp_path / "shop.py"
    if not inbox:
        shop.write_text(without_inbox(shop.read_text()))
    variables = emulators.environment() | {"PYTHONPATH": str(ROOT)}
    with started("pytest", "-q", environment=variables, directory=tmp_path) as testing:
        assert testing.wait() == code, testing.stdout
        testing.wait_for_text(says)


def without_inbox(text: str) -> str:
    """Return the billing service as the page says to see the test fail."""
    returned = 'return inbox.Handler(database, consumer="billing")(write_invoice)'
    assert returned in text
    return text.replace(
        returned,
        "return lambda message: (database.run_in_transaction(write_invoice, message), message.ack())",
    )

"""The guide "Test your service" as written: its files in an empty folder, then pytest."""

import re
from pathlib import Path

import pytest

from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT, run

PAGE = (ROOT / "docs/guide/testing.md").read_text(encoding="utf-8")


def write_files(folder: Path, *, inbox: bool) -> None:
    """Write the files of the page. Without the inbox, the service's last function is the one that the page shows."""
    for text in re.findall(r"^```(?:python|sql|ini)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        head = re.match(r"(?:#|--) ([\w.]+)(.*)", text)
        others = (", with Alembic", ", without the inbox" if inbox else "none")
        if not head or head[2] in others:  # without a name, it is a unit test
            continue
        with (folder / head[1]).open("a", encoding="utf-8") as file:
            file.write(text)


@pytest.mark.parametrize(
    ("inbox", "code", "says"),
    [(True, 0, "5 passed"), pytest.param(False, 1, "1 failed, 4 passed", marks=pytest.mark.extended)],
)
def test_the_tests_of_the_page_pass_and_notice_a_missing_inbox(
    inbox: bool, code: int, says: str, emulators: Emulators, tmp_path: Path
) -> None:
    write_files(tmp_path, inbox=inbox)
    words = (str(tmp_path), "-c", str(tmp_path / "pytest.ini"), "-q")
    done = run("pytest", *words, environment=emulators.environment(), seconds=90)
    assert done.code == code, done.stdout
    assert says in done.stdout

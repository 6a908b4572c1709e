"""The guide "Test your service" as written: its files in an empty folder, then pytest."""

import re
from pathlib import Path

from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT, run

PAGE = (ROOT / "docs/guide/testing.md").read_text(encoding="utf-8")


def test_the_tests_of_the_page_pass(emulators: Emulators, tmp_path: Path) -> None:
    for text in re.findall(r"^```(?:python|sql|ini)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        head = re.match(r"(?:#|--) ([\w.]+)(.*)", text)
        if not head or head[2] == ", with Alembic":  # without a name, it is a unit test
            continue
        with (tmp_path / head[1]).open("a", encoding="utf-8") as file:
            file.write(text)
    words = (str(tmp_path), "-c", str(tmp_path / "pytest.ini"), "-q")
    done = run("pytest", *words, environment=emulators.environment(), seconds=90)
    assert (done.code, "5 passed" in done.stdout) == (0, True), done.stdout

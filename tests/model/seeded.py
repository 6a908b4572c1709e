"""Break each rule of the protocol in the real code, and see who notices: `python -m tests.model.seeded`.

It writes docs/architecture/rules.md; with words as arguments it plays only the rules that contain one of them, and
writes nothing. Each fault has a copy of the tree of its own.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from outbox import __version__
from tests.model.rules import FAULTS
from tests.model.rules.fault import Fault

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture" / "rules.md"
HISTORIES = "tests/unit/test_order_machine.py::test_order"
SECONDS = 600


def main(words: list[str]) -> int:
    """Play the faults; the exit code is 1 if one of them is not noticed."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.rule for word in words)]
    with ThreadPoolExecutor(2) as pool:
        rows = []
        for fault, (by_histories, by_others) in zip(chosen, pool.map(noticed_by, chosen), strict=True):
            print(f"{fault.rule:75} {by_histories or '-':70} {by_others or '-'}", flush=True)
            rows.append((fault, by_histories, by_others))
    if not words:
        PAGE.write_text(page(rows))
    return int(any(not (by_histories or by_others) for _, by_histories, by_others in rows))


def noticed_by(fault: Fault) -> tuple[str, str]:
    """Return what the random histories say of a fault, and which test of the broken part fails first."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"), symlinks=True)
        path = tree / fault.file
        path.write_text(path.read_text().replace(fault.old, fault.new))
        by_histories = _failure(tree, HISTORIES)[1] if fault.in_histories else ""
        return by_histories, _failure(tree, *fault.tests)[0]


def _failure(tree: Path, *tests: str) -> tuple[str, str]:
    """Return the name of the first test that fails, and what it says; both empty if none does."""
    pytest = (sys.executable, "-m", "pytest", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", "-rf")
    try:
        run = subprocess.run(
            (*pytest, *tests),
            cwd=tree,
            env=os.environ | {"COLUMNS": "400"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s", f"no end within {SECONDS} s"
    if run.returncode == 0:
        return "", ""
    name, said = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*?\])?(?: - (.*))?$", run.stdout, re.MULTILINE).groups()
    return name, _shortened(said or "an error")


def _shortened(said: str) -> str:
    """Return it as one line for the terminal."""
    return re.sub(r"\s+", " ", said).removeprefix("AssertionError: ")[:90]


def page(rows: list[tuple[Fault, str, str]]) -> str:
    """Return the page in docs."""
    lines = "\n".join(
        f"| {fault.rule} | {'yes' if by_histories else '-' if fault.in_histories else ''} | `{by_others or '-'}` |"
        for fault, by_histories, by_others in rows
    )
    asked, noticed = sum(fault.in_histories for fault, *_ in rows), sum(bool(said) for _, said, _ in rows)
    return f"""# Every rule of the protocol, broken

What `python -m tests.model.seeded` wrote on {datetime.now(UTC):%Y-%m-%d}, with spanner-outbox {__version__}: each rule
is broken in a copy of the code, by the replacement that `tests/model/rules` holds, and the tests are run on it.
*Histories* is the random machine in its short form, 200 of them ([what it is](model.md)). It notices {noticed} of
{asked}; `-` says that it does not, nothing that it has none of what the rule is about, as shards, polls, processes or
Spanner. The last column is the first test of the broken part that fails.

| rule | histories | first test that fails |
|---|---|---|
{lines}
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

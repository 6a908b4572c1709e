"""An application that is checked strictly: each wrong call of `outbox` is an error, and no right one is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APPLICATION = ROOT / "tests/typing/application.py"
WRONG = [n for n, line in enumerate(APPLICATION.read_text(encoding="utf-8").splitlines(), 1) if "# error" in line]


def check(*command: str) -> str:
    """Return what a type checker writes. It ends with 1, because it finds errors."""
    done = subprocess.run([*command, str(APPLICATION)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_mypy_finds_each_wrong_call_and_no_other() -> None:
    """With the options of an application, not ours: it follows no untyped imports, so their classes are Any."""
    found = check(
        sys.executable, "-m", "mypy", "--config-file=", "--strict", "--untyped-calls-exclude=google",
        "--follow-imports=silent", "--cache-dir=.mypy_cache/application",
    )  # fmt: skip
    assert [int(line) for line in re.findall(r"application\.py:(\d+): error", found)] == WRONG, found


def test_the_examples_name_their_types() -> None:
    """`make lint` checks them strictly, which `Any` would hide."""
    assert [file for file in (ROOT / "docs/examples").rglob("*.py") if re.search(r"\bAny\b", file.read_text())] == []


@pytest.mark.extended
def test_an_example_passes_with_the_options_of_the_page() -> None:
    """As in a project of its own, without our configuration."""
    page = (ROOT / "docs/guide/register.md").read_text(encoding="utf-8")
    [options] = re.findall(r"`mypy (--strict [^`]+)`", page)
    more = ("--config-file=", "--explicit-package-bases", "--cache-dir=.mypy_cache/examples")
    command = (sys.executable, "-m", "mypy", *options.split(), *more, "docs/examples/fastapi_orders")
    environment = os.environ | {"MYPYPATH": "docs/examples"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.extended  # mypy finds the same errors
def test_pyright_finds_each_wrong_call_and_no_other() -> None:
    """By basedpyright, because the package pyright downloads its program when it first runs."""
    found = check(
        sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--level", "error", "--outputjson"
    )
    diagnostics = json.loads(found)["generalDiagnostics"]
    assert [each["range"]["start"]["line"] + 1 for each in diagnostics] == WRONG, found

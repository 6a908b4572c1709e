"""Run the tests on other Python versions and dependencies: `make test-versions` prints rows of the page versions.md.

Each run has its own environment below build/versions. A Python version that is not installed is reported and left out.
"""

import argparse
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
UV = Path(sys.executable).with_name("uv")
TESTS = ("tests/unit", "tests/contract", "tests/integration")
#: The tests of `make test`; the extended ones would take an hour for each run.
QUICK = "not extended and not long"
#: The tests of what applications import, with a client that is too old for the worker.
LIBRARY = (
    *("tests/unit/test_inbox.py", "tests/unit/test_inbox_batches.py", "tests/unit/test_testing.py"),
    *("tests/integration/test_register_spanner.py", "tests/integration/test_inbox.py"),
    "tests/integration/test_drivers.py",
)
#: The packages whose versions the page shows.
CLIENTS = ("google-cloud-spanner", "google-cloud-pubsub", "protobuf")
PINNED = ("--constraint", "constraints.txt")
#: uv finds a Python of pyenv only if its own folder is in the path.
PATH = os.pathsep.join([*map(str, Path.home().glob(".pyenv/versions/*/bin")), os.environ["PATH"]])


class Run(NamedTuple):
    """A Python version, the flags that choose the dependencies, the tests, and the packages to show."""

    python: str
    flags: tuple[str, ...]
    tests: tuple[str, ...] = TESTS
    shown: tuple[str, ...] = CLIENTS
    extras: str = "[worker,spark]"

    @classmethod
    def of_spark(cls, python: str, *flags: str) -> "Run":
        """Return a run of the jobs."""
        return cls(python, flags, ("tests/pipeline",), ("pyspark", "pyarrow", "pandas"))


RUNS = {
    "pinned-3.11": Run("3.11", PINNED),
    "pinned-3.12": Run("3.12", PINNED),
    "pinned-3.13": Run("3.13", PINNED),
    "pinned-3.14": Run("3.14", PINNED),
    "floor": Run("3.11", ("--resolution", "lowest-direct", "--override", "tools/floor.txt"), LIBRARY, extras=""),
    "oldest": Run("3.11", ("--resolution", "lowest-direct")),
    "newest": Run("3.13", ("--upgrade",)),
    "spark-oldest": Run.of_spark("3.11", "--resolution", "lowest-direct"),
    "spark-newest": Run.of_spark("3.13", "--upgrade"),
    "spark-3.14": Run.of_spark("3.14", *PINNED),
}


def main() -> int:
    """Run the chosen tests; return 1 if a test fails or no Python is found."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make test-versions")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"default: {' '.join(RUNS)}")
    parser.add_argument("--pytest", default="", help="flags for pytest")
    arguments = parser.parse_args()
    if unknown := set(arguments.runs) - RUNS.keys():
        parser.error(f"unknown run {', '.join(sorted(unknown))}. Choose from {', '.join(RUNS)}")
    codes = [exit_code_of(name, arguments.pytest.split()) for name in arguments.runs or RUNS]
    return max((code for code in codes if code is not None), default=1)


def exit_code_of(name: str, flags: list[str]) -> int | None:
    """Run the tests and print their row; return pytest's exit code, or None without that Python version."""
    run = RUNS[name]
    python = FOLDER / name / "bin" / "python"
    if _uv("venv", "--clear", "--no-python-downloads", "--python", run.python, python.parents[1]):
        print(f"{name}: Python {run.python} is not installed, so it is not tested. Install it and run again.")
        return None
    groups = ("--group", "test", "--group", "bench", "--group", "install")  # some tests run uv and draw plots
    if _uv("pip", "install", "--python", python, *run.flags, *groups, "--editable", f".{run.extras}"):
        print(f"{name}: installing the dependencies failed; see the messages of uv above.")
        return 1
    report, began = FOLDER / f"{name}.xml", time.monotonic()
    flags = [*flags, "-m", QUICK, f"--junit-xml={report}"]
    command: list[str | Path] = [python, "-m", "pytest", *run.tests, *flags]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if report.exists():
        print(_row(name, python, run.shown, report, (time.monotonic() - began) / 60))
    return done.returncode


def _uv(*arguments: str | Path) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"} | {"PATH": PATH}
    return subprocess.run([UV, *arguments, "--quiet"], cwd=ROOT, check=False, env=environment).returncode


def _row(name: str, python: Path, shown: tuple[str, ...], report: Path, minutes: float) -> str:
    code = f"import platform as p, importlib.metadata as m; print(p.python_version(), *map(m.version, {shown}))"
    versions = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    suite = ET.parse(report).find("testsuite")
    assert suite is not None
    total, failed, errors, skipped = (int(suite.attrib[each]) for each in ("tests", "failures", "errors", "skipped"))
    counts = (total - failed - errors - skipped, failed + errors, skipped)
    cells = (name, f"{datetime.now(UTC):%Y-%m-%d}", *versions, *(f"{each:,}" for each in counts), f"{minutes:.0f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())

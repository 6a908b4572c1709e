"""The modules that an import of the library and a health check load."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_importing_the_library_imports_no_worker_and_no_datadog() -> None:
    code = "import sys, json, outbox, outbox.inbox; outbox.register; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert "outbox" in loaded
    others = {"publishworker", "datadog", "pyspark", "pandas", "sqlalchemy", "django", "google.cloud.spanner_dbapi"}
    assert not others & set(loaded)
    operators = ("outbox.reading", "outbox.program", "outbox.admin", "outbox.cli", "outbox.table.connection")
    assert not [name for name in loaded if name.startswith(operators)]


def test_only_the_command_imports_its_folder() -> None:
    for package in ("outbox", "publishworker", "outbox_pipeline"):
        for file in (ROOT / package).rglob("*.py"):
            if file.parent.name != "cli" and file != ROOT / "outbox/__main__.py":
                assert "outbox.cli" not in file.read_text(), file


def test_a_command_that_needs_no_service_imports_no_client() -> None:
    """The clients take half a second to import, and a shell completes or a person reads the help in less."""
    code = (
        "import contextlib, sys\nfrom outbox.cli import main\n"
        "for words in ('--version', '--help', 'help retry', '', 'schema print', 'pause --project', 'lst'):\n"
        "    with contextlib.suppress(SystemExit): main(words.split())\n"
        "print('loaded', *sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rpartition("loaded ")[2].split())
    assert "outbox.cli.task_commands" in loaded
    assert not {"google.cloud.spanner", "google.cloud.spanner_v1", "google.pubsub_v1", "grpc", "publishworker"} & loaded


def test_the_names_of_the_library_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, outbox\n"
        "assert set(outbox.__all__) <= set(dir(outbox)) and 'grpc' not in sys.modules\n"
        "from outbox import *\nassert register is outbox.register and issubclass(InvalidMessage, OutboxError)\n"
        "assert all(name in globals() for name in outbox.__all__)\n"
        "try: outbox.registered\nexcept AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("module 'outbox' has no attribute 'registered'\n", "")


@pytest.mark.extended
def test_packages_in_a_zip_have_their_files(tmp_path: Path) -> None:
    """The DDL, the files and templates of the console, and the log configuration of Spark."""
    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as packed:
        for folder, name in (("outbox", "outbox"), ("outbox_pipeline", "outbox_pipeline"), ("schema", "outbox/ddl")):
            for file in (ROOT / folder).rglob("*"):
                if file.suffix != ".pyc":
                    packed.write(file, f"{name}/{file.relative_to(ROOT / folder)}")
    code = (
        "from outbox.table import ddl\nimport outbox\n"
        "from outbox.console.visits import _ENVIRONMENT, FILES\nfrom outbox_pipeline.spark import session\n"
        "print(outbox.__file__, len(ddl.text('roles.sql')) > 1000, 'console.js' in FILES,\n"
        "      _ENVIRONMENT.get_template('overview.html').name, session._LOGGING.is_file())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "packages.zip")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [
        f"{tmp_path}/packages.zip/outbox/__init__.py",
        "True",
        "True",
        "overview.html",
        "True",
    ]


def test_the_health_check_imports_the_standard_library_only(tmp_path: Path) -> None:
    """A probe that imports the clients costs half a second of CPU, every few seconds, for ever."""
    code = (
        "import sys\nfrom publishworker.process.cli import main\n"
        f"main(['healthcheck', '--heartbeat-file', {str(tmp_path / 'none')!r}])\nprint(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = set(sys.stdlib_module_names) | {"publishworker", "__main__"}
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    foreign = {
        name for name in loaded - allowed if not name.startswith(("_", "a1_coverage", "coverage", "sitecustomize"))
    }
    assert "publishworker" in loaded
    assert not foreign


def test_the_relay_reads_no_clock_of_its_machine() -> None:
    """Each time comes from the database. A worker only tells when it has started."""
    folders = [ROOT / "publishworker" / name for name in ("delivery", "pubsub", "spanner", "topics", "turn")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    readers = {file.name for file in files if re.search(r"time\.time\(|datetime\.now\(", file.read_text())}
    assert readers == {"grants.py", "membership.py"}

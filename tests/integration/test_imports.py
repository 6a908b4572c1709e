"""The modules that an import of the library and a health check load."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def printed(*code: str, **options: Any) -> list[str]:
    """Return the words that a new process prints."""
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(code)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options).stdout.split()


def test_importing_the_library_imports_no_worker_and_no_datadog() -> None:
    loaded = printed("import sys, outbox, outbox.inbox; outbox.register; print(*sys.modules)")
    assert "outbox" in loaded
    others = {"publishworker", "datadog", "pyspark", "pandas", "sqlalchemy", "django", "google.cloud.spanner_dbapi"}
    assert not others & set(loaded)
    operators = ("outbox.reading", "outbox.program", "outbox.admin", "outbox.cli", "outbox.table.connection")
    assert not [name for name in loaded if name.startswith(operators)]


def test_loading_the_plugin_of_pytest_imports_no_google_client() -> None:
    assert not [name for name in printed("import sys, publishworker.testing; print(*sys.modules)") if "google." in name]


def test_only_the_command_imports_its_folder() -> None:
    for package in ("outbox", "publishworker", "outbox_pipeline"):
        for file in (ROOT / package).rglob("*.py"):
            if file.parent.name != "cli" and file != ROOT / "outbox/__main__.py":
                assert "outbox.cli" not in file.read_text(), file


def test_a_command_that_needs_no_service_imports_no_client() -> None:
    """The clients take half a second to import, and a shell completes or a person reads the help in less."""
    words = printed(
        "import contextlib, sys",
        "from outbox.cli import main",
        "for words in ('--version', '--help', 'help retry', '', 'schema print', 'pause --project', 'lst'):",
        "    with contextlib.suppress(SystemExit): main(words.split())",
        "print('these-are-loaded', *sys.modules)",
        stderr=subprocess.DEVNULL,
    )
    loaded = set(words[words.index("these-are-loaded") :])
    assert "outbox.cli.task_commands" in loaded
    assert not {"google.cloud.spanner", "google.cloud.spanner_v1", "google.pubsub_v1", "grpc", "publishworker"} & loaded


def test_the_names_of_the_library_are_imported_when_they_are_used() -> None:
    words = printed(
        "import sys, outbox",
        "assert set(outbox.__all__) <= set(dir(outbox)) and 'grpc' not in sys.modules",
        "from outbox import *",
        "assert register is outbox.register and issubclass(InvalidMessage, OutboxError)",
        "assert all(name in globals() for name in outbox.__all__)",
        "try: outbox.registered",
        "except AttributeError as error: print(error)",
        stderr=subprocess.STDOUT,
    )
    assert " ".join(words) == "module 'outbox' has no attribute 'registered'"


@pytest.mark.extended
def test_packages_in_a_zip_have_their_files(tmp_path: Path) -> None:
    """The DDL, the files and templates of the console, and the log configuration of Spark."""
    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as packed:
        for folder, name in (("outbox", "outbox"), ("outbox_pipeline", "outbox_pipeline"), ("schema", "outbox/ddl")):
            for file in (ROOT / folder).rglob("*"):
                if file.suffix != ".pyc":
                    packed.write(file, f"{name}/{file.relative_to(ROOT / folder)}")
    words = printed(
        "import outbox",
        "from outbox.console.visits import _ENVIRONMENT, FILES",
        "from outbox.table import ddl",
        "from outbox_pipeline.spark import session",
        "print(outbox.__file__, len(ddl.text('roles.sql')) > 1000, 'console.js' in FILES)",
        "print(_ENVIRONMENT.get_template('overview.html').name, session._LOGGING.is_file())",
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "packages.zip")},
    )
    assert words == [f"{tmp_path}/packages.zip/outbox/__init__.py", "True", "True", "overview.html", "True"]


def test_the_health_check_imports_the_standard_library_only(tmp_path: Path) -> None:
    """A probe that imports the clients costs half a second of CPU, every few seconds, for ever."""
    words = printed(
        "import sys",
        "from publishworker.process.cli import main",
        f"main(['healthcheck', '--heartbeat-file', {str(tmp_path / 'none')!r}])",
        "print('these-are-loaded', *sys.modules)",
    )
    loaded = {name.split(".")[0] for name in words[words.index("these-are-loaded") + 1 :]}
    foreign = loaded - set(sys.stdlib_module_names) - {"publishworker", "__main__"}
    assert "publishworker" in loaded
    assert not [name for name in foreign if not name.startswith(("_", "a1_coverage", "coverage", "sitecustomize"))]


def test_the_relay_reads_no_clock_of_its_machine() -> None:
    """Each time comes from the database. A worker only tells when it has started."""
    folders = [ROOT / "publishworker" / name for name in ("delivery", "pubsub", "spanner", "topics", "turn")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    readers = {file.name for file in files if re.search(r"time\.time\(|datetime\.now\(", file.read_text())}
    assert readers == {"grants.py", "membership.py"}

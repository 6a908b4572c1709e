"""Which modules import each other, and what a program loads."""

import ast
import graphlib
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
    others = {
        "publishworker",
        "outbox_admin",
        "datadog",
        "pyspark",
        "pandas",
        "sqlalchemy",
        "django",
        "google.cloud.spanner_dbapi",
    }
    assert not others & set(loaded)
    operators = ("outbox.reading", "outbox.program", "outbox.rows", "outbox.table.connection")
    assert not [name for name in loaded if name.startswith(operators)]


def test_loading_the_plugin_of_pytest_imports_no_google_client() -> None:
    assert not [name for name in printed("import sys, publishworker.testing; print(*sys.modules)") if "google." in name]


def test_a_command_that_needs_no_service_imports_no_client() -> None:
    """The clients take half a second to import, and a shell completes or a person reads the help in less."""
    words = printed(
        "import contextlib, sys",
        "from outbox_admin.cli import main",
        "for words in ('--version', '--help', 'help retry', '', 'schema print', 'pause --project', 'lst'):",
        "    with contextlib.suppress(SystemExit): main(words.split())",
        "print('these-are-loaded', *sys.modules)",
        stderr=subprocess.DEVNULL,
    )
    loaded = set(words[words.index("these-are-loaded") :])
    assert "outbox_admin.tasks.task_commands" in loaded
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
        for folder, name in (
            ("outbox", "outbox"),
            ("publishworker", "publishworker"),
            ("outbox_admin", "outbox_admin"),
            ("outbox_pipeline", "outbox_pipeline"),
            ("schema", "outbox/ddl"),
        ):
            for file in (ROOT / folder).rglob("*"):
                if file.suffix != ".pyc":
                    packed.write(file, f"{name}/{file.relative_to(ROOT / folder)}")
    words = printed(
        "import outbox",
        "from outbox_admin.web.visits import ENVIRONMENT, FILES",
        "from outbox.table import ddl",
        "from outbox_pipeline.spark import session",
        "print(outbox.__file__, len(ddl.text('roles.sql')) > 1000, 'console.js' in FILES)",
        "print(ENVIRONMENT.get_template('status/overview.html').name, session._LOGGING.is_file())",
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "packages.zip")},
    )
    assert words == [f"{tmp_path}/packages.zip/outbox/__init__.py", "True", "True", "status/overview.html", "True"]


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


#: The packages, each above those before it. Imports point down.
PACKAGES = ("outbox", "publishworker", "outbox_admin", "outbox_pipeline")


def module(file: Path) -> str:
    """Return the name by which a file is imported."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}


def imported(name: str) -> set[str]:
    """Return the modules of ours that a module imports, wherever the import stands, also for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: a relative import"
            found |= {
                each if (each := f"{node.module}.{alias.name}") in FILES else str(node.module) for alias in node.names
            }
    return found & FILES.keys()


IMPORTS = {name: imported(name) for name in FILES}


def package(name: str) -> int:
    """Return the place of a module's package."""
    return PACKAGES.index(name.partition(".")[0])


def folder(name: str) -> str:
    """Return the folder of a module, or the file if it lies beside the folders of its package."""
    path = FILES[name].relative_to(ROOT)
    return str(path.parent if len(path.parts) > 2 else path)


def test_no_import_points_up() -> None:
    """`outbox_pipeline` is above `outbox_admin`, above `publishworker`, above `outbox`."""
    up = {(name, each) for name, found in IMPORTS.items() for each in found if package(each) > package(name)}
    assert not up


def test_no_files_import_each_other_in_a_circle() -> None:
    """Also not lazily, and not for a type."""
    graphlib.TopologicalSorter(IMPORTS).prepare()  # the error names the circle


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Each folder is on a floor of its own. The face of the operators, which hands on modules, is on none."""
    folders: dict[str, set[str]] = {}
    for name, found in IMPORTS.items():
        if name != "outbox_admin":
            folders.setdefault(folder(name), set()).update({folder(each) for each in found - {"outbox_admin"}})
    graphlib.TopologicalSorter({name: found - {name} for name, found in folders.items()}).prepare()


def test_no_module_of_ours_is_imported_by_a_text() -> None:
    """No tool sees such an import. `importer` also imports for type checkers what it imports at the first use."""
    by_text = {name for name, file in FILES.items() if re.search(r"\b(import_module|__import__)\(", file.read_text())}
    assert by_text == {"outbox.base.start", "publishworker.telemetry.clients"}  # the latter those of OpenTelemetry
    for name, file in FILES.items():
        given = re.search(r"\bimporter\(\s*__name__,\s*(\{.*?\})\s*,?\s*\)", file.read_text(), re.DOTALL)
        if given:
            modules = {
                f"{name}.{each}"
                for key, names in ast.literal_eval(given[1]).items()
                for each in key.split() or names.split()
            }
            assert modules <= IMPORTS[name], name


@pytest.mark.parametrize(
    ("code", "most", "absent"),
    [
        pytest.param("import outbox; outbox.register", 1_500, ("outbox.rows", "outbox.table.ddl"), id="application"),
        pytest.param("from publishworker.process import cli; cli._parser()", 10_800, (), id="worker"),
    ],
)
def test_a_program_loads_no_more_than_a_reader_can_read(code: str, most: int, absent: tuple[str, ...]) -> None:
    loaded = FILES.keys() & printed(f"import sys; {code}; print(*sys.modules)")
    assert not [name for name in loaded if name.startswith(("outbox_admin", *absent))]
    assert sum(len(FILES[name].read_text(encoding="utf-8").splitlines()) for name in loaded) <= most

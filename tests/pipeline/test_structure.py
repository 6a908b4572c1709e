"""Rules for the modules of the package: no rows on the driver, and transformations without input or output."""

import ast
from pathlib import Path

import pytest

import outbox_pipeline

FOLDER = Path(outbox_pipeline.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))
#: Methods that collect rows on the driver.
TO_DRIVER = {"collect", "toPandas", "toLocalIterator", "take", "head", "first", "tail", "show", "toArrow"}
#: Their allowed uses: rows of counts, the first line of a file, and a few rows for people.
OF_FEW = {
    "jobs/archive/job.py": 2,
    "jobs/drain/job.py": 1,
    "jobs/register/job.py": 1,
    "spark/tasks.py": 1,
}
PURE = [
    *FOLDER.rglob("transforms.py"),
    FOLDER / "jobs" / "audit" / "received.py",
    FOLDER / "spark" / "tasks.py",
]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_rows_are_collected_on_the_driver(module: Path):
    tree = ast.parse(module.read_text(encoding="utf-8"))
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [each.attr for each in called if isinstance(each, ast.Attribute) and each.attr in TO_DRIVER]
    assert len(calls) == OF_FEW.get(str(module.relative_to(FOLDER)), 0), calls


@pytest.mark.parametrize("module", PURE, ids=lambda path: str(path.relative_to(FOLDER)))
def test_transformations_import_neither_spanner_nor_files(module: Path):
    tree = ast.parse(module.read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if "spanner" in name or name.endswith((".files", ".jobs", ".session"))]

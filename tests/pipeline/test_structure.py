"""What the shape of the package promises: no data on the driver, nothing that is made at import."""

import ast
from pathlib import Path

import pytest

import outbox_pipeline

FOLDER = Path(outbox_pipeline.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))
#: What brings rows of a DataFrame to the driver.
TO_DRIVER = {"collect", "toPandas", "toLocalIterator", "take", "head", "first", "tail", "show", "toArrow"}
#: Where it is used: on rows of counts, on the first line of a file, and on a few rows that a person reads.
OF_FEW = {
    "jobs/archive.py": 2,
    "jobs/audit.py": 3,
    "jobs/drain.py": 1,
    "jobs/register.py": 1,
    "jobs/replay.py": 3,
}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_rows_come_to_the_driver(module: Path) -> None:
    """Its memory does not grow with the data."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    calls = [
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TO_DRIVER
    ]
    assert len(calls) == OF_FEW.get(str(module.relative_to(FOLDER)), 0), calls


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_transformations_know_neither_spanner_nor_files(module: Path) -> None:
    """They are pure: from DataFrame to DataFrame."""
    if "transforms" not in module.parts:
        return
    tree = ast.parse(module.read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if "spanner" in name or name.endswith((".files", ".jobs", ".session"))]

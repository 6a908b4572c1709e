"""Which tests `make test` runs: at least one for every promise."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import quick

ROOT = Path(__file__).parents[2]
SLOWER = re.compile(r"pytest\.mark\.(extended|long)\b")


def promises() -> Iterator[tuple[str, list[str]]]:
    page = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    for promise, tests in re.findall(r"^\| (.+) \| (\[test\]\(.+) \|$", page, re.MULTILINE):
        links = re.findall(r"\]\(\.\./(tests/[^)#]+)#?(\w*)\)", tests)
        yield promise, [f"{path}::{name}" if name else path for path, name in links]


def is_quick(test: str) -> bool:
    path, _, name = test.partition("::")
    if path.startswith("tests/pipeline/"):
        return name in quick.SPARK
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    if any(SLOWER.search(ast.unparse(node)) for node in tree.body if isinstance(node, ast.Assign)):
        return False
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return any(
        not SLOWER.search(" ".join(map(ast.unparse, each.decorator_list)))
        for each in functions
        if each.name == name or (not name and each.name.startswith("test_"))
    )


@pytest.mark.parametrize(("promise", "tests"), list(promises()))
def test_make_test_covers_every_promise(promise: str, tests: list[str]) -> None:
    """A promise that only `make test-all` covers would break unnoticed for too long."""
    assert any(map(is_quick, tests)), promise


def test_the_page_has_promises() -> None:
    """The test above reads the table, whatever its form."""
    assert len(list(promises())) >= 15

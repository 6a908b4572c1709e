"""Each guarantee has a name, which is at its place in the specification, in the code and at its tests."""

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TAG = re.compile(r"\bOUT-[A-Z]+-\d+\b")
GUARANTEES = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/architecture/specification.md").read_text(encoding="utf-8")
_FILES = ("protocol.py", "state.py", "conformance.py", "shards.py")
SPECIFICATION = [ROOT / "tests/specification" / name for name in _FILES]
NAMED = re.findall(r"^\| (OUT-[A-Z]+-\d+) \|", GUARANTEES, re.MULTILINE)


def tags(files: Iterable[Path]) -> set[str]:
    return {tag for file in files for tag in TAG.findall(file.read_text(encoding="utf-8"))}


def test_each_guarantee_has_one_name() -> None:
    assert len(NAMED) == len({*NAMED}) == len(re.findall(r"^\| .*\[test\]", GUARANTEES, re.MULTILINE))
    assert {*NAMED} == {*TAG.findall(GUARANTEES)}


def test_the_specification_has_each_name_or_the_page_says_why_not() -> None:
    specified, not_specified = tags(SPECIFICATION), {*TAG.findall(PAGE)}
    assert specified | not_specified == {*NAMED}
    assert not specified & not_specified


def test_the_code_has_each_name() -> None:
    code = [file for name in ("outbox", "publishworker", "outbox_pipeline") for file in (ROOT / name).rglob("*.py")]
    files = {*code, *(ROOT / "schema").rglob("*.sql")}.difference(SPECIFICATION)
    assert tags(files) == {*NAMED}


def test_the_tests_have_each_name() -> None:
    """A comment where the test begins; or the docstring of the module, if the guarantee names all its tests."""
    files = {*(ROOT / "tests").rglob("*.py")}.difference(SPECIFICATION)
    assert tags(files) == {*NAMED}
    rows = re.findall(r"^\| (OUT-\S+) \|.*\| (.+) \|$", GUARANTEES, re.MULTILINE)
    for tag, links in rows:
        for path, name in re.findall(r"\]\(\.\./(tests/[^)#]+)#?(\w*)\)", links):
            text = (ROOT / path).read_text(encoding="utf-8")
            begin = re.search(rf"def {name}\((?:.|\n)*?:  # (.+)", text) if name else re.search(r'"""(.+)', text)
            assert begin is not None, (tag, path, name)
            assert tag in TAG.findall(begin[1]), (tag, path, name)

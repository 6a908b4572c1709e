"""The documentation agrees with the code and with the figures, and all dependencies have an allowed licence."""

import argparse
import ast
import functools
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import astuple
from importlib import metadata
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import outbox
import outbox.testing
from outbox.base import schedules
from outbox_admin import cli
from outbox_pipeline import cli as pipeline
from publishworker.process import cli as worker
from publishworker.process.worker_settings import RelaySettings
from tests.faults import page as faults
from tests.support.statements import scans
from tools.benchmarks import page as benchmarks
from tools.benchmarks import results
from tools.benchmarks.cost import cost
from tools.scale import __main__ as scale

ROOT = Path(__file__).parents[2]
#: Every page but those of installed packages, caches, whose folders begin with a dot, and what targets of make write.
PAGES = sorted(
    page
    for folder in ROOT.glob("[!.]*")
    if folder.name not in {"build", "dist", "mutants"}
    for page in (folder.rglob("*.md") if folder.is_dir() else [folder])
    if page.suffix == ".md" and "site-packages" not in page.parts
)
STATEMENTS = [f"A{number:02}" for number in range(1, 51)]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@functools.cache
def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code, where brackets are no links."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[tuple[str, str]]:
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("https://", "http://")):
            yield text, target


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the targets of links in a page: its headings, as GitHub writes them, and its own anchors."""
    text = prose(page)
    headings = [re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ +(.+)$", text, re.MULTILINE)]
    return {heading.strip().replace(" ", "-") for heading in headings} | set(re.findall(r'<a id="([^"]+)">', text))


@functools.cache
def defined(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return named | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def row_cells(page: Path) -> list[list[str]]:
    lines = [line for line in prose(page).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@functools.cache
def script(name: str) -> Any:
    """Return a script of docs as a module; `site` is also a module of Python, so `docs` is last in the path."""
    if (folder := str(ROOT / "docs")) not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"{name}_pages", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate, licences, python_reference, site = (
    functools.partial(script, name) for name in ("generate", "licences", "python_reference", "site")
)


def test_generated_pages_match_the_code() -> None:
    """A new setting or metric without `make docs` fails here."""
    pages = generate().pages()
    for_people = {"settings.md", "metrics.md", "errors.md", "python.md", "statements.md"}
    modules = {python_reference().module_page(module).name for module in python_reference().PYTHON}
    assert {page.name for page in pages} == {*for_people, *modules, "settings.schema.json", "metadata.csv", "llms.txt"}
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text, "run `make docs`"


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a parser with its flags."""
    yield name, [flag for each in parser._actions for flag in each.option_strings if flag.startswith("--")]
    for each in parser._actions:
        for word, command in each.choices.items() if isinstance(each, argparse._SubParsersAction) else ():
            yield from commands(command, f"{name} {word}")


def test_each_flag_is_in_the_docs() -> None:
    """Of the worker and the jobs, on the page of the settings: in a row of a setting, or of the command."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    rows = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8").splitlines()
    programs = {"outbox": cli, "outbox-pipeline": pipeline, "publishworker": worker}
    for name, flags in (each for program, module in programs.items() for each in commands(module._parser(), program)):
        words = ("| `--", f"| `{' '.join(name.split()[:2])}`", "| `outbox-pipeline JOB`")
        places = text if name.startswith("outbox ") else "\n".join(row for row in rows if row.startswith(words))
        missing = [flag for flag in flags if not re.search(rf"{flag}(?![-\w])", places)]
        assert {*missing} <= {"--help", "--version"}, name


def test_the_python_page_has_every_public_name() -> None:
    """`__version__` needs no explanation."""
    for module in (outbox, outbox.testing):
        assert set(python_reference().PYTHON[module.__name__]) == {*module.__all__} - {"__version__"}
    functions = {
        (module, name) for module, name, found in python_reference().public() if type(found).__name__ == "Function"
    }
    assert functions <= python_reference().examples().keys(), "each function has an example on a guide"


@each_page
def test_code_of_a_page_uses_public_names(page: Path) -> None:
    """What a page tells people to import has a place in the reference."""
    public, packages = python_reference().PYTHON, ("outbox", "publishworker", "outbox_admin", "outbox_pipeline")
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        code = re.sub("^%.*$", "", block, flags=re.MULTILINE)  # a command of a notebook
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in packages:
                for each in node.names:
                    assert f"{node.module}.{each.name}" in public or each.name in public[str(node.module)], each.name
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = python_reference().NAMES.get(node.value.id, node.value.id)
                assert f"{module}.{node.attr}" in public or node.attr in public.get(module, node.attr), node.attr


def test_result_pages_match_the_results(tmp_path: Path) -> None:
    """Their figures are not edited by hand, and each fault scenario has its promise."""
    benchmarks.write(results.load(), tmp_path / "benchmarks.md")
    assert benchmarks.PAGE.read_text(encoding="utf-8") == (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    page = scale.PAGE.read_text(encoding="utf-8")
    assert page == scale.text(results.load(scale.FILE), page)
    kept = json.loads(faults.KEPT.read_text(encoding="utf-8"))
    page = faults.PAGE.read_text(encoding="utf-8")
    assert page == faults.text(kept, page)
    scenarios = faults.scenarios().values()
    assert all("No task is lost" in each.promise for each in scenarios)
    assert {each.file for each in scenarios} == {file.name for file in (ROOT / "tests/faults").glob("test_*.py")}


@each_page
def test_links_have_targets(page: Path) -> None:
    for text, target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"[{text}]({target})"
        assert not anchor or anchor in (defined if path.endswith(".py") else anchors)(linked), f"[{text}]({target})"
        name = re.fullmatch(r"`(?:\w+\.)?(\w+)`", text)
        if name and target.endswith(".py") and not text.endswith(".py`"):
            assert name[1] in defined(linked), f"[{text}]({target})"


@each_page
def test_named_tests_exist(page: Path) -> None:
    for file, test in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file(), file
        assert not test or test in defined(ROOT / file), f"{file}::{test}"


def test_every_page_is_in_the_index_the_navigation_and_the_list_for_machines() -> None:
    docs = ROOT / "docs"
    pages = {page.relative_to(docs) for page in PAGES if page.is_relative_to(docs)}
    shown = sorted(str(page) for page in pages if page.parts[0] not in site().NOT_SHOWN)
    navigation = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    for_machines = re.findall(r"^- \[[^]]+\]\(\S+/main/docs/(\S+)\)", (docs / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(for_machines) == shown
    linked = {(docs / target.partition("#")[0]).resolve() for _, target in links(docs / "README.md")}
    assert {docs / page for page in pages if "examples" not in page.parts and page.name != "README.md"} <= linked


@each_page
def test_make_targets_exist(page: Path) -> None:
    """`make something` in a page is a target of the Makefile; the README has the two that a newcomer types first."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = re.findall(r"(?:`|^    |\$ )make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= targets
    assert page != ROOT / "README.md" or {"demo", "test"} <= set(named)


@each_page
def test_statements_scan_neither_the_table_nor_an_index(page: Path) -> None:
    """Blocks of SQL, and statements in commands. The same rule as for the statements of the product."""
    text = page.read_text(encoding="utf-8")
    statements = re.findall(r"^```sql\n(.*?)^```|--sql=\"([^\"$]+)\"", text, re.MULTILINE | re.DOTALL)
    assert [found for pair in statements for found in scans("".join(pair))] == []


def test_documented_limits_match_the_code() -> None:
    rows = [
        cells for cells in row_cells(ROOT / "docs/reference/limits.md") if re.match(r"`\w+(\.\w+)+\.[A-Z]", cells[0])
    ]
    assert len(rows) >= 10
    names = {name.strip("`").rpartition(".")[2] for name, _, _ in rows}
    assert {name for name, value in vars(schedules).items() if isinstance(value, schedules.Schedule)} <= names
    for name, value, _ in rows:
        module, _, constant = name.strip("`").rpartition(".")
        found = getattr(importlib.import_module(module), constant)
        assert [*(found[:2] if isinstance(found, tuple) else [found])] == [*map(float, value.split(" to "))], name


def test_the_page_of_logs_has_every_action() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "publishworker").rglob("*.py"))
    actions = {"".join(found) for found in re.findall(r'"action": "(\w+)"|_log\.log\(\s*"(\w+)"', source)}
    listed = re.findall(r"`(\w+)`", (ROOT / "docs/reference/logs.md").read_text(encoding="utf-8"))
    assert "delivery_failed" in actions
    assert actions <= {*listed}


def test_every_statement_of_the_acceptance_list_has_a_line() -> None:
    rows = [cells for cells in row_cells(ROOT / "docs" / "acceptance.md") if re.fullmatch(r"A\d+", cells[0])]
    assert [cells[0] for cells in rows] == STATEMENTS
    for id, _, shown in rows:
        assert "::test_" in shown or "Not yet" in shown or "real service" in shown, id


def test_the_site_leads_to_files_in_the_repository_and_breaks_no_name() -> None:
    text = (
        "[a](register.md#x) [b](../../outbox_admin/web/) [c](../examples/orders/README.md#y) [d](https://e.org) [f](#g)"
    )
    assert site().on_site(text, ROOT / "docs/guide", "https://r") == (
        "[a](register.md#x) [b](https://r/tree/main/outbox_admin/web) "
        "[c](https://r/blob/main/docs/examples/orders/README.md#y) [d](https://e.org) [f](#g)"
    )
    assert site().on_site("![a](docs/pictures/x.png)", ROOT, "") == "![a](pictures/x.png)"
    tabs = "<!-- tabs -->\n**A B**\n\n1\n**C**\n\n2\n<!-- /tabs -->\n"
    assert site().on_site(tabs, ROOT / "docs", "").split("\n") == [
        '=== "A B"', "", "", "    1", "", '=== "C"', "", "", "    2", "", ""
    ]  # fmt: skip
    # A name is not broken into lines. A block of code and a command stay as they are.
    text = "`--batch-size`, `a b`,`c d`\n```sh\n`x`\n```\n"
    assert site().on_site(text, ROOT / "docs", "") == text.replace("size`", "size`{.name}")


#: Permissive ones, and the MPL, which asks only for the source of its own files. Ask a lawyer before you add another.
ALLOWED = {
    "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Zlib", "CC0-1.0"
}  # fmt: skip


def refused(licence: str) -> bool:
    """Return whether an expression is not allowed: of each OR, one side must be."""
    parts = re.split(r" AND ", licence)
    return not all({each.strip("() ") for each in part.split(" OR ")} & ALLOWED for part in parts)


def test_each_dependency_has_an_allowed_licence() -> None:
    found = {name: licences().licence(name) for name in licences().dependencies()}
    assert len(found) > 40
    assert refused("MIT AND LGPL-2.1-only")
    assert not refused("Apache-2.0 OR GPL-3.0-only")
    assert {name: licence for name, licence in found.items() if refused(licence)} == {}


def test_the_page_of_licences_is_up_to_date() -> None:
    """With the versions of constraints.txt; those of another environment may have other dependencies."""
    lines = re.findall(r"^[\w.-]+==.*?(?= \\$)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    # A package can have a version for each version of Python.
    pinned = [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate()]
    versions = {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in pinned}
    others = {name for name in licences().dependencies() if versions.get(name) != metadata.version(name)}
    if others:
        pytest.skip(f"other versions than those of constraints.txt are installed: {', '.join(sorted(others))}")
    assert licences().PAGE.read_text(encoding="utf-8") == licences().page(), "run `make docs`"


COSTS = ROOT / "docs/operations/scaling.md"


def test_full_batches_are_those_of_the_default_settings() -> None:
    default = RelaySettings.read(dict.fromkeys(("project", "instance", "database"), "my-shop"), {}).batch_size
    assert signature(cost).parameters["batch_size"].default == default
    assert f"({default} tasks of one topic, the default of `--batch-size`)" in " ".join(COSTS.read_text().split())


def test_the_cost_page_has_the_results_of_the_function() -> None:
    lines = COSTS.read_text().partition("| per million tasks |")[2].splitlines()[2:10]
    workloads: list[dict[str, int]] = [{}, {"batch_size": 1}, {"tasks_per_key": 10}, {"tasks_per_key": 1}]
    columns = [astuple(cost(1_000_000, **workload)) for workload in workloads]
    expected = [[f"{column[row]:,}" for column in columns] for row in range(len(columns[0]))]
    assert [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines] == expected

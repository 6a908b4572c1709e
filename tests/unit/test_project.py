"""The files of the project: guarantees with their tests, workflows of GitHub, releases, and locked packages."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

import tools
from tests.support import quick
from tools.changelog import missing_line
from tools.release import problems

ROOT = Path(__file__).parents[2]
SLOWER = re.compile(r"pytest\.mark\.(extended|long)\b")
TAG = re.compile(r"\bOUT-[A-Z]+-\d+\b")
GUARANTEES = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
#: The name of each guarantee, and its tests: each a file, and a function or an empty text for the whole file.
NAMED = {
    tag: re.findall(r"\]\(\.\./(tests/[^)#]+)#?(\w*)\)", links)
    for tag, links in re.findall(r"^\| (OUT-\S+) \|.*\| (.+) \|$", GUARANTEES, re.MULTILINE)
}
PAGE = (ROOT / "docs/architecture/specification.md").read_text(encoding="utf-8")
_FILES = ("protocol.py", "state.py", "conformance.py", "shards.py")
SPECIFICATION = [ROOT / "tests/specification" / name for name in _FILES]


def tags(files: Iterable[Path]) -> set[str]:
    return {tag for file in files for tag in TAG.findall(file.read_text(encoding="utf-8"))}


def is_quick(path: str, name: str) -> bool:
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


@pytest.mark.parametrize("tag", NAMED)
def test_make_test_covers_every_guarantee(tag: str) -> None:
    """A guarantee that only `make test-all` covers would break unnoticed for too long."""
    assert any(is_quick(*test) for test in NAMED[tag])


def test_each_guarantee_has_one_name() -> None:
    assert 15 <= len(NAMED) == len(re.findall(r"^\| .*\[test\]", GUARANTEES, re.MULTILINE))
    assert {*NAMED} == {*TAG.findall(GUARANTEES)}


def test_the_specification_has_each_name_or_the_page_says_why_not() -> None:
    specified, not_specified = tags(SPECIFICATION), {*TAG.findall(PAGE)}
    assert specified | not_specified == {*NAMED}
    assert not specified & not_specified


def test_the_code_has_each_name() -> None:
    code = [
        file
        for name in ("outbox", "publishworker", "outbox_admin", "outbox_pipeline")
        for file in (ROOT / name).rglob("*.py")
    ]
    assert tags([*code, *(ROOT / "schema").rglob("*.sql")]) == {*NAMED}


def test_the_tests_have_each_name() -> None:
    """A comment where the test begins; or the docstring of the module, if the guarantee names all its tests."""
    assert tags({*(ROOT / "tests").rglob("*.py")}.difference(SPECIFICATION)) == {*NAMED}
    for tag, (path, name) in ((tag, test) for tag, tests in NAMED.items() for test in tests):
        text = (ROOT / path).read_text(encoding="utf-8")
        begin = re.search(rf"def {name}\((?:.|\n)*?:  # (.+)", text) if name else re.search(r'"""(.+)', text)
        assert begin is not None, (tag, path, name)
        assert tag in TAG.findall(begin[1]), (tag, path, name)


WORKFLOW = ROOT / ".github/workflows/release.yml"
WORKFLOWS: dict[str, dict[str, Any]] = {
    file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(WORKFLOW.parent.glob("*.yml"))
}
JOBS: dict[str, Any] = WORKFLOWS["release"]["jobs"]
#: The commands of each workflow.
COMMANDS = {
    name: "\n".join(step["run"] for job in found["jobs"].values() for step in job.get("steps", []) if "run" in step)
    for name, found in WORKFLOWS.items()
}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", "workflows/*.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
        ("dependabot", "dependabot.yml"),
    ],
)
def test_each_file_matches_the_schema_of_github(schema: str, pattern: str) -> None:
    """check-jsonschema includes these schemas, so nothing is downloaded."""
    files = list((ROOT / ".github").glob(pattern))
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflows_call_make_targets_and_files_that_exist() -> None:
    """A renamed target or Dockerfile would be noticed only at the next release."""
    called = {name: re.findall(r"\bmake ([a-z-]+)", text) for name, text in COMMANDS.items()}
    assert called["release"] == ["release-check", "build", "dist-check", "docs"]
    assert called["nightly"] == ["lint", "test-real", "soak", "test"]
    targets = {each for found in called.values() for each in found}
    assert [name for name in targets if not re.search(rf"^{name}:", MAKEFILE, re.MULTILINE)] == []
    [(file, test)] = re.findall(r"(tests/\S+\.py)::(\w+)$", MAKEFILE.partition("\ndist-check:")[2].partition("\n\n")[0])
    assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")
    files = {
        each for text in COMMANDS.values() for each in re.findall(r"(?:--file|bash|python3) (\.?\w[\w./-]+)", text)
    }
    assert files == {".ci/run", ".github/emulators.sh", "k8s/Dockerfile", "tools/changelog.py"}
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_each_change_and_each_release_runs_all_tests() -> None:
    """YAML reads the key `on` as true."""
    on: Any = {str(key): value for key, value in WORKFLOWS["ci"].items()}["True"]
    assert {"push", "pull_request", "workflow_call"} <= on.keys()
    assert "bash .ci/run" in COMMANDS["ci"]
    assert JOBS["test"]["uses"] == "./.github/workflows/ci.yml"


def test_a_release_attests_where_nothing_else_has_run_and_ends_with_what_cannot_be_undone() -> None:
    """The package goes out after everything else exists, and what follows only names that."""
    build = [step.get("run", step.get("uses", "").partition("@")[0]) for step in JOBS["build"]["steps"]]
    assert [each for each in build if each.startswith("make")] == [build[2], "make build"]
    assert [name for name, job in JOBS.items() if "attestations" in job.get("permissions", {})] == ["build", "image"]
    order = {name: job.get("needs") for name, job in JOBS.items()}
    assert order == {
        "test": None, "build": "test", "check": "build", "image": "check", "site": "check",
        "package": ["image", "site"], "publish": "package", "pages": "publish",
    }  # fmt: skip


def test_actions_are_pinned_and_only_publishing_jobs_may_write() -> None:
    """A tag of an action can be moved to other code; a commit cannot. A name of a branch or a tag is no code."""
    for file in WORKFLOW.parent.glob("*.yml"):
        text = file.read_text(encoding="utf-8")
        lines = re.findall(r"uses: ([^.].*)", text)
        assert lines
        assert [line for line in lines if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
        assert "${{" not in COMMANDS[file.stem]
        assert WORKFLOWS[file.stem]["permissions"] == {"contents": "read"}
    allowed = {
        (name, right)
        for found in WORKFLOWS.values()
        for name, job in found["jobs"].items()
        for right, value in job.get("permissions", {}).items()
        if value == "write"
    }
    assert allowed == {
        ("build", "id-token"), ("build", "attestations"), ("image", "packages"), ("image", "id-token"),
        ("image", "attestations"), ("package", "id-token"), ("publish", "contents"), ("publish", "packages"),
        ("pages", "pages"), ("pages", "id-token"),
    }  # fmt: skip


def test_a_change_of_the_public_surface_needs_a_changelog_line() -> None:
    assert missing_line(["docs/reference/settings.md", "outbox/message.py"]).startswith(
        "docs/reference/settings.md changed"
    )
    assert missing_line(["schema/schema.sql", "CHANGELOG.md"]) == missing_line(["docs/tutorial.md"]) == ""
    assert "python3 tools/changelog.py" in COMMANDS["changelog"]


def test_a_release_needs_the_version_in_tag_and_changelog_and_its_own_repository(tmp_path: Path) -> None:
    """Each difference is reported with the values; without one nothing is reported."""
    (tmp_path / "outbox").mkdir()
    (tmp_path / "outbox/_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/my-org/outbox"\n')
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("## [Unreleased]\n")
    tag, changelog, repository = problems("v1.2.4", "https://github.com/other/outbox", tmp_path)
    assert tag == "The tag is v1.2.4, but outbox/_version.py has 1.2.3. Tag v1.2.3, or change the version first."
    assert "'## [1.2.3] - YYYY-MM-DD'" in changelog
    assert "https://github.com/other/outbox, but pyproject.toml names https://github.com/my-org/outbox" in repository
    changes.write_text("## [Unreleased]\n\n## [1.2.3] - 2026-12-01\n")
    assert list(problems("v1.2.3", "https://github.com/my-org/outbox", tmp_path)) == []
    list(problems("v0", "", ROOT))  # the files have the form that the check expects


LOCK = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [each.name for each in pkgutil.walk_packages(tools.__path__, "tools.")])
def test_a_module_of_tools_finds_what_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers of the tests, above all, which mypy does not check."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/examples"))
    importlib.import_module(name)


def test_each_package_has_a_version_and_hashes() -> None:
    """No line has an address, because the file is also for those who install from a mirror."""
    entries = re.split(r"(?<!\\)\n", LOCK)
    packages = [entry for entry in entries if entry and not entry.startswith("#")]
    assert len(packages) > 100
    pinned = re.compile(r"[a-z0-9-]+==\S+( ; [^\\]+)? (\\\n +--hash=sha256:[0-9a-f]{64} ?)+")
    assert [entry for entry in packages if not pinned.fullmatch(entry)] == []
    assert "://" not in LOCK


def test_what_builds_the_package_is_locked() -> None:
    """`make constraints` resolves all groups, and the group `build` has what the build names."""
    groups = PROJECT["dependency-groups"]
    assert set(PROJECT["build-system"]["requires"]) <= set(groups["build"])
    command = MAKEFILE.partition("\nconstraints:")[2]
    included = {each["include-group"] for group in groups.values() for each in group if isinstance(each, dict)}
    assert set(re.findall(r"--group ([a-z]+)", command)) | included == set(groups)
    assert "--all-extras" in command
    assert "--generate-hashes" in command


def test_a_package_with_another_hash_is_not_installed() -> None:
    install = MAKEFILE.partition("\nINSTALL = ")[2].partition("\n\n")[0]
    assert "pip install --quiet --python $(1) --require-hashes --constraint constraints.txt" in install

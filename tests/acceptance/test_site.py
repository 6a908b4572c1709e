"""The site: each release is built from its tag, in a repository of its own with three of them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What the site is built from, and no npm, so that nothing is downloaded."""
    if not (git := shutil.which("git")):
        pytest.skip("git is not installed")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").symlink_to(git)
    folder = tmp_path / "repository"
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "pyproject.toml"):
        shutil.copyfile(ROOT / name, folder / name)
    run(folder, "git", "init", "--quiet")
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": str(folder.parent / "bin")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def release(repository: Path, tag: str, title: str) -> None:
    """Tag a commit whose first page has this title."""
    page = repository / "docs/README.md"
    _, _, rest = page.read_text(encoding="utf-8").partition("\n")
    page.write_text(f"# {title}\n{rest}", encoding="utf-8")
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for words in (("add", "--all"), (*author, "commit", "--quiet", "--message", tag), ("tag", tag)):
        assert run(repository, "git", *words).returncode == 0


def test_each_minor_version_is_built_from_its_newest_tag(repository: Path) -> None:
    """A broken link in the working tree is in no release, and the selector lists the newest version first."""
    for tag, title in (("v0.9.0", "Nine"), ("v0.10.0", "Ten"), ("v0.10.1", "Ten, corrected"), ("v0.11.0rc1", "Soon")):
        release(repository, tag, title)
    (repository / "docs/README.md").write_text("[broken](nowhere.md)\n", encoding="utf-8")
    done = run(repository, sys.executable, "docs/site.py", "--releases")
    assert done.returncode == 0, done.stdout + done.stderr
    built = repository / "build/site"
    assert json.loads((built / "versions.json").read_text()) == [
        {"version": "0.10", "title": "0.10.1", "aliases": ["latest"]},
        {"version": "0.9", "title": "0.9.0", "aliases": []},
    ]
    assert sorted(path.name for path in built.iterdir() if path.is_dir()) == ["0.10", "0.9"]
    assert '<h1 id="ten-corrected">' in (built / "0.10/index.html").read_text()
    assert '<h1 id="nine">' in (built / "0.9/index.html").read_text()
    assert 'url=0.10/"' in (built / "index.html").read_text()
    assert 'href="https://github.com/my-org/outbox/blob/v0.9.0/CHANGELOG.md"' in (
        (built / "0.9/operations/upgrade/index.html").read_text()
    )
    assert 'rel="canonical" href="https://my-org.github.io/outbox/0.9/tutorial/"' in (
        (built / "0.9/tutorial/index.html").read_text()
    )


def test_the_working_tree_is_built_strictly(repository: Path) -> None:
    """The pages as they are have no warning; with a link to nowhere the build fails and names it."""
    done = run(repository, sys.executable, "docs/site.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [entry["version"] for entry in json.loads((repository / "build/site/versions.json").read_text())] == ["dev"]
    with (repository / "docs/tutorial.md").open("a", encoding="utf-8") as page:
        page.write("\n[broken](nowhere.md)\n")
    done = run(repository, sys.executable, "docs/site.py")
    assert done.returncode != 0
    assert "tutorial.md" in done.stdout + done.stderr


def test_without_a_tag_there_is_no_release(repository: Path) -> None:
    done = run(repository, sys.executable, "docs/site.py", "--releases")
    assert done.returncode == 1
    assert "No tag of a release" in done.stderr

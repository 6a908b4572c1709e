"""The site is built strictly."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
def test_the_working_tree_is_built_strictly(tmp_path: Path) -> None:
    """The pages as they are have no warning; with a link to nowhere the build fails and names it."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "pyproject.toml"):
        shutil.copyfile(ROOT / name, tmp_path / name)

    def build() -> subprocess.CompletedProcess[str]:
        without_npm = {**os.environ, "PATH": ""}  # so that nothing is downloaded
        command = [sys.executable, "docs/site.py"]
        return subprocess.run(command, cwd=tmp_path, env=without_npm, capture_output=True, text=True, check=False)

    done = build()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build/site/tutorial/index.html").exists()
    assert (tmp_path / "build/site/llms.txt").exists()
    with (tmp_path / "docs/tutorial.md").open("a", encoding="utf-8") as page:
        page.write("\n[broken](nowhere.md)\n")
    done = build()
    assert done.returncode != 0
    assert "tutorial.md" in done.stdout + done.stderr

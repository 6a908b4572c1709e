"""Prepares the pages for the site: `make docs` builds it, `make docs-serve` shows it.

The pages are written for a repository page, where links can lead to any file. On the site a link that leaves `docs`, or
leads to a folder or a file that is no page, becomes a link to the repository.
"""

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build/site-source"
#: What the site itself shows.
SHOWN = {".md", ".png", ".svg"}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def prepare(source: Path = SOURCE) -> None:
    """Write the pages and pictures of `docs` to `source`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.rmtree(source, ignore_errors=True)
    for path in sorted((ROOT / "docs").rglob("*")):
        relative = path.relative_to(ROOT / "docs")
        if path.suffix not in SHOWN or relative.parts[0] == "examples":
            continue
        target = source / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            target.write_text(on_site(text, path.parent, project["urls"]["Repository"]), encoding="utf-8")
        else:
            shutil.copyfile(path, target)


def on_site(text: str, folder: Path, repository: str) -> str:
    """Return the text of a page in `folder`, with its links as the site needs them."""

    def link(match: re.Match[str]) -> str:
        target, anchor = Path(os.path.normpath(folder / match[1])), match[2] or ""
        inside = target.relative_to(ROOT)
        if inside.parts[0] == "docs" and "examples" not in inside.parts and target.suffix in SHOWN:
            return match[0]
        return f"{repository}/{'tree' if target.is_dir() else 'blob'}/main/{inside.as_posix()}{anchor}"

    return _LINK.sub(link, text)


if __name__ == "__main__":
    prepare()
    sys.stdout.write(f"wrote {SOURCE.relative_to(ROOT)}\n")

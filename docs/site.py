"""Builds the site: `make docs` from the working tree, `make docs-versions` from the tags of all releases.

The pages are written for a repository page, where links can lead to any file. On the site a link that leaves `docs`, or
leads to a folder or a file that is no page, becomes a link to the repository.

The theme shows a version selector if it finds `versions.json` above the pages. The file has the format of mike, which
MkDocs projects use. A release is built by this script of its own tag, so a change of this script cannot break it.
"""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build/site-source"
SITE = ROOT / "build/site"
#: What the site itself shows.
SHOWN = {".md", ".png", ".svg"}
#: Folders and pages of `docs` for contributors. The site links to them in the repository.
NOT_SHOWN = {"examples", "decisions.md", "acceptance.md"}
#: Draws the diagrams. Zensical's own scripts expect this major version.
MERMAID = "mermaid@12.3.0"
#: The name of the working tree in the version selector.
UNRELEASED = "dev"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
#: The tests at the end of a page, which the site folds.
_PROOF = re.compile(r"^## Verified by\n(.+?)\s*\Z", re.MULTILINE | re.DOTALL)
_FOLDED = r'<details id="verified-by" markdown="1"><summary>Verified by</summary>\n\1\n\n</details>\n'
_TAG = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def build(version: str, ref: str) -> None:
    """Build the site of this tree in `build/site/VERSION`, and fail at a warning such as a broken link."""
    prepare(ref)
    add_mermaid(SOURCE / "assets")
    environment = {**os.environ, "SITE_DIR": f"build/site/{version}", "MIKE_DOCS_VERSION": version}
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        sys.exit("The site has warnings, so it was not built.")


def build_releases() -> None:
    """Build the newest patch release of each minor version from its tag."""
    tags = subprocess.run(["git", "tag"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = newest_patches(tags)
    if not found:
        sys.exit("No tag of a release, such as v1.2.3. In a shallow clone, run `git fetch --tags` first.")
    shutil.rmtree(SITE, ignore_errors=True)
    for version, tag in found.items():
        archive = subprocess.run(["git", "archive", tag], cwd=ROOT, capture_output=True, check=True).stdout
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
            command = [sys.executable, "docs/site.py", "--version", version, "--ref", tag]
            subprocess.run(command, cwd=folder, check=True)
            shutil.copytree(Path(folder, "build/site", version), SITE / version)
    finish({version: tag.removeprefix("v") for version, tag in found.items()})


def newest_patches(tags: Iterable[str]) -> dict[str, str]:
    """Return the tag of the newest patch release by minor version, the oldest version first."""
    releases = sorted(tuple(map(int, match.groups())) for match in map(_TAG.fullmatch, tags) if match)
    return {f"{major}.{minor}": f"v{major}.{minor}.{patch}" for major, minor, patch in releases}


def finish(titles: dict[str, str]) -> None:
    """Write what all versions share: the list for the selector, and a page that opens the last version."""
    newest = list(titles)[-1]
    entries = [
        {"version": version, "title": title, "aliases": ["latest"] if version == newest else []}
        for version, title in reversed(titles.items())
    ]
    shutil.copyfile(SITE / newest / "404.html", SITE / "404.html")
    (SITE / "versions.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    (SITE / "index.html").write_text(
        f'<!doctype html><title>Redirecting</title><meta http-equiv="refresh" content="0; url={newest}/">'
        f'<a href="{newest}/">Documentation</a>\n',
        encoding="utf-8",
    )


def prepare(ref: str, source: Path = SOURCE) -> None:
    """Write the pages and pictures of `docs` to `source`, with links to the repository at the branch or tag `ref`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.rmtree(source, ignore_errors=True)
    for path in sorted((ROOT / "docs").rglob("*")):
        relative = path.relative_to(ROOT / "docs")
        if path.suffix not in SHOWN or relative.parts[0] in NOT_SHOWN:
            continue
        target = source / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            target.write_text(on_site(text, path.parent, project["urls"]["Repository"], ref), encoding="utf-8")
        else:
            shutil.copyfile(path, target)


def on_site(text: str, folder: Path, repository: str, ref: str) -> str:
    """Return the text of a page in `folder`, with its links as the site needs them."""

    def link(match: re.Match[str]) -> str:
        target, anchor = Path(os.path.normpath(folder / match[1])), match[2] or ""
        inside = target.relative_to(ROOT)
        if inside.parts[0] == "docs" and inside.parts[1] not in NOT_SHOWN and target.suffix in SHOWN:
            return match[0]
        return f"{repository}/{'tree' if target.is_dir() else 'blob'}/{ref}/{inside.as_posix()}{anchor}"

    return _PROOF.sub(_FOLDED, _LINK.sub(link, text))


def add_mermaid(assets: Path) -> None:
    """Copy the script that draws the diagrams. Without it, the browser loads it from a public network."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", MERMAID]
        if (
            not shutil.which("npm")
            or subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=False).returncode
        ):
            sys.stderr.write(f"npm did not provide {MERMAID}, so the diagrams of the site need the network.\n")
            return
        [package] = Path(folder).glob("*.tgz")
        shutil.unpack_archive(package, folder, filter="data")
        assets.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(folder, "package/dist/mermaid.min.js"), assets / "mermaid.min.js")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default=UNRELEASED, help="name of the version in the selector")
    parser.add_argument("--ref", default="main", help="branch or tag that links to the repository lead to")
    parser.add_argument("--releases", action="store_true", help="build all releases instead of the working tree")
    arguments = parser.parse_args()
    if arguments.releases:
        build_releases()
    else:
        shutil.rmtree(SITE, ignore_errors=True)
        build(arguments.version, arguments.ref)
        finish({arguments.version: arguments.version})

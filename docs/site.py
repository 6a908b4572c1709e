"""Builds the site: `make docs`.

The pages are written for a repository page, where links can lead to any file. On the site a link that leaves `docs`, or
leads to a folder or a file that is no page, becomes a link to the repository.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build/site-source"
#: To which the links to the repository lead.
BRANCH = "main"
#: What the site itself shows. `llms.txt` is for programs that read.
SHOWN = {".md", ".png", ".svg", ".txt"}
#: Folders and pages of `docs` for contributors. The site links to them in the repository.
NOT_SHOWN = {"examples", "decisions.md", "acceptance.md"}
#: Draws the diagrams. Zensical's own scripts expect this major version.
MERMAID = "mermaid@12.3.0"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
#: Code in a line, or a block of code, which stays as it is.
_CODE = re.compile(r"^ *```.*?^ *```|`[^`]+`", re.MULTILINE | re.DOTALL)
#: Names of settings, metrics and files.
_NAME = re.compile(r"`[^`\s]{1,40}`")
#: The tests at the end of a page, which the site folds.
_PROOF = re.compile(r"^## Verified by\n(.+?)\s*\Z", re.MULTILINE | re.DOTALL)
#: Blocks that the site shows as tabs, each below its title in bold.
_TABS = re.compile(r"^<!-- tabs -->\n(.+?)^<!-- /tabs -->$", re.MULTILINE | re.DOTALL)
_FOLDED = r'<details id="verified-by" markdown="1"><summary>Verified by</summary>\n\1\n\n</details>\n'


def build() -> None:
    """Build the site in `build/site`, and fail at a warning such as a broken link."""
    prepare()
    add_mermaid(SOURCE / "assets")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit("The site has warnings, so it was not built.")


def prepare() -> None:
    """Write the pages and pictures of `docs` to `SOURCE`, with links to the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in sorted((ROOT / "docs").rglob("*")):
        relative = path.relative_to(ROOT / "docs")
        if path.suffix not in SHOWN or relative.parts[0] in NOT_SHOWN:
            continue
        target = SOURCE / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            target.write_text(on_site(text, path.parent, project["urls"]["Repository"]), encoding="utf-8")
        else:
            shutil.copyfile(path, target)
    # The first screen of the repository is the home page; docs/README.md is an index for who reads the files.
    home = (ROOT / "README.md").read_text(encoding="utf-8")
    (SOURCE / "README.md").write_text(on_site(home, ROOT, project["urls"]["Repository"]), encoding="utf-8")


def on_site(text: str, folder: Path, repository: str) -> str:
    """Return the text of a page in `folder`, with its links as the site needs them."""

    def link(match: re.Match[str]) -> str:
        target, anchor = Path(os.path.normpath(folder / match[1])), match[2] or ""
        inside = target.relative_to(ROOT)
        if inside.parts[0] == "docs" and inside.parts[1] not in NOT_SHOWN and target.suffix in SHOWN:
            return os.path.relpath(target, ROOT / "docs" if folder == ROOT else folder) + anchor
        return f"{repository}/{'tree' if target.is_dir() else 'blob'}/{BRANCH}/{inside.as_posix()}{anchor}"

    return _PROOF.sub(_FOLDED, _TABS.sub(_as_tabs, _CODE.sub(_whole, _LINK.sub(link, text))))


def _as_tabs(match: re.Match[str]) -> str:
    _, *parts = re.split(r"^\*\*(.+)\*\*$", match[1], flags=re.MULTILINE)
    return "\n".join(
        f'=== "{title}"\n' + textwrap.indent(text, "    ") for title, text in zip(parts[::2], parts[1::2], strict=True)
    )


def _whole(code: re.Match[str]) -> str:
    """Mark a name, which no line may break (docs/theme/main.html)."""
    return code[0] + "{.name}" * bool(_NAME.fullmatch(code[0]))


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
    build()

"""Refuse a release whose tag, changelog or repository differs from the package: `make release-check`."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, repository: str, root: Path = ROOT) -> Iterator[str]:
    """Yield one sentence for each difference; `tag` is like v1.2.3, `repository` is a URL."""
    [version] = re.findall(r'^__version__ = "(.+)"$', (root / "outbox/_version.py").read_text(), re.MULTILINE)
    if tag != f"v{version}":
        yield f"The tag is {tag}, but outbox/_version.py has {version}. Tag v{version}, or change the version first."
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        yield f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD'. Rename [Unreleased] and add a new one above."
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    if urls["Repository"] != repository:
        yield f"The repository is {repository}, but pyproject.toml names {urls['Repository']}. Change [project.urls]."


if __name__ == "__main__":
    found = list(problems(sys.argv[1], sys.argv[2]))
    print("\n".join(found) or "The tag, the changelog and the repository agree with the package.")
    sys.exit(bool(found))

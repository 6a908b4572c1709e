"""constraints.txt: every package that the Makefile and the images install, with the hashes of its files."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


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

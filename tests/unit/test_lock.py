"""constraints.txt: every package that the Makefile and the images install, with the hashes of its files."""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("tampered", [False, True], ids=["the locked file", "another file"])
def test_a_package_with_another_hash_is_not_installed(tmp_path: Path, tampered: bool) -> None:
    """With the commands of the Makefile, from a folder in place of the index."""
    (tmp_path / ".venv").mkdir()
    wheel = tmp_path / "locked-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("locked.py", "")
        file.writestr("locked-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: locked\nVersion: 1.0\n")
        file.writestr("locked-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("locked-1.0.dist-info/RECORD", "")
    hash = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "constraints.txt").write_text(f"locked==1.0 --hash=sha256:{'0' * 64 if tampered else hash}\n")
    index = '[tool.uv.pip]\nno-index = true\nfind-links = ["."]\n'
    (tmp_path / "pyproject.toml").write_text(f'{index}[dependency-groups]\nany = ["locked"]\n')
    (tmp_path / "Makefile").write_text(f"{MAKEFILE}\nlocked:\n\t@$(call INSTALL,env/bin/python,--group any)\n")
    uv = Path(sys.executable).with_name("uv")
    environment = os.environ | {"UV_NO_CACHE": "1"}
    subprocess.run([uv, "venv", "--quiet", "env"], cwd=tmp_path, env=environment, check=True)
    command = ["make", "--silent", "locked", f"BIN={uv.parent}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    installed = list(tmp_path.glob("env/lib/python*/site-packages/locked.py"))
    found = (done.returncode == 0, bool(installed), "Hash mismatch" in done.stderr)
    assert found == (not tampered, not tampered, tampered), done

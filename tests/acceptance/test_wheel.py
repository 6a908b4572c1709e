"""The published wheel and source distribution. `make dist` sets DIST to the folder of those that it has built."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from outbox import __version__

#: The wheel is built and installed once.
pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("wheel")]

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
REPORT = "outbox_pipeline/jobs/audit/report.html.jinja"
PINS = ("--constraint", ROOT / "constraints.txt")  # uv also verifies the hashes that it has


def shell(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "DIST" in os.environ:
        return Path(os.environ["DIST"])
    target = tmp_path_factory.mktemp("dist")
    shell(UV, "build", "--quiet", "--build-constraint", PINS[1], "--out-dir", target, ROOT, cwd=target)
    return target


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [created] = dist.glob("*.whl")
    return created


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        [name] = [each for each in file.namelist() if each.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(file.read(name))


def test_the_wheel_holds_the_packages_the_ddl_and_the_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"outbox/py.typed", "publishworker/py.typed", "outbox/ddl/schema.sql", REPORT} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "outbox",
        "publishworker",
        "outbox_pipeline",
        "pyspark_outbox",
    }


def test_the_source_distribution_holds_what_the_wheel_is_built_from(dist: Path) -> None:
    """Sources, DDL, licence, README and changelog; no tests, manifests or local files."""
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {name.partition("/")[0] for name in names} == {
        "outbox", "publishworker", "outbox_pipeline", "pyspark_outbox", "schema", "pyproject.toml",
        "LICENSE", "README.md", "CHANGELOG.md", "PKG-INFO", ".gitignore",
    }  # fmt: skip
    assert not [name for name in names if "__pycache__" in name]


def test_each_link_of_the_index_page_is_absolute(metadata: Message) -> None:
    """Links go to the file at the tag of this version, in the repository that the metadata names."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)]+)\)", description)
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"Repository", "Documentation", "Changelog", "Issues"}
    here = f"{urls['Repository']}/blob/v{metadata['Version']}/"
    files = [link.removeprefix(here).partition("#")[0] for link in links if link.startswith(here)]
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.skipif("SBOM" not in os.environ, reason="`make dist` writes it")
def test_the_sbom_names_each_package_with_version_and_licence() -> None:
    """Those of an environment with the wheel alone, and their licences; no path of the machine that built it."""
    text = Path(os.environ["SBOM"]).read_text(encoding="utf-8")
    components = json.loads(text)["components"]
    pinned = re.findall(r"^([\w.-]+)==(\S+)", PINS[1].read_text(encoding="utf-8"), re.MULTILINE)
    assert {("grpcio", dict(pinned)["grpcio"]), ("spanner-outbox", __version__)} <= {
        (each["name"], each["version"]) for each in components
    }
    assert [each["name"] for each in components if not each.get("licenses")] == ["protobuf"]  # its metadata has none
    assert "file:" not in text


@pytest.mark.timeout(300)
def test_an_installed_wheel_imports_and_its_commands_run(wheel: Path, tmp_path: Path) -> None:
    """In an empty environment with the worker's extra: import, `outbox schema print`, both commands' help."""
    shell(UV, "venv", "--quiet", tmp_path / "env", cwd=tmp_path)
    bin = tmp_path / "env" / "bin"
    shell(UV, "pip", "install", "--quiet", "--python", bin / "python", *PINS, f"{wheel}[worker]", cwd=tmp_path)
    imported = shell(bin / "python", "-c", "import outbox; print(outbox.__version__, outbox.__file__)", cwd=tmp_path)
    assert str(tmp_path) in imported
    assert "CREATE TABLE AsynchronousTasks" in shell(bin / "outbox", "schema", "print", cwd=tmp_path)
    assert "drain" in shell(bin / "publishworker", "--help", cwd=tmp_path)
    assert "audit" in shell(bin / "outbox-pipeline", "--help", cwd=tmp_path)
    packages = shell(UV, "pip", "list", "--python", bin / "python", "--format", "freeze", cwd=tmp_path)
    assert "datadog" in packages
    assert not {"pyspark", "pytest", "hatchling"} & {line.partition("==")[0] for line in packages.splitlines()}

"""The published wheel, installed into an empty environment."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("wheel")  # the wheel is built and installed once

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
REPORT = "outbox_pipeline/jobs/audit/report.html.jinja"
PINS = ("--constraint", ROOT / "constraints.txt")


def shell(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    shell(UV, "build", "--quiet", "--wheel", "--out-dir", target, ROOT, cwd=target)
    [created] = target.glob("*.whl")
    return created


def test_the_wheel_holds_the_packages_the_ddl_and_the_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"outbox/py.typed", "publishworker/py.typed", "outbox/ddl/schema.sql", REPORT} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "outbox",
        "publishworker",
        "outbox_pipeline",
    }


@pytest.mark.extended
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

"""The wheel and the source distribution, and `make rehearsal`: what a release and its first users do, on this machine.

`make dist` sets DIST to the folder of those that it has built.
"""

import contextlib
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
from google.cloud.spanner_v1.database import Database

from outbox import __version__
from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT, Process, started
from tests.support.pubsub import Subscription
from tests.support.relays import account, register, wait_until_all_sent, worker
from tests.support.spanner import query, variables
from tests.support.trial import in_background
from tests.support.waiting import eventually

#: The wheel is built and installed once.
pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("wheel")]

UV = Path(sys.executable).with_name("uv")
REPORT = "outbox_pipeline/jobs/audit_report.html.jinja"
PINS = ("--constraint", ROOT / "constraints.txt")  # uv also verifies the hashes that it has


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
    files = [re.split("[#?]", link.removeprefix(here))[0] for link in links if link.startswith(here)]
    assert all(link.endswith("?raw=true") for link in links if ".png" in link)  # the picture, not a page about it
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


VERSION = "0.1.0rc1"
REPOSITORY = "https://github.com/my-org/outbox"


def shell(*command: str | Path, cwd: Path) -> str:
    """Run a command with the variables of a user: not those of pytest, of make and of the emulators."""
    ours = ("PYTEST", "MAKE", "MFLAGS", "COV", "SPANNER_", "PUBSUB_", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the current commit that is tagged and built as version 0.1.0rc1.

    `make dist` also runs the quick start, from `outbox emulators --create` on, with the wheel alone.
    """
    clone = tmp_path_factory.mktemp("release") / "clone"
    shell("git", "clone", "--quiet", ROOT, clone, cwd=ROOT)
    version, changes = clone / "outbox/_version.py", clone / "CHANGELOG.md"
    version.write_text(version.read_text().replace(__version__, VERSION))
    changes.write_text(
        changes.read_text().replace("## [Unreleased]", f"## [Unreleased]\n\n## [{VERSION}] - 2026-12-01")
    )
    who = ("-c", "user.name=rehearsal", "-c", "user.email=rehearsal@example.com")
    shell("git", *who, "commit", "--quiet", "--all", "--message", f"Release {VERSION}", cwd=clone)
    shell("git", *who, "tag", "--annotate", f"v{VERSION}", "--message", f"Release {VERSION}", cwd=clone)
    tag = shell("git", "describe", "--exact-match", cwd=clone).strip()
    shell("make", "release-check", f"TAG={tag}", f"REPOSITORY={REPOSITORY}", cwd=clone)
    built = shell("make", "dist", cwd=clone)
    assert re.search(r"\n=+ \d+ passed in [^\n]+=\n", built), built
    return clone


@pytest.fixture(scope="module")
def installed(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an empty environment, with the worker from the built wheel and each file verified by its hash."""
    empty = tmp_path_factory.mktemp("empty")
    uv, lock = release / ".venv/bin/uv", ("--constraint", release / "constraints.txt")
    [wheel] = (release / "dist").glob(f"spanner_outbox-{VERSION}-*.whl")
    (empty / "wanted.txt").write_text(f"spanner-outbox[worker] @ {wheel.as_uri()}\n")
    shell(
        uv, "pip", "compile", "--quiet", "--generate-hashes", *lock, "wanted.txt", "--output-file", "all.txt", cwd=empty
    )
    shell(uv, "venv", "--quiet", "env", cwd=empty)
    install = ("pip", "install", "--quiet", "--python", "env/bin/python", "--require-hashes", *lock)
    shell(uv, *install, "--requirement", "all.txt", cwd=empty)
    return empty / "env/bin/python"


def versions(database: Database) -> set[str]:
    return {info["version"] for [info] in query(database, "SELECT Info FROM AsynchronousTaskWorkers")}


def sends(database: Database, ids: list[str]) -> None:
    """Return when tasks that were registered from now on are sent."""
    after = len(ids)
    eventually(lambda: len(ids) > after + 20, message="more tasks are registered")
    new = ids[after : after + 20]
    sent = "SELECT COUNT(*) FROM AsynchronousTasks WHERE Id IN UNNEST(@ids) AND SentAt IS NOT NULL"
    eventually(lambda: query(database, sent, ids=new) == [[20]], seconds=60, message="they are sent")


@pytest.mark.long("it builds a release and installs everything again")
@pytest.mark.timeout(1800)
def test_upgrade_to_this_commit_and_roll_back_under_load(
    installed: Path, emulators: Emulators, own_database: Database, subscription: Subscription, tmp_path: Path
) -> None:
    """A new worker starts before an old one stops, and the other way round. No task is lost, and workers exit 0."""

    def released(name: str) -> contextlib.AbstractContextManager[Process]:
        settings = variables(own_database.database_id, emulators) | {"OUTBOX_HEARTBEAT_FILE": str(tmp_path / name)}
        return started("publishworker", "run", environment=settings, directory=tmp_path, python=str(installed))

    ids: list[str] = []
    with contextlib.ExitStack() as workers:
        with in_background(lambda: ids.extend(register(own_database, subscription.topic, 10)), every=0.2):
            old = workers.enter_context(released("before"))
            sends(own_database, ids)
            assert versions(own_database) == {VERSION}
            new = workers.enter_context(worker(emulators, own_database))
            eventually(lambda: versions(own_database) == {VERSION, __version__}, seconds=60)
            old.end()
            sends(own_database, ids)
            assert versions(own_database) == {__version__}
            rolled_back = workers.enter_context(released("after"))
            eventually(lambda: versions(own_database) == {VERSION, __version__}, seconds=60)
            new.end()
            sends(own_database, ids)
        wait_until_all_sent(own_database)
        rolled_back.end()
    found = account(ids, subscription)
    assert (found.lost, found.unexpected) == (frozenset(), frozenset())

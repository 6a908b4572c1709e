"""The wheel and the source distribution, upgrades from another commit, and `make rehearsal`, all on this machine.

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
from outbox.table import ddl
from tests.manifests.rendering import rendered
from tests.support.processes import ROOT, Process, started
from tests.support.pubsub import Subscription
from tests.support.relays import account, register, wait_until_all_sent
from tests.support.roles import grants
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
        "outbox_admin",
        "outbox_pipeline",
        "pyspark_outbox",
    }


def test_the_source_distribution_holds_what_the_wheel_is_built_from(dist: Path) -> None:
    """Sources, DDL, licence, README and changelog; no tests, manifests or local files."""
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {name.partition("/")[0] for name in names} == {
        "outbox", "publishworker", "outbox_admin", "outbox_pipeline", "pyspark_outbox", "schema", "pyproject.toml",
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


#: The commit from which the tests upgrade, and to which they roll back.
BEFORE = "bc7029a658a778000c606defb62056e087e5392d"
OLD = "0.0.1"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the commit BEFORE, as version 0.0.1."""
    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", BEFORE], capture_output=True, check=False).returncode:
        reason = f"commit {BEFORE} is missing: git fetch --unshallow"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    folder = tmp_path_factory.mktemp("before")
    shell("git", "archive", "--output", folder / "before.tar", BEFORE, cwd=ROOT)
    shell("tar", "--extract", "--file", "before.tar", cwd=folder)
    version = folder / "outbox/_version.py"
    version.write_text(re.sub('"(.+)"', f'"{OLD}"', version.read_text()))
    return folder


@pytest.fixture(scope="module")
def old_python(before: Path) -> str:
    """The Python of an environment with the worker of the commit BEFORE."""
    pins = ("--constraint", before / "constraints.txt")
    shell(UV, "build", "--quiet", "--wheel", "--build-constraint", pins[1], "--out-dir", "dist", ".", cwd=before)
    [wheel] = (before / "dist").glob("*.whl")
    shell(UV, "venv", "--quiet", "env", cwd=before)
    shell(UV, "pip", "install", "--quiet", "--python", "env/bin/python", *pins, f"{wheel}[worker]", cwd=before)
    return str(before / "env/bin/python")


@pytest.fixture(
    params=["checkout", pytest.param("release", marks=pytest.mark.long("it builds a release and installs everything"))]
)
def upgrade(request: pytest.FixtureRequest, old_python: str) -> tuple[str, str, str]:
    """The Python with the worker of BEFORE, that with the worker of this commit, and the version of the latter."""
    if request.param == "checkout":
        return old_python, sys.executable, __version__
    return old_python, str(request.getfixturevalue("installed")), VERSION


def versions(database: Database) -> list[str]:
    return sorted(info["version"] for [info] in query(database, "SELECT Info FROM AsynchronousTaskWorkers"))


def sends(database: Database, ids: list[str]) -> None:
    """Return when tasks that were registered from now on are sent."""
    after = len(ids)
    eventually(lambda: len(ids) > after + 20, message="more tasks are registered")
    new = ids[after : after + 20]
    sent = "SELECT COUNT(*) FROM AsynchronousTasks WHERE Id IN UNNEST(@ids) AND SentAt IS NOT NULL"
    eventually(lambda: query(database, sent, ids=new) == [[20]], seconds=60, message="they are sent")


@pytest.mark.timeout(1800)
def test_upgrade_from_another_commit_and_roll_back_under_load(
    upgrade: tuple[str, str, str],
    emulators: Emulators,
    empty_database: Database,
    subscription: Subscription,
    tmp_path: Path,
) -> None:
    """In the order of docs/operations/upgrade.md, with the settings of the new manifests.

    The schema first: afterwards, an old worker starts once more, as when its pod is evicted. Then a worker of this
    commit takes over, and an old one starts again after the roll-back. No task is lost, and workers exit with 0.
    """
    old, new, version = upgrade
    place = variables(empty_database.database_id, emulators)
    settings = {**rendered("base").the("ConfigMap")["data"], **place}

    def apply_schema(python: str) -> None:
        with started("outbox", "schema", "apply", environment=place, directory=tmp_path, python=python) as process:
            assert process.wait(120) == 0

    with contextlib.ExitStack() as workers:

        def joins(name: str, python: str, live: list[str]) -> Process:
            given = settings | {"OUTBOX_HEARTBEAT_FILE": str(tmp_path / name)}
            worker = started("publishworker", "run", environment=given, directory=tmp_path, python=python)
            process = workers.enter_context(worker)
            eventually(lambda: process.child.poll() is not None or versions(empty_database) == live, seconds=60)
            assert process.child.poll() is None
            return process

        ids: list[str] = []
        apply_schema(old)
        first = joins("first", old, [OLD])
        with in_background(lambda: ids.extend(register(empty_database, subscription.topic, 10)), every=0.2):
            sends(empty_database, ids)
            apply_schema(new)
            evicted = joins("evicted", old, [OLD, OLD])
            first.end()
            sends(empty_database, ids)
            upgraded = joins("upgraded", new, [OLD, version])
            evicted.end()
            sends(empty_database, ids)
            assert versions(empty_database) == [version]
            rolled_back = joins("rolled-back", old, [OLD, version])
            upgraded.end()
            sends(empty_database, ids)
        wait_until_all_sent(empty_database)
        rolled_back.end()
    found = account(ids, subscription)
    assert (found.lost, found.unexpected) == (frozenset(), frozenset())


def test_the_manifests_of_another_commit_can_be_applied_again(before: Path) -> None:
    """Kubernetes refuses another selector, and an object with another name would run beside the former one.

    Each setting of one commit is one of the other, so a ConfigMap of either starts both workers.
    """
    for folder in ("base", "overlays/production"):
        old, new = (rendered(each / "k8s" / folder) for each in (before, ROOT))
        for each in old.of_kind("Deployment"):
            assert new.the("Deployment", each["metadata"]["name"])["spec"]["selector"] == each["spec"]["selector"]
        names = [{(each["kind"], without_hash(each["metadata"]["name"])) for each in objects} for objects in (old, new)]
        assert names[0] - {("Namespace", "outbox")} == names[1]
    schemas = [json.loads((each / "docs/reference/settings.schema.json").read_text()) for each in (before, ROOT)]
    given = rendered("overlays/production").the("ConfigMap")["data"]
    assert [name for schema in schemas for name in given if name not in schema["properties"]] == []


def without_hash(name: str) -> str:
    return re.sub(r"^(publishworker)-[a-z0-9]{10}$", r"\1", name)


def test_the_roles_of_another_commit_keep_what_its_worker_needs(before: Path) -> None:
    """An older worker runs with the role of this commit, as long as its tables exist."""
    old, new = (grants("publishworker", file=each / "schema/roles.sql") for each in (before, ROOT))
    tables = ddl.tables()
    missing = {each: columns - new.get(each, frozenset()) for each, columns in old.items() if each[1] in tables}
    assert [each for each, columns in missing.items() if columns and new.get(each) != frozenset({"*"})] == []

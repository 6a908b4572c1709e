"""A release rehearsal: `make rehearsal`. What the workflow and the first users of a release do, on this machine."""

import contextlib
import os
import re
import subprocess
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

VERSION = "0.1.0rc1"
REPOSITORY = "https://github.com/my-org/outbox"

pytestmark = [
    pytest.mark.long("it builds a release and installs everything again"),
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("release"),
]


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

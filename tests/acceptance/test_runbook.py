"""Every command of the operations pages that show situations is run in one, and its output compared with the page."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.devtools.emulators import Emulators
from outbox.table import ddl
from tests.manifests.rendering import programs
from tests.support import fork_server
from tests.support.processes import ROOT, clean_environment
from tests.support.pubsub import PubSub
from tests.support.relays import execute
from tests.support.situations import SITUATIONS, Place
from tests.support.spanner import ADMIN_SECONDS, instance

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("runbook")]  # the databases are made once

PAGES = ROOT / "docs/operations"
EVERYWHERE = [(page, title) for page, situations in SITUATIONS.items() for title in situations]
#: A command is killed after it.
COMMAND_SECONDS = 60.0
GCLOUD = {
    "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
    "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
    "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
}

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)")
DURATION = re.compile(r"\b\d+(\.\d+)?( s|[smhd]( \d+[smh])?)\b")


def sections(page: str) -> dict[str, str]:
    """Return the text below each second-level heading that shows commands."""
    parts = re.split(r"^## (.+)\n", (PAGES / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title: text for title, text in zip(parts[1::2], parts[2::2], strict=True) if "```console" in text}


def shown(text: str) -> list[tuple[str, list[str]]]:
    """Return each command of the text's console blocks, with the lines that the page shows below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def normal(line: str) -> str:
    """Return a line without times, durations and the width of columns, which differ from run to run."""
    line = re.sub(r"\.{3,}", "...", line)  # a dot for each second that gcloud waits
    return re.sub(r" +", " ", DURATION.sub("DURATION", TIME.sub("TIME", line))).strip()


def matches(lines: list[str], expected: list[str]) -> bool:
    """Compare; a line `...` of the page stands for any number of lines."""
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(normal(line)) + r"\n" for line in expected)
    return re.fullmatch(pattern, "".join(normal(line) + "\n" for line in lines)) is not None


@pytest.fixture(scope="module")
def places(emulators: Emulators, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Place]]:
    """A database for each situation, arranged at once."""
    programs("gcloud")
    found = {}
    pubsub = PubSub.on(emulators.pubsub_host)
    for number, (page, title) in enumerate(EVERYWHERE):
        project = f"runbook-{number}"
        directory = tmp_path_factory.mktemp(project)
        environment = clean_environment() | emulators.environment() | GCLOUD
        environment |= {
            "PATH": os.pathsep.join(
                (str(fork_server.scripts()), str(Path(sys.executable).parent), environment["PATH"])
            ),
            "CLOUDSDK_CONFIG": str(directory),
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB": f"http://{emulators.pubsub_host}/",
            # An endpoint instead of PUBSUB_EMULATOR_HOST, so that `check` advises as for Google Cloud.
            "OUTBOX_PUBSUB_ENDPOINT": f"http://{emulators.pubsub_host}",
            "OUTBOX_PROJECT": project,
            "OUTBOX_INSTANCE": "main",
            "OUTBOX_DATABASE": "shop",
            "OUTBOX_HEARTBEAT_FILE": str(directory / "heartbeat"),
            "LOGNAME": "jane",
            "PYTHONUNBUFFERED": "1",  # both streams in the order in which they were written
        }
        database = instance(emulators.spanner_host, "main", project).database("shop", ddl_statements=ddl.statements())
        database.create().result(timeout=ADMIN_SECONDS)
        found[page, title] = place = Place(project, database, pubsub, directory, environment)
        SITUATIONS[page][title](place)
    with _hearts(found.values()):
        yield found


@contextlib.contextmanager
def _hearts(places: "Iterator[Place] | list[Place]") -> Iterator[None]:
    """Let the workers of all places write their rows, as live ones do."""
    stop = threading.Event()
    everywhere = [place for place in places if place.live_workers]

    def beat() -> None:
        while not stop.wait(2):
            for place in everywhere:
                place.workers(place.live_workers, *place.infos)

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    stop.set()
    thread.join()


def in_spanner(command: str, place: Place) -> list[str]:
    """Do what a command of `gcloud spanner` would do, which does not reach the emulator."""
    options = dict(word.split("=", 1) for word in shlex.split(command) if "=" in word)
    if statement := options.get("--sql"):
        count = execute(place.database, statement)
        return [f"Statement modified {count} row{'s' * (count != 1)}"]
    place.database.update_ddl([options["--ddl"]]).result(timeout=ADMIN_SECONDS)
    return ["Schema updating...", ".....done."]


def run(command: str, place: Place) -> list[str]:
    if command.startswith("gcloud spanner"):
        return in_spanner(command, place)
    done = subprocess.run(
        ["bash", "-c", command], env=place.environment, cwd=place.directory, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_SECONDS, check=False, text=True,
    )  # fmt: skip
    return done.stdout.replace(place.project, "my-project").replace(socket.gethostname(), "laptop").splitlines()


@pytest.mark.parametrize("page", SITUATIONS)
def test_every_section_with_commands_has_a_situation(page: str):
    """A new section needs one in which its commands are run, and no situation is without its section."""
    assert set(sections(page)) == set(SITUATIONS[page])


@pytest.mark.parametrize(("page", "title"), EVERYWHERE)
def test_the_commands_of_a_section_print_its_output(page: str, title: str, places: dict[tuple[str, str], Place]):
    """One after the other, as a person on call would."""
    for command, expected in shown(sections(page)[title]):
        printed = run(command, places[page, title])
        assert matches(printed, expected), f"$ {command}\n" + "\n".join(printed)

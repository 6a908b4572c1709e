"""Emulators in containers, where there is no Cloud SDK. A script stands in for Docker and for Podman."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from outbox.devtools import child_process, emulators
from outbox.errors import NotReached
from tests.support.processes import ROOT, clean_environment
from tests.support.waiting import eventually

pytestmark = pytest.mark.emulator_only("it starts emulators")

IMAGES = (emulators.SPANNER.image, emulators.PUBSUB.image)

#: Writes down its words, and does what the engine does with them. The file MODE says what goes wrong. A container is a
#: file with the ID of its process, which is deaf to SIGTERM, like a process 1 without a handler.
ENGINE = """
import json, os, pathlib, signal, socket, sys, time
here, words = pathlib.Path(sys.argv[0]).parent, sys.argv[1:]
engine, mode = pathlib.Path(sys.argv[0]).name, (here / "MODE").read_text()
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([engine, *words]) + chr(10))
if mode == "no service" and engine == "docker":
    sys.exit("Cannot connect to the Docker daemon. Is the docker daemon running?")
if words[:2] == ["image", "inspect"]:
    sys.exit(mode in {"new image", "pull fails"})
if words[0] == "pull" and mode == "pull fails":
    sys.exit("Error response from daemon: manifest unknown")
if words[0] == "run":
    host, port, _ = words[words.index("--publish") + 1].split(":")
    container = here / words[words.index("--name") + 1]
    new = here / ("new-" + container.name)
    new.write_text(str(os.getpid()))
    new.rename(container)  # so that a container always has its ID
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "port taken":
        print("Bind for", host, "failed: port is already allocated", file=sys.stderr)
        sys.exit(125)
    began, listener = time.monotonic(), socket.create_server((host, int(port)))
    while True:
        connection, _ = listener.accept()
        if mode != "slow start" or time.monotonic() - began > 0.6:
            connection.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        connection.close()
if words[0] == "rm":
    container = here / words[-1]
    os.kill(int(container.read_text()), signal.SIGKILL) if mode != "port taken" else None
    container.unlink()
"""


class Engines:
    """The stand-ins in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mode("")

    def mode(self, mode: str) -> None:
        (self.folder / "MODE").write_text(mode)

    def install(self, name: str) -> None:
        script = self.folder / name
        script.write_text(f"#!{sys.executable} -IS{ENGINE}")
        script.chmod(0o755)

    def calls(self) -> list[list[str]]:
        """Return the words of all calls but the questions; names and ports are cut off, as they differ in each run."""
        lines = (self.folder / "calls").read_text().splitlines()
        calls = [[re.sub(r"outbox-\w+|(?<=127.0.0.1:)\d+", "*", word) for word in json.loads(line)] for line in lines]
        return [call for call in calls if call[1:] != ["ps", "--quiet"]]

    def containers(self) -> list[Path]:
        return list(self.folder.glob("outbox-*"))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engines:
    for name in ("SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST", "CLOUDSDK_ROOT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Engines(tmp_path)
    found.install("docker")
    return found


def _calls(engine: str, image: str, port: int, *command: str) -> list[list[str]]:
    run = ["run", "--rm", "--name", "*", "--publish", f"127.0.0.1:*:{port}", image, *command]
    return [[engine, "image", "inspect", image], [engine, *run], [engine, "rm", "--force", "*"]]


def _speak(found: emulators.Emulators) -> bool:
    return all(emulators._speaks(host) for host in (found.spanner_host, found.pubsub_host))


def test_containers_have_these_arguments_and_are_removed(engines: Engines) -> None:
    """Images by digest, ports on the loopback interface, and the flags of the demo. Removed after Ctrl-C too."""
    assert all(re.fullmatch(r"[a-z./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in IMAGES)
    with contextlib.suppress(KeyboardInterrupt), emulators.running(spanner_flags=["--flag", "0"]) as found:
        assert _speak(found)
        assert len(engines.containers()) == 2
        raise KeyboardInterrupt
    assert engines.containers() == []
    spanner = _calls("docker", IMAGES[0], 9010, "./emulator_main", "--host_port", "0.0.0.0:9010", "--flag", "0")
    gcloud = ("gcloud", "beta", "emulators", "pubsub", "start", "--host-port=0.0.0.0:8085")
    pubsub = _calls("docker", IMAGES[1], 8085, *gcloud)
    assert engines.calls() == [*spanner[:2], *pubsub, spanner[2]]


def test_podman_is_used_if_docker_does_not_answer(engines: Engines) -> None:
    engines.mode("no service")
    engines.install("podman")
    with emulators.running():
        pass
    assert {call[0] for call in engines.calls()} == {"podman"}


def test_a_slow_start_is_waited_for(engines: Engines) -> None:
    """The engine's proxy accepts connections before the emulator does."""
    engines.mode("slow start")
    began = time.monotonic()
    with emulators.running() as found:
        assert time.monotonic() - began > 1.2
        assert _speak(found)


def test_an_image_is_pulled_once(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    """It can take minutes, so a line says so. There is no limit, because a pull that was cut off starts again."""
    engines.mode("new image")
    with emulators.running_one(emulators.SPANNER):
        pass
    assert engines.calls()[1] == ["docker", "pull", "--quiet", IMAGES[0]]
    assert f"Pulling {IMAGES[0]}, once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("no service", rf"and neither Docker nor Podman is running.*{re.escape(emulators.HOW_TO_GET_THEM)}"),
        ("pull fails", rf"could not pull {re.escape(IMAGES[0])}: Error response from daemon: manifest unknown"),
        ("port taken", "the Spanner emulator ended with exit code 125.*\n  Bind for 127.0.0.1 failed: port is already"),
    ],
)
def test_the_words_of_the_engine_are_reported(engines: Engines, mode: str, sentence: str) -> None:
    engines.mode(mode)
    with pytest.raises(NotReached, match=sentence):
        emulators.running().__enter__()
    assert engines.containers() == []


def test_a_killed_command_leaves_no_container(engines: Engines) -> None:
    code = "import time; from outbox.devtools import emulators; emulators.running().__enter__(); time.sleep(60)"
    environment = clean_environment() | {"PATH": str(engines.folder)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT) as process:
        eventually(lambda: len(engines.containers()) == 2)
        process.send_signal(signal.SIGKILL)
    assert eventually(lambda: not engines.containers(), message="both containers are removed")


def test_a_listener_that_says_nothing_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        assert child_process.answers(host)
        assert not emulators._speaks(host)


def test_the_emulators_speak(emulators: emulators.Emulators) -> None:
    """The real ones, so that the question is one that both answer."""
    eventually(lambda: _speak(emulators), message="both emulators answer")  # a busy one needs more than one attempt


def test_the_compose_file_has_the_same_images_and_commands() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    for program, service in zip((emulators.SPANNER, emulators.PUBSUB), services.values(), strict=True):
        image, port, command = (program.image, program.own_port, program.command)
        assert service == {"image": image, "command": [*command], "ports": [f"127.0.0.1:{port}:{port}"]}


@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_the_real_engine_runs_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where one works; it may pull the images first."""
    if not emulators.engine():
        pytest.skip("neither Docker nor Podman is running")
    for name in ("SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(tmp_path))
    with emulators.running() as found:
        assert _speak(found)
    assert not child_process.answers(found.spanner_host)

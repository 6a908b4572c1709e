"""Where emulators come from, and the error if one cannot be started. Binaries and engines are stand-ins here."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox.devtools import child_process, emulators
from outbox.errors import NotReached, SettingError
from outbox.program.channels import open_pubsub
from outbox.program.settings import PubSubSettings
from outbox.table.connection import open_database
from tests.support.processes import ROOT, clean_environment
from tests.support.proxy import silent_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.emulator_only("it starts emulators")

Sdk = Callable[..., Path]
LISTEN = """
import socket, sys
port = int(sys.argv[-1].rpartition("=")[2].rpartition(":")[2])
listener = socket.create_server(("127.0.0.1", port))
print("arguments:", *sys.argv[1:], flush=True)
while True:
    listener.accept()
"""
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{LISTEN}"


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST", "CLOUDSDK_ROOT_DIR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))


@pytest.fixture
def sdk(_nothing_installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sdk:
    """Make a Cloud SDK, by name or by CLOUDSDK_ROOT_DIR, whose emulators run these texts; None leaves one out."""

    def make(spanner: str | None = LISTEN, pubsub: str | None = LISTEN, name: str = "") -> Path:
        root = tmp_path / (name or "sdk")
        (root / "bin").mkdir(parents=True)
        for program, text in ((emulators.SPANNER, spanner), (emulators.PUBSUB, pubsub)):
            if text is not None:
                (root / program.path).parent.mkdir(parents=True)
                _script(root / program.path, text)
        if not name:
            monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(root))
        return root

    return make


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable} -IS\n{text}")
    path.chmod(0o755)


def _expect_not_reached(match: str) -> None:
    with pytest.raises(NotReached, match=match):
        emulators.running().__enter__()


def test_only_emulators_without_a_variable_are_started(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """Users with emulators of their own get those: `running` neither starts nor stops them."""
    sdk(spanner=None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", host)
        with emulators.running() as running:
            assert running.spanner_host == host
            assert [child.title for child in running.children] == [emulators.PUBSUB.title]
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", host)
        with emulators.running() as running:
            assert (running.spanner_host, running.pubsub_host, running.children) == (host, host, ())
        assert child_process.answers(host)


@pytest.mark.usefixtures("_nothing_installed")
def test_a_variable_with_a_dead_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable left over from an old shell is found at once, not after minutes of retries."""
    monkeypatch.setattr(emulators, "REACH_SECONDS", 0.1)
    with silent_port() as host:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", host)
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", host)
        _expect_not_reached(f"SPANNER_EMULATOR_HOST is '{host}', but nothing answers")


@pytest.mark.parametrize(("program", "connect"), [(emulators.SPANNER, open_database), (emulators.PUBSUB, open_pubsub)])
def test_a_variable_that_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, program: Any, connect: Any) -> None:
    """In each command, whichever connection it opens first."""
    place = PubSubSettings.read(dict.fromkeys(("project", "instance", "database"), "shop"), {})
    for text in (
        "::1:8085", "[::1]", "[::1:8085", "[1.2.3.4]:1", "localhost", "http://localhost:8085", "localhost:http",
        "localhost:65536", "localhost:0", ":8085", "local host:1", "localhost:8085/", "localhost:٨",
    ):  # fmt: skip
        monkeypatch.setenv(program.variable, text)
        sentence = f"{program.variable}: {text!r} is not allowed. It must be HOST:PORT or [IPV6]:PORT"
        with pytest.raises(SettingError, match=re.escape(sentence)):
            connect(place)
        with pytest.raises(SettingError, match=re.escape(sentence)):
            emulators.running_one(program).__enter__()


@pytest.mark.usefixtures("_nothing_installed")
def test_an_emulator_may_have_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """In brackets. A proxy that the environment names is not used for it."""
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "localhost,::1")
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server, socket.create_server(("127.0.0.1", 0)) as other:
        spanner, pubsub = f"[::1]:{server.getsockname()[1]}", f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", spanner)
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", pubsub)
        with emulators.running() as running:
            assert (running.spanner_host, running.pubsub_host, running.children) == (spanner, pubsub, ())
            assert running.environment()["no_grpc_proxy"] == "localhost,::1,127.0.0.1"
        monkeypatch.delenv("http_proxy")
        assert "no_grpc_proxy" not in running.environment()


def test_the_sdk_is_found_by_the_real_path_of_gcloud(monkeypatch: pytest.MonkeyPatch, sdk: Sdk, tmp_path: Path) -> None:
    """CLOUDSDK_ROOT_DIR excludes other installations."""
    root = sdk(name="linked")
    _script(root / "bin/gcloud", "")
    (tmp_path / "path/gcloud").symlink_to(root / "bin/gcloud")
    with emulators.running() as running:
        assert child_process.answers(running.spanner_host)
        assert child_process.answers(running.pubsub_host)
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(tmp_path))
    _expect_not_reached("not found")


def test_a_requested_port_overrides_the_variable(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """A shell that keeps the exported variables can start the emulators again with the same ports."""
    sdk()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("SPANNER_EMULATOR_HOST", f"127.0.0.1:{port}")
    with emulators.running(spanner_port=port) as running:
        assert running.spanner_host == f"127.0.0.1:{port}"
        assert len(running.children) == 2


#: Those of an emulator that writes a hundred numbers and an error.
LAST_LINES = rf"(\n  \d+){{{child_process.TAIL_LINES - 1}}}\n  libz.so.1: cannot open it"


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ({"pubsub": None}, "^the Pub/Sub emulator not found: PUBSUB_EMULATOR_HOST not set"),
        (
            {"spanner": "import sys\nprint(*range(100), sep='\\n')\nsys.exit('libz.so.1: cannot open it')"},
            rf"^could not start it: the Spanner emulator ended with exit code 1\. Its last lines:{LAST_LINES}$",
        ),
        (
            {"spanner": "import signal\nsignal.pause()"},
            "the Spanner emulator did not answer within 0.2 s and wrote nothing",
        ),
    ],
    ids=["it is missing", "it dies", "it never answers"],
)
def test_an_emulator_that_does_not_start_is_given_up(
    texts: dict[str, str | None], sentence: str, monkeypatch: pytest.MonkeyPatch, sdk: Sdk
) -> None:
    """The error has the emulator's own last lines, so there is no log file to find. The wait has a limit."""
    if "0.2 s" in sentence:
        monkeypatch.setattr(child_process, "START_SECONDS", 0.2)
    sdk(**texts)
    _expect_not_reached(sentence)


def test_both_emulators_are_stopped_when_the_block_fails(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """No emulator outlives an exception; one that ignores SIGTERM is killed."""
    monkeypatch.setattr(child_process, "EMULATOR_STOP_SECONDS", 0.5)
    sdk(spanner=DEAF)
    with pytest.raises(KeyboardInterrupt), emulators.running() as running:
        raise KeyboardInterrupt
    assert [child.process.poll() for child in running.children] == [-signal.SIGKILL, -signal.SIGTERM]


USE = """
import sys, pathlib
from outbox.devtools import emulators
with emulators.sharing(emulators.SPANNER, pathlib.Path(sys.argv[1])) as host:
    print(host, flush=True)
    sys.stdin.read()
"""


def test_a_shared_emulator_outlives_the_process_that_started_it_and_ends_with_its_last_user(
    sdk: Sdk, tmp_path: Path
) -> None:
    """Although the first one is killed. Nobody listens for the users, so none of them can disturb the others."""
    sdk()
    with contextlib.ExitStack() as stack:

        def use() -> tuple[subprocess.Popen[bytes], str]:
            command = [sys.executable, "-c", USE, str(tmp_path)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            user = stack.enter_context(subprocess.Popen(command, cwd=ROOT, **pipes))  # type: ignore[call-overload]  # pipes
            return user, user.stdout.readline().decode().strip()

        (first, host), (_second, same) = use(), use()
        first.kill()
        first.wait()
        assert use()[1] == same == host
        assert child_process.answers(host)
    eventually(lambda: not child_process.answers(host), message="the end of the emulator")
    with emulators.sharing(emulators.SPANNER, tmp_path) as host:  # another one, of this process
        assert child_process.answers(host)
    eventually(lambda: not child_process.answers(host), message="the end of the emulator")


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
        _script(self.folder / name, ENGINE)

    def calls(self) -> list[list[str]]:
        """Return the words of all calls but the questions; names and ports are cut off, as they differ in each run."""
        lines = (self.folder / "calls").read_text().splitlines()
        calls = [[re.sub(r"outbox-\w+|(?<=127.0.0.1:)\d+", "*", word) for word in json.loads(line)] for line in lines]
        return [call for call in calls if call[1:] != ["ps", "--quiet"]]

    def containers(self) -> list[Path]:
        return list(self.folder.glob("outbox-*"))


@pytest.fixture
def engines(_nothing_installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engines:
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
    _expect_not_reached(sentence)
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

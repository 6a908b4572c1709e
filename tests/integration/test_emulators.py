"""Where emulators come from, and the error if one cannot be started. The binaries here are fakes."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox.devtools import child_process, emulators
from outbox.errors import NotReached, SettingError
from outbox.program.channels import open_pubsub
from outbox.program.settings import PubSubSettings
from outbox.table.connection import open_database
from tests.support.processes import ROOT
from tests.support.proxy import silent_port
from tests.support.waiting import eventually

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


pytestmark = pytest.mark.emulator_only("it starts emulators")


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST", "CLOUDSDK_ROOT_DIR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sdk:
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


def _answers(host: str) -> bool:
    name, _, port = host.rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((name, int(port))) == 0


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
        assert _answers(host)


def test_a_variable_with_a_dead_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable left over from an old shell is found at once, not after minutes of retries."""
    monkeypatch.setattr(emulators, "REACH_SECONDS", 0.1)
    with silent_port() as host:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", host)
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", host)
        _expect_not_reached(f"SPANNER_EMULATOR_HOST is '{host}', but nothing answers")


@pytest.mark.parametrize("variable", ["SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST"])
@pytest.mark.parametrize(
    "text",
    ["::1:8085", "[::1]", "[::1:8085", "[1.2.3.4]:1", "localhost", "http://localhost:8085", "localhost:http",
     "localhost:65536", "localhost:0", ":8085", "local host:1", "localhost:8085/", "localhost:٨"],
)  # fmt: skip
def test_a_variable_that_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    """In each command, whichever connection it opens first."""
    monkeypatch.setenv(variable, text)
    sentence = f"{variable}: {text!r} is not allowed. It must be HOST:PORT or [IPV6]:PORT"
    place = PubSubSettings.read(dict.fromkeys(("project", "instance", "database"), "shop"), {})
    of_spanner = variable == emulators.SPANNER.variable
    with pytest.raises(SettingError, match=re.escape(sentence)):
        open_database(place) if of_spanner else open_pubsub(place)
    with pytest.raises(SettingError, match=re.escape(sentence)):
        emulators.running_one(emulators.SPANNER if of_spanner else emulators.PUBSUB).__enter__()


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
        assert _answers(running.spanner_host)
        assert _answers(running.pubsub_host)
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

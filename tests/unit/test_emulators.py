"""Where emulators come from, and what a user reads when one cannot be had. The binaries here are fakes."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox import _child, emulators
from outbox.errors import NotReached
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


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST", "CLOUDSDK_ROOT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(emulators, "USUAL_ROOTS", ())
    path = tmp_path / "path"
    path.mkdir()
    _script(path / "java", "")
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.delenv("JAVA_HOME", raising=False)


@pytest.fixture
def sdk(tmp_path: Path) -> Sdk:
    """Make a Cloud SDK whose emulators run the given Python texts; None leaves one out."""

    def make(spanner: str | None = LISTEN, pubsub: str | None = LISTEN, name: str = "sdk") -> Path:
        root = tmp_path / name
        (root / "bin").mkdir(parents=True)
        for program, text in ((emulators.SPANNER, spanner), (emulators.PUBSUB, pubsub)):
            if text is not None:
                (root / program.path).parent.mkdir(parents=True)
                _script(root / program.path, text)
        return root

    return make


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable} -IS\n{text}")
    path.chmod(0o755)


def _answers(host: str) -> bool:
    name, _, port = host.rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((name, int(port))) == 0


def test_an_emulator_that_a_variable_names_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users with emulators of their own get those: nothing is started, and nothing stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", host)
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", host)
        with emulators.running() as running:
            assert (running.spanner_host, running.pubsub_host, running.children) == (host, host, ())
        assert _answers(host)


def test_only_what_no_variable_names_is_started(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """One emulator may run elsewhere while the other is started here."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk(spanner=None)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", f"127.0.0.1:{server.getsockname()[1]}")
        with emulators.running() as running:
            assert running.spanner_host == os.environ["SPANNER_EMULATOR_HOST"]
            assert [child.title for child in running.children] == [emulators.PUBSUB.title]


def test_a_variable_that_points_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable left over from a shell of yesterday is found at once, not after minutes of retries."""
    monkeypatch.setattr(emulators, "REACH_SECONDS", 0.1)
    with silent_port() as host:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", host)
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", host)
        with pytest.raises(NotReached, match=f"SPANNER_EMULATOR_HOST is '{host}', but nothing answers"):
            emulators.running().__enter__()


def test_a_port_that_is_asked_for_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """A shell that keeps the exported variables can start the emulators again with the same ports."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk()))
    with silent_port() as host:
        port = int(host.rpartition(":")[2])
    monkeypatch.setenv("SPANNER_EMULATOR_HOST", host)
    with emulators.running(spanner_port=port) as running:
        assert running.spanner_host == host
        assert len(running.children) == 2


def test_what_is_missing_is_named_with_every_way_to_get_it() -> None:
    """Without the emulators one error names both, and commands that can be copied for each way to get them."""
    with pytest.raises(NotReached) as caught:
        emulators.running().__enter__()
    text = str(caught.value)
    for part in (
        "the Spanner emulator and the Pub/Sub emulator not found",
        "gcloud components install cloud-spanner-emulator pubsub-emulator",
        "apt-get install google-cloud-cli-spanner-emulator google-cloud-cli-pubsub-emulator",
        "docker run",
        "export SPANNER_EMULATOR_HOST=127.0.0.1:9010",
        "export PUBSUB_EMULATOR_HOST=127.0.0.1:8085",
    ):
        assert part in text


def test_one_missing_emulator_is_named_alone(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """A Cloud SDK with one of the two components is told which one it lacks, before anything is started."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk(pubsub=None)))
    with pytest.raises(NotReached, match=r"^the Pub/Sub emulator not found: PUBSUB_EMULATOR_HOST not set"):
        emulators.running().__enter__()


def test_the_sdk_is_found_by_the_real_path_of_gcloud(sdk: Sdk, tmp_path: Path) -> None:
    """A package manager's link to `gcloud` leads to the emulators of its Cloud SDK."""
    root = sdk()
    _script(root / "bin/gcloud", "")
    (tmp_path / "path/gcloud").symlink_to(root / "bin/gcloud")
    with emulators.running() as running:
        assert _answers(running.spanner_host)
        assert _answers(running.pubsub_host)


def test_the_usual_directories_are_searched(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """The emulators are found where installers put the Cloud SDK, and two halves in two places are fine."""
    roots = (sdk(pubsub=None, name="one"), sdk(spanner=None, name="two"))
    monkeypatch.setattr(emulators, "USUAL_ROOTS", roots)
    with emulators.running() as running:
        assert len(running.children) == 2


def test_a_root_that_is_named_is_the_only_one(monkeypatch: pytest.MonkeyPatch, sdk: Sdk, tmp_path: Path) -> None:
    """CLOUDSDK_ROOT_DIR is believed: emulators of another installation would be a surprise."""
    monkeypatch.setattr(emulators, "USUAL_ROOTS", (sdk(),))
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(tmp_path))
    with pytest.raises(NotReached, match="not found"):
        emulators.running().__enter__()


@pytest.mark.parametrize("home", [None, "/nowhere"])
def test_missing_java_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, sdk: Sdk, tmp_path: Path, home: str | None
) -> None:
    """Without Java the reader is told that the Pub/Sub emulator needs it, and nothing is left running."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk()))
    if home:
        monkeypatch.setenv("JAVA_HOME", home)
    else:
        (tmp_path / "path/java").unlink()
    with pytest.raises(NotReached, match="the Pub/Sub emulator needs Java"):
        emulators.running().__enter__()


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """A port in use is an error with its number: the real emulators would share it, or hang."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk()))
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        port = server.getsockname()[1]
        with pytest.raises(NotReached, match=f"cannot have port {port} of 127.0.0.1"):
            emulators.running(spanner_port=port).__enter__()


def test_another_free_port_is_tried_when_one_is_lost(monkeypatch: pytest.MonkeyPatch, sdk: Sdk, tmp_path: Path) -> None:
    """Somebody else may take the free port in the last moment; nobody notices."""
    lost = tmp_path / "lost"
    unlucky = f"""
import pathlib, signal
if not pathlib.Path({str(lost)!r}).exists():
    pathlib.Path({str(lost)!r}).touch()
    print("java.net.BindException: Address already in use", flush=True)
    signal.pause()  # as the real one: it stays
{LISTEN}"""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk(pubsub=unlucky)))
    with emulators.running() as running:
        assert lost.exists()
        assert _answers(running.pubsub_host)


def test_ports_that_are_always_lost_end_in_an_error(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """An emulator that can bind nowhere is given up, and the one that had started is stopped."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk(pubsub="import sys\nsys.exit('Address already in use')")))
    with pytest.raises(NotReached, match="the Pub/Sub emulator cannot have port"):
        emulators.running().__enter__()


def test_an_emulator_that_dies_shows_its_last_lines(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """Why an emulator does not start is in its own words, without a look for a log file."""
    text = "import sys\nprint(*range(100), sep='\\n')\nsys.exit('libz.so.1: cannot open shared object file')"
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk(spanner=text)))
    with pytest.raises(NotReached) as caught:
        emulators.running().__enter__()
    lines = str(caught.value).splitlines()
    assert lines[0] == "could not start it: the Spanner emulator ended with exit code 1. Its last lines:"
    assert lines[-1] == "  libz.so.1: cannot open shared object file"
    assert len(lines) == 1 + _child.TAIL_LINES


def test_an_emulator_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """The wait for an emulator has an end."""
    monkeypatch.setattr(_child, "START_SECONDS", 0.2)
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk(spanner="import signal\nsignal.pause()")))
    with pytest.raises(NotReached, match=r"the Spanner emulator did not answer within 0.2 s and wrote nothing"):
        emulators.running().__enter__()


def test_flags_and_addresses_reach_the_binaries(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """The emulators listen on the loopback interface only, and the Spanner one gets the flags that are given."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk(spanner=LISTEN.replace("sys.argv[-1]", "sys.argv[2]"))))
    with emulators.running(spanner_flags=["--enable_fault_injection"]) as running:
        spanner, pubsub = running.children
        words = f"arguments: --host_port 127.0.0.1:{spanner.port} --enable_fault_injection"
        eventually(lambda: words in spanner.written())
        eventually(lambda: f"arguments: --host=127.0.0.1 --port={pubsub.port}" in pubsub.written())


def test_both_are_stopped_when_the_block_fails(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """No emulator outlives an exception."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk()))
    with pytest.raises(KeyboardInterrupt), emulators.running() as running:
        raise KeyboardInterrupt
    assert [child.process.poll() for child in running.children] == [-signal.SIGTERM] * 2


def test_an_emulator_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """Stopping has an end, too."""
    deaf = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{LISTEN}"
    monkeypatch.setattr(_child, "STOP_SECONDS", 0.1)
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk(spanner=deaf)))
    with emulators.running() as running:
        pass
    assert running.children[0].process.poll() == -signal.SIGKILL


def test_how_an_emulator_ended_is_told(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """Whoever runs the emulators learns which one is gone, and how."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk()))
    with emulators.running() as running:
        assert running.ended() is None
        running.children[1].process.kill()
        told = eventually(running.ended)
    assert told is not None
    assert told.startswith("the Pub/Sub emulator was killed by SIGKILL. Its last lines:")


def test_a_spanner_emulator_of_its_own_ignores_the_variable(monkeypatch: pytest.MonkeyPatch, sdk: Sdk) -> None:
    """Tests can have a second Spanner emulator with other flags beside the one that a variable names."""
    monkeypatch.setenv("CLOUDSDK_ROOT_DIR", str(sdk(pubsub=None)))
    monkeypatch.setenv("SPANNER_EMULATOR_HOST", "127.0.0.1:1")
    with emulators.running_spanner() as host:
        assert _answers(host)
    assert not _answers(host)


def test_the_environment_is_what_the_clients_need() -> None:
    """Exporting the environment is all that a client of the emulators needs, with two threads as well."""
    assert emulators.Emulators("127.0.0.1:1", "127.0.0.1:2").environment() == {
        "SPANNER_EMULATOR_HOST": "127.0.0.1:1",
        "PUBSUB_EMULATOR_HOST": "127.0.0.1:2",
        "GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW": "false",
    }

"""A signal while a command starts, as process 1 of a container, which has no default actions: it ends at once."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.container import NAMESPACES, need_namespaces
from tests.support.processes import ROOT, children, clean_environment
from tests.support.proxy import LOOPBACK
from tests.support.waiting import eventually

PLACE = {"OUTBOX_PROJECT": "my-project", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop"}
#: A command ends within this time, although a request may last for 30 s.
PROMPT_SECONDS = 3.0


@pytest.fixture(autouse=True)
def _namespaces(tmp_path: Path) -> None:
    need_namespaces(tmp_path)


@contextlib.contextmanager
def process_1(*words: str, environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `python -m words` as process 1 of a namespace; yield the one that waits for it, and its ID out here."""
    command = [*NAMESPACES, sys.executable, "-m", *words]
    variables = clean_environment() | PLACE | environment
    with subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True) as outer:
        try:
            yield outer, eventually(lambda: children(outer.pid), message="process 1")[0]
        finally:
            outer.kill()


def handles_sigterm(pid: int) -> bool:
    """Return whether a process is the Python of a command, with a handler for SIGTERM. Python itself has none."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return status["Name"].strip() != "unshare" and bool(int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)


def ended_in(outer: subprocess.Popen[str]) -> float:
    begin = time.monotonic()
    outer.wait(30)
    return time.monotonic() - begin


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("publishworker run", signal.SIGTERM, 0),
        ("publishworker drain", signal.SIGTERM, 4),
        ("outbox list", signal.SIGINT, 130),
        ("outbox_pipeline drain", signal.SIGTERM, 143),
    ],
)
def test_a_signal_during_the_imports_ends_a_command(words: str, number: signal.Signals, code: int) -> None:
    """The handlers are there before the clients are loaded, which takes most of the time."""
    with process_1(*words.split(), environment={}) as (outer, pid):
        eventually(lambda: handles_sigterm(pid))
        assert "cygrpc" not in Path(f"/proc/{pid}/maps").read_text()
        os.kill(pid, number)
        assert ended_in(outer) < PROMPT_SECONDS
        assert outer.stderr is not None
        assert (outer.returncode, outer.stderr.read()) == (code, "")


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("publishworker run", signal.SIGTERM, 0),
        pytest.param("publishworker drain", signal.SIGINT, 4, marks=pytest.mark.extended),
        pytest.param("outbox tail", signal.SIGTERM, 0, marks=pytest.mark.extended),
        ("outbox retry an-id", signal.SIGTERM, 143),
    ],
)
def test_a_signal_ends_a_command_whose_first_request_hangs(words: str, number: signal.Signals, code: int) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        silent.settimeout(30)
        host = f"{LOOPBACK}:{silent.getsockname()[1]}"
        with process_1(*words.split(), environment={"SPANNER_EMULATOR_HOST": host}) as (outer, pid), silent.accept()[0]:
            os.kill(pid, number)
            assert ended_in(outer) < PROMPT_SECONDS
            assert outer.returncode == code

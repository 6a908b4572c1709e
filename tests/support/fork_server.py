"""Start `python -m MODULE` as a process without paying for its imports: a server imports them once and forks.

    child = fork("publishworker", ["run"], environment, stdout=file, stderr=file)
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 0

`scripts` is a folder with the commands for the PATH of a shell. The server opens no gRPC channel, because gRPC does
not survive a fork. It ends when this process ends, and the kernel then kills its children. Each child leads a process
group of its own.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
#: Packages whose modules the server of the commands, and that of the Spark jobs, imports before it forks.
PRELOADED = {
    "commands": ("outbox", "publishworker", "outbox_admin"),
    "jobs": ("outbox", "publishworker", "outbox_admin", "outbox_pipeline"),
}
#: The modules of commands that have other names.
MODULES = {"outbox": "outbox_admin"}
_PR_SET_PDEATHSIG = 1
_MAX_REQUEST, _MAX_FILES = 1 << 20, 8


class Child:
    """A forked process; the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.returncode = pid, None
        self._connection = connection

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self._connection.close()

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                answer = self._connection.recv(64)
            except (BlockingIOError, TimeoutError):
                return None
            self._connection.close()
            self.returncode = int(answer) if answer else -signal.SIGKILL  # the server ended, and the child with it
        return self.returncode


def fork(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    stdin: IO[bytes] | int | None = None,
    directory: Path = ROOT,
) -> Child:
    """Run `python -m module arguments` in this folder with just this environment; no `stdin` is /dev/null."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(_address("jobs" if module.startswith("outbox_pipeline") else "commands"))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device
        streams = [each if isinstance(each, int) else each.fileno() for each in (stdin or nothing, stdout, stderr)]
        request = json.dumps(
            [[0, 1, 2], MODULES.get(module, module), list(arguments), dict(environment), str(directory)]
        ).encode()
        socket.send_fds(connection, [request], streams)
    return Child(int(connection.recv(64)), connection)


@functools.cache
def scripts() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="outbox-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for name in ("outbox", "publishworker"):
        script = directory / name
        script.write_text(
            _SCRIPT.format(python=sys.executable, address=_address("commands"), module=MODULES.get(name, name))
        )
        script.chmod(0o755)
    return directory


#: The server runs the command with the environment, folder, streams and signals of this process.
_SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
files = [0, 1, 2, *(int(each.removeprefix("/dev/fd/")) for each in sys.argv if each.startswith("/dev/fd/"))]
request = json.dumps([files, "{module}", sys.argv[1:], dict(os.environ), os.getcwd()])
socket.send_fds(server, [request.encode()], files)
pid = int(server.recv(64))
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, lambda number, _: os.kill(pid, number))
code = int(server.recv(64))
sys.exit(code if code >= 0 else 128 - code)
"""


@functools.cache
def _address(kind: str) -> str:
    address = f"\0spanner-outbox-tests-{os.getpid()}-{kind}"
    ready, theirs = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, kind, address[1:], str(theirs)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
        stdin=subprocess.PIPE,  # the server ends when this is closed
        pass_fds=[theirs],
        start_new_session=True,
    )
    atexit.register(server.communicate)  # closes its stdin, then waits for it
    os.close(theirs)
    with os.fdopen(ready) as answer:
        if not answer.read():
            raise AssertionError(f"the fork server of {kind} ended at its start; its stderr says why")
    return address


def _serve(address: str, ready: int) -> tuple[list[int], list[Any]] | None:
    """Fork a process for each request until this test run ends; return the request in the process.

    The answers are the ID of the process, and later its exit code. It is killed if nobody listens any more.
    """
    server, running = os.getpid(), dict[int, tuple[int, socket.socket]]()  # by the file of the process
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen(64)
        os.write(ready, b"ready")
        os.close(ready)
        while True:
            connections = [connection for _, connection in running.values() if connection.fileno() >= 0]
            found = select.select([listener, sys.stdin, *running, *connections], [], [])[0]
            if sys.stdin in found:
                return None
            for file, (pid, connection) in [*running.items()]:
                if file in found:
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _tell(connection, code)
                    connection.close()
                    os.close(file)
                    del running[file]
                elif connection in found:
                    os.kill(pid, signal.SIGKILL)
                    connection.close()
            if listener in found:
                connection, _ = listener.accept()
                text, streams, _, _ = socket.recv_fds(connection, _MAX_REQUEST, _MAX_FILES)
                if (pid := os.fork()) == 0:
                    _end_with(server, *running, *(each.detach() for each in (connection, *connections)))
                    return streams, json.loads(text)
                running[os.pidfd_open(pid)] = pid, connection
                for stream in streams:
                    os.close(stream)
                _tell(connection, pid)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the test has ended
        connection.send(str(number).encode())


def _end_with(parent: int, *files: int) -> None:
    """Let this new process end with its parent, and not keep these files open."""
    for each in files:
        os.close(each)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run(received: Sequence[int], request: list[Any]) -> None:
    numbers, module, arguments, environment, directory = request
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the test run is a background job
    for file, number in zip(received, numbers, strict=True):
        os.dup2(file, number)
        if file not in numbers:
            os.close(file)
    # As at the start of an interpreter: whether a stream is a terminal decides how it is buffered.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    lines = 1 if "PYTHONUNBUFFERED" in environment else -1
    sys.stdout = open(1, "w", buffering=lines, errors=sys.stdout.errors, closefd=False)  # noqa: SIM115 - the same
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - the same
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.argv = [module, *arguments]
    sys.path[:0] = [directory, *(each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each)]
    if "COVERAGE_PROCESS_CONFIG" in os.environ or "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        coverage.process_startup(force=True)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _preload(packages: Sequence[str]) -> None:
    for package in packages:
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    gc.collect()
    gc.freeze()


def _main(kind: str, address: str, ready: str) -> None:
    _preload(PRELOADED[kind])
    if request := _serve(address, int(ready)):
        _run(*request)


if __name__ == "__main__":
    _main(*sys.argv[1:])

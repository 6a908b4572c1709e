"""A server program as a child process on a loopback port that always ends with us. Standard library only."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from outbox.errors import NotReached
from outbox.program.settings import host_and_port

LOOPBACK = "127.0.0.1"
#: Seconds until a server must answer; the Pub/Sub emulator is a Java program and takes about two.
START_SECONDS = 30.0
#: Seconds from SIGTERM to SIGKILL; the emulators end within a tenth of a second.
EMULATOR_STOP_SECONDS = 5.0
#: Last lines of a server's output in an error, and the bytes at its end that are read for them.
TAIL_LINES, TAIL_BYTES = 12, 16_384


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """A server that was started; `running` stops it."""

    title: str
    port: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    @property
    def host(self) -> str:
        """Return `127.0.0.1:PORT`."""
        return f"{LOOPBACK}:{self.port}"

    def ended(self) -> str | None:
        """Return how the process ended, a sentence and its last lines, or None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.title} {how}{self._last_lines()}"

    def written(self) -> str:
        """Return the end of what the process has written."""
        # Not read(): the process writes through the same file position.
        end = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), TAIL_BYTES, max(0, end - TAIL_BYTES)).decode(errors="replace")

    def _last_lines(self) -> str:
        lines = self.written().splitlines()[-TAIL_LINES:]
        return "\n  ".join([". Its last lines:", *lines]) if lines else " and wrote nothing"

    def wait_until(self, ready: Callable[[str], bool]) -> None:
        """Return when `ready` says so of the address. Raises NotReached."""
        deadline = time.monotonic() + START_SECONDS
        while not ready(self.host):
            if ended := self.ended():
                raise NotReached(f"could not start it: {ended}")
            if time.monotonic() > deadline:
                raise NotReached(f"the {self.title} did not answer within {START_SECONDS:g} s{self._last_lines()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL."""
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(EMULATOR_STOP_SECONDS)
        finally:  # also when a second Ctrl-C cuts the wait short
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def answers(host: str) -> bool:
    """Return whether something listens at `host`, HOST:PORT or [IPV6]:PORT."""
    with contextlib.suppress(OSError):
        socket.create_connection(host_and_port(host), timeout=1).close()
        return True
    return False


@contextlib.contextmanager
def running(
    title: str,
    command: Sequence[str],
    port: int = 0,
    *,
    ready: Callable[[str], bool] = answers,
    afterwards: Sequence[str] = (),
) -> Iterator[Child]:
    """Run `command` in the block; `{port}` becomes the port, 0 takes a free one. Raises NotReached with `title`.

    `afterwards` is a command for the end of the block. It also runs if this process is killed.
    """
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("a+b"))
        with _reserved(title, port) as reserved:
            end = _at_our_end(afterwards) if afterwards else contextlib.nullcontext
            process = subprocess.Popen(  # noqa: S603 - the command is ours
                tied([word.replace("{port}", str(reserved)) for word in command]),
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                process_group=0,  # Ctrl-C on the terminal is for us; we stop the children
            )  # fmt: skip
            child = Child(title, reserved, process, output)
            stack.callback(child.stop)
            stack.callback(end)  # before the child is stopped
            child.wait_until(ready)
        yield child


def _at_our_end(command: Sequence[str]) -> Callable[[], object]:
    """Return a function that runs `command`. Without the call, the command runs when this process ends."""
    # A shell waits until the pipe closes, which the kernel does for a killed process too. It has a group of its own, so
    # that a second Ctrl-C does not cut the command short.
    words = ["/bin/sh", "-c", 'read _; exec "$@" > /dev/null 2>&1', "sh", *command]
    shell = subprocess.Popen(words, stdin=subprocess.PIPE, process_group=0)  # noqa: S603 - the command is ours
    return lambda: shell.communicate(timeout=EMULATOR_STOP_SECONDS)


def tied(command: Sequence[str]) -> list[str]:
    """Return `command` so that, on Linux, the kernel kills it when the thread that starts it ends, even by SIGKILL."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


#: A Python of its own asks the kernel to kill it with its parent, then becomes the server. Popen's preexec_fn would
#: run between fork and exec, which can hang a process that has threads.
_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):  # else the parent has already ended
    os.execv(sys.argv[2], sys.argv[2:])
"""


@contextlib.contextmanager
def _reserved(title: str, port: int) -> Iterator[int]:
    """Find a free port, or check `port`, and keep it until the server has it. Raises NotReached."""
    with socket.socket() as reservation:
        if port:
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run linger
        try:
            reservation.bind((LOOPBACK, port))
        except OSError as error:
            raise NotReached(f"the {title} cannot use {LOOPBACK}:{port}: {error.strerror}") from None
        port = reservation.getsockname()[1]
        if sys.platform == "linux":
            # Two Spanner emulators would share one port silently (gRPC sets SO_REUSEPORT). This socket never listens,
            # so it takes no connection, and with these two options it lets the server in.
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            reservation.close()
        yield port

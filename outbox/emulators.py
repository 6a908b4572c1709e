"""The Cloud SDK's Spanner and Pub/Sub emulators as child processes that always end again. Standard library only.

    with running() as emulators:
        os.environ |= emulators.environment()

An emulator that `SPANNER_EMULATOR_HOST` or `PUBSUB_EMULATOR_HOST` names is used as it is, unless a port or flags are
asked for. Otherwise the binaries themselves are started, not the `gcloud` wrapper, which leaves its children behind.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from outbox.errors import NotReached

LOOPBACK = "127.0.0.1"
#: Seconds until a started emulator must answer; the Pub/Sub emulator is a Java program and takes about two.
START_SECONDS = 30.0
#: Seconds for an emulator that a variable names: it may just be starting in a container.
REACH_SECONDS = 5.0
#: Seconds from SIGTERM to SIGKILL; both emulators end within a tenth of a second.
STOP_SECONDS = 5.0
#: How many free ports are tried when the one chosen was taken in the meantime.
PORT_ATTEMPTS = 5
#: Last lines of an emulator's output in an error.
TAIL_LINES = 12

#: Where installers put the Cloud SDK, for a PATH without `gcloud`.
USUAL_ROOTS = (
    Path("~/google-cloud-sdk"),
    Path("/usr/lib/google-cloud-sdk"),
    Path("/opt/google-cloud-sdk"),
    Path("/usr/local/google-cloud-sdk"),
    Path("/snap/google-cloud-cli/current"),
    Path("/opt/homebrew/share/google-cloud-sdk"),
    Path("/usr/local/share/google-cloud-sdk"),
)

HOW_TO_GET_THEM = """Any one of these gives them:
  Cloud SDK  gcloud components install cloud-spanner-emulator pubsub-emulator
  Debian     apt-get install google-cloud-cli-spanner-emulator google-cloud-cli-pubsub-emulator
  Docker     docker run --rm -p 127.0.0.1:9010:9010 gcr.io/cloud-spanner-emulator/emulator
             docker run --rm -p 127.0.0.1:8085:8085 google/cloud-sdk:emulators \\
                 gcloud beta emulators pubsub start --host-port=0.0.0.0:8085
             export SPANNER_EMULATOR_HOST=127.0.0.1:9010
             export PUBSUB_EMULATOR_HOST=127.0.0.1:8085"""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One of the emulators: `path` is below the SDK's root, `{port}` in `arguments` is the port."""

    title: str
    variable: str
    path: str
    arguments: tuple[str, ...]


SPANNER = Program(
    "Spanner emulator",
    "SPANNER_EMULATOR_HOST",
    "bin/cloud_spanner_emulator/emulator_main",
    ("--host_port", LOOPBACK + ":{port}"),
)
PUBSUB = Program(
    "Pub/Sub emulator",
    "PUBSUB_EMULATOR_HOST",
    "platform/pubsub-emulator/bin/cloud-pubsub-emulator",
    (f"--host={LOOPBACK}", "--port={port}"),
)


class _PortTaken(NotReached):
    """Somebody else listens on the port."""


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """A started emulator: stop it with `stop`."""

    program: Program
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
        return f"the {self.program.title} {how}{self.tail()}"

    def tail(self) -> str:
        """Return the last lines of the output, indented, to be added to a sentence."""
        lines = self.written().splitlines()[-TAIL_LINES:]
        return ". Its last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else " and wrote nothing"

    def written(self) -> str:
        """Return the end of what the process has written."""
        # Not read(): the process writes through the same file position.
        end = os.fstat(self.output.fileno()).st_size
        kept = 16_384
        return os.pread(self.output.fileno(), kept, max(0, end - kept)).decode(errors="replace")

    def wait_until_ready(self) -> None:
        """Return when the port answers. Raises NotReached."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            ended = self.ended()
            # The Pub/Sub emulator stays up when it could not bind, so its end is not enough.
            if any(words in self.written() for words in ("Address already in use", "Failed to bind")):
                raise _PortTaken(_taken(self.program, self.port))
            if ended:
                raise NotReached(f"could not start it: {ended}")
            if _answers(self.host):
                return
            time.sleep(0.02)
        raise NotReached(f"the {self.program.title} did not answer within {START_SECONDS:g} s{self.tail()}")

    def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL."""
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        finally:  # also when a second Ctrl-C cuts the wait short
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.output.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


@dataclasses.dataclass(frozen=True, slots=True)
class Emulators:
    """Where the two emulators answer; `children` are those that were started here."""

    spanner_host: str
    pubsub_host: str
    children: tuple[Child, ...] = dataclasses.field(default=(), repr=False)

    def environment(self) -> dict[str, str]:
        """Return the variables with which the Google clients, and every command of this project, use the emulators."""
        return {
            SPANNER.variable: self.spanner_host,
            PUBSUB.variable: self.pubsub_host,
            # Before 1.5.38 the emulator treats a multiplexed session as an ordinary one: the transactions of two
            # threads close one another.
            "GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW": "false",
        }

    def ended(self) -> str | None:
        """Return how an emulator ended that was started here, or None while all run."""
        return next((ended for ended in (child.ended() for child in self.children) if ended), None)


@contextlib.contextmanager
def running(spanner_port: int = 0, pubsub_port: int = 0, spanner_flags: Sequence[str] = ()) -> Iterator[Emulators]:
    """Run both emulators for the time of the block; port 0 takes a free one.

    On Linux they also end when the *thread* that started them ends, however it ends. Raises NotReached: not
    installed, no Java, port taken, died at start, no answer.
    """
    # Both are looked for before either is started, so that one error names all that is missing.
    own_spanner, own_pubsub = _own(SPANNER, spanner_port or spanner_flags), _own(PUBSUB, pubsub_port)
    _check_installed(*([SPANNER] if own_spanner else []), *([PUBSUB] if own_pubsub else []))
    with contextlib.ExitStack() as stack:
        children = []
        if own_spanner:
            children.append(stack.enter_context(_child(SPANNER, spanner_port, spanner_flags)))
        if own_pubsub:
            children.append(stack.enter_context(_child(PUBSUB, pubsub_port)))
        hosts = {child.program: child.host for child in children}
        yield Emulators(hosts.get(SPANNER) or _named(SPANNER), hosts.get(PUBSUB) or _named(PUBSUB), tuple(children))


@contextlib.contextmanager
def running_spanner(port: int = 0, flags: Sequence[str] = ()) -> Iterator[str]:
    """Run a Spanner emulator of our own for the time of the block, whatever the variables say; yield its host.

    Raises NotReached, as `running` does.
    """
    _check_installed(SPANNER)
    with _child(SPANNER, port, flags) as child:
        yield child.host


def _own(program: Program, asked: object) -> bool:
    # A flag wins over its variable, here as everywhere.
    return bool(asked) or not os.environ.get(program.variable)


def _named(program: Program) -> str:
    host = os.environ[program.variable]
    deadline = time.monotonic() + REACH_SECONDS
    while not _answers(host):
        if time.monotonic() > deadline:
            raise NotReached(
                f"{program.variable} is {host!r}, but nothing answers there: start that emulator, or unset the variable"
            )
        time.sleep(0.05)
    return host


def _answers(host: str) -> bool:
    name, _, port = host.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        socket.create_connection((name, int(port)), timeout=1).close()
        return True
    return False


def _check_installed(*programs: Program) -> None:
    missing = [program for program in programs if _executable(program) is None]
    if missing:
        what = " and ".join(f"the {program.title}" for program in missing)
        unset = " and ".join(program.variable for program in missing)
        raise NotReached(
            f"{what} not found: {unset} not set, and no Cloud SDK (PATH, CLOUDSDK_ROOT_DIR, usual directories) "
            f"has {' or '.join(program.path for program in missing)}. {HOW_TO_GET_THEM}"
        )
    if PUBSUB in programs and not _java():
        raise NotReached(
            "the Pub/Sub emulator needs Java, and there is no java in PATH or below JAVA_HOME: "
            "install it (Debian: apt-get install default-jre-headless), or set JAVA_HOME"
        )


def _java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return os.access(Path(home, "bin", "java"), os.X_OK) if home else shutil.which("java") is not None


def _executable(program: Program) -> Path | None:
    paths = (root / program.path for root in _roots())
    return next((path for path in paths if path.is_file() and os.access(path, os.X_OK)), None)


def _roots() -> Iterator[Path]:
    if named := os.environ.get("CLOUDSDK_ROOT_DIR"):
        yield Path(named)  # named on purpose: another installation would be a surprise
        return
    if gcloud := shutil.which("gcloud"):
        yield Path(gcloud).resolve().parent.parent
    yield from (root.expanduser() for root in USUAL_ROOTS)


@contextlib.contextmanager
def _child(program: Program, port: int, flags: Sequence[str] = ()) -> Iterator[Child]:
    child = _start_on_free_port(program, flags) if port == 0 else _start(program, port, flags)
    try:
        yield child
    finally:
        child.stop()


def _start_on_free_port(program: Program, flags: Sequence[str]) -> Child:
    for _ in range(PORT_ATTEMPTS - 1):
        with contextlib.suppress(_PortTaken):
            return _start(program, 0, flags)
    return _start(program, 0, flags)


def _start(program: Program, port: int, flags: Sequence[str]) -> Child:
    with _reserved(program, port) as reserved:
        arguments = [argument.format(port=reserved) for argument in program.arguments]
        output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed by Child.stop
        process = subprocess.Popen(
            [*_tied_to_us(), str(_executable(program)), *arguments, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # Ctrl-C on the terminal is for us; we stop the children
        )
        child = Child(program, reserved, process, output)
        try:
            child.wait_until_ready()
        except BaseException:
            child.stop()
            raise
        return child


@contextlib.contextmanager
def _reserved(program: Program, port: int) -> Iterator[int]:
    """Find a free port, or check `port`, and keep it until the emulator has it. Raises NotReached."""
    with socket.socket() as reservation:
        if port:
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run linger
        try:
            reservation.bind((LOOPBACK, port))
        except OSError as error:
            raise _PortTaken(f"{_taken(program, port)} ({error.strerror})") from None
        port = reservation.getsockname()[1]
        if sys.platform == "linux":
            # Two Spanner emulators would share one port without a word (gRPC sets SO_REUSEPORT). This socket never
            # listens, so it takes no connection, and with these two options it lets the emulator in.
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            reservation.close()
        yield port


def _taken(program: Program, port: int) -> str:
    return f"the {program.title} cannot have port {port} of {LOOPBACK}: something else uses it"


def _tied_to_us() -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid())) if sys.platform == "linux" else ()


#: A Python of its own asks the kernel to kill it with its parent, then becomes the emulator. Popen's preexec_fn would
#: run between fork and exec, which can hang a process that has threads.
_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):  # else the parent is gone already
    os.execv(sys.argv[2], sys.argv[2:])
"""

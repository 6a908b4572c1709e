"""The Spanner and Pub/Sub emulators as child processes that always end again. Standard library only.

    with running() as emulators:
        os.environ |= emulators.environment()

An emulator that `SPANNER_EMULATOR_HOST` or `PUBSUB_EMULATOR_HOST` names is used as it is, unless a port or flags are
asked for. Otherwise the binaries of the Cloud SDK are started, not the `gcloud` wrapper, which leaves its children
behind. Without a Cloud SDK that has them, Docker or Podman runs Google's images.

Several processes, such as those of pytest-xdist, share one emulator: it is started by the first, and ended after the
last. Each user holds a shared lock until it ends, even by SIGKILL. The emulator belongs to a process of its own, this
module, which waits until it gets the lock alone. The lock file and the state file, with the address, are in a folder of
the users.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from outbox.devtools import child_process
from outbox.devtools.child_process import LOOPBACK, Child
from outbox.errors import NotReached
from outbox.program.settings import emulator_address, host_and_port
from outbox.program.terminal import complain

ENGINES = ("docker", "podman")
#: Seconds for the engine's answer to a question. Its service may be starting.
ANSWER_SECONDS = 20.0
#: What a client of HTTP/2 sends first: the preface, and settings without any entry.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
#: Seconds for an emulator that a variable names, because it may be starting in a container.
REACH_SECONDS = 5.0

HOW_TO_GET_THEM = """Install them or name them in one of these ways:
  Cloud SDK  gcloud components install cloud-spanner-emulator pubsub-emulator
  Debian     apt-get install google-cloud-cli-spanner-emulator google-cloud-cli-pubsub-emulator (Google's repository)
  Docker     docker run -d --rm -p 127.0.0.1:9010:9010 gcr.io/cloud-spanner-emulator/emulator
             docker run -d --rm -p 127.0.0.1:8085:8085 google/cloud-sdk:emulators \\
                 gcloud beta emulators pubsub start --host-port=0.0.0.0:8085
             export SPANNER_EMULATOR_HOST=127.0.0.1:9010
             export PUBSUB_EMULATOR_HOST=127.0.0.1:8085"""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One of the emulators: `path` is below the SDK's root, `{port}` in `arguments` is the port.

    In a container of `image`, `command` listens on `own_port`.
    """

    title: str
    variable: str
    path: str
    arguments: tuple[str, ...]
    image: str
    own_port: int
    command: tuple[str, ...]


SPANNER = Program(
    "Spanner emulator",
    "SPANNER_EMULATOR_HOST",
    "bin/cloud_spanner_emulator/emulator_main",
    ("--host_port", LOOPBACK + ":{port}"),
    "gcr.io/cloud-spanner-emulator/emulator:1.5.58"
    "@sha256:c6f3402f2599684f295a0fdefb6fbbbfb18a0e43e309ff5456ccb452a4570a79",
    9010,
    ("./emulator_main", "--host_port", "0.0.0.0:9010"),
)
PUBSUB = Program(
    "Pub/Sub emulator",
    "PUBSUB_EMULATOR_HOST",
    "platform/pubsub-emulator/bin/cloud-pubsub-emulator",
    (f"--host={LOOPBACK}", "--port={port}"),
    "gcr.io/google.com/cloudsdktool/google-cloud-cli:587.0.0-emulators"
    "@sha256:8d8573471c489a409f03891d2c24d177fa531276184f7002b9a2d853d1b3ed54",
    8085,
    ("gcloud", "beta", "emulators", "pubsub", "start", "--host-port=0.0.0.0:8085"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Emulators:
    """Where the two emulators answer; `children` are those that were started here."""

    spanner_host: str
    pubsub_host: str
    children: tuple[Child, ...] = dataclasses.field(default=(), repr=False)

    def environment(self) -> dict[str, str]:
        """Return the variables with which the Google clients, and every command of this project, use the emulators."""
        return environment({SPANNER.variable: self.spanner_host, PUBSUB.variable: self.pubsub_host})

    def ended(self) -> str | None:
        """Return how an emulator ended that was started here, or None while all run."""
        return next((ended for ended in (child.ended() for child in self.children) if ended), None)


def environment(hosts: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for emulators at `hosts`. If the environment names a proxy, gRPC reaches them directly."""
    variables = dict(hosts)
    if any(map(os.environ.get, ("grpc_proxy", "https_proxy", "http_proxy"))):
        former = next(filter(None, map(os.environ.get, ("no_grpc_proxy", "no_proxy"))), "")
        reached = (*former.split(","), *(host_and_port(address)[0] for address in hosts.values()))
        variables["no_grpc_proxy"] = ",".join(dict.fromkeys(filter(None, reached)))
    # Before 1.5.38 the emulator treats a multiplexed session as an ordinary one: the transactions of two threads close
    # one another.
    return variables | {"GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW": "false"}


@contextlib.contextmanager
def running(spanner_port: int = 0, pubsub_port: int = 0, spanner_flags: Sequence[str] = ()) -> Iterator[Emulators]:
    """Run both emulators in the block; port 0 takes a free one. Raises NotReached; SettingError for a variable."""
    # Check for both before starting either, so that one error names everything that is missing.
    own = ((SPANNER, spanner_port or spanner_flags), (PUBSUB, pubsub_port))
    check_installed(*[program for program, wanted in own if wanted or not os.environ.get(program.variable)])
    with (
        _running(SPANNER, spanner_port, spanner_flags) as (spanner, own_spanner),
        _running(PUBSUB, pubsub_port) as (pubsub, own_pubsub),
    ):
        yield Emulators(spanner, pubsub, own_spanner + own_pubsub)


@contextlib.contextmanager
def running_one(program: Program, flags: Sequence[str] = ()) -> Iterator[str]:
    """Run one emulator for the time of the block; yield its host. Raises NotReached, as `running` does."""
    with _running(program, 0, flags) as (host, _):
        yield host


@contextlib.contextmanager
def _running(program: Program, port: int, flags: Sequence[str] = ()) -> Iterator[tuple[str, tuple[Child, ...]]]:
    """Yield a host, and what was started: nothing if the variable names a host, and no port or flags are asked for."""
    host = emulator_address(program.variable)
    if port or flags or not host:
        check_installed(program)
        executable = _executable(program)
        starting = (
            child_process.running(program.title, [str(executable), *program.arguments, *flags], port)
            if executable
            else _in_container(program, port, flags)
        )
        with starting as child:
            yield child.host, (child,)
        return
    deadline = time.monotonic() + REACH_SECONDS
    while not child_process.answers(host):
        if time.monotonic() > deadline:
            raise NotReached(
                f"{program.variable} is {host!r}, but nothing answers there: start that emulator, or unset the variable"
            )
        time.sleep(0.05)
    yield host, ()


def check_installed(*programs: Program) -> None:
    """Return if these can be started here. Raises NotReached: what is missing, how to get it."""
    missing = [program for program in programs if _executable(program) is None]
    if missing and not engine():
        what = " and ".join(f"the {program.title}" for program in missing)
        unset = " and ".join(program.variable for program in missing)
        raise NotReached(
            f"{what} not found: {unset} not set, and no Cloud SDK (CLOUDSDK_ROOT_DIR, or gcloud in PATH) "
            f"has {' or '.join(program.path for program in missing)}, and neither Docker nor Podman is running. "
            f"{HOW_TO_GET_THEM}"
        )


def _executable(program: Program) -> Path | None:
    """Return the program of the Cloud SDK in CLOUDSDK_ROOT_DIR, or else of the one that `gcloud` in PATH belongs to."""
    root, gcloud = os.environ.get("CLOUDSDK_ROOT_DIR"), shutil.which("gcloud")
    if not root and not gcloud:
        return None
    path = (Path(root) if root else Path(str(gcloud)).resolve().parents[1]) / program.path
    return path if path.is_file() and os.access(path, os.X_OK) else None


def _in_container(program: Program, port: int, flags: Sequence[str]) -> contextlib.AbstractContextManager[Child]:
    """Run the emulator in a container of Docker or Podman, which is removed at the end.

    Only the loopback interface reaches it. Raises NotReached.
    """
    found = engine()
    _pull(found, program.image)
    name = f"outbox-{uuid.uuid4().hex[:12]}"
    publish = f"{LOOPBACK}:{{port}}:{program.own_port}"
    words = [found, "run", "--rm", "--name", name, "--publish", publish, program.image, *program.command, *flags]
    # Process 1 of a container ignores signals that it does not handle, so the engine removes the container.
    return child_process.running(program.title, words, port, ready=_speaks, afterwards=[found, "rm", "--force", name])


def engine() -> str:
    """Return the path of Docker or Podman, whichever works here first, or an empty string."""
    paths = filter(None, map(shutil.which, ENGINES))
    return next((path for path in paths if _asked(path, "ps", "--quiet")), "")


def _pull(engine: str, image: str) -> None:
    if _asked(engine, "image", "inspect", image):
        return
    complain("emulators", f"Pulling {image}, once. This can take minutes ...")
    done = subprocess.run([engine, "pull", "--quiet", image], capture_output=True, text=True, check=False)  # noqa: S603 - the command is ours
    if done.returncode:
        raise NotReached(f"could not pull {image}: {done.stderr.strip()}")


def _asked(*command: str) -> bool:
    """Return whether a command succeeds in time."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, check=False, timeout=ANSWER_SECONDS)  # noqa: S603 - the command is ours
        return done.returncode == 0
    return False


def _speaks(host: str) -> bool:
    """Return whether a gRPC server answers. The engine's proxy accepts connections before the server does."""
    with contextlib.suppress(OSError), socket.create_connection(host_and_port(host), timeout=1) as connection:
        connection.sendall(PREFACE)
        return bool(connection.recv(1))
    return False


@contextlib.contextmanager
def sharing(program: Program, folder: Path) -> Iterator[str]:
    """Use an emulator for the time of the block, together with all that pass this folder; yield its host.

    Raises NotReached, as `running` does.
    """
    name = program.variable
    state, users, starting = (folder / f"{name}{end}" for end in (".address", ".users", ".starting"))
    with contextlib.ExitStack() as stack:
        with _locked(starting, fcntl.LOCK_EX):
            stack.enter_context(_locked(users, fcntl.LOCK_SH))
            host = state.read_text() if state.exists() else ""
            if not (host and child_process.answers(host)):
                state.write_text(host := _started(name, state, users))
        yield host


def _started(*arguments: str | Path) -> str:
    """Start the process that runs the emulator; return the host. Raises NotReached."""
    command = [sys.executable, "-m", __spec__.name, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:  # noqa: S603 - ours
        line = process.stdout.readline() if process.stdout else b""
    host, missing = json.loads(line or '["", "the process of the emulator has ended without an answer"]')
    if missing:
        raise NotReached(missing)
    return str(host)


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, kind)  # until the file is closed
        yield


def _run(variable: str, state: str, users: str) -> None:
    """Run the emulator, print its host or what is missing, and wait until it has no users."""
    program = SPANNER if variable == SPANNER.variable else PUBSUB
    try:
        with running_one(program) as host:
            print(json.dumps([host, ""]), flush=True)  # noqa: T201 - for `_started`
            with _locked(Path(users), fcntl.LOCK_EX):
                Path(state).unlink(missing_ok=True)
    except NotReached as error:
        print(json.dumps(["", str(error)]), flush=True)  # noqa: T201 - the same


if __name__ == "__main__" and os.fork() == 0:  # no child of the first user, who may end long before
    os.setsid()  # Ctrl-C on the terminal is for the users
    _run(*sys.argv[1:])

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
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from outbox.devtools import child_process
from outbox.devtools.child_process import LOOPBACK, Child
from outbox.errors import NotReached

#: Seconds for an emulator that a variable names: it may just be starting in a container.
REACH_SECONDS = 5.0
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
    # A port or flags that are asked for win over the variable, as a flag does everywhere.
    own_spanner = bool(spanner_port or spanner_flags) or not os.environ.get(SPANNER.variable)
    own_pubsub = bool(pubsub_port) or not os.environ.get(PUBSUB.variable)
    # Check for both before starting either, so that one error names everything that is missing.
    check_installed(*[program for program, own in ((SPANNER, own_spanner), (PUBSUB, own_pubsub)) if own])
    with contextlib.ExitStack() as stack:
        spanner = stack.enter_context(_started(SPANNER, spanner_port, spanner_flags)) if own_spanner else None
        pubsub = stack.enter_context(_started(PUBSUB, pubsub_port)) if own_pubsub else None
        yield Emulators(
            spanner.host if spanner else _named(SPANNER),
            pubsub.host if pubsub else _named(PUBSUB),
            tuple(child for child in (spanner, pubsub) if child),
        )


@contextlib.contextmanager
def running_spanner(port: int = 0, flags: Sequence[str] = ()) -> Iterator[str]:
    """Run a Spanner emulator of our own for the time of the block, whatever the variables say; yield its host.

    Raises NotReached, as `running` does.
    """
    check_installed(SPANNER)
    with _started(SPANNER, port, flags) as child:
        yield child.host


@contextlib.contextmanager
def running_one(program: Program) -> Iterator[str]:
    """Yield the host of the emulator that its variable names, or of one that runs for the time of the block.

    Raises NotReached, as `running` does.
    """
    if os.environ.get(program.variable):
        yield _named(program)
        return
    check_installed(program)
    with _started(program, 0) as child:
        yield child.host


def check_installed(*programs: Program) -> None:
    """Return if these, and what they need, are installed here. Raises NotReached: what is missing, how to get it."""
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


def _started(program: Program, port: int, flags: Sequence[str] = ()) -> AbstractContextManager[Child]:
    return child_process.running(program.title, [str(_executable(program)), *program.arguments, *flags], port)


def _named(program: Program) -> str:
    host = os.environ[program.variable]
    deadline = time.monotonic() + REACH_SECONDS
    while not child_process.answers(host):
        if time.monotonic() > deadline:
            raise NotReached(
                f"{program.variable} is {host!r}, but nothing answers there: start that emulator, or unset the variable"
            )
        time.sleep(0.05)
    return host


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

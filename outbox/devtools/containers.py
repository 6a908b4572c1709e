"""A server in a container of Docker or Podman, which is removed at the end. Standard library only."""

import dataclasses
import shutil
import socket
import subprocess
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

from outbox.devtools import child_process
from outbox.devtools.child_process import LOOPBACK, Child
from outbox.errors import NotReached
from outbox.program.settings import host_and_port
from outbox.program.terminal import complain

ENGINES = ("docker", "podman")
#: Seconds for the engine's answer to a question. Its service may be starting.
ANSWER_SECONDS = 20.0
#: What a client of HTTP/2 sends first: the preface, and settings without any entry.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def engine() -> str:
    """Return the path of Docker or Podman, whichever works here first, or an empty string."""
    paths = filter(None, map(shutil.which, ENGINES))
    return next((path for path in paths if _asked(path, "ps", "--quiet")), "")


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """`image` runs `command`, which listens on `port` of the container."""

    image: str
    port: int
    command: tuple[str, ...]


def running(
    title: str, container: Container, port: int = 0, flags: Sequence[str] = ()
) -> AbstractContextManager[Child]:
    """Run a container for the time of the block. Only the loopback interface reaches it.

    Raises NotReached: the image cannot be pulled, port taken, ended at start, no answer in time.
    """
    found = engine()
    _pull(found, container.image)
    name = f"outbox-{uuid.uuid4().hex[:12]}"
    publish = f"{LOOPBACK}:{{port}}:{container.port}"
    words = [found, "run", "--rm", "--name", name, "--publish", publish, container.image, *container.command, *flags]
    # Process 1 of a container ignores signals that it does not handle, so the engine removes the container.
    return child_process.running(title, words, port, ready=_speaks, afterwards=[found, "rm", "--force", name])


def _pull(engine: str, image: str) -> None:
    if _asked(engine, "image", "inspect", image):
        return
    complain("emulators", f"Pulling {image}, once. This can take minutes ...")
    done = subprocess.run([engine, "pull", "--quiet", image], capture_output=True, text=True, check=False)  # noqa: S603 - the command is ours
    if done.returncode:
        raise NotReached(f"could not pull {image}: {done.stderr.strip()}")


def _asked(*command: str) -> bool:
    """Return whether a command succeeds in time."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, check=False, timeout=ANSWER_SECONDS)  # noqa: S603 - the command is ours
        return done.returncode == 0
    return False


def _speaks(host: str) -> bool:
    """Return whether a gRPC server answers. The engine's proxy accepts connections before the server does."""
    with suppress(OSError), socket.create_connection(host_and_port(host), timeout=1) as connection:
        connection.sendall(PREFACE)
        return bool(connection.recv(1))
    return False

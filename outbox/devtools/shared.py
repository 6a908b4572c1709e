"""One emulator for several processes, such as those of pytest-xdist: started by the first, ended after the last.

Each user holds a shared lock until it ends, even by SIGKILL. The emulator belongs to a process of its own, this module,
which waits until it gets the lock alone. The lock file and the state file, with the address, are in a folder of the
users. Standard library only.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from outbox.devtools.child_process import answers
from outbox.devtools.emulators import PUBSUB, SPANNER, Program, running_one
from outbox.errors import NotReached


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
            if not (host and answers(host)):
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

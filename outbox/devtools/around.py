"""A command with the emulators around it, a worker beside it, and a file of variables for other terminals.

Standard library only.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from outbox.devtools.child_process import tied
from outbox.errors import OutboxError, SettingError

#: Seconds between two checks that the emulators and the worker are running.
CHECK_CHILD_SECONDS = 0.2
#: Seconds from SIGTERM to SIGKILL, for the worker and a command.
COMMAND_STOP_SECONDS = 10.0
#: The first line of a file of variables. Only a file that begins with it is replaced.
WRITTEN = "# Written by `outbox emulators`, which deletes this file when it stops."

#: Returns a sentence when something has ended that should still run.
Ended = Callable[[], str | None]


def exports(variables: Mapping[str, str]) -> list[str]:
    """Return the lines that set variables in a shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


@contextlib.contextmanager
def env_file(path: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Write the variables for `. FILE`, and delete the file at the end of the block. Raises SettingError."""
    try:
        if path.exists() and not path.read_bytes().startswith(WRITTEN.encode()):
            raise SettingError(f"--env-file: {str(path)!r} was not written by this command. Choose another name")
        path.write_text("\n".join([WRITTEN, *exports(variables), ""]))
    except OSError as error:
        raise SettingError(f"--env-file: {str(path)!r} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def worker(variables: Mapping[str, str]) -> Iterator[Ended]:
    """Run `publishworker run` in the block, which yields what says how it ended."""
    command = [sys.executable, "-m", "publishworker", "run"]
    # A group of its own: Ctrl-C on the terminal is for the command, and the worker outlives it.
    process = subprocess.Popen(tied(command), env=os.environ | variables, stdin=subprocess.DEVNULL, process_group=0)  # noqa: S603 - ours
    try:
        yield lambda: None if process.poll() is None else f"the worker ended with exit code {process.returncode}"
    finally:
        _stop(process)


def program(name: str) -> str:
    """Return the path of a program. Raises SettingError."""
    if path := shutil.which(name):
        return path
    raise SettingError(f"command not found: {name!r}")


def run(words: Sequence[str], variables: Mapping[str, str], ended: Ended) -> int:
    """Run a command with the variables until it ends, and return its exit code as a shell does.

    It gets our SIGTERM and SIGHUP, and SIGINT unless the terminal sends it to both. Raises OutboxError if `ended`
    returns a sentence. Then the command is stopped.
    """
    process = subprocess.Popen(tied([program(words[0]), *words[1:]]), env=os.environ | variables)  # noqa: S603 - the user's
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        is_for_both = number == signal.SIGINT and sys.stdin.isatty()
        signal.signal(number, signal.SIG_IGN if is_for_both else lambda got, _: process.send_signal(got))
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(CHECK_CHILD_SECONDS)
                return code if code >= 0 else 128 - code
            if sentence := ended():
                raise OutboxError(sentence)
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(COMMAND_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

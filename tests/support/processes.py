"""Commands of this project as processes of their own, forked with their imports done, always killed at the end.

with started("publishworker", "run", environment=emulators.environment() | {...}) as worker:
    worker.wait_for_text("working")
    worker.stop()
    assert worker.wait() == 0
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from outbox.devtools.child_process import tied
from tests.support import fork_server, real
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]

#: The variables of our environment that a command gets; the test gives all others.
KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "JAVA_HOME", "SPARK_SUBMIT_OPTS", "CLOUDSDK_ROOT_DIR", "VIRTUAL_ENV")
#: The same by prefix: coverage of child processes.
KEPT_PREFIXES = ("COV_", "COVERAGE_")


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    code: int
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    child: subprocess.Popen[bytes] | fork_server.Child
    _stdout: IO[bytes]
    _stderr: IO[bytes]

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def stdout(self) -> str:
        return _written(self._stdout)

    @property
    def stderr(self) -> str:
        return _written(self._stderr)

    def wait_for_text(self, text: str, seconds: float = 30.0) -> None:
        def written() -> bool:
            return text in self.stdout or text in self.stderr

        eventually(lambda: self.child.poll() is not None or written(), seconds=seconds, message=f"{text!r} written")
        if not written():
            raise AssertionError(f"ended with {self.child.returncode} without {text!r}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.child.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.stop(number)
        assert self.wait() == 0

    def wait(self, seconds: float = 30.0) -> int:
        try:
            return self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s") from None


@contextlib.contextmanager
def started(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    directory: Path = ROOT,
    python: str = sys.executable,
) -> Iterator[Process]:
    """Start `python -m module arguments` in the repository, with few variables of ours and those of `environment`.

    In another `directory` it finds that one's packages first, and `python` can be that of another environment.
    """
    with tempfile.TemporaryFile("a+b") as stdout, tempfile.TemporaryFile("a+b") as stderr:
        given = dict(environment or {})
        variables = clean_environment() | given | real.settings(given)
        child = (
            fork_server.fork(module, arguments, variables, stdout=stdout, stderr=stderr, directory=directory)
            if python == sys.executable and sys.platform == "linux"
            else subprocess.Popen(
                tied([python, "-m", fork_server.MODULES.get(module, module), *arguments]),
                cwd=directory,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                process_group=0,  # Ctrl-C ends the test run, which then ends the command
            )
        )
        process = Process(child, stdout, stderr)
        try:
            yield process
        finally:
            child.kill()
            child.wait()
            print(f"{module} {' '.join(arguments)} ended with {child.returncode}")  # pytest shows it if the test fails
            print(f"--- its stdout\n{process.stdout}--- its stderr\n{process.stderr}")


def run(module: str, *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = 30.0) -> Finished:
    with started(module, *arguments, environment=environment) as process:
        code = process.wait(seconds)
        return Finished(code, process.stdout, process.stderr)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}


def _written(file: IO[bytes]) -> str:
    # Not read(): the process writes through the same file position.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def children(pid: int) -> list[int]:
    return [child for child, (parent, state) in _processes().items() if parent == pid and state != "Z"]


def kill_family(pid: int) -> None:
    """Kill a process and all below it at once, parents first, such as Spark's JVM and its workers; wait for the end."""
    family = [pid]
    for each in family:
        family += children(each)
    for each in family:
        with contextlib.suppress(ProcessLookupError):  # a worker of Spark may end by itself
            os.kill(each, signal.SIGKILL)
    eventually(lambda: all(map(gone, family)), message="all of them have ended")


def gone(pid: int) -> bool:
    """Return whether a process has ended, also if no process has waited for it."""
    return _processes().get(pid, (0, "Z"))[1] == "Z"


def _processes() -> dict[int, tuple[int, str]]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            found[int(path.parent.name)] = (int(parent), state)
    return found

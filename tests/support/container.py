"""A worker as a container runs it: its probe, its memory, as process 1 without rights, and with a part that fails.

python -m tests.support.container CODE run ...    `publishworker run ...`, after CODE has replaced something in it
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT, Process, children, started
from tests.support.spanner import variables
from tests.support.waiting import eventually, lasting

#: Seconds that the manifest grants for a shutdown.
GRACE_SECONDS = 60
#: Seconds within which a probe must notice an unhealthy worker.
NOTICE_SECONDS = 60
#: The limit of the manifest, bytes.
MEMORY_LIMIT = 512 * 1024 * 1024

#: No rights: a read-only root, one small directory that can be written, an ordinary user, no new privileges. The
#: second user namespace is what makes an ordinary user of the first one's root, under any user.
_CONFINE = """
mount -t tmpfs -o size=16m,mode=1777 tmpfs "$0" && mount -o remount,ro,bind / &&
exec unshare --user --map-user=65532 --map-group=65532 setpriv --no-new-privs "$@"
"""
#: `publishworker healthcheck` with another limit.
SHORTER = """
import sys
from publishworker.process import healthcheck
healthcheck.MAX_AGE = {}
sys.exit(healthcheck.main([]))
"""
NAMESPACES = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")


def settings(emulators: Emulators, database_id: str, heartbeat: Path, **environment: str) -> dict[str, str]:
    return variables(database_id, emulators) | {"OUTBOX_HEARTBEAT_FILE": str(heartbeat)} | environment


@contextlib.contextmanager
def altered(code: str, environment: dict[str, str], *arguments: str) -> Iterator[Process]:
    with started("tests.support.container", code, "run", *arguments, environment=environment) as process:
        yield process


class Probe:
    """A probe as Kubernetes runs it: the exit code of a command, and its output."""

    def __init__(self, heartbeat: Path, max_age: float | None = None) -> None:
        """Check `heartbeat`, which may be `max_age` seconds old; None is the command's own limit."""
        # As the manifest has it, without an option, and without the second process that `run` starts.
        self._environment = dict(os.environ) | {"OUTBOX_HEARTBEAT_FILE": str(heartbeat)}
        self._command = ["-m", "publishworker", "healthcheck"] if max_age is None else ["-c", SHORTER.format(max_age)]
        self._heartbeat = heartbeat
        self.output = ""

    def __call__(self) -> int:
        command = [sys.executable, *self._command]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=20, check=False
        )
        self.output = done.stderr.strip()
        return done.returncode

    def is_good(self) -> bool:
        return self() == 0

    def is_bad(self) -> bool:
        """Return whether the worker would be restarted."""
        return self() == 1

    def max_gap(self, seconds: float, check: Callable[[], object]) -> float:
        """Watch the heartbeat and call `check` once a second; return the max time between two heartbeats.

        The time since the last heartbeat counts as well.
        """
        max_gap = checked = 0.0

        def watch() -> None:
            nonlocal max_gap, checked
            max_gap = max(max_gap, time.time() - self._heartbeat.stat().st_mtime)
            if time.monotonic() - checked >= 1:
                checked = time.monotonic()
                check()

        lasting(seconds, watch, interval=0.1)
        return max_gap


def peak_memory(process: Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(kilobytes) * 1024 for kilobytes in re.findall(r"^Vm(?:HWM|Swap):\s+(\d+) kB$", status, re.MULTILINE))


def confined(writable: Path, command: Sequence[str]) -> list[str]:
    """Return `command` so that it runs as process 1, without rights, and can write nothing but `writable`."""
    return [*NAMESPACES, "sh", "-c", _CONFINE, str(writable), *command]


def need_namespaces(writable: Path) -> None:
    import pytest  # here, because workers import this module, and their memory is measured

    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        reason = "no unshare and setpriv in PATH"
    else:
        tried = subprocess.run(confined(writable, ["true"]), capture_output=True, text=True, timeout=20, check=False)
        reason = "" if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip() or tried.returncode}"
    if reason:
        pytest.skip(reason)


@contextlib.contextmanager
def container(directory: Path, environment: dict[str, str], code: str = "") -> Iterator[tuple[Process, int]]:
    arguments = ("in", str(directory), code, "run")
    with started("tests.support.container", *arguments, environment=environment) as process:
        # The one that waits starts one process, which becomes the worker.
        yield process, eventually(lambda: children(process.pid), message="the process in the namespace")[0]


def main() -> int:
    code, *arguments = sys.argv[1:]
    if code == "in":
        directory, *rest = arguments
        command = confined(Path(directory), [sys.executable, "-m", "tests.support.container", *rest])
        os.execvp(command[0], command)
    exec(code, {})
    from publishworker.process.cli import main as publishworker

    return publishworker(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Operators' commands as people and programs use them: in a process, in a shell, at a terminal; and rows for them.

`here` runs them in this process, where a table of cases would start many.

outbox = Commands(emulators, database)
insert(database, [row("a", "dead"), row("b", "sent", age=timedelta(days=40))])
assert outbox.run("retry", "a").code == 0
"""

import contextlib
import functools
import io
import json
import os
import pty
import shutil
import subprocess
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

from google.cloud.spanner_v1.database import Database

from outbox.devtools.child_process import tied
from outbox.devtools.emulators import Emulators
from outbox.table.states import NEVER
from outbox_admin import cli
from tests.support import fork_server, operations, real
from tests.support.operations import Row
from tests.support.processes import ROOT, Finished, Process, clean_environment, run, started
from tests.support.spanner import query, variables
from tests.support.waiting import eventually

#: No output has a stack trace.
TRACE = "Traceback"
HOUR = timedelta(hours=1)
#: Seconds for a command; the emulator and other tests share the machine.
SECONDS = 60.0
#: Made once, because that takes a third of the time of a command.
_parser = functools.cache(cli._parser)


def here(
    *words: str, environment: Mapping[str, str] | None = None, program: Callable[[Sequence[str]], int] = cli.main
) -> Finished:
    """Run a command in this process and return how it ended; half a second sooner than in one of its own."""
    stdout, stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with (
        mock.patch.object(cli, "_parser", _parser),
        mock.patch.dict(os.environ, environment or {}),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            code = program(words)
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
    stdout.flush()
    return Finished(code, stdout.buffer.getvalue().decode(), stderr.getvalue())


@dataclass(frozen=True)
class Commands:
    """Commands on one database of the emulator; `spanner_host` may name a proxy before it."""

    emulators: Emulators
    database: Database
    spanner_host: str = ""
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        reached = {"SPANNER_EMULATOR_HOST": self.spanner_host} if self.spanner_host else {}
        given = self.emulators.environment() | variables(self.database.database_id) | reached | dict(self.more)
        return given | real.settings(given)

    def run(self, *words: str) -> Finished:
        return run("outbox", *words, environment=self.environment, seconds=SECONDS)

    def here(self, *words: str) -> Finished:
        return here(*words, environment=self.environment)

    def objects(self, *words: str) -> list[Any]:
        done = self.here(*words)
        assert done.code == 0, done
        return [json.loads(line) for line in done.stdout.splitlines()]

    def started(self, *words: str) -> "contextlib.AbstractContextManager[Process]":
        return started("outbox", *words, environment=self.environment)

    def shell(self, script: str) -> Finished:
        path = {"PATH": f"{fork_server.scripts()}:{os.environ['PATH']}"}
        done = subprocess.run(
            tied([str(shutil.which("bash")), "-c", script]),
            cwd=ROOT,
            env=clean_environment() | self.environment | path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def terminal(self, *words: str) -> Iterator["Terminal"]:
        """Start a command whose input and output are a terminal; it is killed at the end of the block."""
        ours, its = pty.openpty()
        termios.tcsetwinsize(its, (24, 100))
        environment = clean_environment() | self.environment | {"TERM": "xterm"}
        child = fork_server.fork("outbox", words, environment, stdin=its, stdout=its, stderr=its)
        os.close(its)
        os.set_blocking(ours, False)
        try:
            yield Terminal(child, ours)
        finally:
            child.kill()
            child.wait()
            os.close(ours)


@dataclass
class Terminal:
    child: fork_server.Child
    _file: int
    _seen: bytes = b""

    @property
    def seen(self) -> str:
        with contextlib.suppress(OSError):  # nothing more just now, or closed
            while data := os.read(self._file, 65_536):
                self._seen += data
        return self._seen.decode(errors="replace")

    def wait_for_text(self, text: str) -> None:
        eventually(lambda: text in self.seen, seconds=SECONDS, message=f"{text!r} at the terminal")

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait(self) -> int:
        """Return the exit code; an unread terminal would block the command."""

        def ended() -> bool:
            return self.seen is not None and self.child.poll() is not None

        eventually(ended, seconds=SECONDS, message="the command's end")
        return self.child.wait()


def row(id: str, state: str = "pending", *, topic: str = "orders", age: timedelta = HOUR, **columns: Any) -> Row:
    now = datetime.now(UTC)
    states: dict[str, dict[str, Any]] = {
        "pending": {},
        "retrying": {"AvailableAt": now + HOUR, "Attempts": 3, "LastError": "unavailable: it is away"},
        "scheduled": {"AvailableAt": now + HOUR},
        "blocked": {"AvailableAt": now + HOUR, "OrderingKey": "key", "Attempts": 2, "BlockedBy": "head"},
        "dead": {"AvailableAt": NEVER, "Attempts": 16, "LastError": "not_found: no such topic"},
        "sent": {"SentAt": now - age},
    }
    return operations.row(id, **{"Topic": topic, "Data": b"", "CreatedAt": now - age, **states[state], **columns})


def table(database: Database, condition: str = "TRUE") -> dict[str, tuple[Any, ...]]:
    statement = f"SELECT Id, SentAt, AvailableAt, Attempts FROM AsynchronousTasks WHERE {condition}"
    return {id: tuple(values) for id, *values in query(database, statement)}


def control_codes(text: str) -> list[str]:
    return sorted({each for each in text if not each.isprintable() and each != "\n"})

"""`outbox emulators`: run the Spanner and Pub/Sub emulators, in the foreground or around a command."""

import argparse
import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from outbox.base.values import TOPIC_ID
from outbox.devtools.child_process import tied
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import PREFIX, DatabaseSettings, matching, whole_number
from outbox.program.terminal import INTERRUPTED, note, say
from outbox.table.ddl import cut
from outbox_admin import flags

#: Seconds between two checks that the emulators and the worker are running.
CHECK_CHILD_SECONDS = 0.2
#: Seconds from SIGTERM to SIGKILL, for the worker and a command.
COMMAND_STOP_SECONDS = 10.0
#: The first line of a file of variables, with the process. Only such a file is replaced.
WRITTEN = "# Written by `outbox emulators`, process {}, which deletes this file when it stops."
_WRITER = re.compile(rb"# Written by `outbox emulators`, process (\d+), ")
PORT = whole_number(0, 65_535)
PUBSUB_ID = matching(TOPIC_ID, "an ID that Pub/Sub allows, such as orders")

DESCRIPTION = """\
Run the Spanner and Pub/Sub emulators until Ctrl-C or SIGTERM, and print the environment
variables for clients. With a command after --, set the variables for this command, run it,
and end with its exit code. If SPANNER_EMULATOR_HOST or PUBSUB_EMULATOR_HOST is set, that
emulator is not started, unless you pass its port.

--create creates a database with the outbox's tables, --topic a topic, and --subscription a
subscription to the topic before it. Databases, topics and subscriptions that exist are kept.

    outbox emulators
    outbox emulators -- pytest
    outbox emulators --create my-project/main/shop --topic orders \\
        --subscription billing
    outbox emulators --create my-project/main/shop --topic orders \\
        --worker -- bash"""

WHY_NOT_MULTIPLEXED = (
    "# Emulators before 1.5.38 treat a multiplexed session as a regular one, so the transactions of two threads",
    "# close each other (404 Transaction not found). The Spanner client then needs this:",
)
PLACE = matching("[^/]+/[^/]+/[^/]+", "PROJECT/INSTANCE/DATABASE, such as my-project/main/shop")


def _of_kind(kind: str, text: str) -> tuple[str, str]:
    return kind, PUBSUB_ID.value(text, f"--{kind}")


def add(commands: Any) -> None:
    parser = flags.command(commands, "emulators", "run both emulators until Ctrl-C", DESCRIPTION, run_emulators)
    for name in ("Spanner", "Pub/Sub"):
        flag = f"--{name.lower().replace('/', '')}-port"
        flags.add(parser, flag, PORT, f"Port of the {name} emulator; 0, the default, selects a free one", default=0)
    text = "Create this database with the outbox's tables"
    flags.add(parser, "--create", PLACE, text, metavar="PROJECT/INSTANCE/DATABASE")
    text = "DDL of your own tables for a new database. Each statement ends with a semicolon."
    parser.add_argument("--ddl-file", metavar="FILE", help=text)
    text = "Create the database of --create without the outbox's tables, for your own migrations."
    parser.add_argument("--empty", action="store_true", help=text)
    for kind in ("topic", "subscription"):
        # Both flags append to one list, because the order says to which topic a subscription belongs.
        parser.add_argument(
            f"--{kind}", type=functools.partial(_of_kind, kind), dest="pubsub", action="append", default=[],
            metavar="ID", help=f"Create this {kind} in the project of --create; may be repeated.",
        )  # fmt: skip
    text = "Write the export lines to this file, for `. ./FILE` in other terminals, and delete it at the end."
    parser.add_argument("--env-file", metavar="FILE", type=Path, help=text)
    text = "Also run `publishworker run` for the database of --create. Its log goes to stderr."
    parser.add_argument("--worker", action="store_true", help=text)
    text = "After --: a command to run with the variables. The emulators stop when it ends."
    parser.add_argument("words", nargs="*", metavar="COMMAND", help=text)


def run_emulators(options: argparse.Namespace) -> int:
    """Run both until a signal, then return 0, or around a command, and return its exit code.

    Raises OutboxError: invalid port, no emulator, or an emulator or the worker exited.
    """
    from outbox.devtools.emulators import running  # noqa: PLC0415 - only this command needs it

    target, ddl = _plan(options)
    # Treat SIGTERM, and SIGHUP from a closed terminal, like Ctrl-C, so that both emulators are stopped.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with running(options.spanner_port, options.pubsub_port) as emulators, contextlib.ExitStack() as stack:
            variables = emulators.environment()
            if target:
                _create(options, target, ddl, variables)
                names = ("project", "instance", "database")
                variables = {PREFIX + name.upper(): getattr(target, name) for name in names} | variables
            if options.env_file:
                stack.enter_context(_env_file(options.env_file, variables))
            worker = None
            if options.worker:
                # A group of its own: Ctrl-C on the terminal is for the command, and the worker outlives it.
                words = [sys.executable, "-m", "publishworker", "run"]
                worker = stack.enter_context(_started(words, variables, stdin=subprocess.DEVNULL, process_group=0))

            def ended() -> str | None:
                """Return a sentence when something has ended that should still run."""
                code = worker and worker.poll()
                return emulators.ended() or (None if code is None else f"the worker ended with exit code {code}")

            if options.words:
                return _around(options.words, variables, ended)
            *lines, last = _exports(variables)
            say(*lines, *WHY_NOT_MULTIPLEXED, last)
            if emulators.children or options.worker or options.env_file:
                data = " the emulators, which deletes all their data" if emulators.children else ""
                note(f"Running. Press Ctrl-C to stop{data}")
                _wait(ended)
            note("nothing to start: both variables are set, and both emulators respond")
            return 0
    except KeyboardInterrupt:
        return INTERRUPTED if options.words else 0  # a command that never ran has not succeeded


def _wait(ended: Callable[[], str | None]) -> NoReturn:
    while (sentence := ended()) is None:
        time.sleep(CHECK_CHILD_SECONDS)
    raise OutboxError(sentence)


def _create(
    options: argparse.Namespace, target: DatabaseSettings, ddl: list[str], variables: Mapping[str, str]
) -> None:
    os.environ.update(variables)  # the clients read it
    from outbox.devtools import resources  # noqa: PLC0415 - the clients: half a second

    def exists() -> None:
        if ddl:
            note(f"database {options.create} exists, so {options.ddl_file} was not executed. Its DDL is for a new one")

    resources.create(target, ddl, options.pubsub, empty=options.empty, exists=exists)
    tables = "without" if options.empty else "with"
    others = "".join(f", {kind} {id}" for kind, id in options.pubsub)
    note(f"database {options.create} {tables} the outbox's tables{others}: ready")


def _exports(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


@contextlib.contextmanager
def _env_file(path: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Write the variables for `. FILE`, and delete the file at the end of the block."""
    path.write_text("\n".join([WRITTEN.format(os.getpid()), *_exports(variables), ""]))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _check_env_file(path: Path) -> None:
    """Raise SettingError unless this command may write the file."""
    try:
        if not path.exists():
            path.touch()
            path.unlink()
        elif (writer := _WRITER.match(path.read_bytes())) is None:
            raise SettingError(f"--env-file: {str(path)!r} was not written by this command. Choose another name")
        elif _is_running(int(writer[1])):
            raise SettingError(
                f"--env-file: {str(path)!r} is of the `outbox emulators` that runs as process {int(writer[1])}. "
                "Stop it, or choose another name"
            )
    except OSError as error:
        raise SettingError(f"--env-file: {str(path)!r} cannot be written: {error.strerror}") from None


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is of another user
    return process != os.getpid()


@contextlib.contextmanager
def _started(words: Sequence[str], variables: Mapping[str, str], **more: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program with the variables in the block. At the end, stop it: SIGTERM, then SIGKILL."""
    process = subprocess.Popen(tied(words), env=os.environ | variables, **more)  # noqa: S603 - ours, or the user's
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(COMMAND_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _around(words: Sequence[str], variables: Mapping[str, str], ended: Callable[[], str | None]) -> int:
    """Run a command with the variables until it ends, and return its exit code as a shell does.

    It gets our SIGTERM and SIGHUP, and SIGINT unless the terminal sends it to both. Raises OutboxError if `ended`
    returns a sentence. Then the command is stopped.
    """
    with _started(words, variables) as process:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            is_for_both = number == signal.SIGINT and sys.stdin.isatty()
            signal.signal(number, signal.SIG_IGN if is_for_both else lambda got, _: process.send_signal(got))
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(CHECK_CHILD_SECONDS)
                return code if code >= 0 else 128 - code
            if sentence := ended():
                raise OutboxError(sentence)


def _plan(options: argparse.Namespace) -> tuple[DatabaseSettings | None, list[str]]:
    """Return the database of `--create` and the statements of `--ddl-file`. Raises SettingError for any argument."""
    if options.words:
        path = shutil.which(options.words[0])
        if path is None:
            raise SettingError(f"command not found: {options.words[0]!r}")
        options.words[0] = path
    if options.env_file:
        _check_env_file(options.env_file)
    if options.create is None:
        if options.pubsub or options.ddl_file or options.worker or options.empty:
            raise SettingError(
                "--topic, --subscription, --ddl-file, --empty and --worker need --create PROJECT/INSTANCE/DATABASE"
            )
        return None, []
    if options.empty and options.worker:
        raise SettingError("--worker needs the outbox's tables, which --empty leaves out. Give one of them")
    if options.pubsub and options.pubsub[0][0] == "subscription":
        raise SettingError("--subscription needs a --topic before it")
    target = DatabaseSettings.read(
        dict(zip(("project", "instance", "database"), options.create.split("/"), strict=True))
    )
    return target, cut(flags.read_text(options.ddl_file, "--ddl-file: ") if options.ddl_file else "")

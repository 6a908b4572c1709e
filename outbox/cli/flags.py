"""Flags that several commands share: the database, and which tasks."""

import argparse
import json
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.errors import OutboxError, SettingError
from outbox.shared.settings import DatabaseSettings, SettingType, fields_of, flag_of, one_of
from outbox.shared.times import MOMENT, resolved, shown

if TYPE_CHECKING:
    from outbox.admin.changes import TaskSelection

MAX_ID_CHARACTERS, MAX_TOPIC_CHARACTERS = 64, 400

NARROWING = {
    "--topic": "Only tasks with this value in the Topic column.",
    "--since": "Only tasks at or after this time: SentAt of sent tasks, CreatedAt of others.",
    "--until": "Only tasks before this time.",
    "--error": "Only tasks whose LastError contains this text, ignoring case.",
}


def command(commands: Any, name: str, text: str, description: str) -> argparse.ArgumentParser:
    """Add a command that works on a database."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    DatabaseSettings.add_flags(parser)
    return parser


def _text(longest: int) -> SettingType:
    def parse(text: str) -> str:
        text.encode()  # raises ValueError for an argument that is not valid UTF-8
        if not 0 < len(text) <= longest:
            raise ValueError(text)
        return text

    return SettingType(parse, f"1 to {longest} characters of valid Unicode")


TOPIC, ID, TEXT = _text(MAX_TOPIC_CHARACTERS), _text(MAX_ID_CHARACTERS), _text(1_000)


def add_topic(parser: argparse.ArgumentParser) -> None:
    """Add `--topic`."""
    parser.add_argument("--topic", type=flag_of("--topic", TOPIC), metavar="TOPIC", help=NARROWING["--topic"])


def add_selection(parser: argparse.ArgumentParser, *states: str) -> None:
    """Add `--state` with `states`, and the flags that narrow the selection."""
    kind = one_of(*states)
    parser.add_argument("--state", type=flag_of("--state", kind), metavar="STATE", help=f"{kind.allowed}.")
    add_topic(parser)
    for flag, value, metavar in (("--since", MOMENT, "TIME"), ("--until", MOMENT, "TIME"), ("--error", TEXT, "TEXT")):
        allowed = f" Allowed: {value.allowed}." if value is MOMENT else ""
        parser.add_argument(flag, type=flag_of(flag, value), metavar=metavar, help=NARROWING[flag] + allowed)


def selection(options: argparse.Namespace, now: datetime, ids: tuple[str, ...] | None = None) -> "TaskSelection":
    """Return the selection by the flags of `add_selection` and by `ids`. Relative times count from `now`."""
    from outbox.admin.changes import TaskSelection  # noqa: PLC0415 - the Spanner client: half a second

    since, until = (None if each is None else resolved(each, now) for each in (options.since, options.until))
    check_window(since, until or now)
    return TaskSelection(
        state=options.state, ids=ids, topic=options.topic, since=since, until=until, error=options.error
    )


def check_window(since: datetime | None, until: datetime | None) -> None:
    """Raise SettingError if the time window is empty."""
    if since and until and since >= until:
        raise SettingError(f"--since {shown(since)} is not before the end, {shown(until)}: no task can match")


def add_ids(parser: argparse.ArgumentParser) -> None:
    """Add task IDs as arguments and from a file."""
    parser.add_argument("ids", nargs="*", type=flag_of("ID", ID), metavar="ID", help="Task IDs.")
    parser.add_argument(
        "--ids-file",
        metavar="FILE",
        help="File with one task ID per line, or - for stdin. A line may also be JSON: a string, or an object with "
        "`id`, such as `outbox list --json` writes.",
    )


def ids(options: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the given task IDs without duplicates, or None if none are given. Raises SettingError, OutboxError."""
    if options.ids_file is None:
        return tuple(dict.fromkeys(options.ids)) or None
    where = "stdin" if options.ids_file == "-" else options.ids_file
    try:
        data = sys.stdin.buffer.read() if options.ids_file == "-" else Path(options.ids_file).read_bytes()
        # Not splitlines: it ends a line at characters that a line of JSON may hold as they are.
        lines = data.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise SettingError(f"--ids-file: {where!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingError(f"--ids-file: {where!r} is not UTF-8: {error.reason} at byte {error.start:,}") from None
    found = [_id(line.strip(), f"{where}, line {number:,}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found and not options.ids:
        raise OutboxError(f"{where} contains no task IDs. Nothing was changed")
    return tuple(dict.fromkeys([*options.ids, *found]))


def _id(line: str, where: str) -> str:
    value: Any = line
    if line.startswith(("{", '"')):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise SettingError(f"{where}: {line[:80]!r} is not valid JSON, but begins like it") from None
    if isinstance(value, dict):
        value = value.get("id")
    try:
        return str(ID.parse(value))
    except (ValueError, TypeError, AttributeError):
        raise SettingError(f"{where}: {str(value)[:80]!r} is not a task ID: it must be {ID.allowed}") from None


def again(name: str, options: argparse.Namespace, *more: str, **flags: str) -> str:
    """Return the command line that continues with the same selection, quoted for a shell.

    `flags` replace or add flags; `more` are appended.
    """
    given = {field.flag: getattr(options, field.name, None) for field in fields_of(DatabaseSettings)}
    given |= {
        flag: getattr(options, flag[2:].replace("-", "_"), None)
        for flag in ("--ids-file", "--state", "--topic", "--error")
    }
    given |= {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    words = ["outbox", name]
    for flag, value in given.items():
        # Without the =, a value that begins with - would be parsed as a flag.
        words += [] if not value else [f"{flag}={value}"] if value.startswith("-") else [flag, value]
    ids = getattr(options, "ids", [])
    end = ["--"] if any(id.startswith("-") for id in ids) else []
    line = " ".join(map(shlex.quote, [*words, *more, *end, *ids]))
    return line + ("  # with the same task IDs on stdin" if given["--ids-file"] == "-" else "")

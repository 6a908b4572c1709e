"""Flags that several commands share: the database, and which tasks."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.cli.output import OutputSettings, escaped, named, note
from outbox.errors import OutboxError, SettingError
from outbox.shared.settings import SWITCH, DatabaseSettings, SettingType, did_you_mean, fields_of, flag_of, one_of
from outbox.shared.times import MOMENT, resolved, shown

if TYPE_CHECKING:
    from outbox.admin.changes import TaskSelection
    from outbox.admin.table import TaskTable

MAX_ID_CHARACTERS, MAX_TOPIC_CHARACTERS = 64, 400
#: Min characters of a prefix of a task ID. Shorter ones are probably mistakes.
MIN_PREFIX = 4
PREFIX_HELP = f"the first characters of one ID, at least {MIN_PREFIX}"
#: Max topics that a misspelled one is compared with.
COMPARED = 100

NARROWING = {
    "--topic": "Only tasks with this value in the Topic column.",
    "--since": "Only tasks at or after this time: SentAt of sent tasks, CreatedAt of others.",
    "--until": "Only tasks before this time.",
    "--error": "Only tasks whose LastError contains this text, ignoring case.",
}


def global_flags() -> argparse.ArgumentParser:
    """Return a parent for the parsers of `outbox` and of its commands, with the flags that all of them have.

    A flag that is not given is not in the namespace, so a command's parser never overwrites a flag that precedes it.
    """
    parent = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = parent.add_argument_group("global options", "These options may precede or follow the command.")
    DatabaseSettings.add_flags(group)
    OutputSettings.add_flags(group)
    return parent


def command(commands: Any, name: str, text: str, description: str) -> argparse.ArgumentParser:
    """Add a command."""
    layout = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=layout, parents=[global_flags()]
    )
    return parser


def open_table(options: argparse.Namespace) -> "TaskTable":
    """Return the table of the database that the flags name. Raises SettingError, NotReached, SchemaDiffers."""
    settings = DatabaseSettings.read(vars(options))

    from outbox.admin.table import TaskTable  # noqa: PLC0415 - the import takes half a second, which wrong flags need not wait for
    from outbox.storage.connection import open_database  # noqa: PLC0415 - the same

    return TaskTable(open_database(settings))


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
    parser.add_argument(
        "--state", type=flag_of("--state", kind), choices=states, metavar="STATE", help=f"{kind.allowed}."
    )
    add_topic(parser)
    for flag, value, metavar in (("--since", MOMENT, "TIME"), ("--until", MOMENT, "TIME"), ("--error", TEXT, "TEXT")):
        allowed = f" Allowed: {value.allowed}." if value is MOMENT else ""
        parser.add_argument(flag, type=flag_of(flag, value), metavar=metavar, help=NARROWING[flag] + allowed)


def selection(options: argparse.Namespace, now: datetime, ids: tuple[str, ...] | None = None) -> "TaskSelection":
    """Return the selection by the flags of `add_selection` and by `ids`. Relative times count from `now`."""
    from outbox.admin.changes import TaskSelection  # noqa: PLC0415 - see open_table

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
    parser.add_argument("ids", nargs="*", type=flag_of("ID", ID), metavar="ID", help=f"Task IDs, or {PREFIX_HELP}.")
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
        # splitlines would also split at U+2028 and others, which a line of JSON may contain.
        lines = data.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise SettingError(f"--ids-file: {where!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingError(f"--ids-file: {where!r} is not UTF-8: {error.reason} at byte {error.start:,}") from None
    found = [_id(line.strip(), f"{where}, line {number:,}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found and not options.ids:
        raise OutboxError(f"{where} contains no task IDs. Nothing was changed")
    return tuple(dict.fromkeys([*options.ids, *found]))


def full_ids(table: "TaskTable", options: argparse.Namespace, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return `wanted` with the full ID in place of each prefix in `options.ids`, and print it. Raises OutboxError.

    `options.ids` then has the full IDs, too, so that the command that continues names the same tasks after deletions.
    """
    from outbox.admin import tasks  # noqa: PLC0415 - see open_table

    full = {}
    for prefix, found in tasks.beginning_with(table, [id for id in options.ids if len(id) >= MIN_PREFIX], 3).items():
        if len(found) > 1 and found[0] != prefix:
            raise OutboxError(f"several task IDs begin with {prefix!r}: {named(found)}. Give more characters")
        full[prefix] = found[0]
        if found[0] != prefix:
            note(f"{escaped(prefix)} is task {escaped(found[0])}")
    options.ids = [full.get(id, id) for id in options.ids]
    return tuple(dict.fromkeys(full.get(id, id) for id in wanted))


def explain_none(table: "TaskTable", chosen: "TaskSelection", options: argparse.Namespace) -> None:
    """Print on stderr why no task matches a selection: an unknown topic, the narrowing flags, or the state."""
    from outbox.admin import changes  # noqa: PLC0415 - see open_table
    from outbox.admin.topics import TopicTable  # noqa: PLC0415 - the same

    topics, topic = TopicTable(table), chosen.topic
    if topic is not None and topic not in topics.waiting([topic]) | topics.rows([topic]):
        known = topics.known(COMPARED)
        note(
            f"no unsent task and no row in AsynchronousTaskTopics has topic {topic!r}.{did_you_mean(topic, known)} "
            f"Known topics: {named(known) or 'none'}"
        )
    if chosen.state is not None:
        others = changes.count(table, changes.TaskSelection(state=chosen.state), exact=False)
        given = [flag for flag in NARROWING if vars(options)[flag[2:]] is not None]
        excluded = f", but none matches {' and '.join(given)}" if others.number and given else ""
        note(f"{others} in the state {chosen.state}{excluded}")


def _id(line: str, where: str) -> str:
    value: Any = line
    if line.startswith(("{", '"')):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise SettingError(f"{where}: {line[:80]!r} is not valid JSON, although it begins like JSON") from None
    if isinstance(value, dict):
        value = value.get("id")
    try:
        return str(ID.parse(value))
    except (ValueError, TypeError, AttributeError):
        raise SettingError(f"{where}: {str(value)[:80]!r} is not a task ID: it must be {ID.allowed}") from None


def continue_command(name: str, options: argparse.Namespace, *more: str, **flags: str) -> str:
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
    switches = {field.flag for field in fields_of(DatabaseSettings) if field.kind is SWITCH}
    for flag, value in given.items():
        if value and flag in switches:
            words.append(flag)
        elif value:
            # Without the =, a value that begins with - would be parsed as a flag.
            words += [f"{flag}={value}"] if value.startswith("-") else [flag, value]
    ids = getattr(options, "ids", [])
    end = ["--"] if any(id.startswith("-") for id in ids) else []
    line = " ".join(map(shlex.quote, [*words, *more, *end, *ids]))
    return line + ("  # with the same task IDs on stdin" if given["--ids-file"] == "-" else "")

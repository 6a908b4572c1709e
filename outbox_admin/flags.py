"""Flags that several commands share: the database, and which tasks."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import outbox_admin as admin
from outbox.base.values import MAX_ID_CHARACTERS, json_value, shown
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import (
    MOMENT,
    SWITCH,
    DatabaseSettings,
    SettingType,
    argparse_type,
    did_you_mean,
    fields_of,
    matching,
    one_of,
    resolved,
    whole_number,
)
from outbox.program.terminal import escaped, named, note

MAX_TOPIC_CHARACTERS = 400
#: Max bytes of a file that a user passes: the JSON of some 500,000 tasks. It is read into memory.
MAX_FILE_BYTES = 250_000_000
#: Min characters of a prefix of a task ID. Shorter ones are probably mistakes.
MIN_PREFIX = 4
#: Max task IDs that are counted if they begin with the same prefix.
MAX_MATCHES = 100
PREFIX_HELP = f"The first {MIN_PREFIX} or more characters are enough, if no other ID begins with them"
#: Max known topics to compare a misspelled topic with.
MAX_SUGGESTION_TOPICS = 100

NARROWING = {
    "--topic": "Only tasks with this value in the Topic column",
    "--since": "Only tasks at or after this time: SentAt of sent or cancelled tasks, CreatedAt of unsent tasks",
    "--until": "Only tasks before this time",
    "--error": "Only tasks whose LastError contains this text, ignoring case",
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves the global options out of the usage line, because they have a group of their own."""

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], *more: Any, **others: Any) -> None:
        """Add the usage line."""
        names = {field.name for field in fields_of(DatabaseSettings)}
        super().add_usage(usage, [action for action in actions if action.dest not in names], *more, **others)


def global_flags() -> argparse.ArgumentParser:
    """Return a parent for the parsers of `outbox` and of its commands, with the flags that all of them have.

    A flag that is not given is not in the namespace, so a command's parser does not overwrite a flag given before
    the command.
    """
    parent = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = parent.add_argument_group("global options", "These options may precede or follow the command.")
    DatabaseSettings.add_flags(group)
    return parent


def command(
    commands: Any, name: str, text: str, description: str, run: Callable[[argparse.Namespace], int | None] | None = None
) -> argparse.ArgumentParser:
    """Add a command. `run` gets its options and may return an exit code. Without `run`, the command prints its help."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=HelpFormatter, parents=[global_flags()]
    )
    parser.set_defaults(**{"run": run, "command": name} if run else {"parser": parser})
    return parser


def open_table(options: argparse.Namespace) -> "admin.rows.task_table.TaskTable":
    """Return the table of the database that the flags name. Raises SettingError, NotReached, SchemaDiffers."""
    return admin.rows.task_table.open_table(DatabaseSettings.read(vars(options)))


def _text(longest: int) -> SettingType:
    # An argument that is not valid UTF-8 has surrogates.
    return matching(rf"[^\ud800-\udfff]{{1,{longest}}}", f"1 to {longest} characters of valid Unicode")


TOPIC, ID, TEXT = _text(MAX_TOPIC_CHARACTERS), _text(MAX_ID_CHARACTERS), _text(1_000)
KEY = matching(r"[^\ud800-\udfff]{1,1024}", "1 to 1,024 characters of valid Unicode")
LIMIT, RATE = whole_number(1, 100_000), whole_number(1, 1_000_000)


def add(parser: argparse._ActionsContainer, name: str, kind: SettingType, text: str, **more: Any) -> None:
    """Add a flag with a value, or an argument. `more` are other arguments of `add_argument`.

    `text` is its help, with {} for the allowed values.
    """
    source = name if name.startswith("--") else more["metavar"]
    parser.add_argument(name, type=argparse_type(source, kind), help=f"{text.format(kind.allowed)}.", **more)


def switch(parser: argparse._ActionsContainer, name: str, text: str, **more: Any) -> None:
    """Add a flag without a value. `text` is its help."""
    parser.add_argument(name, action="store_true", help=f"{text}.", **more)


def add_reason(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add `--reason`."""
    add(parser, "--reason", TEXT, f"Why, for the record of operations{more}", metavar="TEXT")


def author(options: argparse.Namespace) -> "admin.operations.Author":
    """Return who runs the command, and the reason."""
    return admin.operations.Author(reason=options.reason)


def add_state(parser: argparse.ArgumentParser, states: Sequence[str], text: str, **more: Any) -> None:
    """Add `--state` with `states`."""
    kind = one_of(*states)
    add(parser, "--state", kind, f"{text}: {{}}", metavar="STATE", choices=states, **more)


def add_narrowing(parser: argparse.ArgumentParser, *, error: bool = True) -> None:
    """Add the flags that narrow a selection of tasks. Sent tasks have no `error`."""
    add(parser, "--topic", TOPIC, NARROWING["--topic"], metavar="TOPIC")
    for flag in ("--since", "--until"):
        add(parser, flag, MOMENT, NARROWING[flag] + ". Allowed: {}", metavar="TIME")
    if error:
        add(parser, "--error", TEXT, NARROWING["--error"], metavar="TEXT")


def selection(
    options: argparse.Namespace, now: datetime, ids: tuple[str, ...] | None = None
) -> "admin.tasks.selections.TaskSelection":
    """Return the selection by the flags of `add_narrowing`, and by `ids`. Relative times count from `now`."""
    since, until = (None if each is None else resolved(each, now) for each in (options.since, options.until))
    check_window(since, until or now)
    others: dict[str, Any] = {name: vars(options).get(name) for name in ("state", "topic", "error", "ordering_key")}
    include_expired = vars(options).get("include_expired", True)
    return admin.tasks.selections.TaskSelection(
        ids=ids, since=since, until=until, include_expired=include_expired, **others
    )


def check_window(since: datetime | None, until: datetime | None) -> None:
    """Raise SettingError if the time window is empty."""
    if since and until and since >= until:
        raise SettingError(f"--since {shown(since)} is not before the end, {shown(until)}: no task can match")


def add_ids(parser: argparse.ArgumentParser) -> None:
    """Add task IDs as arguments and from a file."""
    add(parser, "ids", ID, f"Task IDs. {PREFIX_HELP}", metavar="ID", nargs="*")
    parser.add_argument(
        "--ids-file",
        metavar="FILE",
        help="File with one task ID per line, or - for stdin. A line may also be JSON: a string, or an object with "
        "`id`, such as `outbox list --json` writes.",
    )


def ids(options: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the task IDs of arguments and file, without duplicates, or None. Raises SettingError, OutboxError."""
    if options.ids_file is None:
        return tuple(dict.fromkeys(options.ids)) or None
    where = "stdin" if options.ids_file == "-" else options.ids_file
    # splitlines would also split at U+2028 and others, which a line of JSON may contain.
    lines = read_text(options.ids_file, "--ids-file: ").split("\n")
    listed = [_id(line.strip(), f"{where}, line {number:,}") for number, line in enumerate(lines, 1) if line.strip()]
    if not listed and not options.ids:
        raise OutboxError(f"{where} contains no task IDs. Nothing was changed")
    return tuple(dict.fromkeys([*options.ids, *listed]))


def read_text(file: str, source: str = "") -> str:
    """Return the text of a file, or of stdin if it is `-`. Raises SettingError, which begins with `source`."""
    named = source + ("stdin" if file == "-" else repr(file))
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
            found = stream.read(MAX_FILE_BYTES + 1)
        if len(found) > MAX_FILE_BYTES:
            raise SettingError(f"{named} has more than {MAX_FILE_BYTES:,} bytes. Split it")
        return found.decode("utf-8-sig")
    except OSError as error:
        raise SettingError(f"{named} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingError(f"{named} is not UTF-8: {error.reason} at byte {error.start:,}") from None


def full_ids(
    table: "admin.rows.task_table.TaskTable", options: argparse.Namespace, wanted: Sequence[str]
) -> tuple[str, ...]:
    """Replace each prefix in `wanted` and `options.ids` with the full ID, and print each replacement on stderr.

    With --yes it refuses prefixes, because the user is not asked whether the full ID is right. Raises SettingError,
    OutboxError.
    """
    full = {}
    for prefix, matches in admin.tasks.lookup.beginning_with(table, options.ids, MAX_MATCHES + 1).items():
        if matches[0] == prefix:
            continue
        if len(prefix) < MIN_PREFIX:
            note(
                f"{prefix!r} is too short for the beginning of {named(matches)}. Give at least {MIN_PREFIX} characters"
            )
            continue
        full[prefix] = matches[0]
        if len(matches) > 1:
            number = f"more than {MAX_MATCHES}" if len(matches) > MAX_MATCHES else len(matches)
            raise OutboxError(f"{number} task IDs begin with {prefix!r}: {named(matches)}. Give more characters")
        if vars(options).get("yes"):
            raise SettingError(
                f"{prefix!r} is only a prefix of task {escaped(matches[0])}. With --yes, pass full IDs. Nothing was "
                "changed"
            )
        note(f"{escaped(prefix)} is task {escaped(matches[0])}")
    options.ids = [full.get(id, id) for id in options.ids]
    return tuple(dict.fromkeys(full.get(id, id) for id in wanted))


def explain_none(
    table: "admin.rows.task_table.TaskTable",
    selected: "admin.tasks.selections.TaskSelection",
    options: argparse.Namespace,
) -> None:
    """Print on stderr why no task matches a selection: an unknown topic, the narrowing flags, or the states."""
    if selected.topic is not None and admin.topics.editing.unknown(table, [selected.topic]):
        note(unknown_topics(table, [selected.topic]))
    for state in vars(options).get("states") or filter(None, [selected.state]):
        count = admin.tasks.selections.count(table, admin.tasks.selections.TaskSelection(state=state), exact=False)
        flags = [flag for flag in NARROWING if vars(options).get(flag[2:]) is not None]
        excluded = f", but none matches {' and '.join(flags)}" if count.number and flags else ""
        note(f"{count} in the state {state}{excluded}")


def unknown_topics(table: "admin.rows.task_table.TaskTable", unknown: Sequence[str]) -> str:
    """Return a message about `unknown` topics that suggests known ones. Raises NotReached, OutboxError."""
    known = sorted({*table.topics(MAX_SUGGESTION_TOPICS), *admin.topics.editing.sent_lately(table)})
    return (
        f"unknown topic {named(map(repr, unknown))} (no row in AsynchronousTaskTopics, no unsent task, and none "
        "sent in the last minute)."
        f"{''.join(did_you_mean(topic, known) for topic in unknown)} Known topics: {named(known) or 'none'}"
    )


def _id(line: str, where: str) -> str:
    try:
        value = json_value(line) if line.startswith(("{", '"')) else line
        return str(ID.parse(value["id"] if isinstance(value, dict) else value))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise SettingError(
            f"{where}: {line[:80]!r} is not a task ID. It must be {ID.allowed}, or JSON with a task ID"
        ) from None


def command_line(name: str, *arguments: object, **flags: object) -> str:
    """Return an `outbox` command, quoted for a shell. `flags` that are None or False are left out.

    A flag that is True has no value. Values join their flag, so that one that begins with a dash is no flag.
    """
    given = [
        f"--{flag.replace('_', '-')}" + ("" if value is True else f"={value}")
        for flag, value in flags.items()
        if value not in (None, False)
    ]
    return shlex.join(["outbox", *name.split(), *given, *(["--", *map(str, arguments)] if arguments else [])])


def place(options: argparse.Namespace) -> dict[str, str | bool]:
    """Return the flags that name the database, as the user has passed them."""
    given = vars(options)
    fields = (field for field in fields_of(DatabaseSettings) if field.name in given)
    return {field.name: field.kind is SWITCH or given[field.name] for field in fields}

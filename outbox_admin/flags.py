"""Flags that several commands share: the database and the reason; and how a command adds flags."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import outbox_admin as admin
from outbox.base.values import listed
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import (
    SWITCH,
    DatabaseSettings,
    Formatter,
    SettingType,
    argparse_type,
    did_you_mean,
    fields_of,
    flag_of,
)
from outbox.program.terminal import as_json, named, note, say
from outbox_admin.value_types import TEXT

#: The table of the database that the flags name.
Table: TypeAlias = "admin.rows.task_table.TaskTable"
#: Max bytes of a file that a user passes: the JSON of some 500,000 tasks. It is read into memory.
MAX_FILE_BYTES = 250_000_000
#: Max known topics to compare a misspelled topic with.
MAX_SUGGESTION_TOPICS = 100


class HelpFormatter(Formatter):
    """Only `outbox --help` describes the global options, and no usage line has them."""

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], *more: Any, **others: Any) -> None:
        super().add_usage(usage, _own(actions), *more, **others)

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        is_of_command = " " in self._prog
        super().add_arguments(_own(actions) if is_of_command else actions)


def _own(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    names = {field.name for field in fields_of(DatabaseSettings)}
    return [action for action in actions if action.dest not in names]


def global_flags(text: str) -> argparse.ArgumentParser:
    """Return a parent for the parsers of `outbox` and of its commands, with the flags that all of them have.

    A flag that is not given is not in the namespace, so a command's parser does not overwrite a flag given before
    the command.
    """
    parent = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    DatabaseSettings.add_flags(parent.add_argument_group("global options", text))
    return parent


def command(
    commands: Any, name: str, text: str, description: str, run: Callable[[argparse.Namespace], int | None] | None = None
) -> argparse.ArgumentParser:
    """Add a command. `run` gets its options and may return an exit code. Without `run`, the command prints its help.

    `run` raises SettingError, NotReached, or another OutboxError. `cli.main` prints its sentence.
    """
    names = listed(field.flag for field in fields_of(DatabaseSettings))
    parents = [global_flags(f"{names}, before or after the command. `outbox --help` describes them.")]
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=HelpFormatter, parents=parents
    )
    parser.set_defaults(**{"run": run, "command": name} if run else {"parser": parser})
    return parser


def open_table(options: argparse.Namespace) -> Table:
    """Return the table of the database that the flags name. Raises SettingError, NotReached, SchemaDiffers."""
    return admin.rows.task_table.open_table(DatabaseSettings.read(vars(options)))


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
    add(parser, "--reason", TEXT, f"Why, for the record of operations{more}", metavar="TEXT")


def author(options: argparse.Namespace) -> "admin.operations.Author":
    return admin.operations.Author(reason=options.reason)


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Print an OutboxError of the block as a note: the command has already done, or printed, what it is for."""
    try:
        yield
    except OutboxError as error:
        note(str(error))


def answer(options: argparse.Namespace, value: object, *lines: str) -> None:
    """Print `value` as one JSON object if the command has `--json`, or else the lines."""
    say(*([as_json(value)] if options.json else lines))


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


def unknown_topics(table: Table, unknown: Sequence[str]) -> str:
    """Return a message about `unknown` topics that suggests known ones. Raises NotReached, OutboxError."""
    known = sorted({*table.topics(MAX_SUGGESTION_TOPICS), *admin.editing.sent_lately(table)})
    return (
        f"unknown topic {named(map(repr, unknown))} (no row in AsynchronousTaskTopics, no unsent task, and none "
        "sent in the last minute)."
        f"{''.join(did_you_mean(topic, known) for topic in unknown)} Known topics: {named(known) or 'none'}"
    )


def command_line(command: str, *arguments: object, **given: object) -> str:
    """Return an `outbox` command, quoted for a shell. Flags whose `given` values are None or False are left out.

    A flag that is True has no value. Values join their flag, so that one that begins with a dash is no flag.
    """
    words = [
        flag_of(name) + ("" if value is True else f"={value}")
        for name, value in given.items()
        if value is not None and value is not False
    ]
    return shlex.join(["outbox", *command.split(), *words, *(["--", *map(str, arguments)] if arguments else [])])


def database_flags(options: argparse.Namespace) -> dict[str, str | bool]:
    """Return the flags that name the database, as the user has passed them."""
    given = vars(options)
    fields = (field for field in fields_of(DatabaseSettings) if field.name in given)
    return {field.name: field.kind is SWITCH or given[field.name] for field in fields}

"""Flags and arguments that say which tasks: IDs, a state, and filters."""

import argparse
from collections.abc import Sequence
from datetime import datetime

import outbox_admin as admin
from outbox.base.values import json_value, shown
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import MOMENT, flag_of, one_of, resolved
from outbox.program.terminal import escaped, named, note
from outbox_admin import flags
from outbox_admin.tasks.selections import FILTERS, TaskSelection
from outbox_admin.value_types import ID

#: Min characters of a prefix of a task ID. Shorter ones are probably mistakes.
MIN_PREFIX = 4
#: Max task IDs that are counted if they begin with the same prefix.
MAX_MATCHES = 100
PREFIX_HELP = f"The first {MIN_PREFIX} or more characters are enough, if no other ID begins with them"


def add_state(parser: argparse.ArgumentParser, states: Sequence[str], text: str, **more: object) -> None:
    kind = one_of(*states)
    flags.add(parser, "--state", kind, f"{text}: {{}}", metavar="STATE", choices=states, **more)


def add_filters(parser: argparse.ArgumentParser, command: str) -> None:
    for name, each in FILTERS.items():
        if command in each.commands:
            flags.add(parser, flag_of(name), each.kind, each.help, metavar=each.metavar)


def selection(options: argparse.Namespace, now: datetime, ids: tuple[str, ...] | None = None) -> TaskSelection:
    """Return the selection by the flags of filters, and by `ids`. Relative times count from `now`."""
    given = {name: value for name in FILTERS if (value := vars(options).get(name)) is not None}
    given |= {name: resolved(value, now) for name, value in given.items() if FILTERS[name].kind is MOMENT}
    check_window(given.get("since"), given.get("until", now))
    include_expired, state = vars(options).get("include_expired", True), vars(options).get("state")
    return TaskSelection(ids=ids, state=state, include_expired=include_expired, **given)


def check_window(since: datetime | None, until: datetime | None) -> None:
    """Raise SettingError if the time window is empty."""
    if since and until and since >= until:
        raise SettingError(f"--since {shown(since)} is not before the end, {shown(until)}: no task can match")


def explain_none(table: flags.Table, selected: TaskSelection, options: argparse.Namespace) -> None:
    """Print on stderr why no task matches a selection: an unknown topic, the filters, or the states."""
    if selected.topic is not None and admin.editing.unknown(table, [selected.topic]):
        note(flags.unknown_topics(table, [selected.topic]))
    for state in vars(options).get("states") or filter(None, [selected.state]):
        count = admin.selected.count(table, TaskSelection(state=state), exact=False)
        narrowing = [flag_of(name) for name in FILTERS if vars(options).get(name) is not None]
        excluded = f", but none matches {' and '.join(narrowing)}" if count.number and narrowing else ""
        note(f"{count} in the state {state}{excluded}")


def add_ids(parser: argparse.ArgumentParser) -> None:
    """Add task IDs as arguments and from a file."""
    flags.add(parser, "ids", ID, f"Task IDs. {PREFIX_HELP}", metavar="ID", nargs="*")
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
    lines = flags.read_text(options.ids_file, "--ids-file: ").split("\n")
    listed = [_id(line.strip(), f"{where}, line {number:,}") for number, line in enumerate(lines, 1) if line.strip()]
    if not listed and not options.ids:
        raise OutboxError(f"{where} contains no task IDs. Nothing was changed")
    return tuple(dict.fromkeys([*options.ids, *listed]))


def full_ids(table: flags.Table, options: argparse.Namespace, wanted: Sequence[str]) -> tuple[str, ...]:
    """Replace each prefix in `wanted` and `options.ids` with the full ID, and print each replacement on stderr.

    With --yes it refuses prefixes, because the user is not asked whether the full ID is right. Raises SettingError,
    OutboxError.
    """
    matches = admin.lookup.beginning_with(table, options.ids, MAX_MATCHES + 1)
    full = {prefix: _full_id("task", prefix, ids, options) for prefix, ids in matches.items()}
    options.ids = [full.get(id, id) for id in options.ids]
    return tuple(dict.fromkeys(full.get(id, id) for id in wanted))


def full_operation_id(table: flags.Table, options: argparse.Namespace, prefix: str) -> str:
    """Return the ID of the operation that begins with `prefix`, or `prefix` if there is none. See `full_ids`."""
    matches = admin.operations.beginning_with(table, prefix, MAX_MATCHES + 1) if len(prefix) >= MIN_PREFIX else []
    return _full_id("operation", prefix, matches, options) if matches else prefix


def _full_id(kind: str, prefix: str, matches: Sequence[str], options: argparse.Namespace) -> str:
    """Return the only one of `matches`, or `prefix` if it is an ID or too short. Raises SettingError, OutboxError."""
    if matches[0] == prefix:
        return prefix
    if len(prefix) < MIN_PREFIX:
        note(f"{prefix!r} is too short for the beginning of {named(matches)}. Give at least {MIN_PREFIX} characters")
        return prefix
    if len(matches) > 1:
        number = f"more than {MAX_MATCHES}" if len(matches) > MAX_MATCHES else len(matches)
        raise OutboxError(f"{number} {kind} IDs begin with {prefix!r}: {named(matches)}. Give more characters")
    if vars(options).get("yes"):
        raise SettingError(
            f"{prefix!r} is only a prefix of {kind} {escaped(matches[0])}. With --yes, pass full IDs. Nothing was "
            "changed"
        )
    note(f"{escaped(prefix)} is {kind} {escaped(matches[0])}")
    return matches[0]


def _id(line: str, where: str) -> str:
    try:
        value = json_value(line) if line.startswith(("{", '"')) else line
        return str(ID.parse(value["id"] if isinstance(value, dict) else value))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise SettingError(
            f"{where}: {line[:80]!r} is not a task ID. It must be {ID.allowed}, or JSON with a task ID"
        ) from None

"""`outbox topics`, `pause`, `resume` and `limit`: read and write AsynchronousTaskTopics, which the workers read."""

import argparse
import dataclasses
import math
from typing import Any

from outbox import admin
from outbox.cli import bulk, flags
from outbox.cli.output import as_json, by_field, named, note
from outbox.cli.output import table as as_table
from outbox.cli.status import HEADS, cells, fields
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import SettingType, did_you_mean, whole_number
from outbox.program.terminal import say
from outbox.program.times import shown
from outbox.table.ddl import MIN_RATE

TOPICS_DESCRIPTION = """\
Show the pauses and limits of topics with their backlog. The list has every topic that has
a row in AsynchronousTaskTopics, an unsent task, or a task sent in the last minute.

    outbox topics --project my-project --instance main --database shop"""
PAUSE_DESCRIPTION = """\
Publish no tasks of these topics until `outbox resume`. Their limits do not change, and
applications can still register tasks.

    outbox pause orders --project my-project --instance main --database shop"""
RESUME_DESCRIPTION = """\
Resume publishing tasks of these paused topics. Their limits do not change.

    outbox resume orders --project my-project --instance main --database shop"""
LIMIT_DESCRIPTION = """\
Limit a topic. A limit that you do not pass keeps its value. Limits apply to all live
workers together. Each worker gets an equal part. Its burst and max in flight are at
least 1.

    outbox limit orders --rate 10 --burst 20 --project my-project \\
        --instance main --database shop
    outbox limit orders --max-in-flight 5 ...
    outbox limit orders --off ..."""

APPLIED_SOON = "workers apply this within 10 seconds"
SHARED = "each live worker gets an equal part. Its burst and max in flight are at least 1"


def _rate(text: str) -> float:
    value = float(text)
    if not (value >= MIN_RATE and math.isfinite(value)):
        raise ValueError(text)
    return value


RATE = SettingType(_rate, f"a finite number of tasks a second, {MIN_RATE:g} or more")
COUNT = whole_number(1, 1_000_000_000)

#: The flags of `limit`: column, kind, help.
LIMITS = {
    "--rate": ("RatePerSecond", RATE, "Tasks a second; together with --burst."),
    "--burst": ("Burst", COUNT, "Tasks that may be sent at once after a quiet period; together with --rate."),
    "--max-in-flight": ("MaxInFlight", COUNT, "Max tasks that are being published at the same time."),
}


def add(commands: Any) -> None:
    """Add the four commands to the subparsers `commands`."""
    showing = flags.command(
        commands, "topics", "list topics with pauses, limits and backlog", TOPICS_DESCRIPTION, run_topics
    )
    showing.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    showing.add_argument("--exact", action="store_true", help="Count all tasks, without a limit.")
    pausing = flags.command(commands, "pause", "stop publishing tasks of topics", PAUSE_DESCRIPTION, run_pause)
    resuming = flags.command(commands, "resume", "resume paused topics", RESUME_DESCRIPTION, run_resume)
    limiting = flags.command(commands, "limit", "limit a topic, or remove its limits", LIMIT_DESCRIPTION, run_limit)
    for parser, count in ((pausing, "+"), (resuming, "+"), (limiting, 1)):
        flags.add(parser, "topics", flags.TOPIC, "Value of the Topic column", metavar="TOPIC", nargs=count)
    for flag, (column, kind, text) in LIMITS.items():
        flags.add(limiting, flag, kind, f"{text} Allowed: {kind.allowed}", metavar="N", dest=column)
    limiting.add_argument("--off", action="store_true", help="Remove all limits.")
    for parser in (pausing, resuming, limiting):
        flags.add_reason(parser)
    for parser in (pausing, limiting):
        parser.add_argument("--yes", action="store_true", help="Skip the confirmation for an unknown topic.")


def run_topics(options: argparse.Namespace) -> int:
    """Print the topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    table = flags.open_table(options)
    backlog = admin.backlog.read(table, exact=options.exact)
    controls, lines = admin.topics.controls(table), backlog.topics()
    topics = {
        topic: (controls.get(topic, admin.topics.Control()), lines.get(topic, admin.backlog.Line(topic, 0)))
        for topic in sorted({*controls, *lines})
    }
    if options.json:
        rows = [
            {"topic": topic, **by_field(dataclasses.asdict(control)), **fields(backlog, line)}
            for topic, (control, line) in topics.items()
        ]
        say(as_json({"as_of": backlog.as_of, "topics": rows}))
        return 0
    say(f"as of {shown(backlog.as_of)}")
    cells_of = [[topic, _described(control), *cells(backlog, line)] for topic, (control, line) in topics.items()]
    say(as_table(("TOPIC", "CONTROL", *HEADS), cells_of) if topics else "no topics")
    return 0


def run_pause(options: argparse.Namespace) -> int:
    """Pause topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    return _change(_open_known(options, "Pause"), options, "pause", {"Paused": True})


def run_limit(options: argparse.Namespace) -> int:
    """Limit a topic; returns 0. Raises SettingError, NotReached, OutboxError."""
    values = _limits(options)
    return _change(_open_known(options, "Limit"), options, "limit", values)


def run_resume(options: argparse.Namespace) -> int:
    """Resume topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    table = _open(options)
    controls = admin.topics.controls(table)
    if missing := [topic for topic in options.topics if topic not in controls]:
        paused = [topic for topic, control in controls.items() if control.Paused]
        raise OutboxError(
            f"cannot resume {named(missing)}: no row in AsynchronousTaskTopics. Nothing was written."
            f"{''.join(did_you_mean(topic, paused) for topic in missing)} Paused topics: {named(paused) or 'none'}"
        )
    return _change(table, options, "resume", {"Paused": False})


def _open_known(options: argparse.Namespace, verb: str) -> "admin.table.TaskTable":
    """Return the table. If a topic is unknown, ask first. Raises SettingError, NotReached, OutboxError."""
    table = _open(options)
    if not options.yes and (unknown := admin.topics.unknown(table, options.topics)):
        question = f"{flags.unknown_topics(table, unknown)}. {verb} {named(map(repr, unknown))} anyway?"
        bulk.confirm(question, yes=False)
    return table


def _open(options: argparse.Namespace) -> "admin.table.TaskTable":
    """Return the table. Print a note if unsent tasks use the other name (ID or full name) of a topic."""
    table = flags.open_table(options)
    project = table.name.split("/")[1]
    names = {name: topic for topic in options.topics if (name := _other_name(topic, project)) not in options.topics}
    for name in sorted(admin.topics.waiting(table, names)):
        note(
            f"unsent tasks also use {name}, which is the same topic as {names[name]}. Pass {name} too; otherwise "
            "its tasks are not affected"
        )
    return table


def _change(table: "admin.table.TaskTable", options: argparse.Namespace, operation: str, values: dict[str, Any]) -> int:
    """Write the values, by column, and print the new rows; returns 0."""
    changed = admin.topics.change(table, operation, options.topics, values, flags.author(options))
    for topic, control in changed.items():
        say(f"{topic}: {_described(control, 'resumed' if operation == 'resume' else '')}")
    note(f"{APPLIED_SOON}; {SHARED}" if operation == "limit" else APPLIED_SOON)
    return 0


def _other_name(topic: str, project: str) -> str:
    """Return the full name for a topic ID, and the ID for a full name. A topic of another project has only one name."""
    prefix = f"projects/{project}/topics/"
    return topic.removeprefix(prefix) if topic.startswith("projects/") else prefix + topic


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values to write, by column. Raises SettingError."""
    values = {flag: vars(options)[column] for flag, (column, _, _) in LIMITS.items()}
    passed = {flag: value for flag, value in values.items() if value is not None}
    if options.off and passed:
        raise SettingError(f"--off removes all limits. Pass it without {' and '.join(passed)}")
    if options.off:
        return {column: None for column, _, _ in LIMITS.values()}
    if not passed:
        raise SettingError("no limit given. Pass --rate with --burst, --max-in-flight, or --off")
    for flag, other in (("--rate", "--burst"), ("--burst", "--rate")):
        if flag in passed and other not in passed:
            raise SettingError(f"{flag} needs {other}. Pass both. {other} must be {LIMITS[other][1].allowed}")
    return {LIMITS[flag][0]: value for flag, value in passed.items()}


def _described(control: "admin.topics.Control", unpaused: str = "") -> str:
    limits = (
        (control.RatePerSecond, "tasks a second"),
        (control.Burst, "at once"),
        (control.MaxInFlight, "in flight"),
    )
    parts = ", ".join(f"{value:,.15g} {unit}" for value, unit in limits if value is not None)
    state = "paused" if control.Paused else unpaused
    return "; ".join(part for part in (state, parts and f"at most {parts}") if part) or "no limits"

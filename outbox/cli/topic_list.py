"""`outbox topics`: list topics with their controls and backlog, and export or apply the controls as a JSON file."""

import argparse
import dataclasses
import json
import re
from typing import Any

from outbox import admin
from outbox.cli import bulk, errors, flags
from outbox.cli.output import by_field, note
from outbox.cli.output import table as as_table
from outbox.cli.status import HEADS, cells, fields, read_noted
from outbox.cli.topics import APPLIED_SOON, check_destination, described, joined_controls, open_known
from outbox.errors import SettingError
from outbox.program.settings import did_you_mean
from outbox.program.terminal import Escaped, as_json, counted, escaped, say
from outbox.program.times import shown
from outbox.program.values import json_value
from outbox.table.controls import BOUNDS, problems

TOPICS_DESCRIPTION = """\
Show the pauses, limits, routes and retry policies of topics with their backlog. The list
has every topic that has a row in AsynchronousTaskTopics, an unsent task, or a task sent in
the last minute. A second list has the topics to which a live worker does not publish,
because they fail.

    outbox topics --project my-project --instance main --database shop
    outbox topics export ... > topics.json"""
EXPORT_DESCRIPTION = """\
Print the pauses, limits, routes and retry policies of all topics as JSON. `outbox topics
apply` reads such a file.

    outbox topics export --project my-project --instance main --database shop > topics.json"""
APPLY_DESCRIPTION = """\
Replace the controls of the topics in a file, in one transaction. A field that a topic
does not have in the file gets its default. Topics that are not in the file do not change.

    outbox topics apply topics.json --dry-run --project my-project --instance main --database shop
    outbox topics apply topics.json ..."""
FORGET_DESCRIPTION = """\
Delete the row of a topic in AsynchronousTaskTopics. The topic then has no pause, limit,
route or retry policy. Its tasks do not change.

    outbox topics forget orders --project my-project --instance main --database shop"""


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    showing = flags.command(
        commands, "topics", "list topics with pauses, limits and backlog", TOPICS_DESCRIPTION, run_topics
    )
    showing.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    showing.add_argument("--exact", action="store_true", help="Count all tasks, without a limit.")
    actions = showing.add_subparsers(metavar="ACTION")
    flags.command(actions, "export", "print the controls of all topics as JSON", EXPORT_DESCRIPTION, run_export)
    applying = flags.command(actions, "apply", "write the controls of a file", APPLY_DESCRIPTION, run_apply)
    applying.add_argument("file", metavar="FILE", help="The file, or - for stdin.")
    applying.add_argument("--dry-run", action="store_true", help="Only print the difference.")
    applying.add_argument("--force", action="store_true", help="Do not ask Pub/Sub whether each `publish_to` exists.")
    forgetting = flags.command(actions, "forget", "delete the row of a topic", FORGET_DESCRIPTION, run_forget)
    flags.add(forgetting, "topic", flags.TOPIC, "Value of the Topic column", metavar="TOPIC")
    for parser in (applying, forgetting):
        flags.add_reason(parser)
        parser.add_argument("--yes", action="store_true", help="Skip the confirmation.")


def run_topics(options: argparse.Namespace) -> int:
    """Print the topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    table = flags.open_table(options)
    backlog = read_noted(table, exact=options.exact)
    controls, lines = admin.topics.controls(table), backlog.topics()
    none = admin.backlog.Line("", 0, at_least=set(() if backlog.whole else admin.backlog.COUNTS))
    topics = {
        topic: (controls.get(topic, admin.topics.Control()), lines.get(topic, none))
        for topic in sorted({*controls, *lines})
    }
    if options.json:
        rows = [
            {"topic": topic, **by_field(dataclasses.asdict(control)), **fields(backlog, line)}
            for topic, (control, line) in topics.items()
        ]
        circuits = admin.workers.open_circuits(backlog.workers)
        say(as_json({"as_of": backlog.as_of, "topics": rows, "circuits": circuits}))
        return 0
    cells_of = [
        [topic, joined_controls(backlog.workers, control), *cells(backlog, line)]
        for topic, (control, line) in topics.items()
    ]
    listed = as_table(("TOPIC", "CONTROL", *HEADS), cells_of) if topics else "no topics"
    say(f"as of {shown(backlog.as_of)}", listed, *errors.circuit_lines(backlog.workers, backlog.as_of))
    return 0


def run_export(options: argparse.Namespace) -> int:
    """Print the file; returns 0. Raises SettingError, NotReached, OutboxError."""
    controls = admin.topics.controls(flags.open_table(options))
    topics = {
        topic: {name: value for name, value in by_field(dataclasses.asdict(control)).items() if value is not None}
        for topic, control in sorted(controls.items())
    }
    # ASCII without control characters, so that no name controls a terminal. JSON allows DEL as it is.
    say(Escaped(json.dumps({"topics": topics}, indent=2).replace("\x7f", r"\u007f")))
    return 0


def run_apply(options: argparse.Namespace) -> int:
    """Write the rows of a file; returns 0. Raises SettingError, NotReached, OutboxError."""
    wanted = parsed(_read(options.file))
    options.topics = list(wanted)
    table = open_known(options, "Apply")
    for topic in sorted({control.PublishTo for control in wanted.values() if control.PublishTo}):
        check_destination(table, options, topic)
    difference = admin.topics.apply(table, wanted, flags.author(options), dry_run=options.dry_run)
    for topic, (before, after) in sorted(difference.items()):
        say(f"{topic}: {described(before)} -> {described(after)}")
    would = "would be " if options.dry_run else ""
    say(f"{counted(len(difference), 'topic')} {would}changed, {len(wanted) - len(difference)} unchanged")
    if difference and not options.dry_run:
        note(APPLIED_SOON)
    return 0


def run_forget(options: argparse.Namespace) -> int:
    """Delete the row of a topic; returns 0. Raises SettingError, NotReached, OutboxError."""
    table = flags.open_table(options)
    control = admin.topics.controls(table).get(options.topic)
    if control not in (None, admin.topics.Control()):
        bulk.confirm(f"{escaped(options.topic)} has: {described(control)}. Forget it?", yes=options.yes)
    admin.topics.forget(table, options.topic, flags.author(options))
    say(f"{options.topic}: forgotten")
    note(APPLIED_SOON)
    return 0


def _read(file: str) -> Any:
    """Return the JSON of a file. Raises SettingError."""
    text = flags.read_text(file)
    try:
        return json_value(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{file!r} cannot be read as JSON: {error}. Nothing was changed") from None


def parsed(value: Any) -> "dict[str, admin.topics.Control]":
    """Return the controls by topic. Raises SettingError with the path of each wrong value."""
    if not (isinstance(value, dict) and value.keys() == {"topics"} and isinstance(value["topics"], dict)):
        raise SettingError('the file must be {"topics": {...}}, as `outbox topics export` prints it')
    names = [field.name for field in dataclasses.fields(admin.topics.Control)]
    columns = dict(zip(by_field(dict.fromkeys(names)), names, strict=True))
    wrong: list[str] = []
    rows: dict[str, dict[str, Any]] = {}
    for topic, given in value["topics"].items():
        if not re.fullmatch(flags.TOPIC.pattern, topic):
            wrong.append(f"topics.{topic:.100} is no topic. It must be {flags.TOPIC.allowed}")
        if not isinstance(given, dict):
            wrong.append(f"topics.{topic:.100} must be an object")
            continue
        unknown = sorted(given.keys() - columns)
        wrong += [f"topics.{topic:.100}.{name:.100} is unknown.{did_you_mean(name, columns)}" for name in unknown]
        rows[topic] = {column: _number(column, given[name]) for name, column in columns.items() if name in given}
        wrong += _wrong(topic, rows[topic])
    if wrong:
        sentences = (each if each.endswith((".", "?")) else f"{each}." for each in wrong)
        raise SettingError(f"{' '.join(sentences)} Nothing was changed")
    return {topic: admin.topics.Control(**row) for topic, row in rows.items()}


def _number(column: str, value: Any) -> Any:
    """Return the value of a column: JSON does not tell 5 from 5.0 and 5e0, but Spanner does."""
    bounds = BOUNDS.get(column)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # whatever the notation is
    return float(value) if bounds and bounds.kind is float and bounds.contain(value) else value


def _wrong(topic: str, row: dict[str, Any]) -> list[str]:
    found = problems(row)
    if not isinstance(row.get("Paused", False), bool):
        found["Paused"] = f"is {row['Paused']!r}. It must be true or false"
    return [f"topics.{topic}.{name} {text}" for name, text in by_field(found).items()]

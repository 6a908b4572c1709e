"""`outbox pause`, `resume` and `topics`: list topics, and write AsynchronousTaskTopics, which the workers read."""

import argparse
import dataclasses
import json
import re
from typing import Any

import outbox_admin as admin
from outbox.base.values import counted, json_value, topic_name
from outbox.errors import SettingError
from outbox.program.settings import did_you_mean, one_of
from outbox.program.terminal import CONFIRM_ABOVE, Escaped, as_json, by_field, confirm, escaped, named, note, say
from outbox.table.controls import CONTROL_NAMES, FIELDS, LIMITS, NO_CONTROLS, VALUES, TopicControls, described, problems
from outbox_admin import flags, value_types
from outbox_admin.status.status_commands import add_topics, as_of, circuit_table, fields, figures_table, read_noted

PAUSE_DESCRIPTION = """\
Publish no tasks of these topics until `outbox resume`. Their limits do not change, and
applications can still register tasks.

    outbox pause orders"""
RESUME_DESCRIPTION = """\
Resume publishing tasks of these paused topics. Their limits do not change.

    outbox resume orders"""
TOPICS_DESCRIPTION = """\
Show the pauses, limits, routes and retry policies of topics with their backlog, and the
open circuits. The list has every topic that has a row in AsynchronousTaskTopics, an unsent
task, or a task sent in the last minute.

    outbox topics
    outbox topics export > topics.json"""
SET_DESCRIPTION = """\
Set limits, the route or the retry policy of a topic. A value that you do not pass keeps
its value.

Limits apply to all live workers together. Each worker gets an equal part. Its burst and
max in flight are at least 1. A route publishes the messages to another Pub/Sub topic.
Until all workers have applied it, both can receive messages.

    outbox topics set orders --rate 10 --burst 20
    outbox topics set orders --route orders-v2 --dry-run"""
UNSET_DESCRIPTION = """\
Remove limits, the route, or values of the retry policy of a topic. Without a FIELD, remove
all of them and its pause: the row in AsynchronousTaskTopics. Its tasks do not change.

    outbox topics unset orders rate burst
    outbox topics unset orders"""
EXPORT_DESCRIPTION = """\
Print the pauses, limits, routes and retry policies of all topics as JSON. `outbox topics
apply` reads such a file.

    outbox topics export > topics.json"""
APPLY_DESCRIPTION = """\
Replace the controls of the topics in a file, in one transaction. A field that a topic
does not have in the file gets its default, but a paused topic stays paused unless the file
has `"paused": false`. Topics that are not in the file do not change.

    outbox topics apply topics.json --dry-run"""
PROBE_DESCRIPTION = """\
Let each worker whose circuit of the topic is open publish a probe now, instead of at the
time that `outbox topics` shows. If it succeeds, the circuit closes.

    outbox topics probe orders"""

#: What becomes of a topic that is not paused.
SWITCHED = {"resume": "resumed", "probe": "probe requested"}
APPLIED_SOON = "workers apply this within 10 seconds"
PROBED_SOON = "workers probe within 10 seconds. `outbox topics` shows the open circuits"
SHARED = "each live worker gets an equal part. Its burst and max in flight are at least 1"


def add(commands: Any) -> None:
    pausing = flags.command(commands, "pause", "stop publishing tasks of topics", PAUSE_DESCRIPTION, _run_switch)
    resuming = flags.command(commands, "resume", "resume paused topics", RESUME_DESCRIPTION, _run_switch)
    showing = flags.command(commands, "topics", "list topics, or set their controls", TOPICS_DESCRIPTION, _run_topics)
    add_topics(showing)
    flags.switch(showing, "--json", "Print one JSON object instead of a table")
    flags.switch(showing, "--exact", "Count all tasks, without a limit")
    actions = showing.add_subparsers(metavar="ACTION")
    setting = flags.command(actions, "set", "set limits, the route or the retry policy", SET_DESCRIPTION, _run_set)
    unsetting = flags.command(actions, "unset", "remove them", UNSET_DESCRIPTION, _run_unset)
    probing = flags.command(actions, "probe", "probe a topic whose circuit is open", PROBE_DESCRIPTION, _run_switch)
    flags.command(actions, "export", "print the controls of all topics as JSON", EXPORT_DESCRIPTION, _run_export)
    applying = flags.command(actions, "apply", "write the controls of a file", APPLY_DESCRIPTION, _run_apply)

    for parser, count in ((pausing, "+"), (resuming, "+"), (probing, "+"), (setting, 1), (unsetting, 1)):
        flags.add(parser, "topics", value_types.TOPIC, "Value of the Topic column", metavar="TOPIC", nargs=count)
    for name, (flag, text, _, kind) in VALUES.items():
        metavar = "TOPIC" if name == "publish_to" else "S" if name.endswith("_seconds") else "N"
        flags.add(setting, flag, kind, f"{text} Allowed: {{}}", metavar=metavar, dest=name)
    field = one_of(*CONTROL_NAMES)
    text = "What to remove: {}. Without it, all of them and the pause"
    flags.add(unsetting, "fields", field, text, metavar="FIELD", nargs="*")
    applying.add_argument("file", metavar="FILE", help="The file, or - for stdin.")
    for parser in (setting, applying):
        flags.switch(parser, "--force", "Do not ask Pub/Sub whether a routed topic exists")
    for parser in (pausing, resuming, probing, setting, unsetting, applying):
        flags.switch(parser, "--dry-run", "Only print the difference")
        flags.switch(parser, "--json", "Print the difference as one JSON object")
        flags.add_reason(parser)
    for parser in (pausing, probing, setting, unsetting, applying):
        flags.switch(parser, "--yes", "Skip the confirmation")


def _run_switch(options: argparse.Namespace) -> None:
    name = options.command
    table = _open(options, "" if name == "resume" else name.capitalize())
    author = flags.author(options)
    difference = admin.editing.switch(table, name, options.topics, author, dry_run=options.dry_run)
    _print_change(options, difference, SWITCHED.get(name, ""))
    if options.dry_run:
        return
    note(PROBED_SOON if name == "probe" else APPLIED_SOON)
    paused = {topic_name(topic, table.project) for topic in options.topics if name == "pause"}
    for topic, controls in sorted(table.controls().items()) if paused else ():
        to = controls.publish_to
        if to is not None and not controls.paused and topic_name(to, table.project) in paused:
            note(f"messages of {escaped(topic)} still go to {escaped(to)}, because of its route. Pause it, too")


def _run_set(options: argparse.Namespace) -> None:
    values = {name: value for name in VALUES if (value := vars(options)[name]) is not None}
    if not values:
        raise SettingError(f"no value given. Pass {' or '.join(value.flag for value in VALUES.values())}")
    _write(_open(options, "Set controls of"), options, values)


def _run_unset(options: argparse.Namespace) -> None:
    _write(_open(options), options, {CONTROL_NAMES[name]: None for name in options.fields} or None)


def _write(table: flags.Table, options: argparse.Namespace, values: dict[str, Any] | None) -> None:
    """Preview a change, ask if it routes many tasks or removes a row, and write it."""
    topics, force = options.topics, vars(options).get("force", True)
    found = admin.editing.preview(table, topics, values, exact=options.dry_run, force=force)
    to, unsent = (values or {}).get("publish_to") or topics[0], found.unsent
    if found.unchecked:
        note(found.unchecked)
    if options.dry_run:
        _print_change(options, found.difference, unsent=unsent)
        if unsent and not options.json:
            say(f"{unsent} of {topics[0]} would be published to {to}")
        return
    if values is None and (row := found.difference[topics[0]][0]) != NO_CONTROLS:
        confirm(f"{escaped(topics[0])} has: {described(row)}. Remove all of it?", yes=options.yes)
    if unsent and unsent.number > CONFIRM_ABOVE:
        confirm(f"{unsent} of {escaped(topics[0])} will be published to {escaped(to)}.", yes=options.yes)
    difference = admin.editing.change(table, "controls", topics, values, flags.author(options))
    _print_change(options, difference, unsent=unsent)
    is_limited = any((values or {}).get(name) for name in LIMITS)
    note(f"{APPLIED_SOON}; {SHARED}" if is_limited else APPLIED_SOON)
    if unsent:
        note(f"{unsent} of {escaped(topics[0])} not sent yet. {admin.editing.ORDERED.format(escaped(to))}")


def _run_topics(options: argparse.Namespace) -> None:
    table = flags.open_table(options)
    backlog = read_noted(table, options.topics, exact=options.exact)
    controls, lines = table.controls(), backlog.topics()
    none = admin.rows.backlog.Line("", at_least=set(() if backlog.whole else admin.rows.backlog.COUNTS))
    names = sorted(name for name in {*controls, *lines} if not options.topics or name in options.topics)
    topics = [(topic, controls.get(topic, NO_CONTROLS), lines.get(topic, none)) for topic in names]
    if options.json:
        rows = [
            {"topic": topic, **by_field(dataclasses.asdict(row)), **fields(backlog, line)}
            for topic, row, line in topics
        ]
        circuits = admin.live_workers.open_circuits(backlog.workers)
        say(as_json({"as_of": backlog.as_of, "topics": rows, "circuits": circuits}))
    else:
        listed = [((topic, described(row)), line) for topic, row, line in topics]
        text, left_out = figures_table(backlog, ("TOPIC", "CONTROL"), listed)
        circuit_text = circuit_table(backlog.workers, backlog.as_of)
        head = as_of(backlog.as_of, backlog.workers)
        say(head, text if topics else "no topics", *(["", circuit_text] if circuit_text else []))
        if left_out:
            note(f"the terminal is too narrow for {', '.join(left_out)}")


def _run_export(options: argparse.Namespace) -> None:
    controls = flags.open_table(options).controls()
    topics = {
        # Without `"paused": false`, which would end a pause when the file is applied.
        topic: {
            name: value
            for name in FIELDS
            if (value := by_field(dataclasses.asdict(row))[name]) is not None and value is not False
        }
        for topic, row in sorted(controls.items())
    }
    # ASCII without control characters, so that no name controls a terminal. JSON allows DEL as it is.
    say(Escaped(json.dumps({"topics": topics}, indent=2).replace("\x7f", r"\u007f")))


def _run_apply(options: argparse.Namespace) -> None:
    text = flags.read_text(options.file)
    try:
        wanted = parsed(json_value(text))
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{options.file!r} cannot be read as JSON: {error}. Nothing was changed") from None
    options.topics = list(wanted)
    table = _open(options, "Apply")
    destinations = [] if options.force else [values.get("publish_to") for values in wanted.values()]
    if unchecked := admin.editing.check_destinations(table, destinations):
        note(unchecked)
    difference = admin.editing.apply(table, wanted, flags.author(options), dry_run=options.dry_run)
    changed = _print_change(options, difference, of_file=True)
    would = "would be " if options.dry_run else ""
    if not options.json:
        say(f"{counted(changed, 'topic')} {would}changed, {len(wanted) - changed} unchanged")
    if changed and not options.dry_run:
        note(APPLIED_SOON)


def _print_change(
    options: argparse.Namespace,
    difference: "admin.editing.Difference",
    switched: str = "",
    *,
    unsent: "admin.rows.backlog.Count | None" = None,
    of_file: bool = False,
) -> int:
    """Print the rows of topics after a change, or what changes. Return the number of those that change.

    `switched` says what has become of the topics. The JSON object also has the `unsent` tasks. Of a file, which may
    have many topics, print only what changes.
    """
    changed = {topic: rows for topic, rows in difference.items() if rows[0] != rows[1]}
    if options.json:
        count = {"unsent": dataclasses.asdict(unsent)} if unsent else {}
        say(as_json({"dry_run": options.dry_run, **admin.editing.recorded(changed), **count}))
    elif options.dry_run or of_file:
        for topic, (before, after) in sorted(changed.items()):
            say(f"{topic}: {described(before)} -> {described(after, switched)}")
    else:
        for topic, (_, row) in difference.items():
            say(f"{topic}: {described(row, switched)}")
    return len(changed)


def _open(options: argparse.Namespace, verb: str = "") -> flags.Table:
    """Return the table. Print a note if unsent tasks use the other name (ID or full name) of a topic.

    With a `verb`, ask first if a topic is unknown; in a dry run, only print a note. Raises SettingError, NotReached,
    OutboxError.
    """
    table = flags.open_table(options)
    prefix = f"projects/{table.project}/topics/"
    # A topic of another project has only one name.
    others = {
        each.removeprefix(prefix) if each.startswith("projects/") else prefix + each: each for each in options.topics
    }
    names = {name: topic for name, topic in others.items() if name not in options.topics}
    for name in sorted(admin.editing.waiting(table, names)):
        note(
            f"unsent tasks also use {name}, which is the same topic as {names[name]}. Pass {name} too; otherwise "
            "its tasks are not affected"
        )
    if verb and not options.yes and (unknown := admin.editing.unknown(table, options.topics)):
        found = flags.unknown_topics(table, unknown)
        if vars(options).get("dry_run"):
            note(found)
        else:
            confirm(f"{found}. {verb} {named(map(repr, unknown))} anyway?", yes=False)
    return table


def parsed(value: Any) -> dict[str, dict[str, Any]]:
    """Return the given values by topic and field. Raises SettingError with the path of each wrong value."""
    if not (isinstance(value, dict) and value.keys() == {"topics"} and isinstance(value["topics"], dict)):
        raise SettingError('the file must be {"topics": {...}}, as `outbox topics export` prints it')
    wrong: list[str] = []
    controls: dict[str, dict[str, Any]] = {}
    for topic, given in value["topics"].items():
        if not re.fullmatch(value_types.TOPIC.pattern, topic):
            wrong.append(f"topics.{topic:.100} is no topic. It must be {value_types.TOPIC.allowed}")
        if not isinstance(given, dict):
            wrong.append(f"topics.{topic:.100} must be an object")
            continue
        unknown = sorted(given.keys() - {*FIELDS})
        wrong += [f"topics.{topic:.100}.{name:.100} is unknown.{did_you_mean(name, FIELDS)}" for name in unknown]
        controls[topic] = {name: _number(name, given[name]) for name in FIELDS if name in given}
        wrong += [f"topics.{topic}.{each}" for each in problems(TopicControls(**controls[topic]), str).values()]
    if wrong:
        sentences = (each if each.endswith((".", "?")) else f"{each}." for each in wrong)
        raise SettingError(f"{' '.join(sentences)} Nothing was changed")
    return controls


def _number(name: str, value: Any) -> Any:
    """Return the value of a field: JSON does not tell 5 from 5.0 and 5e0, but Spanner does."""
    bounds = VALUES[name].kind.bounds if name in VALUES else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # whatever the notation is
    return float(value) if bounds and bounds.kind is float and bounds.contain(value) else value

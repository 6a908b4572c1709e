"""`outbox pause`, `resume`, `limit`, `route` and `policy`: write AsynchronousTaskTopics, which the workers read."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from outbox import admin
from outbox.cli import bulk, flags
from outbox.cli.output import named, note
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import SettingType, did_you_mean, matching, number
from outbox.program.terminal import escaped, say
from outbox.program.times import SECONDS
from outbox.program.values import TOPIC
from outbox.table.controls import BOUNDS

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
ROUTE_DESCRIPTION = """\
Publish the messages of a topic to another Pub/Sub topic from now on. Tasks keep their
topic, so its pause, limits and retry policy still apply. Until all workers have applied
the route, both Pub/Sub topics can receive messages.

    outbox route orders --to orders-v2 --dry-run --project my-project \\
        --instance main --database shop
    outbox route orders --to orders-v2 ...
    outbox route orders --off ..."""
POLICY_DESCRIPTION = """\
Set the retry policy of a topic. A value that you do not pass keeps its value. Without a
value, the setting of the worker applies. The next failed attempt of a task uses it.

    outbox policy orders --max-attempts 3 --backoff-max 60s --project my-project \\
        --instance main --database shop
    outbox policy orders --off ..."""

APPLIED_SOON = "workers apply this within 10 seconds"
ORDERED = "Subscribers of {} do not get the earlier messages of an ordering key, and order holds only within a topic"
SHARED = "each live worker gets an equal part. Its burst and max in flight are at least 1"


class Value(NamedTuple):
    """A control that has a value: its column, the kind and the help of its flag, and how a sentence states it."""

    column: str
    kind: SettingType
    help: str
    stated: str


_whole = partial(number, kind=int)


def _value(column: str, help: str, stated: str, parse: Callable[[str], float] = _whole, allowed: str = "{}") -> Value:
    """Return the control of a column, by default of whole numbers. `allowed` may name the bounds of the column."""
    bounds = BOUNDS[column]

    def checked(text: str) -> float:
        if not bounds.contain(value := parse(text)):
            raise ValueError(text)
        return value

    return Value(column, SettingType(checked, allowed.format(bounds)), help, stated)


_duration = partial(_value, parse=SECONDS.parse, allowed=SECONDS.allowed + ", from {0.low:g} to {0.high:,.0f} seconds")
_RATE = "a finite number of tasks a second, {0.low:g} or more"

#: The flags of `limit` and of `policy`.
LIMITS = {
    "--rate": _value(
        "RatePerSecond", "Tasks a second; together with a burst.", "{:,.15g} tasks a second", number, _RATE
    ),
    "--burst": _value(
        "Burst", "Tasks that may be sent at once after a quiet period; together with a rate.", "{:,} at once"
    ),
    "--max-in-flight": _value("MaxInFlight", "Max tasks that are being published at the same time.", "{:,} in flight"),
}
POLICY = {
    "--max-attempts": _value("MaxAttempts", "Failed attempts after which a task is dead.", "dead after {:,} attempts"),
    "--backoff-initial": _duration(
        "BackoffInitialSeconds",
        "Time until a failed task is retried; doubles with each attempt.",
        "first retry after {:,.15g} s",
    ),
    "--backoff-max": _duration(
        "BackoffMaxSeconds", "Max time between two attempts.", "retries at most {:,.15g} s apart"
    ),
    "--dead-after": _duration(
        "DeadAfterSeconds",
        "A task does not become dead before this age if its topic is missing or refuses messages.",
        "not dead before {:,.15g} s",
    ),
}
TOPIC_NAME = matching(TOPIC, "a topic ID or projects/PROJECT/topics/ID")


def add(commands: Any) -> None:
    """Add the commands to the subparsers `commands`."""
    pausing = flags.command(commands, "pause", "stop publishing tasks of topics", PAUSE_DESCRIPTION, run_pause)
    resuming = flags.command(commands, "resume", "resume paused topics", RESUME_DESCRIPTION, run_resume)
    limiting = flags.command(commands, "limit", "limit a topic, or remove its limits", LIMIT_DESCRIPTION, run_limit)
    routing = flags.command(commands, "route", "publish a topic's messages elsewhere", ROUTE_DESCRIPTION, run_route)
    governing = flags.command(commands, "policy", "set the retry policy of a topic", POLICY_DESCRIPTION, run_policy)
    for parser, count in ((pausing, "+"), (resuming, "+"), (limiting, 1), (routing, 1), (governing, 1)):
        flags.add(parser, "topics", flags.TOPIC, "Value of the Topic column", metavar="TOPIC", nargs=count)
    for parser, of_flags in ((limiting, LIMITS), (governing, POLICY)):
        for flag, (column, kind, text, _) in of_flags.items():
            flags.add(parser, flag, kind, f"{text} Allowed: {kind.allowed}", metavar="N", dest=column)
    limiting.add_argument("--off", action="store_true", help="Remove all limits.")
    governing.add_argument("--off", action="store_true", help="Use the workers' settings again.")
    where = routing.add_mutually_exclusive_group(required=True)
    text = f"The Pub/Sub topic that gets the messages: {TOPIC_NAME.allowed}"
    flags.add(where, "--to", TOPIC_NAME, text, metavar="TOPIC")
    where.add_argument("--off", action="store_true", help="Publish to the topic itself again.")
    routing.add_argument("--dry-run", action="store_true", help="Only print the number of tasks.")
    routing.add_argument("--force", action="store_true", help="Do not ask Pub/Sub whether the topic exists.")
    for parser in (pausing, resuming, limiting, routing, governing):
        flags.add_reason(parser)
    for parser in (pausing, limiting, routing, governing):
        parser.add_argument("--yes", action="store_true", help="Skip the confirmation for an unknown topic.")


def run_pause(options: argparse.Namespace) -> int:
    """Pause topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    table = open_known(options, "Pause")
    code = _change(table, options, "pause", {"Paused": True})
    controls = admin.topics.controls(table)
    paused = {admin.topics.full_name(topic, table.project) for topic in options.topics}
    for topic, control in sorted(controls.items()):
        to = control.PublishTo
        if to is not None and not control.Paused and admin.topics.full_name(to, table.project) in paused:
            note(f"messages of {escaped(topic)} still go to {escaped(to)}, because of its route. Pause it, too")
    return code


def run_limit(options: argparse.Namespace) -> int:
    """Limit a topic; returns 0. Raises SettingError, NotReached, OutboxError."""
    values = _values(options, LIMITS, "limit", "limits", "--rate with --burst, --max-in-flight, or --off")
    for flag, other in (("--rate", "--burst"), ("--burst", "--rate")):
        if not options.off and LIMITS[flag].column in values and LIMITS[other].column not in values:
            raise SettingError(f"{flag} needs {other}. Pass both. {other} must be {LIMITS[other].kind.allowed}")
    return _change(open_known(options, "Limit"), options, "limit", values)


def run_policy(options: argparse.Namespace) -> int:
    """Set the retry policy of a topic; returns 0. Raises SettingError, NotReached, OutboxError."""
    values = _values(options, POLICY, "value", "values", f"{', '.join(POLICY)}, or --off")
    return _change(open_known(options, "Set the policy of"), options, "policy", values)


def run_route(options: argparse.Namespace) -> int:
    """Route a topic; returns 0. Raises SettingError, NotReached, OutboxError."""
    table = open_known(options, "Route")
    [topic] = options.topics
    to, values = options.to or topic, {"PublishTo": options.to}
    if options.to:
        check_destination(table, options, to)
    unsent = admin.changes.count_unsent(table, topic, exact=options.dry_run)
    if options.dry_run:
        admin.topics.change(table, "route", [topic], values, dry_run=True)
        say(f"{unsent} of {topic} would be published to {to}")
        return 0
    if unsent.number > bulk.CONFIRM_ABOVE:
        bulk.confirm(f"{unsent} of {escaped(topic)} will be published to {escaped(to)}.", yes=options.yes)
    _change(table, options, "route", values)
    note(f"{unsent} of {escaped(topic)} not sent yet. {ORDERED.format(escaped(to))}")
    return 0


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


def check_destination(table: "admin.table.TaskTable", options: argparse.Namespace, topic: str) -> None:
    """Ask Pub/Sub whether the topic exists, unless --force is given. Raises OutboxError if it does not."""
    if not options.force and (unknown := admin.topics.check_destination(table, topic)):
        note(unknown)


def open_known(options: argparse.Namespace, verb: str) -> "admin.table.TaskTable":
    """Return the table. If a topic is unknown, ask first; in a dry run, only print a note.

    Raises SettingError, NotReached, OutboxError.
    """
    table = _open(options)
    if not options.yes and (unknown := admin.topics.unknown(table, options.topics)):
        found = flags.unknown_topics(table, unknown)
        if vars(options).get("dry_run"):
            note(found)
        else:
            bulk.confirm(f"{found}. {verb} {named(map(repr, unknown))} anyway?", yes=False)
    return table


def _open(options: argparse.Namespace) -> "admin.table.TaskTable":
    """Return the table. Print a note if unsent tasks use the other name (ID or full name) of a topic."""
    table = flags.open_table(options)
    others = {_other_name(topic, table.project): topic for topic in options.topics}
    names = {name: topic for name, topic in others.items() if name not in options.topics}
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
        say(f"{topic}: {described(control, 'resumed' if operation == 'resume' else '')}")
        if control.BackoffInitialSeconds and "BackoffInitialSeconds" in values:
            workers = admin.workers.live(table, table.now())
            if cut := admin.workers.cut_retry(workers, control.BackoffInitialSeconds, control.BackoffMaxSeconds):
                note(f"{escaped(topic)}: {cut}")
    limited = operation == "limit" and any(values.values())
    note(f"{APPLIED_SOON}; {SHARED}" if limited else APPLIED_SOON)
    return 0


def _other_name(topic: str, project: str) -> str:
    """Return the full name for a topic ID, and the ID for a full name. A topic of another project has only one name."""
    prefix = f"projects/{project}/topics/"
    return topic.removeprefix(prefix) if topic.startswith("projects/") else prefix + topic


def _values(
    options: argparse.Namespace, of_flags: Mapping[str, Value], one: str, all_: str, advice: str
) -> dict[str, Any]:
    """Return the values to write, by column. Raises SettingError."""
    given = vars(options)
    passed = {flag: given[each.column] for flag, each in of_flags.items() if given[each.column] is not None}
    if options.off and passed:
        raise SettingError(f"--off removes all {all_}. Pass it without {' and '.join(passed)}")
    if options.off:
        return {each.column: None for each in of_flags.values()}
    if not passed:
        raise SettingError(f"no {one} given. Pass {advice}")
    return {of_flags[flag].column: value for flag, value in passed.items()}


def described(control: "admin.topics.Control | None", unpaused: str = "") -> str:
    """Return the controls of a topic as a text."""
    if control is None:
        return "no row"
    limits = ", ".join(_stated(control, LIMITS))
    route = "" if control.PublishTo is None else f"published to {control.PublishTo}"
    parts = ("paused" if control.Paused else unpaused, limits and f"at most {limits}", route, *_stated(control, POLICY))
    return "; ".join(filter(None, parts)) or "no limits"


def joined_controls(workers: "Sequence[admin.workers.Worker]", control: "admin.topics.Control") -> str:
    """Return the controls of a topic as a text, and what its workers make of its retry policy."""
    cut = admin.workers.cut_retry(workers, control.BackoffInitialSeconds, control.BackoffMaxSeconds)
    return f"{described(control)}; {cut}" if cut else described(control)


def _stated(control: "admin.topics.Control", of_flags: Mapping[str, Value]) -> list[str]:
    values = ((getattr(control, each.column), each.stated) for each in of_flags.values())
    return [stated.format(value) for value, stated in values if value is not None]

"""`outbox topics`, `pause`, `resume` and `limit`: read and write AsynchronousTaskTopics, which the workers read."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outbox.cli.flags import COMPARED, command, open_table
from outbox.cli.output import as_json, named, note, table
from outbox.cli.status import HEADS, cells, fields
from outbox.errors import InvalidMessage, NotReached, OutboxError, SettingError
from outbox.shared.settings import DatabaseSettings, PubSubSettings, SettingType, did_you_mean, flag_of, whole_number
from outbox.shared.times import shown
from outbox.storage.ddl import MIN_RATE

if TYPE_CHECKING:
    from outbox.admin.topics import Control, TopicTable

TOPICS_DESCRIPTION = """\
Show the pauses and limits of topics with their backlog. The list has every topic that has
a row in AsynchronousTaskTopics, an unsent task, or a task sent in the last minute.

    outbox topics --project my-project --instance main --database shop"""
PAUSE_DESCRIPTION = """\
Publish no tasks of these topics until `outbox resume`. Their limits do not change, and
applications can still register tasks.

    outbox pause orders --project my-project --instance main --database shop"""
RESUME_DESCRIPTION = """\
Publish tasks of these paused topics again. Their limits do not change.

    outbox resume orders --project my-project --instance main --database shop"""
LIMIT_DESCRIPTION = """\
Limit a topic. A limit that you do not pass keeps its value. Limits apply to all live
workers together: each gets an equal part, at least 1.

    outbox limit orders --rate 10 --burst 20 --project my-project \\
        --instance main --database shop
    outbox limit orders --max-in-flight 5 ...
    outbox limit orders --off ..."""

FOLLOW = "workers apply this within 10 seconds"
SHARED = "the limits are divided by the number of live workers, at least 1 each"
#: Timeout for asking Pub/Sub whether a topic exists.
PUBSUB_SECONDS = 5.0


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
    showing = command(commands, "topics", "pauses, limits and backlog of topics", TOPICS_DESCRIPTION)
    showing.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    showing.add_argument("--exact", action="store_true", help="Count all tasks, without a limit.")
    showing.set_defaults(run=run_topics)
    pausing = command(commands, "pause", "stop publishing tasks of topics", PAUSE_DESCRIPTION)
    resuming = command(commands, "resume", "publish paused topics again", RESUME_DESCRIPTION)
    for parser in (pausing, resuming):
        parser.add_argument("topics", type=_topic, nargs="+", metavar="TOPIC", help="Value of the Topic column.")
    limiting = command(commands, "limit", "limit a topic, or remove its limits", LIMIT_DESCRIPTION)
    limiting.add_argument("topic", type=_topic, metavar="TOPIC", help="Value of the Topic column.")
    for flag, (column, kind, text) in LIMITS.items():
        limiting.add_argument(
            flag,
            dest=column,
            type=flag_of(flag, kind),
            metavar="N",
            help=f"{text} Allowed: {kind.allowed}.",
        )
    limiting.add_argument("--off", action="store_true", help="Remove all limits.")
    for parser in (pausing, limiting):
        PubSubSettings.add_flags(parser, without=DatabaseSettings)
    pausing.set_defaults(run=run_pause)
    resuming.set_defaults(run=run_resume)
    limiting.set_defaults(run=run_limit)


def _topic(text: str) -> str:
    from outbox.message import check_topic  # noqa: PLC0415 - the Pub/Sub client: a third of a second, only for a topic

    try:
        check_topic(text)
    except InvalidMessage as error:
        raise SettingError(str(error)) from None
    return text


def run_topics(options: argparse.Namespace) -> int:
    """Print the topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    tasks = open_table(options)

    from outbox.admin import backlog  # noqa: PLC0415 - see open_table
    from outbox.admin.topics import Control, TopicTable  # noqa: PLC0415 - see open_table

    waiting = backlog.read(tasks, exact=options.exact)
    controls, lines = TopicTable(tasks).controls(), waiting.topics()
    topics = {
        topic: (controls.get(topic, Control()), lines.get(topic, backlog.Line(topic, 0)))
        for topic in sorted({*controls, *lines})
    }
    if options.json:
        rows = [
            {"topic": topic, **_plain(control), **fields(waiting, line)} for topic, (control, line) in topics.items()
        ]
        print(as_json({"as_of": waiting.as_of, "topics": rows}))
        return 0
    print(f"as of {shown(waiting.as_of)}")
    shown_rows = [[topic, _described(control, ""), *cells(waiting, line)] for topic, (control, line) in topics.items()]
    print(table(("TOPIC", "CONTROL", *HEADS), shown_rows) if topics else "no topics")
    return 0


def _plain(control: "Control") -> dict[str, Any]:
    names = ("paused", "rate_per_second", "burst", "max_in_flight")
    return dict(zip(names, dataclasses.astuple(control), strict=True))


def run_pause(options: argparse.Namespace) -> int:
    """Pause topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    topics, settings = _open(options)
    _note_other_spellings(topics, options.topics, settings.project)
    _require_known(topics, options.topics, settings)
    _print(topics.change("pause", options.topics, {"Paused": True}))
    note(FOLLOW)
    return 0


def run_resume(options: argparse.Namespace) -> int:
    """Resume topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    topics, settings = _open(options)
    _note_other_spellings(topics, options.topics, settings.project)
    there = topics.rows(options.topics)
    missing = [topic for topic in options.topics if topic not in there]
    if missing:
        paused = topics.paused(COMPARED)
        raise OutboxError(
            f"cannot resume {named(missing)}: no row in AsynchronousTaskTopics. Nothing was written. "
            f"{_suggestions(missing, paused)}Paused topics: {named(paused) or 'none'}"
        )
    _print(topics.change("resume", options.topics, {"Paused": False}), unpaused="resumed")
    note(FOLLOW)
    return 0


def run_limit(options: argparse.Namespace) -> int:
    """Limit a topic; returns 0. Raises SettingError, NotReached, OutboxError."""
    values = _limits(options)
    topics, settings = _open(options)
    _note_other_spellings(topics, [options.topic], settings.project)
    _require_known(topics, [options.topic], settings)
    _print(topics.change("limit", [options.topic], values))
    note(f"{FOLLOW}; {SHARED}")
    return 0


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values to write, by column. Raises SettingError."""
    flags = vars(options)
    given = {flag: flags[column] for flag, (column, _, _) in LIMITS.items() if flags[column] is not None}
    if options.off and given:
        raise SettingError(f"--off is given with {' and '.join(given)}: it removes all limits, so pass it alone")
    if options.off:
        return {column: None for column, _, _ in LIMITS.values()}
    if not given:
        raise SettingError("limit: no limit given. Pass --rate with --burst, --max-in-flight, or --off")
    for flag, other in (("--rate", "--burst"), ("--burst", "--rate")):
        if flag in given and other not in given:
            raise SettingError(
                f"{flag} {given[flag]:,.15g} is given without {other}: pass both. "
                f"{other} must be {LIMITS[other][1].allowed}"
            )
    return {LIMITS[flag][0]: value for flag, value in given.items()}


def _open(options: argparse.Namespace) -> "tuple[TopicTable, PubSubSettings]":
    """Return the table, and the settings of Pub/Sub. Raises SettingError, NotReached, OutboxError."""
    settings = PubSubSettings.read(vars(options))
    table = open_table(options)

    from outbox.admin.topics import TopicTable  # noqa: PLC0415 - see open_table

    return TopicTable(table), settings


def _note_other_spellings(table: "TopicTable", topics: Sequence[str], project: str) -> None:
    others = {other: topic for topic in topics if (other := _other_spelling(topic, project)) not in topics}
    for other in sorted(table.waiting(others)):
        note(
            f"unsent tasks also use {other}, which is the same topic as {others[other]}. Pass {other} too; otherwise "
            "its tasks are not affected"
        )


def _require_known(table: "TopicTable", topics: Sequence[str], settings: PubSubSettings) -> None:
    """Raise OutboxError unless each topic has a row, an unsent task, or exists in Pub/Sub, to catch typing errors."""
    known = table.rows(topics) | table.waiting(topics)
    full = {topic: _full_name(topic, settings.project) for topic in topics}
    unknown = [topic for topic in topics if topic not in known and not _in_pubsub(full[topic], settings)]
    if unknown:
        names = table.known(COMPARED)
        raise OutboxError(
            f"unknown topic {named(unknown)}: no unsent task and no row in AsynchronousTaskTopics has it, and Pub/Sub "
            f"has no {named([full[topic] for topic in unknown])}. Nothing was written. "
            f"{_suggestions(unknown, names)}Known topics: {named(names) or 'none'}"
        )


def _suggestions(unknown: Sequence[str], known: Sequence[str]) -> str:
    return "".join(f"{did_you_mean(topic, known).strip()} " for topic in unknown).lstrip()


def _in_pubsub(name: str, settings: PubSubSettings) -> bool:
    """Ask Pub/Sub whether the topic exists. If the request fails, print a note and return True."""
    from google.api_core.exceptions import GoogleAPIError, NotFound  # noqa: PLC0415 - only for an unknown name
    from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415 - see open_table
    from google.pubsub_v1 import PublisherClient  # noqa: PLC0415 - see open_table

    from outbox.shared.pubsub import open_pubsub  # noqa: PLC0415 - see open_table

    try:
        PublisherClient(transport=open_pubsub(settings)).get_topic(topic=name, timeout=PUBSUB_SECONDS, retry=None)
    except NotFound:
        return False
    except (GoogleAPIError, GoogleAuthError, NotReached) as error:
        reason = str(error).partition("\n")[0]
        note(f"could not check in Pub/Sub whether {name} exists. Continuing without the check: {reason}")
    return True


def _print(changed: "dict[str, Control]", *, unpaused: str = "") -> None:
    for topic, control in changed.items():
        print(f"{topic}: {_described(control, unpaused)}")


def _described(control: "Control", unpaused: str) -> str:
    state = "paused" if control.Paused else unpaused
    parts = [
        f"{value:,.15g} {unit}"
        for value, unit in (
            (control.RatePerSecond, "tasks a second"),
            (control.Burst, "at once"),
            (control.MaxInFlight, "in flight"),
        )
        if value is not None
    ]
    limits = f"at most {', '.join(parts)}" if parts else ""
    return "; ".join(part for part in (state, limits) if part) or "no limits"


def _full_name(topic: str, project: str) -> str:
    return topic if topic.startswith("projects/") else f"projects/{project}/topics/{topic}"


def _other_spelling(topic: str, project: str) -> str:
    """Return the full name for a topic ID, and the ID for a full name. A topic of another project has only one name."""
    own = _full_name("", project)
    return topic.removeprefix(own) if topic.startswith("projects/") else own + topic

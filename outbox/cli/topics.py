"""`outbox pause`, `resume` and `limit`: the rows of AsynchronousTaskTopics, which the workers read."""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from outbox._ddl import LEAST_RATE
from outbox.errors import InvalidMessage, OutboxError, SettingError
from outbox.message import check_topic
from outbox.settings import DatabaseSettings, Kind, flag_of, whole_number

if TYPE_CHECKING:
    from outbox.topics import Control, TopicTable

PAUSE_DESCRIPTION = """\
Publish nothing more of these topics until `outbox resume`. Their limits stay as
they are, and tasks can be registered as ever.

    outbox pause orders --project my-project --instance main --database shop"""
RESUME_DESCRIPTION = """\
Publish tasks of these paused topics again, within the limits that they have.

    outbox resume orders --project my-project --instance main --database shop"""
LIMIT_DESCRIPTION = """\
Limit a topic. What is not named keeps its value. Limits are those of all
workers together: each takes its part, at least 1.

    outbox limit orders --rate 10 --burst 20 --project my-project \\
        --instance main --database shop
    outbox limit orders --max-in-flight 5 ...
    outbox limit orders --off ..."""

FOLLOW = "the workers follow within 10 seconds"
SHARED = "limits are the fleet's, divided by the living workers, at least 1 each"
#: Names in a sentence that says which topics there are.
NAMES = 10
#: Seconds for Pub/Sub's answer whether a topic exists.
PUBSUB_SECONDS = 5.0


def _rate(text: str) -> float:
    value = float(text)
    if not (value >= LEAST_RATE and math.isfinite(value)):
        raise ValueError(text)
    return value


RATE = Kind(_rate, f"a finite number of tasks a second, {LEAST_RATE:g} or more")
COUNT = whole_number(1, 1_000_000_000)

#: The flags of `limit`: column, kind, help.
LIMITS = {
    "--rate": ("RatePerSecond", RATE, "Tasks a second; together with --burst."),
    "--burst": ("Burst", COUNT, "Tasks that may go at once after a rest; together with --rate."),
    "--max-in-flight": ("MaxInFlight", COUNT, "Tasks that are being published at the same time."),
}


def add(commands: Any) -> None:
    """Add the three commands to the subparsers `commands`."""
    pausing = _command(commands, "pause", "publish nothing more of topics", PAUSE_DESCRIPTION)
    resuming = _command(commands, "resume", "publish paused topics again", RESUME_DESCRIPTION)
    for parser in (pausing, resuming):
        parser.add_argument("topics", type=_topic, nargs="+", metavar="TOPIC", help="As tasks have it in Topic.")
    limiting = _command(commands, "limit", "limit a topic, or take its limits away", LIMIT_DESCRIPTION)
    limiting.add_argument("topic", type=_topic, metavar="TOPIC", help="As tasks have it in Topic.")
    for flag, (column, kind, text) in LIMITS.items():
        limiting.add_argument(
            flag,
            dest=column,
            type=flag_of(flag, kind),
            metavar="N",
            help=f"{text} Allowed: {kind.allowed}.",
        )
    limiting.add_argument("--off", action="store_true", help="Take all limits away.")
    pausing.set_defaults(run=run_pause)
    resuming.set_defaults(run=run_resume)
    limiting.set_defaults(run=run_limit)


def _command(commands: Any, name: str, text: str, description: str) -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=layout
    )
    DatabaseSettings.add_flags(parser)
    return parser


def _topic(text: str) -> str:
    try:
        check_topic(text)
    except InvalidMessage as error:
        raise SettingError(str(error)) from None
    return text


def run_pause(options: argparse.Namespace) -> int:
    """Pause topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    table, project = _open(options)
    _note_other_spellings(table, options.topics, project)
    _require_known(table, options.topics, project)
    _print(table.change(options.topics, {"Paused": True}))
    _note(FOLLOW)
    return 0


def run_resume(options: argparse.Namespace) -> int:
    """Resume topics; returns 0. Raises SettingError, NotReached, OutboxError."""
    table, project = _open(options)
    _note_other_spellings(table, options.topics, project)
    there = table.rows(options.topics)
    missing = [topic for topic in options.topics if topic not in there]
    if missing:
        raise OutboxError(
            f"AsynchronousTaskTopics has no row of {_listed(missing)}, so there is no pause to end; nothing was "
            f"written. Paused: {_listed(table.paused(NAMES + 1)) or 'no topic'}"
        )
    _print(table.change(options.topics, {"Paused": False}), unpaused="resumed")
    _note(FOLLOW)
    return 0


def run_limit(options: argparse.Namespace) -> int:
    """Limit a topic; returns 0. Raises SettingError, NotReached, OutboxError."""
    values = _limits(options)
    table, project = _open(options)
    _note_other_spellings(table, [options.topic], project)
    _require_known(table, [options.topic], project)
    _print(table.change([options.topic], values))
    _note(f"{FOLLOW}; {SHARED}")
    return 0


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is to be written, by column. Raises SettingError."""
    flags = vars(options)
    given = {flag: flags[column] for flag, (column, _, _) in LIMITS.items() if flags[column] is not None}
    if options.off and given:
        raise SettingError(f"--off is given with {' and '.join(given)}: it takes all limits away, so give it alone")
    if options.off:
        return {column: None for column, _, _ in LIMITS.values()}
    if not given:
        raise SettingError("limit: no limit is given: give --rate with --burst, --max-in-flight, or --off")
    for flag, other in (("--rate", "--burst"), ("--burst", "--rate")):
        if flag in given and other not in given:
            raise SettingError(
                f"{flag} {given[flag]:,.15g} is given without {other}: give both; "
                f"{other} must be {LIMITS[other][1].allowed}"
            )
    return {LIMITS[flag][0]: value for flag, value in given.items()}


def _open(options: argparse.Namespace) -> "tuple[TopicTable, str]":
    """Return the table and the project of topics without one. Raises SettingError, NotReached, OutboxError."""
    settings = DatabaseSettings.read(vars(options))

    from outbox.cli.database import open_database  # noqa: PLC0415 - half a second, for nothing if a flag is wrong
    from outbox.topics import TopicTable  # noqa: PLC0415 - the same

    return TopicTable(open_database(settings)), settings.project


def _note_other_spellings(table: "TopicTable", topics: Sequence[str], project: str) -> None:
    others = {other: topic for topic in topics if (other := _other_spelling(topic, project)) not in topics}
    for other in sorted(table.waiting(others)):
        _note(f"tasks wait for {other}, which is another name than {others[other]}: it stays as it is")


def _require_known(table: "TopicTable", topics: Sequence[str], project: str) -> None:
    """Return if each topic has a row, an unsent task, or is in Pub/Sub. Raises OutboxError for a typing error."""
    known = table.rows(topics) | table.waiting(topics)
    unknown = [topic for topic in topics if topic not in known and not _in_pubsub(_full_name(topic, project))]
    if unknown:
        raise OutboxError(
            f"nobody knows {_listed(unknown)}: no task waits for it, AsynchronousTaskTopics has no row of it, and "
            f"Pub/Sub has no {_listed([_full_name(topic, project) for topic in unknown])}; nothing was written. "
            f"Tasks wait or rows exist for: {_listed(table.known(NAMES + 1)) or 'no topic'}"
        )


def _in_pubsub(name: str) -> bool:
    """Ask Pub/Sub for the topic. If it cannot be asked, say so and return True."""
    from google.api_core.exceptions import GoogleAPIError, NotFound  # noqa: PLC0415 - only for a name that is in doubt
    from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415 - the same
    from google.cloud.pubsub_v1 import PublisherClient  # noqa: PLC0415 - the same

    try:
        PublisherClient().get_topic(topic=name, timeout=PUBSUB_SECONDS, retry=None)
    except NotFound:
        return False
    except (GoogleAPIError, GoogleAuthError) as error:
        reason = str(error).partition("\n")[0]
        _note(f"Pub/Sub could not be asked whether {name} exists, and nothing else knows it; going on. {reason}")
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
    """Return the full name for an id, and the reverse; a topic of another project has one name only."""
    own = _full_name("", project)
    return topic.removeprefix(own) if topic.startswith("projects/") else own + topic


def _listed(names: Iterable[str]) -> str:
    """Return at most ten names, and three dots for more."""
    listed = list(names)
    return ", ".join([*listed[:NAMES], *(["..."] if len(listed) > NAMES else [])])


def _note(text: str) -> None:
    print(f"outbox: {text}", file=sys.stderr)

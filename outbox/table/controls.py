"""The topic controls: the columns of AsynchronousTaskTopics, and which values they may have.

Workers, commands, pages and files use this table of fields. Any program may write other values.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple

from outbox.base.values import TOPIC
from outbox.program.settings import SECONDS, Bounds, SettingType, bounded, matching, number, whole_number


class Value(NamedTuple):
    """A control that has a value: the name and help of its flag, how a text becomes its value, and how it is stated."""

    flag: str
    help: str
    stated: str
    kind: SettingType


def _control(flag: str, kind: SettingType, stated: str, help: str) -> Any:
    return dataclasses.field(default=None, metadata={"value": Value(flag, help, stated, kind)})


def _duration(low: float, high: float) -> SettingType:
    allowed = f"{SECONDS.allowed}, from {low:g} to {high:,.0f} seconds"
    return bounded(Bounds(float, low, high), SECONDS.parse, allowed)


#: Min tasks a second: one in thirty years. A smaller rate is a mistake, and could become 0 for each worker.
MIN_RATE = 1e-9
_RATE = bounded(
    Bounds(float, MIN_RATE, sys.float_info.max), number, f"a finite number of tasks a second, {MIN_RATE:g} or more"
)
_TOPIC_NAME = matching(TOPIC, "a topic ID or projects/PROJECT/topics/ID")


@dataclasses.dataclass(frozen=True, slots=True)
class TopicControls:
    """The controls of a topic. None means no limit, no route, or the retry policy of the worker.

    Limits apply to all live workers together. Each field is a column: `max_in_flight` is MaxInFlight.
    """

    paused: bool = False
    rate_per_second: float | None = _control(
        "--rate", _RATE, "{:,.15g} tasks a second", "Tasks a second; together with a burst."
    )
    burst: int | None = _control(
        "--burst", whole_number(1, 1_000_000_000), "{:,} at once",
        "Tasks that may be sent at once after a quiet period; together with a rate.",
    )  # fmt: skip
    max_in_flight: int | None = _control(
        "--max-in-flight", whole_number(1, 1_000_000_000), "{:,} in flight",
        "Max tasks that are being published at the same time.",
    )  # fmt: skip
    publish_to: str | None = _control(
        "--route", _TOPIC_NAME, "published to {}", "The Pub/Sub topic that gets the messages instead."
    )
    max_attempts: int | None = _control(
        "--max-attempts", whole_number(1, 1_000_000), "dead after {:,} attempts",
        "Failed attempts after which a task is dead.",
    )  # fmt: skip
    backoff_initial_seconds: float | None = _control(
        "--backoff-initial", _duration(0.05, 3600), "first retry after {:,.15g} s",
        "Time until a failed task is retried; doubles with each attempt.",
    )  # fmt: skip
    backoff_max_seconds: float | None = _control(
        "--backoff-max", _duration(0.05, 7 * 86_400), "retries at most {:,.15g} s apart",
        "Max time between two attempts.",
    )  # fmt: skip
    dead_after_seconds: float | None = _control(
        "--dead-after", _duration(0, 365 * 86_400), "not dead before {:,.15g} s",
        "A task does not become dead before this age if its topic is missing or refuses messages.",
    )  # fmt: skip
    #: When an operator asked for a probe of an open circuit. It is no control, so no file and no record has it.
    probe_requested_at: datetime | None = None


NO_CONTROLS = TopicControls()
FIELDS = tuple(field.name for field in dataclasses.fields(TopicControls) if field.name != "probe_requested_at")
#: The fields that have a value. `paused` is a switch.
VALUES: dict[str, Value] = {
    field.name: field.metadata["value"] for field in dataclasses.fields(TopicControls) if field.metadata
}
#: The names of the fields in commands and forms, each with its field.
CONTROL_NAMES = {value.flag[2:]: name for name, value in VALUES.items()}
LIMITS = ("rate_per_second", "burst", "max_in_flight")
POLICY = ("max_attempts", "backoff_initial_seconds", "backoff_max_seconds", "dead_after_seconds")

CONTROLS_TABLE = "AsynchronousTaskTopics"


def column(field: str) -> str:
    """Return `MaxInFlight` for `max_in_flight`."""
    return field.title().replace("_", "")


def flag(field: str) -> str:
    """Return `--max-in-flight` for `max_in_flight`. `paused` has no flag."""
    return VALUES[field].flag if field in VALUES else field


CONTROLS_COLUMNS = ("Topic", *map(column, (*FIELDS, "probe_requested_at")))
#: The topic controls. Reads a whole small table, with one row for each topic that has any.
CONTROLS = f"SELECT {', '.join(CONTROLS_COLUMNS)} FROM {CONTROLS_TABLE}"  # noqa: S608 - constants


def problems(controls: TopicControls, named: Callable[[str], str] = column) -> dict[str, str]:
    """Return a sentence for each field that has a value that is not allowed.

    `named` returns what the reader calls a field: `column`, `flag`, or `str` for the key of a file.
    """
    found = {
        name: f"{named(name)} is {value!r}. It must be {bounds}"
        for name, (*_, kind) in VALUES.items()
        if (bounds := kind.bounds) and (value := getattr(controls, name)) is not None and not bounds.contain(value)
    }
    if not isinstance(controls.paused, bool):
        found["paused"] = f"{named('paused')} is {controls.paused!r}. It must be true or false"
    to: object = controls.publish_to
    if to is not None and not (isinstance(to, str) and re.fullmatch(TOPIC, to)):
        found["publish_to"] = f"{named('publish_to')} is {to!r:.300}. It must be {_TOPIC_NAME.allowed}"
    if (controls.rate_per_second is None) != (controls.burst is None):
        both = f"{named('rate_per_second')} and {named('burst')} go together. Set both or neither"
        found.setdefault("rate_per_second", both)
    first, longest = controls.backoff_initial_seconds, controls.backoff_max_seconds
    if found.keys().isdisjoint(POLICY) and first is not None and longest is not None and first > longest:
        found["backoff_initial_seconds"] = (
            f"{named('backoff_initial_seconds')} is {first!r}. It must not exceed {named('backoff_max_seconds')}, "
            f"which is {longest!r}"
        )
    return found


def stated(controls: TopicControls, names: Iterable[str]) -> list[str]:
    """Return a text for each of these fields that has a value."""
    values = ((getattr(controls, name), VALUES[name].stated) for name in names)
    return [text.format(value) for value, text in values if value is not None]


def described(controls: TopicControls | None, unpaused: str = "") -> str:
    """Return the controls of a topic as a text."""
    if controls is None:
        return "no row"
    limits = ", ".join(stated(controls, LIMITS))
    parts = ("paused" if controls.paused else unpaused, limits and f"at most {limits}")
    return "; ".join(filter(None, (*parts, *stated(controls, ("publish_to", *POLICY))))) or "no limits"

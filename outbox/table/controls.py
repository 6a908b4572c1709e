"""The topic controls: the columns of AsynchronousTaskTopics, and which values they may have.

Workers, commands, pages and files use this table of fields. Any program may write other values.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from outbox.base.values import TOPIC
from outbox.program.settings import SECONDS, SettingType, matching, number
from outbox.table.ddl import MIN_RATE


class Bounds(NamedTuple):
    """The values of a column: whole numbers (`int`) or numbers (`float`) from `low` to `high`."""

    kind: type
    low: float
    high: float

    def __str__(self) -> str:
        number = "a whole number" if self.kind is int else "a number"
        return f"{number} from {self.low:,.12g} to {self.high:,.12g}"

    def contain(self, value: object) -> bool:
        """Tell whether the column may have this value. In Python, True is a number."""
        kinds = int if self.kind is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high


class Value(NamedTuple):
    """A control that has a value: the name and help of its flag, how a text becomes its value, and how it is stated."""

    flag: str
    help: str
    stated: str
    kind: SettingType
    bounds: Bounds | None = None


def _control(flag: str, bounds: Bounds, stated: str, help: str, *, parse: Callable[[str], float], allowed: str) -> Any:
    """Declare a column with a number. `allowed` may name the bounds."""

    def checked(text: str) -> float:
        if not bounds.contain(value := parse(text)):
            raise ValueError(text)
        return value

    kind = SettingType(checked, allowed.format(bounds))
    return dataclasses.field(default=None, metadata={"value": Value(flag, help, stated, kind, bounds)})


_whole = partial(_control, parse=partial(number, kind=int), allowed="{}")
_duration = partial(
    _control, parse=SECONDS.parse, allowed=SECONDS.allowed + ", from {0.low:g} to {0.high:,.0f} seconds"
)
_TOPIC_NAME = matching(TOPIC, "a topic ID or projects/PROJECT/topics/ID")
_ROUTE = Value("--route", "The Pub/Sub topic that gets the messages instead.", "published to {}", _TOPIC_NAME)


@dataclasses.dataclass(frozen=True, slots=True)
class TopicControls:
    """The controls of a topic. None means no limit, no route, or the retry policy of the worker.

    Limits apply to all live workers together. Each field is a column: `max_in_flight` is MaxInFlight.
    """

    paused: bool = False
    rate_per_second: float | None = _control(
        "--rate", Bounds(float, MIN_RATE, sys.float_info.max), "{:,.15g} tasks a second",
        "Tasks a second; together with a burst.",
        parse=number, allowed="a finite number of tasks a second, {0.low:g} or more",
    )  # fmt: skip
    burst: int | None = _whole(
        "--burst", Bounds(int, 1, 1_000_000_000), "{:,} at once",
        "Tasks that may be sent at once after a quiet period; together with a rate.",
    )  # fmt: skip
    max_in_flight: int | None = _whole(
        "--max-in-flight", Bounds(int, 1, 1_000_000_000), "{:,} in flight",
        "Max tasks that are being published at the same time.",
    )  # fmt: skip
    publish_to: str | None = dataclasses.field(default=None, metadata={"value": _ROUTE})
    max_attempts: int | None = _whole(
        "--max-attempts", Bounds(int, 1, 1_000_000), "dead after {:,} attempts",
        "Failed attempts after which a task is dead.",
    )  # fmt: skip
    backoff_initial_seconds: float | None = _duration(
        "--backoff-initial", Bounds(float, 0.05, 3600), "first retry after {:,.15g} s",
        "Time until a failed task is retried; doubles with each attempt.",
    )  # fmt: skip
    backoff_max_seconds: float | None = _duration(
        "--backoff-max", Bounds(float, 0.05, 7 * 86_400), "retries at most {:,.15g} s apart",
        "Max time between two attempts.",
    )  # fmt: skip
    dead_after_seconds: float | None = _duration(
        "--dead-after", Bounds(float, 0, 365 * 86_400), "not dead before {:,.15g} s",
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
NAMES = {value.flag[2:]: name for name, value in VALUES.items()}
LIMITS = ("rate_per_second", "burst", "max_in_flight")
POLICY = ("max_attempts", "backoff_initial_seconds", "backoff_max_seconds", "dead_after_seconds")

TABLE = "AsynchronousTaskTopics"
COLUMNS = ("Topic", *(name.title().replace("_", "") for name in (*FIELDS, "probe_requested_at")))
#: The topic controls. Reads a whole small table, with one row for each topic that has any.
CONTROLS = f"SELECT {', '.join(COLUMNS)} FROM {TABLE}"  # noqa: S608 - constants


def problems(controls: TopicControls) -> dict[str, str]:
    """Return why fields have a value that is not allowed."""
    found = {
        name: f"is {value!r}. It must be {bounds}"
        for name, (*_, bounds) in VALUES.items()
        if bounds and (value := getattr(controls, name)) is not None and not bounds.contain(value)
    }
    if not isinstance(controls.paused, bool):
        found["paused"] = f"is {controls.paused!r}. It must be true or false"
    to: object = controls.publish_to
    if to is not None and not (isinstance(to, str) and re.fullmatch(TOPIC, to)):
        found["publish_to"] = f"is {to!r:.300}. It must be {_TOPIC_NAME.allowed}"
    if (controls.rate_per_second is None) != (controls.burst is None):
        found.setdefault("rate_per_second", "and burst go together. Set both or neither")
    first, longest = controls.backoff_initial_seconds, controls.backoff_max_seconds
    if found.keys().isdisjoint(POLICY) and first is not None and longest is not None and first > longest:
        found["backoff_initial_seconds"] = f"is {first!r}. It must not exceed backoff_max_seconds, which is {longest!r}"
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

"""The topic controls: which values the columns of AsynchronousTaskTopics may have. Any program may write others."""

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from outbox.program.values import TOPIC
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


BOUNDS = {
    "RatePerSecond": Bounds(float, MIN_RATE, sys.float_info.max),
    "Burst": Bounds(int, 1, 1_000_000_000),
    "MaxInFlight": Bounds(int, 1, 1_000_000_000),
    "MaxAttempts": Bounds(int, 1, 1_000_000),
    "BackoffInitialSeconds": Bounds(float, 0.05, 3600),
    "BackoffMaxSeconds": Bounds(float, 0.05, 7 * 86_400),
    "DeadAfterSeconds": Bounds(float, 0, 365 * 86_400),
}


def problems(row: Mapping[str, Any]) -> dict[str, str]:
    """Return why values of a row are not allowed, by column. A value of None is allowed."""
    found = {
        column: f"is {row[column]!r}. It must be {bounds}"
        for column, bounds in BOUNDS.items()
        if row.get(column) is not None and not bounds.contain(row[column])
    }
    if (to := row.get("PublishTo")) is not None and not (isinstance(to, str) and re.fullmatch(TOPIC, to)):
        found["PublishTo"] = f"is {to!r:.300}. It must be a topic ID or projects/PROJECT/topics/ID"
    if found:
        return found
    if (row.get("RatePerSecond") is None) != (row.get("Burst") is None):
        found["RatePerSecond"] = "and Burst go together. Set both or neither"
    first, longest = row.get("BackoffInitialSeconds"), row.get("BackoffMaxSeconds")
    if first is not None and longest is not None and first > longest:
        found["BackoffInitialSeconds"] = f"is {first!r}. It must not exceed BackoffMaxSeconds, which is {longest!r}"
    return found

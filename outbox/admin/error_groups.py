"""Groups of tasks with the same topic, state and error. Errors that differ only in IDs and numbers are the same.

The reason at the beginning of LastError has no number, so errors of different reasons are never the same.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

#: UUIDs, and words with a digit: numbers, IDs, times and addresses. Python and Spanner read it alike.
_IDS = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|\w*[0-9]\w*"
_CHARACTERS = 200


def sql(column: str) -> tuple[str, str]:
    """Return the SQL of what groups the errors in a column, and of an error as an example of its group."""
    line = f"SPLIT({column}, '\\n')[SAFE_OFFSET(0)]"
    return f"SUBSTR(REGEXP_REPLACE({line}, r'{_IDS}', '#'), 1, {_CHARACTERS})", f"SUBSTR({line}, 1, {_CHARACTERS})"


def pattern(error: str | None) -> str:
    """Return what groups an error, as in SQL: the beginning of its first line, without IDs and numbers."""
    return re.sub(_IDS, "#", (error or "").split("\n")[0], flags=re.ASCII)[:_CHARACTERS]


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorCount:
    """A number of unsent tasks with the same topic, state and error. If `at_least`, there may be more.

    `error` is the LastError of one of them, and `part` is a part that all of them have.
    """

    topic: str
    state: str
    error: str | None
    tasks: int
    at_least: bool
    #: When the first and the last of these tasks were registered. The table has no times of failures.
    first: datetime | None = None
    last: datetime | None = None

    @property
    def part(self) -> str:
        """Return the longest part of the error without IDs and numbers."""
        return max(pattern(self.error).split("#"), key=len).strip()


def count(
    errors: Iterable[tuple[str, str, str | None, datetime | None]], *, at_least: bool = False
) -> list[ErrorCount]:
    """Return the groups of (topic, state, LastError, CreatedAt), largest first."""
    groups: dict[tuple[str, str, str], list[tuple[str | None, datetime | None]]] = defaultdict(list)
    for topic, state, error, time in errors:
        groups[topic, state, pattern(error)].append((error, time))
    counts = []
    for (topic, state, _), found in groups.items():
        times = sorted(time for _, time in found if time)
        first, last = (times[0], times[-1]) if times else (None, None)
        counts.append(ErrorCount(topic, state, found[0][0], len(found), at_least, first, last))
    return sorted(counts, key=lambda each: -each.tasks)

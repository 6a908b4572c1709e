"""Values that callers pass, as the exact types that the code relies on; and as users read them. No client is needed."""

import contextlib
import inspect
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

#: A project ID, in lower case, also with a domain (example.com:shop), or a number. Emulators accept any of these.
PROJECT = r"[a-z0-9][a-z0-9.:_-]{0,99}"
INSTANCE = r"[a-z][a-z0-9-]{1,63}"
DATABASE = r"[a-z][a-z0-9_-]{1,29}"
#: A topic or subscription ID: https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names
TOPIC_ID = r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}"
#: A topic: its ID, or its full name.
TOPIC = rf"(?:projects/{PROJECT}/topics/)?{TOPIC_ID}"

#: Max characters of a task ID, as in the column Id.
MAX_ID_CHARACTERS = 64

#: Max characters and levels of a JSON text that is read from a column that any program may write.
MAX_JSON, MAX_LEVELS = 80_000, 10

T = TypeVar("T")


def plain(text: str) -> str:
    """Return `text` without its subclass. A member of `class T(str, Enum)` has the format and the hash of its name."""
    return text if type(text) is str else str.__str__(text)


def class_name(value: object) -> str:
    """Return the name of the value's class with its module, because several packages have classes of one name."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def json_column(text: str) -> Any:
    """Return the value of a JSON text that any program may have written. Raises ValueError if it is not within bounds.

    It has at most MAX_JSON characters and MAX_LEVELS, and no number or text that Spanner would refuse.
    """
    with contextlib.suppress(RecursionError):
        if len(text) <= MAX_JSON and _has_levels(value := json.loads(text), MAX_LEVELS):
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return value
    raise ValueError(f"more than {MAX_JSON:,} characters or {MAX_LEVELS} levels of JSON")


def _has_levels(value: Any, most: int) -> bool:
    """Tell whether a value has at most so many levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most > 0 and all(_has_levels(each, most - 1) for each in inner if isinstance(each, dict | list))


def json_object(text: str | None) -> dict[str, Any]:
    """Return a JSON object that any program may have written, or an empty one if the text holds none."""
    try:
        found = json_column(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class _Pairs(tuple[tuple[str, Any], ...]):
    """The names and values of a JSON object, as written."""

    __slots__ = ()


def json_value(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, RecursionError.

    A name that an object has twice is refused with its path, because Python would silently take the last value.
    """
    return _unique(json.loads(text, object_pairs_hook=_Pairs), "")


def _unique(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_unique(each, path) for each in value]
    if not isinstance(value, _Pairs):
        return value
    found: dict[str, Any] = {}
    for name, each in value:
        if name in found:
            raise ValueError(f"{path}{name:.100} is there twice")
        found[name] = _unique(each, f"{path}{name:.100}.")
    return found


def in_utc(time: datetime) -> datetime:
    """Return an aware time in UTC. Raises OverflowError outside of the years 1 to 9999.

    Python compares and subtracts times of one zone by the clock on the wall, which shows an hour twice in autumn.
    """
    return time.astimezone(UTC)


def chunked(
    values: Iterable[T], size: int, max_bytes: float = math.inf, bytes_of: Callable[[T], int] = lambda _: 0
) -> Iterator[list[T]]:
    """Yield `values` in lists of at most `size` values and `max_bytes` bytes. A larger value is alone in a list."""
    chunk: list[T] = []
    total = 0
    for value in values:
        added = bytes_of(value)
        if chunk and total + added > max_bytes:
            yield chunk
            chunk, total = [], 0
        chunk.append(value)
        total += added
        if len(chunk) >= size:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def counted(number: int, noun: str) -> str:
    """Return text such as `1 task` or `1,500 tasks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return text such as `a, b, c, d, e, ...` with the first names."""
    texts = [*names]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


def check_finished(result: object, function: str, *others: type) -> None:
    """Raise TypeError if a function of the caller has returned work that is not done, such as a coroutine or a future.

    Also if a list, tuple, set or dict holds such work. `others` are further types that count as unfinished work.
    """
    if result is None:
        return  # the usual case, quickly
    looked_at: dict[int, object] = {}  # a list can hold itself
    to_look_at = [result]
    while to_look_at:
        one = to_look_at.pop()
        if id(one) in looked_at:
            continue
        looked_at[id(one)] = one
        if _unfinished(one, others):
            raise TypeError(
                f"{function} returned a {type(one).__name__}, so its work may not be done. It must be a plain function "
                "that returns when its work is done: no `async def`, no `yield`, and it waits for futures and threads "
                "and reads all rows of a result"
            )
        if isinstance(one, dict):
            to_look_at.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            to_look_at.extend(one)


def _unfinished(result: Any, others: tuple[type, ...]) -> bool:
    # A MagicMock counts as finished: its iterator is another object, and its type has none of the names.
    return (
        isinstance(result, (Awaitable, partial, *others))
        or inspect.isroutine(result)
        or _is_iterator(result)
        or _is_iterator(getattr(result, "__dict__", {}).get("gen"))  # a context manager that was not entered
        or any(all(hasattr(type(result), name) for name in names) for names in _UNFINISHED_METHODS)
    )


#: Methods of futures, threads and processes, results of pools, and child processes.
_UNFINISHED_METHODS = (("add_done_callback",), ("is_alive",), ("ready", "wait"), ("poll", "wait"))


def _is_iterator(result: Any) -> bool:
    return (isinstance(result, Iterator) and iter(result) is result) or (
        isinstance(result, AsyncIterator) and aiter(result) is result
    )


def topic_name(topic: str, project: str) -> str:
    """Return the full name of a topic. A bare ID is a topic of `project`."""
    return topic if topic.startswith("projects/") else f"projects/{project}/topics/{topic}"


def shown(time: datetime) -> str:
    """Return a time as RFC 3339, in UTC with Z: what `--since` and `--until` take back."""
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def spoken(seconds: float) -> str:
    """Return a duration for people, in its two largest units: `2d 3h`, `15m 4s`, `0.4s`."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{value}{unit}" for value, unit in ((days, "d"), (hours, "h"), (minutes, "m"), (left, "s"))]
    first = next((index for index, part in enumerate(parts) if not part.startswith("0")), len(parts) - 1)
    return " ".join(part for part in parts[first : first + 2] if not part.startswith("0"))

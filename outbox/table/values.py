"""Values that callers pass, as the exact types that the rest of the code relies on. Standard library only."""

from collections.abc import AsyncIterator, Awaitable, Iterator
from datetime import UTC, datetime


def plain(text: str) -> str:
    """Return `text` without its subclass. A member of `class T(str, Enum)` has the format and the hash of its name."""
    return str.__str__(text)


def in_utc(time: datetime) -> datetime:
    """Return an aware time in UTC. Raises OverflowError outside of the years 1 to 9999.

    Python compares and subtracts times of one zone by the clock on the wall, which shows an hour twice in autumn.
    """
    return time.astimezone(UTC)


def check_finished(result: object, function: str, *others: type) -> None:
    """Raise TypeError if a function of the caller has returned work that has not been done, and may never be.

    `others` are types of results that stand for such work.
    """
    # A MagicMock has all methods of an iterator, but it is not its own iterator.
    if (
        isinstance(result, (Awaitable, *others))
        or hasattr(type(result), "add_done_callback")
        or (isinstance(result, Iterator) and iter(result) is result)
        or (isinstance(result, AsyncIterator) and aiter(result) is result)
    ):
        raise TypeError(
            f"{function} returned a {type(result).__name__}, so its work may not be done. It must be a plain function "
            "that returns when its work is done: no `async def`, no `yield`, and it waits for futures and reads all "
            "rows of a result"
        )

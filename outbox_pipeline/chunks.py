"""Divides rows into chunks with a max number of rows and bytes."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def chunks(rows: Iterable[T], max_rows: int, max_bytes: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of at most `max_rows` rows. A list ends with the row that reaches `max_bytes`, measured by `size`."""
    chunk: list[T] = []
    total = 0
    for row in rows:
        chunk.append(row)
        total += size(row)
        if len(chunk) >= max_rows or total >= max_bytes:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk

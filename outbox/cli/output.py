"""What commands print: tables for people, JSON for programs. No control code of a row reaches a terminal."""

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from outbox.shared.logs import as_line
from outbox.shared.times import shown

#: Names in a sentence.
NAMES = 10


def escaped(text: str) -> str:
    """Return `text` with all that is not printable written as Python writes it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def cell(value: object) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return shown(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escaped(str(value))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return aligned columns, numbers to the right."""
    values = [list(row) for row in rows]
    cells = [list(heads), *([cell(value) for value in row] for row in values)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [bool(values) and all(_is_number(row[place]) for row in values) for place in range(len(heads))]
    lines = (
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        )
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _is_number(value: object) -> bool:
    # Counts that stopped early are texts that begin with >=.
    return isinstance(value, int | float) or value is None or (isinstance(value, str) and value.startswith(">="))


def as_json(value: object) -> str:
    """Return one line of JSON, times as RFC 3339; what is not printable is escaped, as JSON escapes it."""
    return as_line(value, _plain)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return shown(value)
    raise TypeError(f"{type(value).__name__} has no JSON")


def named(names: Iterable[str]) -> str:
    """Return at most ten names for a sentence, and three dots for more."""
    every = [escaped(name) for name in names]
    return ", ".join([*every[:NAMES], *(["..."] if len(every) > NAMES else [])])


def note(text: str) -> None:
    """Say something on stderr that is no answer."""
    print(f"outbox: {text}", file=sys.stderr)

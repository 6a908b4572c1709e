"""Values of rows and results as text, for people and for programs."""

from datetime import datetime
from typing import Any

from outbox.program.logs import as_line
from outbox.program.terminal import Escaped, escaped
from outbox.program.times import shown


def cell(value: object) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return shown(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escaped(str(value))


def as_json(value: object) -> Escaped:
    """Return one line of JSON, with times in RFC 3339. Unprintable characters are escaped."""
    return Escaped(as_line(value, _plain))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return shown(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")

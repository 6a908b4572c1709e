"""IDs of rows, and members of JSON objects, in plain Python. Applications, which need the IDs, need no Spark."""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid5

from outbox.base.values import plain
from outbox.message import TASK_ID_ATTRIBUTE

#: The namespace of all derived IDs.
NAMESPACE = UUID("3b0c7e0e-9b50-5d3c-8f43-6d6e2a6d1c55")
EPOCH, MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


def task_id(topic: str, *key: str) -> str:
    """Return the ID that `register` gives a row with this topic and these values of its key columns."""
    return derived(map(plain, (topic, *key)))


def derived(parts: Iterable[str | None]) -> str:
    """Return the ID of a list of texts. None differs from every text."""
    name = "".join("-" if part is None else f"{len(part.encode())}:{part}" for part in parts)
    return str(uuid5(NAMESPACE, name))


def whole_row_id(row: Mapping[str, Any]) -> str:
    """Return the ID of a row without a key. It depends on the values only. `row` has the columns of a task.

    Columns without a value are left out, so no new column changes the ID of a row that does not have it.
    """
    given = {name: row[name] for name in sorted(row) if row[name] is not None}
    return derived(part for name, value in given.items() for part in (name, _canonical(value)))


def _canonical(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return str((value - EPOCH) // MICROSECOND)
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else text(value)


def text(value: object) -> str | None:
    """Return a value as Spark casts it to a text. A decimal keeps the digits of its column."""
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else f"{value:f}" if isinstance(value, Decimal) else str(value)


#: What to do with a text in another encoding.
CONVERT = "Convert the file to UTF-8, for example with iconv -f WINDOWS-1252 -t UTF-8, and register it again"
_PUNCTUATION = re.compile(r"[ \t\r\n]*([{}:,])[ \t\r\n]*")


def members_of_line(line: bytes) -> dict[str, str | None]:
    """Return `members_of` the bytes of a line. Raises ValueError with a sentence about the line."""
    # Invalid bytes become surrogates, so that the error can name the member that contains them.
    text = line.decode("utf-8", "surrogateescape")
    try:
        return members_of(text)
    except json.JSONDecodeError as error:
        if not is_text(text):
            raise ValueError(f"the line is not valid UTF-8. {CONVERT}") from None
        raise ValueError(f"the line is not a JSON object: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("the line is not a JSON object that can be parsed: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the line {error}") from None


def members_of(text: str) -> dict[str, str | None]:
    """Return the members of a JSON object. A value that is neither a text nor null is returned as it is written.

    Raises ValueError if the text is not exactly one object, has a duplicate name, or contains a lone surrogate.
    """
    found: dict[str, str | None] = {}
    sign, place = _punctuation(text, 0, "{")
    if text[place : place + 1] == "}":
        sign, place = _punctuation(text, place, "}")
    while sign != "}":
        name, place = _member(text, place, "a name")
        if name is None or text[place - 1] != '"':
            raise json.JSONDecodeError("Expecting a name in double quotes", text, place)
        if name in found:
            raise ValueError(f"has the name {name[:100]} twice")
        _, place = _punctuation(text, place, ":")
        found[name], place = _member(text, place, name)
        sign, place = _punctuation(text, place, ",}")
    if place != len(text):
        raise json.JSONDecodeError("Expecting nothing after the object", text, place)
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"is not a JSON object: {name} is not a value of JSON")


#: Numbers are not converted, because Python refuses to convert very long ones.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_constant)


def _member(text: str, begin: int, name: str) -> tuple[str | None, int]:
    """Return the value that begins at a place, and its end."""
    value, end = _DECODER.raw_decode(text, begin)
    written = text[begin:end]
    if not is_text(written):
        raise ValueError(f"is not valid UTF-8 in {name[:100]}. {CONVERT}")
    if value is None or written[0] != '"':
        return None if value is None else written, end
    if not is_text(value):
        raise ValueError(f"has half a surrogate pair in {name[:100]}")
    return value, end


def is_text(value: str) -> bool:
    """Tell whether a text is valid Unicode, without the surrogates of invalid bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _punctuation(text: str, place: int, allowed: str) -> tuple[str, int]:
    found = _PUNCTUATION.match(text, place)
    if found is None or found[1] not in allowed:
        raise json.JSONDecodeError(f"Expecting {' or '.join(allowed)}", text, place)
    return found[1], found.end()


#: Attributes that were not registered, because the relay, Pub/Sub or a subscription adds them: the task ID; the
#: ordering key, which subscriptions write into the attributes; Google's own and tracing attributes; the attributes of a
#: dead-letter topic, see https://cloud.google.com/pubsub/docs/handling-failures#track-delivery-attempts
ADDED = (TASK_ID_ATTRIBUTE, "ordering_key")
ADDED_PREFIXES = ("goog", "CloudPubSubDeadLetter")

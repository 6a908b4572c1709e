"""Parses JSON objects without changing a value: numbers and nested values keep the bytes of the input.

Spark would parse and serialize them again (`1.10` becomes `1.1`), replace invalid UTF-8 and half a surrogate pair, and
accept more than JSON.
"""

import json
import re

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
        if "\0" in text or not _is_text(text):  # UTF-16 has null characters
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
        name, place = _value(text, place, "a name")
        if name is None or text[place - 1] != '"':
            raise json.JSONDecodeError("Expecting a name in double quotes", text, place)
        if name in found:
            raise ValueError(f"has the name {name[:100]} twice")
        _, place = _punctuation(text, place, ":")
        found[name], place = _value(text, place, name)
        sign, place = _punctuation(text, place, ",}")
    if place != len(text):
        raise json.JSONDecodeError("Expecting nothing after the object", text, place)
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"is not a JSON object: {name} is not a value of JSON")


#: Numbers are not converted, because Python refuses to convert very long ones.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_constant)


def _value(text: str, begin: int, name: str) -> tuple[str | None, int]:
    """Return the value that begins at a place, and its end."""
    value, end = _DECODER.raw_decode(text, begin)
    written = text[begin:end]
    if not _is_text(written):
        raise ValueError(f"is not valid UTF-8 in {name[:100]}. {CONVERT}")
    if value is None or written[0] != '"':
        return None if value is None else written, end
    if not _is_text(value):
        raise ValueError(f"has half a surrogate pair in {name[:100]}")
    return value, end


def _is_text(value: str) -> bool:
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

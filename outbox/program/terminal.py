"""What the commands of all packages write on stdout and stderr: whatever a row contains, it cannot control a terminal.

`say`, `complain` and `write` are the only functions that write for people and programs. Standard library only.
"""

import codecs
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from outbox.base.times import shown
from outbox.errors import NotReached, OutboxError

_DISCARD = Path(os.devnull)
#: Exit codes.
FAILED, INTERRUPTED = 1, 130


class Escaped(str):
    """Text that contains no unescaped value, so `say` writes it as it is: JSON, and tables with colors."""

    __slots__ = ()


def escaped(text: str) -> str:
    """Return `text` with every unprintable character, also a line break, as a Python escape."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def json_escaped(text: str) -> str:
    """Return `text` with every unprintable character escaped as in JSON."""
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def as_json(value: object) -> Escaped:
    """Return one line of JSON. Times are in RFC 3339, dataclasses are objects, unprintable characters are escaped."""
    return Escaped(json_escaped(json.dumps(value, ensure_ascii=False, default=_plain)))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return shown(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def cell(value: object) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return shown(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return escaped(str(value))


def joined(*lines: str) -> Escaped:
    """Return `lines` as one text. A line that is not Escaped becomes exactly one line."""
    return Escaped("\n".join(line if isinstance(line, Escaped) else escaped(line) for line in lines))


def sentences(text: str) -> Escaped:
    """Return a message of several lines. All but the first are indented, so none of them looks like another message."""
    first, *others = text.split("\n")
    return joined(first, *(line if line.startswith("  ") else f"  {line}" for line in others))


def say(*lines: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Write `lines`, each as one line, on stdout or on `stream`. Raises what `write` raises."""
    write(f"{joined(*lines)}{end}", stream or sys.stdout)


def write(output: str | bytes, stream: TextIO) -> None:
    """Write text, or bytes, at once. Raises NotReached or BrokenPipeError if stdout does not take it."""
    try:
        if isinstance(output, bytes):
            stream.buffer.write(output)
        else:
            stream.write(output)
        stream.flush()
    except OSError as error:
        # Python writes the rest of the buffer at exit. It would fail again, and end with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is not sys.stdout:
            return  # a message, and there is no other place for it
        if isinstance(error, BrokenPipeError):
            raise
        raise NotReached(f"cannot write the output: {error.strerror}") from None


def complain(program: str, text: str) -> None:
    """Write a message of a program on stderr."""
    say(sentences(f"{program}: {text}"), stream=sys.stderr)


def ended(program: str, command: Callable[[], int]) -> int:
    """Run a command of a program, and return its exit code. An expected error is one sentence on stderr."""
    try:
        return command()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutboxError as error:
        complain(program, str(error))
        return error.exit_code


def prepare_streams() -> None:
    """Let stdout and stderr escape what their encoding lacks, as JSON does.

    A closed stdin is empty, and a closed stderr discards. Each `write` to a closed stdout fails.
    """
    sys.stdin = sys.stdin or _DISCARD.open()
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    sys.stderr = sys.stderr or _DISCARD.open("w")
    codecs.register_error("json_escape", _replacement)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="json_escape")


def _replacement(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end

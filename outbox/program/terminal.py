"""What commands write: tables for people, JSON for programs. Whatever a row contains, it cannot control a terminal.

`say`, `complain` and `write` are the only functions that write for people and programs. Standard library only.
"""

import codecs
import dataclasses
import io
import json
import logging
import math
import os
import re
import select
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from outbox.base.values import listed, shown
from outbox.errors import NotReached, OutboxError, SettingError

_DISCARD = Path(os.devnull)
#: Exit codes.
FAILED, INTERRUPTED = 1, 130
#: Max names, rows or findings of one kind that a message shows, and max characters of a text in a table.
SHOWN, CHARACTERS = 10, 80
#: Commands ask for confirmation above this number of tasks.
CONFIRM_ABOVE = 1_000
_BARS, _PLAIN_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", "_.:-=+*#"
_BOLD, _RED, _YELLOW, _NORMAL = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"


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
        stream.flush()
        if isinstance(stream, io.TextIOWrapper):
            data = output if isinstance(output, bytes) else output.encode(stream.encoding, stream.errors or "strict")
            _write_all(data, getattr(stream.buffer, "raw", stream.buffer))
        else:
            stream.write(str(output))  # into the memory of a test
    except OSError as error:
        # Python writes the rest of the buffer at exit. It would fail again, and end with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if stream is not sys.stdout:
            return  # a message, and there is no other place for it
        if isinstance(error, BrokenPipeError):
            raise
        raise NotReached(f"cannot write the output: {error.strerror}") from None


def _write_all(data: bytes, raw: Any) -> None:
    """Write to a file without a buffer. A pipe that does not block may take only a part, without an error."""
    rest = memoryview(data)
    while rest := rest[raw.write(rest) or 0 :]:
        select.select([], [raw], [])


#: Returns the log line for a message: of a program, its level and its text. None if messages are sentences.
as_log_line: Callable[[str, int, str], str] | None = None


def complain(program: str, text: str, level: int = logging.ERROR) -> None:
    """Write a message of a program on stderr."""
    line = as_log_line(program, level, text) if as_log_line else sentences(f"{program}: {text}")
    say(Escaped(line), stream=sys.stderr)


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


def _has_colors() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shortened(text: str | None) -> str | None:
    """Return the first CHARACTERS of a text. `--json` and `outbox show` print all."""
    return text if text is None or len(text) <= CHARACTERS else text[: CHARACTERS - 3] + "..."


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Escaped:
    """Return aligned columns. Numbers are aligned right, and dead and retrying tasks stand out.

    On a terminal that is narrower than the table, each row is a card instead: one line for each of its values.
    """
    values = [list(row) for row in rows]
    text = _aligned(heads, values)
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    is_wide = any(_width(re.sub(r"\x1b\[\d+m", "", line)) > limit for line in text.splitlines())
    return Escaped(_cards(heads, values) if is_wide and values else text)


def _cards(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    width = max(map(len, heads))
    cards = [[(head, text) for head, value in zip(heads, row, strict=True) if (text := cell(value))] for row in rows]
    return "\n\n".join(
        "\n".join(f"{_painted(head, head.ljust(width))}  {_painted(head, text)}" for head, text in card)
        for card in cards
    )


def _aligned(heads: Sequence[str], values: Sequence[Sequence[object]]) -> str:
    columns = []
    for column, head in enumerate(heads):
        texts = [head, *(cell(row[column]) for row in values)]
        right = bool(values) and all(_is_number(row[column]) for row in values)
        width = max(map(_width, texts))
        if column == len(heads) - 1 and not right:
            width = 0  # so that no line ends with spaces, also if its last cell is colored
        gaps = [" " * (width - _width(text)) for text in texts]
        cells = [gap + text if right else text + gap for text, gap in zip(texts, gaps, strict=True)]
        columns.append([_painted(head, text) for text in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    shown = [each for each in text if unicodedata.category(each) not in {"Mn", "Me"}]
    return sum(2 if unicodedata.east_asian_width(each) in {"W", "F"} else 1 for each in shown)


def _painted(head: str, text: str) -> str:
    word = text.strip()
    if word == head:
        color = _BOLD
    elif head == "DEAD":
        color = "" if word == "0" else _RED
    else:
        color = {"dead": _RED, "retrying": _YELLOW}.get(word, "") if head == "STATE" else ""
    return f"{color}{text}{_NORMAL}" if color and _has_colors() else text


def _is_number(value: object) -> bool:
    # A count that stopped early is a string that begins with >=.
    return isinstance(value, int | float) or value is None or (isinstance(value, str) and value.startswith(">="))


def bars(values: Sequence[float | None]) -> str:
    """Return a bar for each value, the largest one full, and a space for a gap."""
    top = max(filter(None, values), default=1)
    ramp = _BARS if (sys.stdout.encoding or "").lower().startswith("utf") else _PLAIN_BARS
    return "".join(" " if each is None else ramp[math.ceil(each / top * (len(ramp) - 1))] for each in values)


def by_field(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of columns under the names that JSON has: `ordering_key` for OrderingKey."""
    return {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): _finite(value) for name, value in columns.items()}


def _finite(value: Any) -> Any:
    """Return a value, or as a text if it is a number that JSON does not have: nan, inf or -inf."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def named(names: Iterable[str]) -> str:
    """Return at most SHOWN names for a message, and three dots for the others."""
    return listed(map(escaped, names), SHOWN)


def note(text: str) -> None:
    """Print a message on stderr."""
    complain("outbox", text, logging.INFO)


def confirm(question: str, *, yes: bool) -> None:
    """Return if `yes`, or if the user confirms at the terminal. Raises SettingError, OutboxError."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingError(f"{question} This is not a terminal, so pass --yes to confirm. Nothing was changed")
    say(f"{question} [y/N] ", stream=sys.stderr, end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise OutboxError("not confirmed. Nothing was changed")

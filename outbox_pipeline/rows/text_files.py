"""The reader of text files: JSON lines and CSV by RFC 4180. It yields a record or a reason to reject for each line.

Lines are bytes until here, so nothing is replaced, and each value is the text that the file has. A value depends on its
own line only, so no line changes the task ID of another one.
"""

import csv
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from urllib.parse import unquote

import pyarrow as pa

from outbox.errors import SettingError
from outbox_pipeline.file_names import columns_of_folders
from outbox_pipeline.rows.texts import CONVERT, is_text, members_of_line

#: What other programs write to CSV for NULL.
_NULL = re.compile(r"NULL|null|\\N|\(null\)|<NA>|NaN|nan|None|NA|N/A|#N/A|#NA|nil")
_NULL_DATA = ("NULL", r"\N")
#: A value of a line whose quotes are known to be right, and whether it is in quotes.
_VALUE = re.compile(r'("(?:[^"]++|"")*+")?[^,]*+(,|\Z)')
#: The characters that are none of \\S, by which the driver finds the header.
_BLANK = " \t\n\x0b\f\r"
#: Max characters of a value. Without it, quotes that are not closed could fill the memory. A message has 10 MB.
_MOST = 16_000_000
#: Precedes a line in which invalid UTF-8 was replaced, so that the line cannot be registered by accident.
REPLACED = "(invalid UTF-8 was replaced) "

#: Characters that no text file has: UTF-16, a file that a crash cut off and filled up, and the end of a file in DOS.
_BINARY = re.compile(r"[\0\x1a]")

#: A line, its values, why it is rejected, and the columns with a text that may mean NULL.
_Found = tuple[str, Mapping[str, str | None], str | None, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Record:
    """The values of a line, and of the names of its folders. `nulls` are the columns with a text that may mean NULL."""

    values: Mapping[str, str | None]
    file: str
    line: str
    why: str | None = None
    nulls: Sequence[str] = ()


@dataclass(frozen=True)
class TextFiles:
    """How to read lines. `heads` has the columns of each CSV file, or is None for JSON lines.

    `folders` are the columns from the names of folders. `known` are the members that a JSON line may have, None is any.
    """

    heads: Mapping[str, Sequence[str]] | None = None
    folders: Sequence[str] = ()
    known: frozenset[str] | None = field(default=None)

    def records(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Record]:
        """Yield the records of lines: the bytes, the file, and the place where the part of the file begins.

        The lines of a part are together and in order.
        """
        rows = (zip(*(column.to_pylist() for column in batch.columns), strict=True) for batch in batches)
        for (file, begin), part in itertools.groupby(itertools.chain(*rows), itemgetter(1, 2)):
            values, lines = columns_of_folders(unquote(file)), map(itemgetter(0), part)
            folders = {name: values.get(name) for name in self.folders}
            where = "/".join(f"{name}={value or 'NULL'}" for name, value in folders.items())
            found = self._json(lines) if self.heads is None else _csv(self.heads[file], lines, is_first=begin == 0)
            for text, members, reason, nulls in found:
                twice = [name for name in folders if name in members]
                why = reason or (f"the line has unknown columns: {', '.join(twice)}" if twice else None)
                if binary := _BINARY.search(text):
                    why = (
                        f"the line has the control character {binary[0]!r}. The file is in UTF-16, or its end was "
                        "lost. Convert it to UTF-8, or write it again"
                    )
                if why and where:  # the line does not have their columns
                    why += f" (folder {where})"
                yield Record({} if why else {**members, **folders}, unquote(file), _readable(text), why, nulls)

    def _json(self, lines: Iterable[bytes]) -> Iterator[_Found]:
        for line in (each.removeprefix(b"\xef\xbb\xbf").strip() for each in lines):
            if not line:
                continue
            members, why = dict[str, str | None](), None
            try:
                members = members_of_line(line)
                if self.known is not None and (others := [name for name in members if name not in self.known]):
                    why = f"the line has unknown columns: {', '.join(others)}"
            except ValueError as error:
                why = str(error)
            yield line.decode("utf-8", "surrogateescape"), members, why, ()


def _csv(head: Sequence[str], lines: Iterable[bytes], *, is_first: bool) -> Iterator[_Found]:
    csv.field_size_limit(_MOST)
    taken: list[str] = []

    def texts() -> Iterator[str]:
        for line in lines:
            # Invalid bytes become surrogates, so that the error can name the column that contains them.
            taken.append(line.decode("utf-8", "surrogateescape"))
            yield f"{taken[-1]}\n"

    reader = csv.reader(texts(), strict=True)
    while True:
        fields, why = list[str](), None
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            why = f"the line has bad quotes: {error}"
        text = "\n".join(taken).removesuffix("\r")
        taken.clear()
        if is_first and not text.strip(_BLANK):  # a line before the header
            continue
        is_header, is_first = is_first, False
        if is_header or not (why or fields):  # an empty line
            continue
        if why is None and len(fields) != len(head):
            why = f"the line has {len(fields)} values, but the header has {len(head)} columns"
        if why and '\\"' in text:
            why += ". Double the quotes inside of quotes instead of a backslash. Spark needs the option escape='\"'"
        yield (text, {}, why, ()) if why else _csv_line(head, fields, text)


def _csv_line(head: Sequence[str], fields: Sequence[str], text: str) -> _Found:
    values: dict[str, str | None] = dict(zip(head, fields, strict=True))
    unsure = [name for name, value in values.items() if not value or _NULL.fullmatch(value)]
    nulls = []
    if unsure:
        quoted = dict(zip(head, _quoted(text), strict=True))
        for name in unsure:
            if not values[name]:
                values[name] = "" if quoted[name] else None
            elif not quoted[name] and (name != "data" or values[name] in _NULL_DATA):
                nulls.append(name)
    invalid = [] if is_text(text) else [name for name, value in values.items() if value and not is_text(value)]
    return text, values, f"{invalid[0]} is not valid UTF-8. {CONVERT}" if invalid else None, nulls


def _quoted(text: str) -> Iterator[bool]:
    """Yield for each value whether it is in quotes."""
    place, more = 0, True
    while more and (found := _VALUE.match(text, place)):
        yield found[1] is not None
        place, more = found.end(), found[2] == ","


def _readable(text: str) -> str:
    return text if is_text(text) else REPLACED + text.encode("utf-8", "surrogateescape").decode(errors="replace")


def null_text(name: str) -> str:
    """Return why a row with a text for NULL is rejected."""
    return f"{name} is a text for NULL. Write nothing for NULL, or the text in quotes"


def header(file: str, line: bytes | None) -> list[str]:
    """Return the names of the columns of a CSV file. Raises SettingError with the way to correct the file."""
    line = line or b""
    begin = f"--input {unquote(file)}: the header {line[:80]!r}"
    if b"\0" in line or not is_text(text := line.decode("utf-8-sig", "surrogateescape").removesuffix("\r")):
        raise SettingError(f"{begin} is not valid UTF-8. {CONVERT}")  # UTF-16 has null characters
    if "\r" in text:
        raise SettingError(f"{begin} contains a carriage return. End each line with LF or CR LF, not with CR alone")
    try:
        names = next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        raise SettingError(f"{begin} has bad quotes: {error}") from None
    if len(names) <= 1 and (found := re.search(r"[;\t|]", text)):
        raise SettingError(f"{begin} has no comma, but {found[0]!r}. Separate the values by commas")
    if not all(names):
        raise SettingError(f"{begin} has a column without a name. Is there a comma too many, or an index of pandas?")
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingError(f"{begin} has the column {twice[0]!r} twice. Rename one")
    if not names:
        raise SettingError(f"{begin} is empty. It must have the names of the columns")
    return names

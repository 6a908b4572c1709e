"""Checks, parses and registers users' rows in Spark tasks.

Spark can run a Spark task again, and a row can occur twice. A row whose task exists is not inserted again. If the
existing task is different, the row is rejected.
"""

import contextlib
import itertools
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyarrow.fs import FileSystem
from pyspark import TaskContext
from pyspark.sql import types as t

from outbox import InvalidMessage, OutboxError, Priority, Task
from outbox.base.values import shown
from outbox.errors import SettingError
from outbox.message import parsed
from outbox.program.settings import DatabaseSettings, SettingType
from outbox.registration import COLUMNS as REGISTERED
from outbox.registration import task_row
from outbox_pipeline import job_settings, schemas
from outbox_pipeline.rows.texts import (
    CONVERT,
    EPOCH,
    MICROSECOND,
    derived,
    members_of,
    members_of_line,
    text,
    whole_row_id,
)
from outbox_pipeline.spanner import COMMIT_BYTES, Table, open_table
from outbox_pipeline.spark.spark_tasks import Pace, Rows

#: The columns of rows, described in docs/pipeline/register.md.
COLUMNS = (
    "task_id", "topic", "data", "data_base64", "attributes", "priority", "ordering_key", "available_at", "expires_at",
    "at_most_once", "sequence",
)  # fmt: skip
#: More columns of rejected rows. They are accepted as input, so that corrected rows can be registered.
OF_REJECTS = ("reason", "line")
#: A column of JSON lines, as bytes. And columns for a line that cannot be parsed: the line, and the reason.
LINE, UNPARSED, PARSE_ERROR = "_json", "_line", "_why"

_INTEGERS = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
#: Types of whole numbers in pandas, if a value of the column is missing.
_FLOATS = (t.FloatType, t.DoubleType)
#: Types whose conversion to text does not depend on the session.
_KEY_TYPES: tuple[type[t.DataType], ...] = (t.StringType, *_INTEGERS, t.DecimalType, t.BooleanType, t.DateType)
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]{1,2})?")
#: Date, time and offset. Python would cut off more than six decimals.
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d(?:\.\d{1,6}0*)?)?) ?(Z|[+-]\d\d:?\d\d)", re.ASCII)
_FLAGS = dict.fromkeys(("true", "t", "yes", "y", "1"), True) | dict.fromkeys(("false", "f", "no", "n", "0"), False)
_YEARS = "is outside of the years 1 to 9999 in UTC"
#: Precedes a line in which invalid UTF-8 was replaced, so that the line cannot be registered by accident.
_REPLACED = "(invalid UTF-8 was replaced) "
_NOTHING = dict.fromkeys(schemas.INPUT.fieldNames())

#: Max tasks in one commit. If one ID exists, the whole chunk is tried again.
REGISTER_ROWS = 100
#: Bytes of rejected rows that are written at once.
_FILE_BYTES = 1_000_000
_TAG = "outbox-pipeline-register"

COUNTS = ("registered", "existing", "repeated", "rejected")
ANSWER = schemas.counts(*COUNTS)

_ID, _TOPIC, _DATA, _KEY = 0, 1, 2, 4
#: The columns in which an existing task is compared with a row. They never change after the insert.
_SAME = ("Id", "Topic", "Data", "OrderingKey", "CreatedAt")
_Row = tuple[Any, ...]
_Reject = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class _Format:
    """How to parse a text of a column, which other types the column can have, and what an error calls a valid text.

    `parse` raises ValueError, KeyError, RecursionError, or OverflowError for a time outside of Python's years.
    """

    parse: Callable[[Any], Any]
    types: tuple[type[t.DataType], ...]
    wanted: str


@dataclass(frozen=True)
class _Unusable:
    """A value that Python cannot hold: why, and the value as a text."""

    why: str
    text: str


def _whole_number(value: Any) -> int:
    """Return a whole number, also one that pandas has converted to a float, such as 50.0 or 1e3."""
    if not _NUMBER.fullmatch(written := str(value).strip()):
        raise ValueError(value)
    number = Decimal(written)
    if number != number.to_integral_value() or not -(2**63) <= number < 2**63:
        raise ValueError(value)
    return int(number)


def _time(value: str) -> datetime:
    if not (found := _MOMENT.fullmatch(value)):
        raise ValueError(value)
    return datetime.fromisoformat("{}T{}{}".format(*found.groups())).astimezone(UTC)


_FORMATS = {
    **dict.fromkeys(("task_id", "topic", "ordering_key"), _Format(str, (), "a text")),
    "data": _Format(str.encode, (t.BinaryType,), "a text"),
    "data_base64": _Format(lambda text: b64decode("".join(text.split()), validate=True), (), "base64"),
    "attributes": _Format(members_of, (t.MapType,), "a JSON object of strings"),
    **dict.fromkeys(("priority", "sequence"), _Format(_whole_number, (*_INTEGERS, *_FLOATS), "a whole number")),
    **dict.fromkeys(
        ("available_at", "expires_at"),
        _Format(
            _time, (t.TimestampType,), "a time with its offset and at most 6 decimals, such as 2026-11-21T13:00:00Z"
        ),
    ),
    "at_most_once": _Format(lambda text: _FLAGS[text.strip().lower()], (t.BooleanType,), "true or false"),
}


def check(schema: t.StructType, topic: str, key: Sequence[str]) -> None:
    """Check the columns of rows. Raises SettingError if one is unknown, missing or of a wrong type."""
    names = schema.fieldNames()
    there = ", ".join(names)
    known = {*COLUMNS, *OF_REJECTS, *key}
    if unknown := [name for name in names if name not in known | {LINE, UNPARSED, PARSE_ERROR}]:
        raise SettingError(
            f"Unknown column {unknown[0]!r}. Drop it or add it to the key. Known columns: {', '.join(COLUMNS)}"
        )
    found = known if LINE in names else set(names)  # any line can have any of them
    if not {"data", "data_base64"} & found:
        raise SettingError(f"Column data or data_base64 is missing. The rows have {there}")
    if not topic and "topic" not in found:
        raise SettingError(f"Column topic is missing. Add it or pass a topic. The rows have {there}")
    for name in filter(names.__contains__, COLUMNS):
        _check_type(name, schema[name].dataType)
    for name in key:
        if name not in found:
            raise SettingError(f"Key column {name!r} is missing. The rows have {there}")
        if name in names and not isinstance(type_ := schema[name].dataType, _KEY_TYPES):
            raise SettingError(
                f"Key column {name} is {type_.simpleString()}. Cast it to a string, such as with --select"
            )


def _check_type(name: str, type_: t.DataType) -> None:
    # A map's other values have no text that is independent of the session.
    inside = (type_.keyType, type_.valueType) if isinstance(type_, t.MapType) else ()
    allowed: tuple[type[t.DataType], ...] = (t.StringType, *_FORMATS[name].types)
    if not isinstance(type_, allowed) or not all(isinstance(each, _KEY_TYPES) for each in inside):
        # In Parquet, pandas writes a column of None as integers without a value.
        hint = ". If it has no value, drop the column" if isinstance(type_, (t.IntegerType, t.NullType)) else ""
        raise SettingError(f"Column {name} is {type_.simpleString()}, but must be {_FORMATS[name].wanted}{hint}")


def complete(names: Sequence[str], topic: str, key: Sequence[str], batches: Iterator[pa.RecordBatch]) -> Iterator[Rows]:
    """Yield rows with columns of these `names` as rows of `schemas.INPUT` with their task IDs.

    For a row that cannot be parsed, `reason` is set and `line` is the original row as JSON. Its other columns are None,
    so that an incomplete row cannot be registered by accident.
    """
    for batch in batches:
        columns = zip(*map(_values, batch.columns), strict=True)
        yield [_completed(dict(zip(names, each, strict=True)), topic, key) for each in columns]


def _completed(given: Mapping[str, Any], topic: str, key: Sequence[str]) -> dict[str, Any]:
    given = _of_line(given, key) if LINE in given else given
    try:
        return _parsed(given, topic, key)
    except ValueError as error:
        line = given.get(UNPARSED)
        if line is None:
            line = json_line({name: value for name, value in given.items() if name not in (UNPARSED, PARSE_ERROR)})
        line = line.text if isinstance(line, _Unusable) else line
        is_replaced = any(isinstance(value, _Unusable) and value.why != _YEARS for value in given.values())
        return {**_NOTHING, "reason": str(error), "line": f"{_REPLACED}{line}" if is_replaced else line}


def _of_line(given: Mapping[str, Any], key: Sequence[str]) -> dict[str, Any]:
    """Return the values of a JSON line and of its folders, or UNPARSED and PARSE_ERROR."""
    folders = {name: value for name, value in given.items() if name != LINE}
    try:
        members = members_of_line(given[LINE])
    except ValueError as error:
        reason = str(error)
    else:
        known = {*COLUMNS, *OF_REJECTS, *key} - folders.keys()
        others = ", ".join(name for name in members if name not in known)
        if not others:
            return folders | {name: value for name, value in members.items() if name not in OF_REJECTS}
        reason = f"the line has unknown columns: {others}"
    if folders:  # the line does not have their columns
        where = "/".join(f"{name}={value or 'NULL'}" for name, value in folders.items())
        reason += f" (folder {where})"
    [line] = _values(pa.array([given[LINE]]).view(pa.string()))
    return {UNPARSED: line, PARSE_ERROR: reason}


def _parsed(given: Mapping[str, Any], topic: str, key: Sequence[str]) -> dict[str, Any]:
    """Return a row of `schemas.INPUT`. The ValueError has the reason to reject it."""
    if given.get(PARSE_ERROR) is not None:
        raise ValueError(given[PARSE_ERROR])
    for name, value in given.items():
        if isinstance(value, _Unusable):
            raise ValueError(f"{name} {value.why}")  # noqa: TRY004 - a value, not a type of the caller
    values = {name: _value(name, given.get(name)) for name in COLUMNS}
    as_base64 = values.pop("data_base64")
    if values["data"] is not None and as_base64 is not None:
        raise ValueError("both data and data_base64")
    row = {**_NOTHING, **values, "data": as_base64 if values["data"] is None else values["data"]}
    row["topic"] = (topic or None) if row["topic"] is None else row["topic"]
    # An empty key is no key, as in outbox.register, so rows without a key need not be in one partition.
    row["ordering_key"] = row["ordering_key"] or None
    if row["task_id"] is None and key:
        if missing := [name for name in key if given.get(name) is None]:
            raise ValueError(f"key column {missing[0]} is NULL")
        row["task_id"] = derived([row["topic"], *(text(given[name]) for name in key)])
    elif row["task_id"] is None:
        row["task_id"] = whole_row_id(row)
    return row


def _value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        if len(value) > len(named := {text(each): text(other) for each, other in value}):
            raise ValueError(f"{name} has a name twice")
        return named
    if not isinstance(value, (str, float)):
        return value
    try:
        return _FORMATS[name].parse(value)
    except OverflowError:
        raise ValueError(f"{name} {_YEARS}") from None
    except (ValueError, KeyError, RecursionError):
        raise ValueError(f"{name} {str(value)[:100]} is not {_FORMATS[name].wanted}") from None


def _values(column: pa.Array) -> list[Any]:
    """Return the values of a column. Some can be unusable. Times are in UTC, dates are texts."""
    if pa.types.is_timestamp(column.type):
        return [None if each is None else _from_micros(each) for each in column.cast(pa.int64()).to_pylist()]
    column = column.cast(pa.string()) if pa.types.is_date(column.type) else column
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_decoded(each) for each in column]


def _from_micros(micros: int) -> datetime | _Unusable:
    try:
        return EPOCH + micros * MICROSECOND
    except OverflowError:
        return _Unusable(_YEARS, f"{micros} microseconds since 1970")


def _decoded(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        parts = scalar.values.flatten() if pa.types.is_map(scalar.type) else [pa.array([scalar])]
        texts = [each for part in parts for each in part.cast(pa.binary()).to_pylist()]
        return _Unusable(
            f"is not valid UTF-8. {CONVERT}", " ".join((each or b"").decode(errors="replace") for each in texts)
        )


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a JSON line that users can correct and register."""
    values = {
        "data_base64" if isinstance(value, bytes) else name: (
            {text(key): each for key, each in value} if isinstance(value, list) else value
        )
        for name, value in row.items()
        if value is not None
    }
    return json.dumps(values, default=_json_value, ensure_ascii=False, separators=(",", ":"))


def _json_value(value: Any) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, datetime):
        return shown(value)
    return value.text if isinstance(value, _Unusable) else str(value)


def _folder(text: str) -> str:
    """Return a URL, or the absolute path of a folder of the driver. Raises ValueError if pyarrow does not know it."""
    path = text if ":" in text.partition("/")[0] else str(Path(text).absolute())
    FileSystem.from_uri(path)
    return path


#: The folder of rejected rows, in which each run has a folder.
REJECTS = SettingType(_folder, job_settings.REJECTS.allowed)


def new_run() -> str:
    """Return a unique name for the folder of a run."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"


def register_rows(
    database: DatabaseSettings, began: datetime, rate: float, rejects: str | None, batches: Iterator[Rows]
) -> Iterator[Rows]:
    """Register rows of `schemas.INPUT` in a Spark task, and yield their counts, a row of ANSWER.

    `began` is the start of the job by the database's clock. `rate` is rows per second of this Spark task, 0 is no
    limit. `rejects` is the folder for rejected rows. Without it, raises OutboxError for the first rejected row.
    """
    with _rejecting(rejects) as reject:
        writer = Writer(open_table(database), began, reject, Pace(rate))
        for row in itertools.chain.from_iterable(batches):
            writer.add(row)
        writer.flush()
    yield [writer.counts]


@contextlib.contextmanager
def _rejecting(folder: str | None) -> Iterator[_Reject]:
    """Yield a function that writes a row with its reason to the file of this Spark task.

    The file gets its name when the Spark task ends, so an attempt that is killed does not damage that of another one.
    """
    task: Any = TaskContext.get()
    opened: list[tuple[Any, str, Any]] = []  # the file system, the name at the end and the stream, after the first row

    def reject(row: dict[str, Any]) -> None:
        if folder is None:
            raise OutboxError(
                f"A row is rejected: {row['reason']}. The row is "
                f"{(row['line'] or json_line(row | {'reason': None}))[:1000]}. "
                "Correct it, or pass the option rejects, a folder for rejected rows"
            )
        if not opened:
            system, path = FileSystem.from_uri(folder)
            system.create_dir(path, recursive=True)
            name = f"{path}/part-{task.partitionId():05}.json"
            stream = system.open_output_stream(f"{name}.{task.taskAttemptId()}", buffer_size=_FILE_BYTES)
            opened.append((system, name, stream))
        opened[0][-1].write(f"{json_line(row)}\n".encode())

    try:
        yield reject
    finally:
        for _, _, stream in opened:
            stream.close()
    for system, name, _ in opened:
        system.move(f"{name}.{task.taskAttemptId()}", name)


@dataclass
class Writer:
    """Collects rows, writes them in chunks, and counts the outcomes."""

    table: Table
    began: datetime
    reject: _Reject
    pace: Pace = field(default_factory=Pace)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    _chunk: list[tuple[_Row, Mapping[str, Any]]] = field(default_factory=list)
    _bytes: int = 0
    #: Whether to read before inserting: for the first chunk, and while chunks contain existing tasks.
    _read_first: bool = True
    #: The tasks of the last chunk as the table has them, with the outcome of a row that is equal.
    _known: dict[str, tuple[_Row, str]] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one row of `schemas.INPUT`."""
        try:
            task = _task(row)
        except (InvalidMessage, TypeError) as error:
            self._reject(row, str(error))
            return
        if task[_ID] in self._known:
            self._compare(task, row)
            return
        self._chunk.append((task, row))
        self._bytes += len(task[_DATA])
        if len(self._chunk) >= self.pace.chunk(REGISTER_ROWS) or self._bytes >= COMMIT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows. Raises NotReached, OutboxError."""
        if not self._chunk:
            return
        chunk, self._chunk, self._bytes, self._known = self._chunk, [], 0, {}
        new: dict[str, _Row] = {}
        for task, _ in chunk:
            new.setdefault(task[_ID], task)
        self.pace.wait(len(new))
        while True:
            if self._read_first:
                self._read_first = self._remove_existing(new)
            if not new or self.table.insert(REGISTERED, list(new.values()), _TAG):
                break
            self._read_first = True
        self._known |= {id: (task, "registered") for id, task in new.items()}
        for task, row in chunk:
            self._compare(task, row)

    def _remove_existing(self, new: dict[str, _Row]) -> bool:
        """Remove the tasks that exist. Return whether there were any."""
        found = self.table.read_ids(_SAME, new, _TAG)
        for id, topic, data, key, created in found:
            del new[id]
            # A task that was created since the job began was written by an earlier attempt of this Spark task.
            self._known[id] = (id, topic, data, None, key), "registered" if created >= self.began else "existing"
        return bool(found)

    def _compare(self, task: _Row, row: Mapping[str, Any]) -> None:
        """Count a row, or reject it, by the task that the table has. Only the first equal row is not `repeated`."""
        id = task[_ID]
        known, outcome = self._known[id]
        if _same(task, known):
            self.counts[outcome] += 1
            self._known[id] = known, "repeated"
        elif outcome == "repeated":
            self._reject(row, f"task ID {id!r} occurs twice, with different messages, topics or ordering keys")
        else:
            self._reject(row, f"task {id!r} exists with another message, topic or ordering key")

    def _reject(self, row: Mapping[str, Any], reason: str) -> None:
        self.counts["rejected"] += 1
        self.reject({**row, "reason": reason})


def _task(row: Mapping[str, Any]) -> _Row:
    """Return the row to insert. Raises InvalidMessage or TypeError if `outbox.register` refuses it."""
    if row["reason"] is not None:
        raise InvalidMessage(row["reason"])
    if row["task_id"] is None:
        raise InvalidMessage("task_id is NULL")
    if row["data"] is None:
        raise InvalidMessage("data is NULL. For a message without data, pass an empty string")
    task = Task(
        row["topic"],
        row["data"],
        dict(row["attributes"] or ()),
        priority=Priority.NORMAL if row["priority"] is None else row["priority"],
        ordering_key=row["ordering_key"] or "",
        available_at=row["available_at"],
        expires_at=row["expires_at"],
        at_most_once=bool(row["at_most_once"]),
        task_id=row["task_id"],
    )
    return task_row(task)


def _same(one: _Row, other: _Row) -> bool:
    """Tell whether two rows with the same ID are the same task, even if their messages are serialized differently."""
    if (one[_TOPIC], one[_KEY]) != (other[_TOPIC], other[_KEY]):
        return False
    return one[_DATA] == other[_DATA] or parsed(b64decode(one[_DATA])) == parsed(b64decode(other[_DATA]))

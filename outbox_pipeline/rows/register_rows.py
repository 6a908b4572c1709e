"""Checks, parses and registers users' rows in Spark tasks.

Spark can run a Spark task again, and a row can occur twice. A row whose task exists is not inserted again. If the
existing task is different, the row is rejected.
"""

import itertools
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import types as t

from outbox import InvalidMessage, Priority, Task
from outbox.base.values import chunked, shown
from outbox.errors import SettingError
from outbox.message import parsed
from outbox.program.settings import DatabaseSettings
from outbox.registration import TASK_COLUMNS as REGISTERED
from outbox.registration import task_row
from outbox.table.states import LONG_AGO
from outbox_pipeline import schemas
from outbox_pipeline.rows.text_files import REPLACED, TextFiles, null_text
from outbox_pipeline.rows.texts import (
    CONVERT,
    EPOCH,
    MICROSECOND,
    derived,
    members_of,
    text,
    whole_row_id,
)
from outbox_pipeline.spanner import COMMIT_BYTES, Table, open_table
from outbox_pipeline.spark.spark_tasks import Pace, Rows

#: The columns of rows, described in docs/pipeline/register.md.
INPUT_COLUMNS = (
    "task_id", "topic", "data", "data_base64", "attributes", "priority", "ordering_key", "available_at", "expires_at",
    "at_most_once", "sequence",
)  # fmt: skip
#: The columns that the source has under other names, and those that the outbox sets itself.
_OF_SOURCE = {
    "Id": "task_id", "Topic": "topic", "Payload": "data", "Attributes": "attributes", "Priority": "priority",
    "OrderingKey": "ordering_key", "Sequence": "sequence", "AvailableAt": "available_at", "ExpiresAt": "expires_at",
    "AtMostOnce": "at_most_once",
}  # fmt: skip
#: The serialized message, which has the data and the attributes.
_MESSAGE = "Data"
#: Columns of the source that are bytes. Programs write them to text files as base64, or in their own way.
_BYTES = {"Payload": "binary", _MESSAGE: "a serialized PubsubMessage"}
#: A row has one of these columns.
OF_DATA = frozenset({"data", "data_base64", *_BYTES})
_SET = {*schemas.SOURCE.names} - {*_OF_SOURCE, _MESSAGE}
#: The columns of a task, which make the ID of a row that has none. `data_base64` is another form of `data`.
_OF_TASK = tuple(name for name in INPUT_COLUMNS if name not in ("task_id", "data_base64"))
#: More columns of rejected rows. They are accepted as input, so that corrected rows can be registered.
OF_REJECTS = ("reason", "file", "line")
#: All columns that rows may have, besides those of the key.
KNOWN = frozenset({*INPUT_COLUMNS, *OF_REJECTS, *_OF_SOURCE, *_SET, _MESSAGE})
#: Columns of rows from files, of which no file has one: the file, the line, and why the line is rejected.
FILE, LINE, WHY = HIDDEN = ("(outbox) file", "(outbox) line", "(outbox) reason")

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
_NOTHING = dict.fromkeys(schemas.INPUT.fieldNames())

#: Rows that are parsed at once.
SOME = 1_000
#: Max tasks in one commit. If one ID exists, the whole chunk is tried again.
REGISTER_ROWS = 100
_TAG = "outbox-pipeline-register"

COUNTS = ("registered", "existing", "repeated", "rejected")
#: A row with counts, or with a rejected row.
ANSWER = t.StructType([*schemas.counts(*COUNTS), t.StructField("reject", schemas.REJECT)])
_ZERO = dict.fromkeys(COUNTS, 0)

_ID, _TOPIC, _DATA, _KEY = 0, 1, 2, 4
#: The columns in which an existing task is compared with a row. They never change after the insert.
_SAME = ("Id", "Topic", "Data", "OrderingKey", "CreatedAt")
_Stored = tuple[Any, ...]
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
        ("available_at", "expires_at", "CreatedAt"),
        _Format(
            _time, (t.TimestampType,), "a time with its offset and at most 6 decimals, such as 2026-11-21T13:00:00Z"
        ),
    ),
    "at_most_once": _Format(lambda text: _FLAGS[text.strip().lower()], (t.BooleanType,), "true or false"),
}


def check(schema: t.StructType, topic: str, key: Sequence[str]) -> None:
    """Check the columns of rows. Raises SettingError if one is unknown, missing, there twice or of a wrong type."""
    given = [name for name in schema.fieldNames() if name not in HIDDEN]
    there = ", ".join(given)
    names = [_OF_SOURCE.get(name, name) for name in given]
    if unknown := [name for name in names if name not in KNOWN.union(key)]:
        raise SettingError(
            f"Unknown column {unknown[0]!r}. Drop it or add it to the key. Known columns: {', '.join(INPUT_COLUMNS)}"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingError(f"Column {twice[0]!r} is there twice. The rows have {there}")
    if not OF_DATA & {*given}:
        raise SettingError(f"Column data or data_base64 is missing. The rows have {there}")
    if not topic and "topic" not in names:
        raise SettingError(f"Column topic is missing. Add it or pass a topic. The rows have {there}")
    for name in given:
        _check_type(name, schema[name].dataType)
    for name in key:
        if name not in given:
            raise SettingError(f"Key column {name!r} is missing. The rows have {there}")
        if not isinstance(type_ := schema[name].dataType, _KEY_TYPES):
            raise SettingError(
                f"Key column {name} is {type_.simpleString()}. Cast it to a string, such as with --select"
            )


def _not_bytes(name: str, type_: str) -> str:
    return (
        f"Column {name} is {type_}, but must be {_BYTES[name]}, as the source has it. Name a text data, and base64 "
        "data_base64"
    )


def _check_type(given: str, type_: t.DataType) -> None:
    if given in _BYTES and not isinstance(type_, t.BinaryType):
        raise SettingError(_not_bytes(given, type_.simpleString()))
    if (name := _OF_SOURCE.get(given, given)) not in _FORMATS:
        return
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
        found = []
        for each in zip(*map(_values, batch.columns), strict=True):
            row = dict(zip(names, each, strict=True))
            hidden = [row.pop(name, None) for name in HIDDEN]
            found.append(_completed(row, topic, key, hidden))
        yield found


def complete_lines(
    files: TextFiles, topic: str, key: Sequence[str], batches: Iterator[pa.RecordBatch]
) -> Iterator[Rows]:
    """Yield the lines of text files as `complete` does."""
    used = {*INPUT_COLUMNS, *_OF_SOURCE, *key}
    for some in chunked(files.records(batches), SOME):
        rows = []
        for each in some:
            nulls = [name for name in each.nulls if name in used]
            why = each.why or (null_text(nulls[0]) if nulls else None)
            rows.append(_completed(each.values, topic, key, (each.file, each.line, why)))
        yield rows


def _completed(
    given: Mapping[str, Any], topic: str, key: Sequence[str], hidden: Sequence[str | None]
) -> dict[str, Any]:
    """Return a row of `schemas.INPUT`. `hidden` has the values of HIDDEN."""
    file, line, why = hidden
    try:
        if why is not None:
            raise ValueError(why)  # noqa: TRY301 - one way to reject
        given = _with_data(given)
        return {**_parsed(given, topic, key), "file": file}
    except ValueError as error:
        if line is None:
            is_replaced = any(isinstance(value, _Unusable) and value.why != _YEARS for value in given.values())
            line = f"{REPLACED if is_replaced else ''}{json_line(given)}"
        return {**_NOTHING, "reason": str(error), "line": line, "file": file}


def _with_data(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the data and the attributes of its serialized message, if it has one."""
    for name in _BYTES:
        if isinstance(given.get(name), str):
            raise ValueError(_not_bytes(name, "a text"))  # noqa: TRY004 - a value, not a type of the caller
    if _MESSAGE not in given:
        return given
    if (message := parsed(given[_MESSAGE])) is None:
        raise ValueError(f"{_MESSAGE} is no serialized PubsubMessage")
    others = {name: value for name, value in given.items() if name not in {"Attributes", *_BYTES}}
    return {**others, "data": message.data, "attributes": [*message.attributes.items()]}


def _values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of INPUT_COLUMNS, except `data_base64`, under whichever names they have."""
    for name, value in given.items():
        if isinstance(value, _Unusable):
            raise ValueError(f"{name} {value.why}")  # noqa: TRY004 - a value, not a type of the caller
    values = {name: _value(name, given.get(name)) for name in INPUT_COLUMNS}
    for other, name in [*_OF_SOURCE.items(), ("data_base64", "data")]:
        if given.get(other) is not None:
            if values[name] is not None:
                raise ValueError(f"both {name} and {other}")
            values[name] = values[other] if other in values else _value(name, given[other])
    del values["data_base64"]
    return values


def _parsed(given: Mapping[str, Any], topic: str, key: Sequence[str]) -> dict[str, Any]:
    """Return a row of `schemas.INPUT`. The ValueError has the reason to reject it."""
    row = {**_NOTHING, **_values_of(given), "created_at": _value("CreatedAt", given.get("CreatedAt"))}
    row["topic"] = (topic or None) if row["topic"] is None else row["topic"]
    # An empty key is no key, as in outbox.register, so rows without a key need not be in one partition.
    row["ordering_key"] = row["ordering_key"] or None
    if row["task_id"] is None and key:
        if missing := [name for name in key if given.get(name) is None]:
            raise ValueError(f"key column {missing[0]} is NULL")
        row["task_id"] = derived([row["topic"], *(text(given[name]) for name in key)])
    elif row["task_id"] is None:
        row["task_id"] = whole_row_id({name: row[name] for name in _OF_TASK})
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
        "data_base64" if isinstance(value, bytes) and name != _MESSAGE else name: (
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


def register_rows(database: DatabaseSettings, began: datetime, rate: float, batches: Iterator[Rows]) -> Iterator[Rows]:
    """Register rows of `schemas.INPUT` in a Spark task, and yield rows of ANSWER: each rejected row, and the counts.

    `began` is the start of the job by the database's clock. `rate` is rows per second of this Spark task, 0 is no
    limit.
    """
    rejected = list[dict[str, Any]]()
    writer = Writer(open_table(database), began, rejected.append, Pace(rate))
    for rows in batches:
        for row in rows:
            writer.add(row)
        yield [{**_ZERO, "reject": each} for each in rejected]
        rejected.clear()
    writer.flush()
    yield [*({**_ZERO, "reject": each} for each in rejected), {**writer.counts, "reject": None}]


def register_in_key_order(database: DatabaseSettings, rate: float, batches: Iterator[Rows]) -> Iterator[Rows]:
    """Do the same for a partition of a stream, which Spark cannot sort."""
    yield from register_rows(database, open_table(database).now(), rate, chunked(in_key_order(batches), SOME))


def in_key_order(batches: Iterator[Rows]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows, and last those that their key orders, which are held in memory until then."""
    ordered = []
    for row in itertools.chain.from_iterable(batches):
        if row["ordering_key"] is None or row["sequence"] is row["created_at"] is None:
            yield row
        else:
            ordered.append(row)
    yield from sorted(ordered, key=lambda row: (row["created_at"] or LONG_AGO, row["sequence"] or 0, row["task_id"]))


@dataclass
class Writer:
    """Collects rows, writes them in chunks, and counts the outcomes."""

    table: Table
    began: datetime
    reject: _Reject
    pace: Pace = field(default_factory=Pace)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    _chunk: list[tuple[_Stored, Mapping[str, Any]]] = field(default_factory=list)
    _bytes: int = 0
    #: Whether to read before inserting: for the first chunk, and while chunks contain existing tasks.
    _read_first: bool = True
    #: The tasks of the last chunk as the table has them, with the outcome of a row that is equal.
    _known: dict[str, tuple[_Stored, str]] = field(default_factory=dict)

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
        new: dict[str, _Stored] = {}
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

    def _remove_existing(self, new: dict[str, _Stored]) -> bool:
        """Remove the tasks that exist. Return whether there were any."""
        found = self.table.read_ids(_SAME, new, _TAG)
        for id, topic, data, key, created in found:
            del new[id]
            # A task that was created since the job began was written by an earlier attempt of this Spark task.
            self._known[id] = (id, topic, data, None, key), "registered" if created >= self.began else "existing"
        return bool(found)

    def _compare(self, task: _Stored, row: Mapping[str, Any]) -> None:
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
        data = {} if row["data"] is None else {"data_base64": _json_value(row["data"])}
        times = {name: shown(row[name]) for name in ("available_at", "expires_at") if row[name] is not None}
        self.reject({**dict.fromkeys(schemas.REJECT.names), **row, **data, **times, "reason": reason})


def _task(row: Mapping[str, Any]) -> _Stored:
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


def _same(one: _Stored, other: _Stored) -> bool:
    """Tell whether two rows with the same ID are the same task, even if their messages are serialized differently."""
    if (one[_TOPIC], one[_KEY]) != (other[_TOPIC], other[_KEY]):
        return False
    return one[_DATA] == other[_DATA] or parsed(b64decode(one[_DATA])) == parsed(b64decode(other[_DATA]))

"""Prepares the rows of users for registration: checks columns, parses texts, derives IDs and sorts the rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f
from pyspark.sql import types as t

from outbox.errors import SettingError
from outbox_pipeline import schemas
from outbox_pipeline.jobs.register.ids import as_uuid5, named
from outbox_pipeline.jobs.register.json_objects import CONVERT, parsed
from outbox_pipeline.spark.spark_tasks import placed

#: The columns of rows, described in docs/pipeline/register.md.
COLUMNS = (
    "task_id", "topic", "data", "data_base64", "attributes", "priority", "ordering_key", "available_at", "expires_at",
    "at_most_once", "sequence",
)  # fmt: skip
#: More columns of rejected rows. They are accepted as input, so that corrected rows can be registered.
OF_REJECTS = ("reason", "line")
#: Columns for a line that cannot be parsed: the line, and the reason.
UNPARSED, PARSE_ERROR = "_line", "_why"
#: The prefix of temporary columns, which must not collide with the users' key columns.
_OURS = "_outbox_"

_INTEGERS = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
#: Types of whole numbers in pandas, if a value of the column is missing.
_FLOATS = (t.FloatType, t.DoubleType)
#: Types whose conversion to text does not depend on the session.
_KEY_TYPES = (t.StringType, *_INTEGERS, t.BooleanType, t.DateType)
#: Date, time and offset. Spark would replace a missing date by today and a missing offset by the session's time zone,
#: and cut off more than six decimals.
_MOMENT = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6}0*)?)? ?(?:Z|[+-]\d\d:?\d\d)$"
_WANTED_TIME = "a time with its offset and at most 6 decimals, such as 2026-11-21T13:00:00Z"
#: Precedes a line in which invalid UTF-8 was replaced, so that the line cannot be registered by accident.
_REPLACED = "(invalid UTF-8 was replaced) "
#: The years 1 to 9999 in microseconds since 1970. Spark supports more years, Python and Spanner do not.
_YEARS = (-62_135_596_800_000_000, 253_402_300_799_999_999)
#: The format of times in rejected rows, which this job can parse again.
TIMES = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


@dataclass(frozen=True)
class _Format:
    """How to parse a text of a column, which other types the column can have, and what an error calls a valid text."""

    parse: Callable[[Column], Column]
    types: tuple[type[t.DataType], ...]
    wanted: str


def _time(text: Column) -> Column:
    # Spark parses no time without seconds.
    whole = f.regexp_replace(text, r"^(.{10}[T ]\d\d:\d\d)(?!:)", "$1:00")
    return f.when(text.rlike(_MOMENT), whole.try_cast("timestamp"))


def _whole_number(text: Column) -> Column:
    """Return a whole number, also one that pandas has converted to a float, such as 50.0 or 1e3."""
    float = f.when(text.rlike(r"^[+-]?\d+(?:\.0*|(?:\.\d{1,17})?[eE]\+?\d{1,2})$"), text.try_cast("decimal(38,18)"))
    return f.coalesce(text.try_cast("long"), f.when(float == f.floor(float), float.try_cast("long")))


_FORMATS = {
    "attributes": _Format(
        lambda text: parsed(text.cast("binary"))["members"], (t.MapType,), "a JSON object of strings"
    ),
    **dict.fromkeys(("priority", "sequence"), _Format(_whole_number, (*_INTEGERS, *_FLOATS), "a whole number")),
    **dict.fromkeys(("available_at", "expires_at"), _Format(_time, (t.TimestampType,), _WANTED_TIME)),
    "at_most_once": _Format(lambda text: text.try_cast("boolean"), (t.BooleanType,), "true or false"),
    "data_base64": _Format(lambda text: f.try_to_binary(text, f.lit("base64")), (), "base64"),
    "data": _Format(lambda text: text.cast("binary"), (t.BinaryType,), "a text"),
    **dict.fromkeys(("task_id", "topic", "ordering_key"), _Format(lambda text: text, (), "a text")),
}


def parse_json_lines(lines: DataFrame, key: Sequence[str] = ()) -> DataFrame:
    """Return rows of texts from JSON lines in a column `value`, with its other columns, which come from folders.

    If a line is not a JSON object or has an unknown name, UNPARSED is the line and PARSE_ERROR the reason.
    """
    folders = [name for name in lines.columns if name != "value"]
    names = [name for name in dict.fromkeys((*COLUMNS, *OF_REJECTS, *key)) if name not in folders]
    value = f.col("value")
    found = lines.where(value.rlike(r"\S")).select("*", parsed(value.cast("binary")).alias("found"))
    members, fault = f.col("found.members"), f.col("found.fault")
    others = f.array_except(f.map_keys(members), f.array(*map(f.lit, names)))
    reason = f.when(fault.isNotNull(), f.concat(f.lit("the line "), fault))
    reason = reason.when(
        f.size(others) > 0, f.concat(f.lit("the line has unknown columns: "), f.array_join(others, ", "))
    )
    return found.select(
        *(members[name].alias(name) for name in names if name not in OF_REJECTS),
        *map(_column, folders),
        f.when(reason.isNotNull(), f.col("value")).alias(UNPARSED),
        in_folders(reason, folders).alias(PARSE_ERROR),
    )


def in_folders(reason: Column, folders: Sequence[str]) -> Column:
    """Add the columns of folders to the reason to reject a line, because the line does not have them."""
    if not folders:
        return reason
    each = [f.concat(f.lit(f"{name}="), f.coalesce(_column(name), f.lit("NULL"))) for name in folders]
    return f.concat(reason, f.lit(" (folder "), f.concat_ws("/", *each), f.lit(")"))


def prepared(rows: DataFrame, *, topic: str = "", key: Sequence[str] = ()) -> DataFrame:
    """Return `rows` with the columns of `schemas.INPUT` and their task IDs.

    For a row that cannot be parsed, `reason` is set and `line` is the original row as JSON. Its other columns are NULL,
    so that nobody can register an incomplete row by accident.

    Raises SettingError: a column is unknown, missing or of a wrong type.
    """
    _check(rows, topic, key)
    _check_key(rows, key)
    has = set(rows.columns)
    invalid = {
        field.name: ~f.is_valid_utf8(_text(_column(field.name), field.dataType))
        for field in rows.schema
        if isinstance(field.dataType, (t.StringType, t.MapType))
    }
    values, reasons = {}, [f.col(PARSE_ERROR)] if PARSE_ERROR in has else []
    reasons += [f.when(found, f.lit(f"{name} is not valid UTF-8. {CONVERT}")) for name, found in invalid.items()]
    for name in COLUMNS:
        if name in has:
            values[name], wrong = _value(name, rows.schema[name].dataType)
            reasons += wrong
        else:
            values[name] = f.lit(None)
    reasons.append(
        f.when(values["data"].isNotNull() & values["data_base64"].isNotNull(), f.lit("both data and data_base64"))
    )
    values["topic"] = f.coalesce(values["topic"], f.lit(topic or None))
    # An empty key is no key, as in outbox.register, so rows without a key need not be in one partition.
    values["ordering_key"] = f.nullif(values["ordering_key"], f.lit(""))
    values["data"] = f.coalesce(values["data"], values["data_base64"])
    columns = {field.name: field.dataType for field in schemas.INPUT if field.name not in ("line", "reason")}
    # In steps, so that Spark computes a value once even if several columns use it.
    parsed = rows.withColumns({f"{_OURS}{name}": values[name].cast(type_) for name, type_ in columns.items()})
    name_of_id, no_id = _id(key)
    reasons.append(f.when(values["task_id"].isNull(), no_id))
    whole = _json_line([name for name in rows.columns if name not in (UNPARSED, PARSE_ERROR)], rows)
    line = f.make_valid_utf8(f.coalesce(f.col(UNPARSED), whole) if UNPARSED in has else whole)
    if invalid:
        line = f.when(f.greatest(*invalid.values(), f.lit(False)), f.concat(f.lit(_REPLACED), line)).otherwise(line)
    stepped = parsed.withColumns(
        {
            f"{_OURS}reason": f.make_valid_utf8(f.coalesce(*reasons).cast("string")),
            f"{_OURS}line": line,
            f"{_OURS}name": name_of_id,
        }
    )
    given, reason = {name: f.col(_OURS + name) for name in columns}, f.col(f"{_OURS}reason")
    given["task_id"] = f.coalesce(given["task_id"], as_uuid5(f.col(f"{_OURS}name")))
    return stepped.select(
        *(f.when(reason.isNull(), value).alias(name) for name, value in given.items()),
        f.when(reason.isNotNull(), f.col(f"{_OURS}line")).alias("line"),
        reason.alias("reason"),
    )


def _value(name: str, type_: t.DataType) -> tuple[Column, list[Column]]:
    """Return the value of a column, and the possible reasons to reject it."""
    source, read = _column(name), _FORMATS[name]
    value, reasons = source, []
    if isinstance(type_, (t.StringType, *_FLOATS)):
        source = source.cast("string")
        value = read.parse(source)
        message = f.concat(f.lit(f"{name} "), f.substring(source, 1, 100), f.lit(f" is not {read.wanted}"))
        reasons.append(f.when(source.isNotNull() & value.isNull(), message))
    elif isinstance(type_, t.MapType):
        value = source.cast(schemas.INPUT["attributes"].dataType)
        names = f.map_keys(value)
        reasons.append(f.when(f.size(names) > f.size(f.array_distinct(names)), f.lit(f"{name} has a name twice")))
    if t.TimestampType in read.types:
        is_a_year = f.unix_micros(value).between(*_YEARS)
        reasons.append(f.when(~is_a_year, f.lit(f"{name} is outside of the years 1 to 9999 in UTC")))
    return value, reasons


def _text(column: Column, type_: t.DataType) -> Column:
    """Return a text, or all texts of a map, as one text."""
    return f.concat_ws("", f.map_keys(column), f.map_values(column)) if isinstance(type_, t.MapType) else column


def _json_line(names: Sequence[str], rows: DataFrame) -> Column:
    """Return a row as a JSON line that users can correct and register."""
    each = [
        _column(name).alias("data_base64" if isinstance(rows.schema[name].dataType, t.BinaryType) else name)
        for name in names
    ]
    return f.to_json(f.struct(*each), {"timestampFormat": TIMES})


def _column(name: str) -> Column:
    return f.col(f"`{name.replace('`', '``')}`")


def _id(key: Sequence[str]) -> tuple[Column, Column]:
    """Return the name from which the ID of a row without `task_id` derives, and the reason if there is none."""
    if key:
        parts = [_column(name).cast("string") for name in key]
        missing = [
            f.when(part.isNull(), f.lit(f"key column {name} is NULL")) for name, part in zip(key, parts, strict=True)
        ]
        return named([f.col(f"{_OURS}topic"), *parts]), f.coalesce(*missing)
    # These texts depend on the values only, not on the run or the session's options.
    attributes = f.array_sort(f.map_entries(f"{_OURS}attributes"))
    texts = [
        f.col(f"{_OURS}topic"),
        f.hex(f"{_OURS}data"),
        f.to_json(f.struct(attributes.alias("attributes")), {"ignoreNullFields": "false"}),
        *(f.col(_OURS + name).cast("string") for name in ("priority", "ordering_key", "at_most_once", "sequence")),
        *(f.unix_micros(_OURS + name).cast("string") for name in ("available_at", "expires_at")),
    ]
    return named(texts), f.lit(None)


def in_order(tasks: DataFrame, partitions: int = 0) -> DataFrame:
    """Return tasks in write order. Tasks of one ordering key, or with equal IDs, are in one partition.

    Tasks without an ordering key are sorted by ID, so a commit touches few splits of the table:
    https://cloud.google.com/spanner/docs/bulk-loading. Tasks of an ordering key are sorted by `sequence`, then by ID.
    """
    # Rows with equal IDs are adjacent, whatever their sequences. Otherwise a later row would find its task in the
    # table, where it looks like a task that an earlier attempt of the Spark task wrote.
    first = f.min("sequence").over(Window.partitionBy("_place", "task_id"))
    # The hash makes the order of two different rows with one ID deterministic.
    whole = f.xxhash64("topic", "data", f.to_json(f.struct(f.array_sort(f.map_entries("attributes")))), "priority")
    ordered = placed(tasks, partitions, "ordering_key", "task_id", "line").withColumn("_first", first)
    return ordered.sortWithinPartitions("ordering_key", "_first", "task_id", "sequence", whole).drop("_place", "_first")


def _check(rows: DataFrame, topic: str, key: Sequence[str]) -> None:
    known = {*COLUMNS, *OF_REJECTS, UNPARSED, PARSE_ERROR, *key}
    if unknown := [name for name in rows.columns if name not in known]:
        raise SettingError(
            f"Unknown column {unknown[0]!r}. Drop it or add it to the key. Known columns: {', '.join(COLUMNS)}"
        )
    if not {"data", "data_base64"} & set(rows.columns):
        raise SettingError(f"Column data or data_base64 is missing. The rows have {', '.join(rows.columns)}")
    if not topic and "topic" not in rows.columns:
        raise SettingError(f"Column topic is missing. Add it or pass a topic. The rows have {', '.join(rows.columns)}")
    for name in COLUMNS:
        if name in rows.columns:
            type_ = rows.schema[name].dataType
            # Spark would round other values of a map when it converts them to texts.
            inside = (type_.keyType, type_.valueType) if isinstance(type_, t.MapType) else ()
            if not isinstance(type_, (t.StringType, *_FORMATS[name].types)) or not all(
                isinstance(each, _KEY_TYPES) for each in inside
            ):
                # In Parquet, pandas writes a column of None as integers without a value.
                hint = ". If it has no value, drop the column" if isinstance(type_, (t.IntegerType, t.NullType)) else ""
                raise SettingError(
                    f"Column {name} is {type_.simpleString()}, but must be {_FORMATS[name].wanted}{hint}"
                )


def _check_key(rows: DataFrame, key: Sequence[str]) -> None:
    for name in key:
        if name not in rows.columns:
            raise SettingError(f"Key column {name!r} is missing. The rows have {', '.join(rows.columns)}")
        if not isinstance(type_ := rows.schema[name].dataType, _KEY_TYPES):
            raise SettingError(f"Key column {name} is {type_.simpleString()}. Cast it to a string")

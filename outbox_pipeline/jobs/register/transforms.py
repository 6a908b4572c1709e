"""From rows of users to rows that can be registered: columns checked, texts read, ids made, in the order of writing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    TimestampType,
)

from outbox.errors import SettingError
from outbox_pipeline import schemas
from outbox_pipeline.jobs.register.ids import as_uuid5, named

#: Columns that rows may have; docs/pipeline/register.md says what each means.
COLUMNS = (
    "task_id", "topic", "data", "data_base64", "attributes", "priority", "ordering_key", "available_at", "expires_at",
    "at_most_once", "sequence",
)  # fmt: skip
#: Further columns of the rejects, so that they can be corrected and registered.
OF_REJECTS = ("reason", "line")
#: What a reader makes of a line that it cannot read: the line, and why.
UNREAD, WHY = "_line", "_why"
#: The prefix of our own columns. Users choose the names of key columns.
_OURS = "_outbox_"

_WHOLE = (ByteType, ShortType, IntegerType, LongType)
#: Types with the same text in every session.
_NAMES = (StringType, *_WHOLE, BooleanType, DateType)
#: A day, without which Spark would take today, a time, and an offset, without which it would take the session's zone.
_MOMENT = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*(?:Z|[+-]\d\d:?\d\d)$"
#: The years 1 to 9999 in microseconds since 1970; Spark has more, Python and Spanner do not.
_YEARS = (-62_135_596_800_000_000, 253_402_300_799_999_999)
#: As Spark writes a time, it can be read again.
TIMES = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


@dataclass(frozen=True)
class _Read:
    """How a text becomes a value of a column, which other types that has, and what is said of a text that does not."""

    parse: Callable[[Column], Column]
    types: tuple[type[DataType], ...]
    wanted: str


def _time(text: Column) -> Column:
    return f.when(text.rlike(_MOMENT), text.try_cast("timestamp"))


def _object(text: Column) -> Column:
    """Return the map of a JSON object; NULL if the text is something else, more than that, or has a name twice."""
    # Spark reads the first value of a text and passes over the rest: as the first of two it must be all of it.
    found = f.from_json(f.concat(f.lit("["), text, f.lit(",{}]")), "array<map<string,string>>")
    names = f.map_keys(found[0])
    return f.when((f.size(found) == 2) & (f.size(names) == f.size(f.array_distinct(names))), found[0])


_READ = {
    "attributes": _Read(_object, (MapType,), "a JSON object of texts"),
    "priority": _Read(lambda text: text.try_cast("long"), _WHOLE, "a whole number"),
    "sequence": _Read(lambda text: text.try_cast("long"), _WHOLE, "a whole number"),
    "available_at": _Read(_time, (TimestampType,), "a time with its offset, such as 2026-11-21T13:00:00Z"),
    "expires_at": _Read(_time, (TimestampType,), "a time with its offset, such as 2026-11-21T13:00:00Z"),
    "at_most_once": _Read(lambda text: text.try_cast("boolean"), (BooleanType,), "true or false"),
    "data_base64": _Read(lambda text: f.try_to_binary(text, f.lit("base64")), (), "base64"),
    "data": _Read(lambda text: f.encode(text, "UTF-8"), (BinaryType,), "a text"),
    "task_id": _Read(lambda text: text, (), "a text"),
    "topic": _Read(lambda text: text, (), "a text"),
    "ordering_key": _Read(lambda text: text, (), "a text"),
}


def of_json_lines(lines: DataFrame, key: Sequence[str] = ()) -> DataFrame:
    """Return rows of texts, from a column `value` of lines of JSON.

    A line that is no JSON object, or that has a name which is no column, is in UNREAD, and why in WHY.
    """
    names = [*COLUMNS, *OF_REJECTS, *(name for name in key if name not in COLUMNS)]
    parsed = lines.where(f.col("value").rlike(r"\S")).select("value", _object(f.col("value")).alias("found"))
    unknown = f.array_except(f.map_keys("found"), f.array(*map(f.lit, names)))
    reason = (
        f.when(~f.is_valid_utf8("value"), f.lit("the line is not valid UTF-8"))
        .when(f.col("found").isNull(), f.lit("the line is no JSON object, or has a name twice"))
        .when(
            f.size(unknown) > 0,
            f.concat(f.lit("the line has names that are no columns: "), f.array_join(unknown, ", ")),
        )
    )
    return parsed.select(
        *(f.col("found")[name].alias(name) for name in names if name not in OF_REJECTS),
        f.when(reason.isNotNull(), f.col("value")).alias(UNREAD),
        reason.alias(WHY),
    )


def prepared(rows: DataFrame, *, topic: str = "", key: Sequence[str] = ()) -> DataFrame:
    """Return `rows` with the columns of `schemas.INPUT`, each with its id.

    A row that cannot be read has a reason, and `line` is the original row as JSON. Its columns are NULL, so that a
    second run cannot register half of it.

    Raises SettingError: a column is unknown, missing or of a type that cannot be taken.
    """
    _check(rows, topic, key)
    _check_key(rows, key)
    has = set(rows.columns)
    values, reasons = {}, [f.col(WHY)] if WHY in has else []
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
    # No key, as for outbox.register: rows without one have no place that they must share.
    values["ordering_key"] = f.nullif(values["ordering_key"], f.lit(""))
    values["data"] = f.coalesce(values["data"], values["data_base64"])
    columns = {field.name: field.dataType for field in schemas.INPUT if field.name not in ("line", "reason")}
    # In steps, so that nothing is worked out once for each column that it goes into.
    made = rows.withColumns({f"{_OURS}{name}": values[name].cast(type_) for name, type_ in columns.items()})
    name_of_id, no_id = _id(key)
    reasons.append(f.when(values["task_id"].isNull(), no_id))
    whole = _whole([name for name in rows.columns if name not in (UNREAD, WHY)], rows)
    line = f.coalesce(f.col(UNREAD), whole) if UNREAD in has else whole
    stepped = made.withColumns(
        {
            f"{_OURS}reason": f.make_valid_utf8(f.coalesce(*reasons).cast("string")),
            f"{_OURS}line": f.make_valid_utf8(line),
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


def _value(name: str, type_: DataType) -> tuple[Column, list[Column]]:
    """Return the value of a column, and the reasons for which it may not be one."""
    source, read = _column(name), _READ[name]
    value, text, reasons = source, source, []
    if isinstance(type_, StringType):
        value = read.parse(source)
        said = f.concat(f.lit(f"{name} "), f.substring(source, 1, 100), f.lit(f" is not {read.wanted}"))
        reasons.append(f.when(source.isNotNull() & value.isNull(), said))
    elif isinstance(type_, MapType):
        value = source.cast(schemas.INPUT["attributes"].dataType)
        text = f.concat_ws("", f.map_keys(value), f.map_values(value))
    if isinstance(type_, (StringType, MapType)):
        reasons.append(f.when(~f.is_valid_utf8(text), f.lit(f"{name} is not valid UTF-8")))
    if TimestampType in read.types:
        is_a_year = f.unix_micros(value).between(*_YEARS)
        reasons.append(f.when(~is_a_year, f.lit(f"{name} is outside of the years 1 to 9999 in UTC")))
    return value, reasons


def _whole(names: Sequence[str], rows: DataFrame) -> Column:
    """Return a row as a line of JSON that can be corrected and registered."""
    each = [
        _column(name).alias("data_base64" if isinstance(rows.schema[name].dataType, BinaryType) else name)
        for name in names
    ]
    return f.to_json(f.struct(*each), {"timestampFormat": TIMES})


def _column(name: str) -> Column:
    return f.col(f"`{name.replace('`', '``')}`")


def _id(key: Sequence[str]) -> tuple[Column, Column]:
    """Return the name that makes the id of a row without one, and the reason why there is none."""
    if key:
        parts = [_column(name).cast("string") for name in key]
        missing = [
            f.when(part.isNull(), f.lit(f"{name}, of the key, is NULL")) for name, part in zip(key, parts, strict=True)
        ]
        return named([f.col(f"{_OURS}topic"), *parts]), f.coalesce(*missing)
    # Texts that are the same for the same values, in any run and with any settings of the session.
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
    """Return tasks in the order in which they are written: tasks with an order, or with equal IDs, in one partition.

    Neighboring IDs are neighbors in the table, so a commit touches few of its splits:
    https://cloud.google.com/spanner/docs/bulk-loading. Tasks of an ordering key go by `sequence`, then by id.
    """
    placed = tasks.withColumn("_place", f.coalesce("ordering_key", "task_id", "line"))
    parted = placed.repartition(partitions, "_place") if partitions else placed.repartition("_place")
    # Of rows with one id all stand at the first one's place, whatever their own sequence: else the later ones would be
    # found in the table, and could not be told from what an earlier run of the Spark task wrote.
    first = f.min("sequence").over(Window.partitionBy("_place", "task_id"))
    # The hash, so that of two different rows with one id always the same one comes first.
    whole = f.xxhash64("topic", "data", f.to_json(f.struct(f.array_sort(f.map_entries("attributes")))), "priority")
    ordered = parted.withColumn("_first", first)
    return ordered.sortWithinPartitions("ordering_key", "_first", "task_id", "sequence", whole).drop("_place", "_first")


def _check(rows: DataFrame, topic: str, key: Sequence[str]) -> None:
    known = {*COLUMNS, *OF_REJECTS, UNREAD, WHY, *key}
    if unknown := [name for name in rows.columns if name not in known]:
        raise SettingError(
            f"column {unknown[0]!r} is not known: drop it, or name it in the key. There are {', '.join(COLUMNS)}"
        )
    if not {"data", "data_base64"} & set(rows.columns):
        raise SettingError(f"column data is missing, or data_base64: there are {', '.join(rows.columns)}")
    if not topic and "topic" not in rows.columns:
        raise SettingError(f"column topic is missing, and no topic is given: there are {', '.join(rows.columns)}")
    for name in COLUMNS:
        if name in rows.columns:
            type_ = rows.schema[name].dataType
            if not isinstance(type_, (StringType, *_READ[name].types)):
                raise SettingError(f"column {name} is {type_.simpleString()}, it must be {_READ[name].wanted}")


def _check_key(rows: DataFrame, key: Sequence[str]) -> None:
    for name in key:
        if name not in rows.columns:
            raise SettingError(f"column {name!r} of the key is missing: there are {', '.join(rows.columns)}")
        if not isinstance(type_ := rows.schema[name].dataType, _NAMES):
            raise SettingError(f"column {name} of the key is {type_.simpleString()}: cast it to a text of your own")

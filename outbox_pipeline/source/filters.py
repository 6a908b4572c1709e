"""Filters of one column as plain data: those of options, and those that Spark pushes down, which it applies again."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from outbox_pipeline import schemas

#: A column, the name of Spark's filter, and its value, or its values if the filter is In.
ColumnFilter = tuple[str, str, Any]
_COMPARED = {
    "EqualTo": pc.equal, "GreaterThan": pc.greater, "GreaterThanOrEqual": pc.greater_equal, "LessThan": pc.less,
    "LessThanOrEqual": pc.less_equal, "In": lambda values, wanted: pc.is_in(values, value_set=wanted),
}  # fmt: skip


def of_columns(filters: Iterable[Any]) -> tuple[ColumnFilter, ...]:
    """Return the filters that compare a column of the table, or the state."""
    names = {*schemas.STORED.names, "State"}
    known = ((type(each).__name__, each) for each in filters if type(each).__name__ in _COMPARED)
    return tuple((each.attribute[0], kind, each.value) for kind, each in known if each.attribute[0] in names)


def mask(values: pa.Array, given: ColumnFilter) -> pa.Array:
    """Return a mask of the values of the column that the filter selects."""
    _, kind, value = given
    wanted = pa.array(value, values.type) if kind == "In" else pa.scalar(value, values.type)
    return pc.fill_null(_COMPARED[kind](values, wanted), False)


def equal(filters: Iterable[ColumnFilter], name: str) -> list[str] | None:
    """Return the values that the column must have one of, or None if no filter says it. NULL equals nothing."""
    found = [[value] if kind == "EqualTo" else [*value] for column, kind, value in filters
             if column == name and kind in {"EqualTo", "In"}]  # fmt: skip
    return sorted({*found[0]}.intersection(*found) - {None}) if found else None


def time_bounds(filters: Iterable[ColumnFilter], name: str) -> tuple[list[datetime], list[datetime]]:
    """Return the times that the column is not before, and those that it is not after."""
    times = [(kind, value) for column, kind, value in filters if column == name and isinstance(value, datetime)]
    earliest = [value for kind, value in times if kind in {"EqualTo", "GreaterThan", "GreaterThanOrEqual"}]
    return earliest, [value for kind, value in times if kind in {"EqualTo", "LessThan", "LessThanOrEqual"}]

"""The options of `spark.read.format("outbox")`, and the tasks that they select."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from outbox.base.values import shown
from outbox.errors import SettingError
from outbox.program.settings import MOMENT, DatabaseSettings, SettingType, one_of, resolved, whole_number
from outbox.table.states import STATES, arrow_states
from outbox_pipeline import schemas

#: Options of the database, and their settings, whose environment variables are the defaults.
_DATABASE = {
    "project": "project", "instance": "instance", "database": "database", "databaseRole": "database_role",
    "spannerEndpoint": "spanner_endpoint",
}  # fmt: skip
_COLUMNS = tuple(schemas.TASK.fieldNames())


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if set(names) - set(_COLUMNS) or len(set(names)) < len(names):
        raise ValueError(text)
    return names


#: The options as documented. Spark passes their names without case.
_KINDS = {
    "state": one_of(*STATES),
    "topic": SettingType(str, "a value of the column Topic"),
    "since": MOMENT,
    "until": MOMENT,
    "columns": SettingType(_columns, f"unique names from {', '.join(_COLUMNS)}, separated by commas"),
    "readTimestamp": MOMENT,
    "partitions": whole_number(1, 100_000),
    "maxRowsPerTrigger": whole_number(1, 1_000_000_000),
}
#: The fields of Options whose names differ.
_FIELDS = {"readTimestamp": "read_timestamp", "maxRowsPerTrigger": "max_rows"}


@dataclass(frozen=True, slots=True)
class Options:
    """The parsed options. A timedelta means a time that long ago, and `at` resolves it."""

    database: DatabaseSettings
    state: str | None = None
    topic: str | None = None
    since: timedelta | datetime | None = None
    until: timedelta | datetime | None = None
    columns: tuple[str, ...] = tuple(schemas.TABLE.fieldNames())
    read_timestamp: timedelta | datetime | None = None
    partitions: int = 8
    #: Max tasks of a batch of a stream. 0 is no limit.
    max_rows: int = 0

    @property
    def schema(self) -> StructType:
        """Return the selected columns."""
        return StructType([schemas.TASK[name] for name in self.columns])

    def at(self, time: datetime) -> "RowFilter":
        """Return the selection as of `time`. Raises SettingError if since is not before until."""
        since, until = (None if each is None else resolved(each, time) for each in (self.since, self.until))
        if since and until and since >= until:
            raise SettingError(f"Option since: {shown(since)} is not before until, {shown(until)}")
        return RowFilter(self.state, self.topic, since, until)


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A selection of tasks.

    `since` is inclusive, `until` exclusive. They apply to the SentAt of a sent task and the CreatedAt of any other
    task.
    """

    state: str | None = None
    topic: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the columns that the selection depends on."""
        names = ["State"] if self.state else []
        names += ["Topic"] if self.topic is not None else []
        names += ["SentAt", "CreatedAt"] if self.since or self.until else []
        return tuple(names)

    def mask(self, columns: Mapping[str, pa.Array], at: datetime) -> pa.Array | None:
        """Return a mask of the selected tasks, or None if all are selected."""
        masks = []
        if self.state:
            masks.append(pc.equal(arrow_states(pc, columns, at), self.state))
        if self.topic is not None:
            masks.append(pc.equal(columns["Topic"], self.topic))
        if self.since or self.until:
            masks.append(self.between(pc.coalesce(columns["SentAt"], columns["CreatedAt"])))
        return reduce(pc.and_, masks) if masks else None

    def between(self, times: pa.Array) -> pa.Array:
        """Return a mask of the times from `since` on and before `until`. NULL is not in it."""
        masks = [pc.is_valid(times)]
        masks += [pc.greater_equal(times, pa.scalar(self.since, times.type))] if self.since else []
        masks += [pc.less(times, pa.scalar(self.until, times.type))] if self.until else []
        return pc.fill_null(reduce(pc.and_, masks), False)


def parse(options: Mapping[str, str]) -> Options:
    """Parse the options of a reader. Raises SettingError if one is unknown, missing or not allowed."""
    values, database = given_options(options, _KINDS)
    return Options(database, **{_FIELDS.get(name, name): values[name] for name in values})


def given_options(
    options: Mapping[str, str], kinds: Mapping[str, SettingType], ignored: Sequence[str] = ()
) -> tuple[dict[str, Any], DatabaseSettings]:
    """Return the values of the `options` that are given, and their database. Raises SettingError."""
    given = {name.lower(): value for name, value in options.items()}
    known = (*kinds, *_DATABASE)
    if unknown := sorted(given.keys() - {name.lower() for name in (*known, *ignored)}):
        raise SettingError(f"Unknown option {unknown[0]}. Known options: {', '.join(known)}")
    values = {
        name: kind.value(given[name.lower()], f"Option {name}") for name, kind in kinds.items() if name.lower() in given
    }
    return values, DatabaseSettings.read({field: given.get(name.lower()) for name, field in _DATABASE.items()})

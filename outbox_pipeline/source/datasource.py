"""`spark.read.format("outbox")` and `spark.readStream.format("outbox")`.

Spark makes these objects in a process beside its driver, plans there, and sends the parts to executors; whatever
travels is plain data. The API is that of Spark 4.0: https://spark.apache.org/docs/4.0.0/api/python/tutorial/sql/python_data_source.html.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from outbox.errors import OutboxError, SettingError
from outbox.shared.times import resolved, shown
from outbox_pipeline import schemas
from outbox_pipeline.source import columns, parts
from outbox_pipeline.source.options import Options, RowFilter, parse
from outbox_pipeline.spanner import TO_SEND, Table, table_of, too_old

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # Spark before 4.2 asks no source written in Python

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]  # it stands in for the one above
        """Nothing."""


#: The smallest difference between two times in Spark.
_TICK = timedelta(microseconds=1)


def register_source(spark: SparkSession) -> None:
    """Make the format `outbox` known to `spark`."""
    spark.dataSource.register(OutboxDataSource)


class OutboxDataSource(DataSource):
    """The table AsynchronousTasks; docs/pipeline/source.md has the options and columns."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(...)`."""
        return "outbox"

    def schema(self) -> StructType:
        """Return the columns that the options ask for."""
        return parse(self.options).schema

    def reader(self, schema: StructType) -> "OutboxReader":
        """Return what plans and reads."""
        return OutboxReader(parse(self.options), _checked(schema))

    def streamReader(self, schema: StructType) -> "OutboxStreamReader":  # noqa: N802 - a name of Spark
        """Return what follows the tasks that are sent."""
        return OutboxStreamReader(parse(self.options), _checked(schema))


def _checked(schema: StructType) -> StructType:
    """Return the schema that the user gave, or `schema` gave. Raises SettingError for a column that there is not."""
    for field in schema:
        if field.name not in schemas.TASK.fieldNames():
            raise SettingError(f"column {field.name!r} is not known; there are {', '.join(schemas.TASK.fieldNames())}")
        if field.dataType.simpleString() != (ours := schemas.TASK[field.name].dataType.simpleString()):
            raise SettingError(f"column {field.name} is {ours}, not {field.dataType.simpleString()}")
    return schema


@dataclass
class _Part(InputPartition):
    """A part with what its reader must know."""

    part: parts.Part
    selection: RowFilter
    at: datetime

    def __init__(self, part: parts.Part, selection: RowFilter, at: datetime) -> None:
        """Keep them; the base class keeps nothing that is needed."""
        super().__init__(None)
        self.part, self.selection, self.at = part, selection, at


class _Reading:
    """What both readers share: options, columns, and how a part is read."""

    def __init__(self, options: Options, schema: StructType) -> None:
        """Keep them."""
        self._options = options
        self._schema = schema

    @property
    def _table(self) -> Table:
        return table_of(self._options.database)

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one part; on an executor."""
        wanted = schemas.arrow(self._schema)
        needs = columns.needed((*self._schema.fieldNames(), *partition.selection.needs))
        for each in partition.part.read(self._table, needs, partition.selection, partition.at):
            yield columns.batch(each, wanted, partition.at)

    def _planned(self, found: Sequence[parts.Part], selection: RowFilter, at: datetime) -> list[_Part]:
        return [_Part(part, selection, at) for part in found]


class OutboxReader(_Reading, DataSourceReader):
    """Reads the table as of one time."""

    def partitions(self) -> Sequence[InputPartition]:
        """Return the parts, for executors to read. Raises SettingError, NotReached, OutboxError."""
        options, table = self._options, self._table
        now = table.now()
        at = now if options.read_timestamp is None else resolved(options.read_timestamp, now)
        if at > now:
            raise SettingError(f"option readTimestamp: {shown(at)} is to come: the database has {shown(now)}")
        if at < now - table.retention():
            raise OutboxError(too_old(at))
        selection = options.at(at)
        names = columns.needed((*self._schema.fieldNames(), *selection.needs))
        found: Sequence[parts.Part] = parts.of_keys(options.partitions)
        if options.data_boost:
            found = parts.of_query(table, names, selection, at, options.partitions)
        elif selection.state == "sent" and selection.since:
            until = min(filter(None, (selection.until, at + _TICK)))
            if parts.share_of_sent(table, selection.since, until, at) < parts.INDEX_PAYS:
                found = parts.of_sent(table.shards, selection.since, until, options.partitions)
        return self._planned(found, selection, at)


class OutboxStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows what is sent: every (Id, SentAt) once, in batches of which each is what one snapshot of the table shows.

    An offset is a time. The batch from `start` to `end` is what was sent after `start` and not after `end`, read as of
    `end`. SentAt is a commit timestamp, so nothing that is committed later can belong to it, and whoever reads it again
    reads the same: https://cloud.google.com/spanner/docs/true-time-external-consistency.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        """Refuse what a stream cannot have. Raises SettingError."""
        super().__init__(options, schema)
        if options.state not in (None, "sent"):
            raise SettingError(f"option state: a stream follows what is sent, not {options.state}")
        for name, value in (
            ("until", options.until), ("readTimestamp", options.read_timestamp), ("dataBoost", options.data_boost)
        ):  # fmt: skip
            if value:
                raise SettingError(f"option {name} is not for a stream")
        if isinstance(options.since, timedelta):
            # Spark asks for the beginning again if the query ends before its first batch has: it must be the same.
            raise SettingError("option since: a stream needs a time, such as 2026-11-21T13:00:00Z, not how long ago")
        self._since = options.since
        self._last: datetime | None = None
        #: Where a query begins by itself, until its first batch, which is to be empty: Spark keeps where it ends only.
        self._first: datetime | None = None
        #: Where a query ends that reads what is there.
        self._target: datetime | None = None

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - a name of Spark
        """Return where a query begins that has no checkpoint: `since`, or now."""
        if self._since is not None:
            # What was sent just then belongs to the stream: a batch begins after its start.
            return _offset(self._since - _TICK)
        self._first = self._table.now()
        return _offset(self._first)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - a name of Spark
        """Note where the query ends. Without this Spark ends it after a batch that an earlier run left unfinished."""
        self._target = self._table.now()

    def latestOffset(self, start: dict[str, str] | None = None, limit: object = None) -> dict[str, str]:  # noqa: N802 - `limit` is of Spark 4.2
        """Return now, or `start` if nothing was sent since: then Spark runs nothing."""
        if self._first is not None:
            self._last, self._first = self._first, None
            return _offset(self._last)
        begin = _time(start) if start else self._last
        now = self._target or self._table.now()
        if begin is not None and not (now > begin and self._any_sent(begin, now)):
            now = begin
        self._last = now
        return _offset(now)

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Return the parts of a batch. Raises OutboxError if it was planned so long ago that it cannot be read."""
        since, until = _time(start), _time(end)
        table = self._table
        if until <= since:
            return []
        if until < table.now() - table.retention():
            raise OutboxError(
                f"the batch of what was sent after {shown(since)} was planned and not finished when the query ended: "
                f"{too_old(until)}. To go on now, begin with a new checkpoint and the option since={shown(since)}: "
                "what was sent from then on comes again"
            )
        found = parts.of_sent(table.shards, since, until, self._options.partitions, after=True)
        return self._planned(found, RowFilter(topic=self._options.topic), until)

    def _any_sent(self, since: datetime, until: datetime) -> bool:
        [part] = parts.of_sent(self._table.shards, since, until, 1, after=True)
        return any(True for _ in self._table.rows(("Id",), part.keys, until, index=TO_SEND, limit=1))


def _offset(time: datetime) -> dict[str, str]:
    return {"sent_at": shown(time)}


def _time(offset: dict[str, str]) -> datetime:
    return datetime.fromisoformat(offset["sent_at"])

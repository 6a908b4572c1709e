"""`spark.read.format("outbox")` and `spark.readStream.format("outbox")`. The writers are in sink.py.

Spark creates these objects in a Python process next to the driver, plans there, and sends the parts to executors. Parts
are plain data that can be pickled. The API is from Spark 4.0: https://spark.apache.org/docs/4.0.0/api/python/tutorial/sql/python_data_source.html.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from outbox.admin.table import LayoutChanged, too_old
from outbox.base.values import shown
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import DatabaseSettings, resolved
from outbox.table.states import LONG_AGO
from outbox_pipeline import schemas
from outbox_pipeline.source import columns, parts
from outbox_pipeline.source.options import Options, RowFilter, parse
from outbox_pipeline.source.sink import OutboxStreamWriter, OutboxWriter
from outbox_pipeline.spanner import Table, open_table
from outbox_pipeline.spark.spark_tasks import read_partitions, read_parts
from outbox_pipeline.spark.stack_traces import without_stack_trace

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # Spark before 4.2 has neither limits nor Trigger.AvailableNow for Python sources

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]  # replaces the import
        """An empty base class."""


_DECODED = StructType([schemas.DERIVED["Attributes"], schemas.DERIVED["Payload"]])
#: The precision of Spark's times.
_TICK = timedelta(microseconds=1)


def read_tasks(
    spark: SparkSession, database: DatabaseSettings, columns: Sequence[str], at: datetime, wanted: RowFilter
) -> DataFrame:
    """Return the wanted tasks as of `at`, as `spark.read.format("outbox")` does, but planned in this process.

    For the jobs: Spark would start several Python processes to plan, which takes seconds.
    """
    partitions = read_partitions(spark)
    selection = (wanted.state, wanted.topic, wanted.since, wanted.until)
    options = Options(database, *selection, tuple(columns), at, partitions)
    reader = OutboxReader(options, options.schema)
    return read_parts(spark, reader.read, reader.partitions(), options.schema)


def read_cancelled(
    spark: SparkSession,
    database: DatabaseSettings,
    names: Sequence[str],
    at: datetime,
    *,
    since: datetime = LONG_AGO,
    until: datetime | None = None,
) -> DataFrame:
    """Return the tasks that operators cancelled from `since` on and before `until`, as of `at`.

    `names` are columns of the table, which have the values that they had before the cancel, and CancelledAt.
    """
    schema = StructType([schemas.ARCHIVED[name] for name in names])

    def read(end: datetime) -> Iterator[pa.RecordBatch]:
        for each in parts.cancelled(open_table(database), names, since, end, at):
            yield columns.batch(each, schemas.arrow(schema), at)

    # In one Spark task, because operators cancel few tasks.
    return read_parts(spark, read, [until or at + _TICK], schema)


def decoded(tasks: DataFrame) -> DataFrame:
    """Add the columns `Attributes` and `Payload` to tasks with `Id` and `Data`, from the table or from the archive."""
    return tasks.mapInArrow(_decode, StructType([*tasks.schema, *_DECODED]))


def _decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    added = schemas.arrow(_DECODED)
    for batch in batches:
        messages = columns.message_columns(batch["Id"].to_pylist(), batch["Data"].to_pylist())
        arrays = [*batch.columns, *(messages[field.name].cast(field.type) for field in added)]
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*batch.schema, *added]))


class OutboxDataSource(DataSource):
    """The table AsynchronousTasks. docs/pipeline/source.md describes the options and columns."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "outbox"

    @without_stack_trace()
    def schema(self) -> StructType:
        """Return the columns that the options select."""
        return parse(self.options).schema

    @without_stack_trace()
    def reader(self, schema: StructType) -> "OutboxReader":
        """Return the batch reader."""
        options = parse(self.options)
        if options.max_rows:
            raise SettingError("Option maxRowsPerTrigger is for streams only. Remove it")
        return OutboxReader(options, _checked(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the stream reader, which follows sent tasks."""
        return OutboxStreamReader(self.options, schema)

    @without_stack_trace()
    def writer(self, schema: StructType, overwrite: bool) -> OutboxWriter:
        """Return the batch writer, which registers rows as tasks."""
        return OutboxWriter(self.options, schema, overwrite)

    @without_stack_trace()
    def streamWriter(self, schema: StructType, overwrite: bool) -> OutboxStreamWriter:  # noqa: N802 - Spark's name
        """Return the stream writer."""
        return OutboxStreamWriter(self.options, schema, overwrite)


def _checked(schema: StructType) -> StructType:
    """Return the schema. Raises SettingError if it has an unknown column or a column of the wrong type."""
    for field in schema:
        if field.name not in schemas.TASK.fieldNames():
            raise SettingError(f"Unknown column {field.name!r}. Known columns: {', '.join(schemas.TASK.fieldNames())}")
        if field.dataType.simpleString() != (ours := schemas.TASK[field.name].dataType.simpleString()):
            raise SettingError(f"Column {field.name} is {ours}, not {field.dataType.simpleString()}")
    return schema


class _Reading:
    """The base class of both readers."""

    _options: Options
    _schema: StructType

    @property
    def _table(self) -> Table:
        return open_table(self._options.database)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one part. Spark calls this on an executor."""
        part, selection, at, layout = partition.value
        with without_stack_trace():
            table = self._table
            table.layout = layout
            wanted = schemas.arrow(self._schema)
            needs = columns.needed((*self._schema.fieldNames(), *selection.needs))
            for each in part.read(table, needs, selection, at):
                yield columns.batch(each, wanted, at)


class OutboxReader(_Reading, DataSourceReader):
    """Reads the table at one timestamp."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options, self._schema = options, schema

    @without_stack_trace()
    def partitions(self) -> Sequence[InputPartition]:
        """Return the parts for the executors. Raises SettingError, NotReached, OutboxError."""
        options, table = self._options, self._table
        table.read_layout()
        now = table.now()
        at = now if options.read_timestamp is None else resolved(options.read_timestamp, now)
        if at > now:
            raise SettingError(
                f"Option readTimestamp: {shown(at)} is in the future. The database's time is {shown(now)}"
            )
        if at < now - table.retention():
            raise OutboxError(too_old(at))
        selection = options.at(at)
        found: Sequence[parts.Part] = parts.key_parts(options.partitions)
        if selection.state == "sent" and selection.since:
            until = min(filter(None, (selection.until, at + _TICK)))
            if parts.share_of_sent(table, selection.since, until, at) < parts.INDEX_PAYS:
                found = parts.sent_parts(table.layout.ids, selection.since, until, options.partitions)
        return [InputPartition((part, selection, at, table.layout)) for part in found]


class OutboxStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows sent tasks: yields every (Id, SentAt) once. Each batch reads one snapshot of the table.

    An offset is a time. The batch from `start` to `end` contains the tasks with `start` < SentAt <= `end`, read as of
    `end`, or as of `read_at` of the offset `end` if a limit of rows made the batch end earlier. SentAt is a commit
    timestamp, so no later commit can add a task to the batch, and reading the batch again gives the same tasks:
    https://cloud.google.com/spanner/docs/true-time-external-consistency.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._given, self._schema = dict(options), schema
        self._last: dict[str, str] | None = None
        #: The start of a query without `since`. Its first batch ends here and is empty, because Spark stores only the
        #: ends of batches in the checkpoint.
        self._first: datetime | None = None
        #: The end of a query with Trigger.AvailableNow.
        self._target: datetime | None = None

    @cached_property
    def _options(self) -> Options:  # type: ignore[override]  # when Spark calls a method, whose error it passes on
        """Check the options and columns. Raises SettingError if a stream does not support one."""
        options = parse(self._given)
        _checked(self._schema)
        if options.state not in (None, "sent"):
            raise SettingError(f"Option state: a stream follows sent tasks only, not {options.state}")
        for name, value in (("until", options.until), ("readTimestamp", options.read_timestamp)):
            if value:
                raise SettingError(f"Option {name} is not supported for a stream. Remove it")
        if isinstance(options.since, timedelta):
            # If the query ends before its first batch, Spark asks for the start again. It must be the same time.
            raise SettingError("Option since: a stream needs a time such as 2026-11-21T13:00:00Z, not a duration")
        return options

    @without_stack_trace()
    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return the start of a query without a checkpoint: `since` or now."""
        if isinstance(since := self._options.since, datetime):
            # `since` is inclusive, but the start of a batch is exclusive.
            self._last = _offset(since - _TICK)
            return self._last
        self._first = self._table.now()
        return _offset(self._first)

    @without_stack_trace()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Set the end of the query. Without it, Spark would stop after a batch that an earlier run did not finish."""
        self._target = self._table.now()

    @without_stack_trace()
    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
        """Return the limit of the options. Spark passes it to `latestOffset`, or another one for Trigger.Once."""
        return ReadMaxRows(self._options.max_rows) if self._options.max_rows else ReadAllAvailable()

    @without_stack_trace()
    def latestOffset(self, start: dict[str, str] | None = None, limit: Any = None) -> dict[str, str]:  # noqa: N802 - `start` and `limit` are of Spark 4.2
        """Return the end of the next batch, or `start` if no task was sent since, so that Spark runs no batch."""
        if self._first is not None:
            self._last, self._first = _offset(self._first), None
            return self._last
        begin, now = start or self._last, self._table.now()
        most = getattr(limit, "max_rows", 0) if limit else self._options.max_rows
        until = self._target or now
        if begin is None:
            end = _offset(until, now)
        else:
            found = self._end(_time(begin), until, now, most)
            end = begin if found is None else _offset(found, now)
        self._last = end
        return end

    @without_stack_trace()
    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Return the parts of a batch. Raises OutboxError if the batch is older than the version retention period."""
        since, until, at = _time(start), _time(end), _time(end, "read_at")
        table = self._table
        if until <= since:
            return []
        if not table.keeps(at):
            raise OutboxError(
                f"The batch of tasks sent after {shown(since)} was not finished when the query ended, and "
                f"{too_old(at)}. To continue, start with a new checkpoint, a new output folder and the option "
                f"since={shown(since)}. The stream then repeats the tasks sent since that time. In the former folder, "
                "Spark would skip the first batches of a new checkpoint"
            )
        found = parts.sent_parts(table.layout.ids, since, until, self._options.partitions, after=True)  # OUT-SPARK-2
        selection = RowFilter(topic=self._options.topic)
        return [InputPartition((part, selection, at, table.layout)) for part in found]

    def _end(self, since: datetime, until: datetime, now: datetime, most: int) -> datetime | None:
        """Return the end of the batch after `since`, at most `until`, or None if no task was sent in this time.

        The batch has at most `most` tasks (0 is no limit) if each shard has at most its share of them. The tasks of one
        commit have the same SentAt, so they are in one batch even if they are more.
        """
        ids = self._table.layout.ids
        try:
            if until <= since or not self._times(since, until, now, ids, 1):
                return None
            share = max(1, most // len(ids))
            for shard in ids if most else ():
                times = self._times(since, until, now, [shard], share + 1)
                if len(times) > share:
                    until = max(times[0], times[-1] - _TICK)
        except LayoutChanged:
            return self._end(since, until, now, most)
        return until

    def _times(
        self, since: datetime, until: datetime, now: datetime, shards: Sequence[int], most: int
    ) -> list[datetime]:
        """Return the first `most` SentAt of one shard, or of some without an order."""
        [part] = parts.sent_parts(shards, since, until, 1, after=True)
        rows = self._table.rows(("SentAt",), part.keys, now, index=part.index, limit=most)
        return [datetime.fromisoformat(sent_at.string_value) for (sent_at,) in rows]


def _offset(time: datetime, read_at: datetime | None = None) -> dict[str, str]:
    return {"sent_at": shown(time)} | ({"read_at": shown(read_at)} if read_at and read_at > time else {})


def _time(offset: dict[str, str], name: str = "sent_at") -> datetime:
    return datetime.fromisoformat(offset.get(name, offset["sent_at"]))

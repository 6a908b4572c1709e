"""The readers and writers of the format `outbox`, and reads of the table by the jobs.

Spark creates these objects in a Python process next to the driver, plans there, and sends readers, their parts and
writers to executors. The API is from Spark 4.0:
https://spark.apache.org/docs/4.0.0/api/python/tutorial/sql/python_data_source.html.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from outbox.base.values import shown
from outbox.errors import OutboxError, SettingError
from outbox.program import logs
from outbox.program.settings import MOMENT, SWITCH, DatabaseSettings, SettingType, one_of, resolved, whole_number
from outbox.rows.task_table import LayoutChanged, too_old
from outbox.table.states import CANCELLED, STATES
from outbox_pipeline import schemas
from outbox_pipeline.job_settings import RATE
from outbox_pipeline.rows.register_rows import COUNTS, Writer, check, complete, in_key_order, json_line
from outbox_pipeline.rows.texts import MICROSECOND
from outbox_pipeline.source import parts
from outbox_pipeline.source.filters import ColumnFilter, equal, of_columns, time_bounds
from outbox_pipeline.source.parts import IdsPart, RowFilter
from outbox_pipeline.spanner import Table, open_table
from outbox_pipeline.spark.spark_tasks import Pace, read_partitions, read_parts, report
from outbox_pipeline.spark.stack_traces import without_stack_trace

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # Spark before 4.2 has neither limits nor Trigger.AvailableNow for Python sources

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]  # replaces the import
        """An empty base class."""


try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # Spark before 4.1 passes rows, whose times depend on the time zone of the executor

    class DataSourceStreamArrowWriter:  # type: ignore[no-redef]  # replaces the import
        """The base class of a writer that cannot be created."""

        def __new__(cls, *_: object) -> Any:
            """Raise SettingError."""
            raise SettingError(
                "writeStream to the outbox needs Spark 4.1. Call outbox_pipeline.register in foreachBatch instead"
            )


#: Options of the database, and their settings, whose environment variables are the defaults.
_DATABASE = {
    "project": "project", "instance": "instance", "database": "database", "databaseRole": "database_role",
    "spannerEndpoint": "spanner_endpoint",
}  # fmt: skip
#: What Spark adds to the options of CREATE TABLE, which it also passes a second time, as `option.NAME`.
_OF_TABLE = {"collation", "comment", "external", "is_managed_location", "location", "owner", "path", "provider"}
_COLUMNS = tuple(schemas.SOURCE.fieldNames())


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if set(names) - set(_COLUMNS) or len(set(names)) < len(names):
        raise ValueError(text)
    return names


#: The options of readers and writers as documented. Spark passes their names without case.
OF_READER = {
    "state": one_of(*STATES),
    "topic": SettingType(str, "a value of the column Topic"),
    "since": MOMENT,
    "until": MOMENT,
    "columns": SettingType(_columns, f"unique names from {', '.join(_COLUMNS)}, separated by commas"),
    "readTimestamp": MOMENT,
    "partitions": whole_number(1, 100_000),
    "maxRowsPerTrigger": whole_number(1, 1_000_000_000),
    "failOnDataLoss": SWITCH,
}
_OF_WRITER = {
    "topic": SettingType(str, "a topic"),
    "key": SettingType(
        lambda text: tuple(name.strip() for name in text.split(",")), "names of columns, separated by commas"
    ),
    "maxRowsPerSecond": RATE,
}


def parse_options(
    options: Mapping[str, str], kinds: Mapping[str, SettingType], ignored: Sequence[str] = ()
) -> tuple[dict[str, Any], DatabaseSettings]:
    """Return the values of the `options` that are given, and their database. Raises SettingError."""
    named = {name.lower(): value for name, value in options.items()}
    given = {name: value for name, value in named.items() if not name.startswith("option.") and name not in _OF_TABLE}
    known = (*kinds, *_DATABASE)
    if unknown := sorted(given.keys() - {name.lower() for name in (*known, *ignored)}):
        raise SettingError(f"Unknown option {unknown[0]}. Known options: {', '.join(known)}")
    values = {
        name: kind.value(given[name.lower()], f"Option {name}") for name, kind in kinds.items() if name.lower() in given
    }
    return values, DatabaseSettings.read({field: given.get(name.lower()) for name, field in _DATABASE.items()})


def _of_options(options: Mapping[str, Any]) -> tuple[ColumnFilter, ...]:
    """Return the filters that the options of a reader say."""
    columns = {"state": "State", "topic": "Topic"}
    return tuple((column, "EqualTo", options[name]) for name, column in columns.items() if name in options)


_log = logging.getLogger("outbox_pipeline")

_DECODED = StructType([schemas.DERIVED["Attributes"], schemas.DERIVED["Payload"]])


def read_tasks(
    spark: SparkSession, database: DatabaseSettings, columns: Sequence[str], at: datetime, wanted: RowFilter
) -> DataFrame:
    """Return the wanted tasks as of `at`, as `spark.read.format("outbox")` does, but planned in this process.

    For the jobs: Spark would start several Python processes to plan, which takes seconds.
    """
    schema = StructType([schemas.SOURCE[name] for name in columns])
    reader = OutboxReader({"partitions": read_partitions(spark)}, database, schema)
    return read_parts(spark, reader.read, reader.planned(wanted, at), schema)


def decoded(tasks: DataFrame) -> DataFrame:
    """Add the columns `Attributes` and `Payload` to tasks with `Id` and `Data`, from the table or from the archive."""
    return tasks.mapInArrow(_decode, StructType([*tasks.schema, *_DECODED]))


def _decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    added = schemas.arrow(_DECODED)
    for batch in batches:
        messages = parts.message_columns(batch["Id"].to_pylist(), batch["Data"].to_pylist())
        arrays = [*batch.columns, *(messages[field.name].cast(field.type) for field in added)]
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*batch.schema, *added]))


def _checked(schema: StructType) -> StructType:
    """Return the schema. Raises SettingError if it has an unknown column or a column of the wrong type."""
    for field in schema:
        if field.name not in _COLUMNS:
            raise SettingError(f"Unknown column {field.name!r}. Known columns: {', '.join(_COLUMNS)}")
        if field.dataType.simpleString() != (ours := schemas.SOURCE[field.name].dataType.simpleString()):
            raise SettingError(f"Column {field.name} is {ours}, not {field.dataType.simpleString()}")
    return schema


class _Reading:
    #: The options, and their database.
    _parsed: tuple[dict[str, Any], DatabaseSettings]
    _schema: StructType

    @property
    def _table(self) -> Table:
        return open_table(self._parsed[1])

    @property
    def _count(self) -> int:
        return int(self._parsed[0].get("partitions", 8))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one part. Spark calls this on an executor."""
        part, selection, at, layout = partition.value
        with without_stack_trace():
            table = self._table
            table.layout = layout
            wanted = schemas.arrow(self._schema)
            needs = parts.needed((*self._schema.fieldNames(), *selection.needs))
            for each in part.read(table, needs, selection, at):
                yield parts.arrow_batch(each, wanted, at)


class OutboxReader(_Reading, DataSourceReader):
    """Reads the table at one timestamp."""

    filters: tuple[ColumnFilter, ...] = ()

    def __init__(self, options: dict[str, Any], database: DatabaseSettings, schema: StructType) -> None:
        self._parsed, self._schema = (options, database), schema

    @without_stack_trace()
    def partitions(self) -> Sequence[InputPartition]:
        """Return the parts for the executors. Raises SettingError, NotReached, OutboxError."""
        options, table = self._parsed[0], self._table
        now = table.now()
        at = resolved(options.get("readTimestamp", now), now)
        if at > now:
            raise SettingError(
                f"Option readTimestamp: {shown(at)} is in the future. The database's time is {shown(now)}"
            )
        if at < now - table.retention():
            raise OutboxError(too_old(at))
        since, until = (resolved(options[name], at) if name in options else None for name in ("since", "until"))
        if since and until and since >= until:
            raise SettingError(f"Option since: {shown(since)} is not before until, {shown(until)}")
        return self.planned(RowFilter((*_of_options(options), *self.filters), since, until), at)

    def planned(self, selection: RowFilter, at: datetime) -> Sequence[InputPartition]:
        table = self._table
        table.read_layout()
        if (ids := equal(selection.filters, "Id")) is not None:
            divided = [IdsPart(tuple(ids[start :: self._count])) for start in range(min(self._count, len(ids)))]
            return [InputPartition((part, selection, at, table.layout)) for part in divided]
        found: Sequence[parts.Part] = parts.key_parts(self._count)
        earliest, latest = time_bounds(selection.filters, "SentAt")
        if (states := equal(selection.filters, "State")) and {*states} <= {"sent", CANCELLED}:
            earliest += [selection.since] if selection.since else []
            latest += [selection.until - MICROSECOND] if selection.until else []
        if earliest:
            since, until = max(earliest), min([at, *latest]) + MICROSECOND
            if since < until and parts.share_of_sent(table, since, until, at) < parts.INDEX_PAYS:
                found = parts.sent_parts(table.layout.ids, since, until, self._count)
        return [InputPartition((part, selection, at, table.layout)) for part in found]


class FilteringReader(OutboxReader):
    """Reads only the tasks that Spark's filters can select. Spark applies the filters again."""

    def pushFilters(self, filters: list[Any]) -> Iterator[Any]:  # noqa: N802 - Spark's name
        """Take the filters of the table's columns."""
        self.filters = of_columns(filters)
        return iter(filters)


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
        #: Up to when tasks are sent that are not read yet, and the last period that was read too late.
        self._known: dict[str, str] | None = None
        self._gap = ""

    @cached_property
    def _parsed(self) -> tuple[dict[str, Any], DatabaseSettings]:  # type: ignore[override]  # when Spark calls a method, whose error it passes on
        """Check the options and columns. Raises SettingError if a stream does not support one."""
        options, database = parse_options(self._given, OF_READER)
        _checked(self._schema)
        if (state := options.get("state", "sent")) != "sent":
            raise SettingError(f"Option state: a stream follows sent tasks only, not {state}")
        for name in ("until", "readTimestamp"):
            if name in options:
                raise SettingError(f"Option {name} is not supported for a stream. Remove it")
        if isinstance(options.get("since"), timedelta):
            # If the query ends before its first batch, Spark asks for the start again. It must be the same time.
            raise SettingError("Option since: a stream needs a time such as 2026-11-21T13:00:00Z, not a duration")
        return options, database

    @property
    def _max_rows(self) -> int:
        """Return the max tasks of a batch. 0 is no limit."""
        return int(self._parsed[0].get("maxRowsPerTrigger", 0))

    @without_stack_trace()
    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return the start of a query without a checkpoint: `since` or now."""
        if since := self._parsed[0].get("since"):
            # `since` is inclusive, but the start of a batch is exclusive.
            self._last = _offset(since - MICROSECOND)
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
        return ReadMaxRows(self._max_rows) if self._max_rows else ReadAllAvailable()

    @without_stack_trace()
    def latestOffset(self, start: dict[str, str] | None = None, limit: Any = None) -> dict[str, str]:  # noqa: N802 - `start` and `limit` are of Spark 4.2
        """Return the end of the next batch, or `start` if no task has a later SentAt, so that Spark runs no batch."""
        if self._first is not None:
            self._last, self._first = _offset(self._first), None
            return self._last
        begin, now = start or self._last, self._table.now()
        self._known = None
        most = getattr(limit, "max_rows", 0) if limit else self._max_rows
        until = self._target or now
        if begin is None:
            end = _offset(until, now)
        else:
            found = self._end(_time(begin), until, now, most)
            end = begin if found is None else _offset(found, now)
            self._known = None if found is None else _offset(until)
        self._last = end
        return end

    def reportLatestOffset(self) -> dict[str, str] | None:  # noqa: N802 - Spark's name
        """Return the offset up to which unread tasks are sent, and the last gap, for the progress of the query."""
        known = self._known or self._last
        return known and known | ({"gap": self._gap} if self._gap else {})

    @without_stack_trace()
    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Return the parts of a batch. Raises OutboxError if the batch is older than the version retention period."""
        since, until, at = _time(start), _time(end), _time(end, "read_at")
        table = self._table
        if until <= since:
            return []
        if not table.keeps(at):
            if self._parsed[0].get("failOnDataLoss", True):
                raise OutboxError(
                    f"The batch of tasks sent after {shown(since)} was not finished when the query ended, and "
                    f"{too_old(at)}. To continue, start with a new checkpoint, a new output folder and the option "
                    f"since={shown(since)}. The stream then repeats the tasks sent since that time. In the former "
                    "folder, Spark would skip the first batches of a new checkpoint. To continue with the next tasks "
                    "instead, pass the option failOnDataLoss=false"
                )
            at, self._gap = table.now(), f"{shown(since)}/{shown(until)}"
            logs.configure()
            text = (
                "Spanner no longer keeps versions of the tasks sent in %s. Those sent again or deleted since are lost"
            )
            _log.warning(text, self._gap, extra={"action": "gap"})
        # OUT-SPARK-2: `since` is exclusive, and `until` inclusive.
        found = parts.sent_parts(table.layout.ids, since + MICROSECOND, until + MICROSECOND, self._count)
        selection = RowFilter(_of_options({"state": "sent", **self._parsed[0]}))
        return [InputPartition((part, selection, at, table.layout)) for part in found]

    def _end(self, since: datetime, until: datetime, now: datetime, most: int) -> datetime | None:
        """Return the end of the batch after `since`, at most `until`, or None if no task has a SentAt in this time.

        The batch has at most `most` tasks (0 is no limit) if each shard has at most its share of them, with cancelled
        ones. The tasks of one commit have the same SentAt, so they are in one batch even if they are more.
        """
        ids = self._table.layout.ids
        try:
            if until <= since or not self._times(since, until, now, ids, 1):
                return None
            share = max(1, most // len(ids))
            for shard in ids if most else ():
                times = self._times(since, until, now, [shard], share + 1)
                if len(times) > share:
                    until = max(times[0], times[-1] - MICROSECOND)
        except LayoutChanged:
            return self._end(since, until, now, most)
        return until

    def _times(
        self, since: datetime, until: datetime, now: datetime, shards: Sequence[int], most: int
    ) -> list[datetime]:
        """Return the first `most` SentAt of one shard, or of some without an order."""
        [part] = parts.sent_parts(shards, since + MICROSECOND, until + MICROSECOND, 1)
        rows = self._table.rows(("SentAt",), part.keys, now, index=part.index, limit=most)
        return [datetime.fromisoformat(sent_at.string_value) for (sent_at,) in rows]


def _offset(time: datetime, read_at: datetime | None = None) -> dict[str, str]:
    return {"sent_at": shown(time)} | ({"read_at": shown(read_at)} if read_at and read_at > time else {})


def _time(offset: dict[str, str], name: str = "sent_at") -> datetime:
    return datetime.fromisoformat(offset.get(name, offset["sent_at"]))


class _Writing:
    """The base class of both writers.

    Spark repeats a Spark task, or a micro-batch, that failed. A task ID derives from its row, not from the attempt, so
    a row whose task exists is not registered again. That is why there is nothing to commit or to abort.
    """

    @without_stack_trace()
    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Check options and columns. Raises SettingError."""
        if overwrite:
            raise SettingError("The outbox can only be appended to: pass mode('append') or outputMode('append')")
        of_table = ("checkpointLocation", "queryName", "columns")  # of the query, or of CREATE TABLE
        values, self._settings = parse_options(options, _OF_WRITER, ignored=of_table)
        self._topic, self._key = values.get("topic", ""), values.get("key", ())
        self._rate, self._names = float(values.get("maxRowsPerSecond", 0)), schema.fieldNames()
        check(schema, self._topic, self._key)

    @without_stack_trace()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Register the rows of a partition in the order of their keys. Spark calls this on an executor."""
        table = open_table(self._settings)
        writer = Writer(table, table.now(), _refuse, Pace(self._rate))
        for row in in_key_order(complete(self._names, self._topic, self._key, iterator)):  # OUT-SPARK-3: with IDs
            writer.add(row)
        writer.flush()
        return _Written(writer.counts)

    @without_stack_trace()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 - Spark's name
        """Log and count the outcomes. Spark calls this on the driver, once for each write or micro-batch."""
        logs.configure()
        written = [each.counts for each in messages if isinstance(each, _Written)]
        report("sink", {name: sum(each[name] for each in written) for name in COUNTS}, batchId)


@dataclass(frozen=True)
class _Written(WriterCommitMessage):
    """The outcomes of the rows of a partition."""

    counts: dict[str, int]


def _refuse(row: dict[str, Any]) -> None:
    """Raise OutboxError for the first rejected row."""
    raise OutboxError(
        f"A row is rejected: {row['reason']}. The row is {(row['line'] or json_line(row | {'reason': None}))[:1000]}. "
        "Correct it, or use outbox_pipeline.register or register_stream, which write rejected rows to a folder"
    )


class OutboxWriter(_Writing, DataSourceArrowWriter):
    """Registers the rows of a DataFrame."""


class OutboxStreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Registers the rows of each micro-batch of a stream."""


@without_stack_trace()
def schema_of(given: Mapping[str, str]) -> StructType:
    options, _ = parse_options(given, OF_READER | _OF_WRITER)
    return StructType([schemas.SOURCE[name] for name in options.get("columns", schemas.STORED.names)])


@without_stack_trace()
def reader_of(given: Mapping[str, str], schema: StructType) -> OutboxReader:
    """Return the batch reader, in the process that pushes filters down one that takes them."""
    options, database = parse_options(given, OF_READER, ignored=(*_OF_WRITER,))  # which a table of SQL has, too
    if only := [name for name in ("maxRowsPerTrigger", "failOnDataLoss") if name in options]:
        raise SettingError(f"Option {only[0]} is for streams only. Remove it")
    # Spark refuses any other reader with this method unless spark.sql.python.filterPushdown.enabled is set.
    pushes = "pyspark.sql.worker.data_source_pushdown_filters" in sys.modules
    return (FilteringReader if pushes else OutboxReader)(options, database, _checked(schema))

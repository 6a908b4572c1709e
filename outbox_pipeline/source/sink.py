"""`df.write.format("outbox")` and `df.writeStream.format("outbox")`: each Spark task registers the rows of a partition.

Spark repeats a Spark task, or a micro-batch, that failed. A task ID derives from its row, not from the attempt, so a
row whose task exists is not registered again. That is why there is nothing to commit or to abort.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from outbox.errors import SettingError
from outbox.program.settings import SettingType
from outbox_pipeline.jobs.register.executor import REJECTS, new_run, register_rows
from outbox_pipeline.jobs.register.rows import check, complete
from outbox_pipeline.source.options import given_options
from outbox_pipeline.spark.stack_traces import without_stack_trace

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


#: Spark sets these properties for the Spark tasks of a micro-batch.
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


_KINDS = {
    "topic": SettingType(str, "a topic"),
    "key": SettingType(
        lambda text: tuple(name.strip() for name in text.split(",")), "names of columns, separated by commas"
    ),
    "rejects": REJECTS,
}


class _Writing:
    """What both writers share. Spark creates a writer in a Python process of the driver and sends it to executors."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Check options and columns. Raises SettingError."""
        if overwrite:
            raise SettingError("The outbox can only be appended to: pass mode('append') or outputMode('append')")
        values, self._database = given_options(options, _KINDS, ignored=("checkpointLocation", "queryName"))
        self._topic, self._key = values.get("topic", ""), values.get("key", ())
        self._names = schema.fieldNames()
        self._rejects: str | None = values.get("rejects")
        self._run = new_run()
        check(schema, self._topic, self._key)

    @without_stack_trace()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Register the rows of a partition in their order. Spark calls this on an executor."""
        rows = complete(self._names, self._topic, self._key, iterator)  # OUT-SPARK-3: with IDs
        task: Any = TaskContext.get()
        query, number = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
        folder = self._rejects and f"{self._rejects}/{f'{query}/{number}' if query else self._run}"
        # Whether a task is new is only counted by the job.
        for _ in register_rows(self._database, datetime.min.replace(tzinfo=UTC), 0.0, folder, rows):
            pass
        return WriterCommitMessage()


class OutboxWriter(_Writing, DataSourceArrowWriter):
    """Registers the rows of a DataFrame."""


class OutboxStreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Registers the rows of each micro-batch of a stream."""

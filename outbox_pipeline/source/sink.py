"""`df.write.format("outbox")` and `df.writeStream.format("outbox")`: each Spark task registers the rows of a partition.

Spark repeats a Spark task, or a micro-batch, that failed. A task ID derives from its row, not from the attempt, so a
row whose task exists is not registered again. That is why there is nothing to commit or to abort.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyarrow.fs import FileSystem
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from outbox.errors import OutboxError, SettingError
from outbox.program.settings import SettingType
from outbox_pipeline import schemas
from outbox_pipeline.jobs.register.executor import register_rows
from outbox_pipeline.jobs.register.rows import check, complete, json_line
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


def _folder(text: str) -> str:
    """Return a URL, or the absolute path of a folder of the driver. Raises ValueError if pyarrow does not know it."""
    path = text if ":" in text.partition("/")[0] else str(Path(text).absolute())
    FileSystem.from_uri(path)
    return path


_KINDS = {
    "topic": SettingType(str, "a topic"),
    "key": SettingType(
        lambda text: tuple(name.strip() for name in text.split(",")), "names of columns, separated by commas"
    ),
    "rejects": SettingType(_folder, "a path, or a URL of a file system of pyarrow, such as gs://bucket/folder"),
}


class _Writing:
    """What both writers share. Spark creates a writer in a Python process of the driver and sends it to executors."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Check options and columns. Raises SettingError."""
        if overwrite:
            raise SettingError("The outbox can only be appended to: pass mode('append') or outputMode('append')")
        values, self._database = given_options(options, _KINDS, ignored=("checkpointLocation",))
        self._topic, self._key = values.get("topic", ""), values.get("key", ())
        self._names = schema.fieldNames()
        self._rejects: str | None = values.get("rejects")
        self._run = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"
        check(schema, self._topic, self._key)

    @without_stack_trace()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Register the rows of a partition in their order. Spark calls this on an executor."""
        rows = complete(self._names, self._topic, self._key, iterator)  # OUT-SPARK-3: with IDs
        with ExitStack() as files:
            file = None
            # Whether a task is new is only counted by the job.
            for answers in register_rows(self._database, datetime.min.replace(tzinfo=UTC), 0.0, rows):
                if rejected := [each for each in answers if each["reason"] is not None]:
                    file = file or files.enter_context(self._open(rejected[0]))
                    file.write("".join(f"{_line(each, 'reason')}\n" for each in rejected).encode())
        return WriterCommitMessage()

    def _open(self, first: Mapping[str, Any]) -> Any:
        """Open the file for the rejects of this Spark task. Another attempt replaces it. Raises OutboxError."""
        if not self._rejects:
            raise OutboxError(
                f"A row is rejected: {first['reason']}. The row is {(first['line'] or _line(first))[:1000]}. "
                "Correct it, or pass the option rejects, a folder for rejected rows"
            )
        task: Any = TaskContext.get()
        query, number = task.getLocalProperty(_QUERY), task.getLocalProperty(_BATCH)
        system, folder = FileSystem.from_uri(f"{self._rejects}/{f'{query}/{number}' if query else self._run}")
        system.create_dir(folder, recursive=True)
        return system.open_output_stream(f"{folder}/part-{task.partitionId():05}.json")


class OutboxWriter(_Writing, DataSourceArrowWriter):
    """Registers the rows of a DataFrame."""


class OutboxStreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Registers the rows of each micro-batch of a stream."""


def _line(answer: Mapping[str, Any], *more: str) -> str:
    return json_line({name: answer[name] for name in (*more, *schemas.INPUT.fieldNames()[:-1])})

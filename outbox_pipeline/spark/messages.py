"""What is in the messages of tasks, wherever the tasks were read."""

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from outbox_pipeline import schemas
from outbox_pipeline.source.columns import message_columns

_DECODED = [schemas.DERIVED["Attributes"], schemas.DERIVED["Payload"]]


def decoded(tasks: DataFrame) -> DataFrame:
    """Return tasks with `Attributes` and `Payload`, as the data source has them, from their `Id` and `Data`."""
    return tasks.mapInArrow(_decode, StructType([*tasks.schema.fields, *_DECODED]))


def _decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    added = schemas.arrow(StructType(_DECODED))
    for batch in batches:
        made = message_columns(batch["Id"].to_pylist(), batch["Data"].to_pylist())
        arrays = [*batch.columns, *(made[field.name].cast(field.type) for field in added)]
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*batch.schema, *added]))

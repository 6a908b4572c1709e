"""Decodes the messages of tasks, from the table or from the archive."""

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from outbox_pipeline import schemas
from outbox_pipeline.source.columns import message_columns

_DECODED = [schemas.DERIVED["Attributes"], schemas.DERIVED["Payload"]]


def decoded(tasks: DataFrame) -> DataFrame:
    """Add the data source's columns `Attributes` and `Payload` to tasks with `Id` and `Data`."""
    return tasks.mapInArrow(_decode, StructType([*tasks.schema.fields, *_DECODED]))


def _decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    added = schemas.arrow(StructType(_DECODED))
    for batch in batches:
        messages = message_columns(batch["Id"].to_pylist(), batch["Data"].to_pylist())
        arrays = [*batch.columns, *(messages[field.name].cast(field.type) for field in added)]
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*batch.schema, *added]))

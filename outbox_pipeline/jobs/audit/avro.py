"""Reads the Avro files of Pub/Sub's Cloud Storage subscriptions, without a jar.

The schema is PubsubMessageWithMetadata, see
https://cloud.google.com/pubsub/docs/create-cloudstorage-subscription#file_format.
"""

from collections.abc import Iterator
from typing import Any

import fastavro
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, MapType, StringType, StructField, StructType, TimestampType

from outbox.errors import OutboxError, SettingError
from outbox.storage.sql import chunked
from outbox_pipeline import schemas

_MESSAGES = StructType(
    [
        StructField("message_id", StringType()),
        StructField("publish_time", TimestampType()),
        StructField("attributes", MapType(StringType(), StringType())),
        StructField("data", BinaryType()),
    ]
)
#: Max messages, and max bytes of their data, in an Arrow batch.
_ROWS, _BYTES = 2_000, 8_000_000


def read_avro(spark: SparkSession, path: str) -> DataFrame:
    """Return the messages of Avro files. A Spark task holds a whole file in memory.

    Spark raises SettingError if the files have another schema, and OutboxError if a file is damaged.
    """
    files = spark.read.format("binaryFile").load(path).select("path", "content")
    return files.mapInArrow(_decode, _MESSAGES)


def _decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    schema = schemas.arrow(_MESSAGES)
    for batch in batches:
        for path, content in zip(batch["path"].to_pylist(), batch["content"], strict=True):
            try:
                file: Any = fastavro.reader(pa.BufferReader(content.as_buffer()))
                _check(path, {field["name"] for field in file.writer_schema["fields"]})
                for messages in chunked(file, _ROWS, _BYTES, lambda message: len(message["data"])):
                    yield pa.RecordBatch.from_pylist(messages, schema)
            except OutboxError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise OutboxError(f"{path} is not a complete Avro file of Pub/Sub messages: {reason}") from error


def _check(path: str, fields: set[str]) -> None:
    if missing := [name for name in _MESSAGES.names if name not in fields]:
        raise SettingError(
            f"{path} has no field {missing[0]}. Set write_metadata and remove use_topic_schema in the configuration of "
            "the subscription"
        )

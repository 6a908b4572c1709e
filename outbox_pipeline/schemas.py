"""The schemas of DataFrames: tasks, rows to register, and the results of Spark tasks."""

from inspect import signature
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DateType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_TEXT, _NUMBER, _TIME, _BYTES, _YES = StringType(), LongType(), TimestampType(), BinaryType(), BooleanType()
ATTRIBUTES = MapType(StringType(), StringType(), valueContainsNull=False)

#: The columns of the table, in its order and with its names.
TABLE = StructType(
    [
        StructField("Id", _TEXT, nullable=False),
        StructField("Topic", _TEXT, nullable=False),
        StructField("Data", _BYTES, nullable=False),
        StructField("Bytes", _NUMBER, nullable=False),
        StructField("Priority", _NUMBER, nullable=False),
        StructField("OrderingKey", _TEXT),
        StructField("Sequence", _NUMBER),
        StructField("Shard", _NUMBER, nullable=False),
        StructField("CreatedAt", _TIME, nullable=False),
        StructField("AvailableAt", _TIME),
        StructField("BlockedBy", _TEXT),
        StructField("ExpiresAt", _TIME),
        StructField("AtMostOnce", _YES, nullable=False),
        StructField("Attempts", _NUMBER, nullable=False),
        StructField("LastError", _TEXT),
        StructField("TimesSent", _NUMBER, nullable=False),
        StructField("SentAt", _TIME),
    ]
)
#: Columns derived from the table: the state at the read timestamp, and the message in Data as subscribers get it. The
#: message is NULL if Data is not a message.
DERIVED = StructType(
    [
        StructField("State", _TEXT, nullable=False),
        StructField("Attributes", ATTRIBUTES),
        StructField("Payload", _BYTES),
    ]
)
#: All columns of the data source.
TASK = StructType([*TABLE.fields, *DERIVED.fields])

#: A row to register, after its columns were parsed. `reason` is why the row is rejected, or NULL.
INPUT = StructType(
    [
        StructField("task_id", _TEXT),
        StructField("topic", _TEXT),
        StructField("data", _BYTES),
        StructField("attributes", MapType(StringType(), StringType())),
        StructField("priority", _NUMBER),
        StructField("ordering_key", _TEXT),
        StructField("available_at", _TIME),
        StructField("expires_at", _TIME),
        StructField("at_most_once", _YES),
        StructField("sequence", _NUMBER),
        StructField("line", _TEXT),
        StructField("reason", _TEXT),
    ]
)

#: An archived task: the table's columns, and the day (UTC) of its SentAt.
ARCHIVED = StructType([*TABLE.fields, StructField("SentDate", DateType(), nullable=False)])
#: The partition columns of the archive, and all its columns. TopicFolder exists because not every topic is a valid
#: folder name.
ARCHIVE_PARTITIONS = ("SentDate", "TopicFolder")
STORED = StructType([*ARCHIVED.fields, StructField("TopicFolder", _TEXT, nullable=False)])

#: One row for each chunk of a purge.
PURGED = StructType(
    [
        StructField("deleted", _NUMBER, nullable=False),
        StructField("resent", _NUMBER, nullable=False),
        StructField("missing", _NUMBER, nullable=False),
    ]
)
#: One row for each worker of a drain.
DRAINED = StructType(
    [
        StructField("published", _NUMBER, nullable=False),
        StructField("already_published", _NUMBER, nullable=False),
        StructField("uncommitted", _NUMBER, nullable=False),
        StructField("failed", _NUMBER, nullable=False),
        StructField("became_dead", _NUMBER, nullable=False),
        StructField("unconfirmed", _NUMBER, nullable=False),
        StructField("aborted", _NUMBER, nullable=False),
    ]
)

#: A sending of a task, or an unsent task, as the audit shuffles it: without the message.
SEND = StructType(
    [
        StructField("task_id", _TEXT),
        StructField("topic", _TEXT),
        StructField("key", _NUMBER),
        StructField("sequence", _NUMBER),
        StructField("created_at", _TIME),
        StructField("sent_at", _TIME),
        StructField("dead", _YES),
        StructField("digest", _NUMBER),
    ]
)
#: A sending with the outcome. If no task has the ID, the task's columns are NULL. `state` is NULL outside the window.
#: `first` is true if no earlier sending of the ID is known.
JUDGED = StructType(
    [
        *(field for field in SEND if field.name not in ("dead", "digest")),
        StructField("state", _TEXT),
        StructField("first_at", _TIME),
        StructField("messages", _NUMBER),
        StructField("republished", _NUMBER),
        StructField("redelivered", _NUMBER),
        StructField("mismatched", _NUMBER),
        StructField("first", _YES),
    ]
)
#: A finding of the audit: a task, or an ID that no task has. `overtaken_at` is when an earlier task of its ordering key
#: was first published, `processed_at` is from the inbox.
FOUND = StructType(
    [
        StructField("class", _TEXT),
        *(JUDGED[name] for name in ("task_id", "topic", "created_at", "sent_at", "first_at", "messages")),
        StructField("overtaken_at", _TIME),
        StructField("processed_at", _TIME),
    ]
)

#: The columns of an archived task that a replay inserts again.
ARCHIVED_ROW = StructType(
    [TABLE[name] for name in ("Id", "Topic", "Data", "Priority", "OrderingKey", "Sequence", "CreatedAt", "AtMostOnce")]
)
#: One row for each chunk of a replay.
REPLAYED = StructType(
    [StructField(name, _NUMBER, nullable=False) for name in ("replayed", "registered", "unsent", "resent", "missing")]
)


def arrow(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects for batches of these columns, including nullability."""
    # Spark 4.0 has no argument `timezone` and always uses UTC.
    zoned: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zoned)

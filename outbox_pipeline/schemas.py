"""The columns of DataFrames: of tasks as they are read, of rows to be registered, of what the jobs answer."""

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
#: What is worked out of them: the state at the time of the reading, and the message in Data as subscribers get it, NULL
#: where Data is no message.
DERIVED = StructType(
    [
        StructField("State", _TEXT, nullable=False),
        StructField("Attributes", ATTRIBUTES),
        StructField("Payload", _BYTES),
    ]
)
#: Every column that the data source can give.
TASK = StructType([*TABLE.fields, *DERIVED.fields])

#: A row to be registered, after its columns have been read; `reason` says why it cannot be.
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

#: What an archived task has: the table's columns, and the day (UTC) of its SentAt.
ARCHIVED = StructType([*TABLE.fields, StructField("SentDate", DateType(), nullable=False)])
#: By what its files are parted, and all that they hold. A folder cannot have each name that a topic can.
ARCHIVE_PARTITIONS = ("SentDate", "TopicFolder")
STORED = StructType([*ARCHIVED.fields, StructField("TopicFolder", _TEXT, nullable=False)])

#: One row a chunk of a purge.
PURGED = StructType(
    [
        StructField("deleted", _NUMBER, nullable=False),
        StructField("changed", _NUMBER, nullable=False),
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

#: A sending of a task, or an unsent task, as the audit moves it: no body.
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
#: The same with what came of it. Of an id that no task has, all that is the task's is NULL. `state` is NULL outside of
#: the window; `first` tells that no earlier sending of the id is known.
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
#: What the audit tells of one task, or of one id that no task has; `overtaken_at` is when a later task of its key came.
FOUND = StructType(
    [
        StructField("class", _TEXT),
        *(JUDGED[name] for name in ("task_id", "topic", "created_at", "sent_at", "first_at", "messages")),
        StructField("overtaken_at", _TIME),
    ]
)

#: What of an archived task is inserted again.
ARCHIVED_ROW = StructType(
    [TABLE[name] for name in ("Id", "Topic", "Data", "Priority", "OrderingKey", "Sequence", "CreatedAt", "AtMostOnce")]
)
#: One row a chunk of a replay.
REPLAYED = StructType(
    [StructField(name, _NUMBER, nullable=False) for name in ("replayed", "registered", "waiting", "changed", "missing")]
)


def arrow(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of batches of these columns, to the last nullability."""
    # Spark 4.0 has no such argument: its times are in UTC here.
    zoned: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zoned)

"""The parts of statements, and the whole statements, that more than one package sends. Values are parameters.

Aliases differ from column names, because Spanner compares names without case: `Shard = shard` is true for every row.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from google.cloud.spanner_v1 import param_types

from outbox.table.states import NEVER_SQL

#: The index for polls: (Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt).
TO_SEND_INDEX = "AsynchronousTasksToSend"
TO_SEND = f"AsynchronousTasks@{{FORCE_INDEX={TO_SEND_INDEX}}}"
#: The whole key of that index. A statement that orders by it needs no sort, whatever the optimizer infers.
TO_SEND_ORDER = "Shard, SentAt, Topic, AvailableAt, Priority DESC, CreatedAt"
#: A range of that index: the unsent tasks of a shard and topic.
OF_TOPIC = "Shard = in_shard AND SentAt IS NULL AND Topic = of_topic"
#: The shards and topics of these ranges.
EACH_TOPIC = "UNNEST(@shards) AS in_shard, UNNEST(@topics) AS of_topic"
#: The index for ordering keys: the unsent tasks of a topic and key in order.
IN_ORDER = "AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksInOrder}"
IN_ORDER_ORDER = "Shard, OrderingKey, Topic, SentAt, CreatedAt, Sequence, Id"
#: The index of the cancelled tasks: (Shard, SentAt).
TO_RESTORE = "AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksToRestore}"
#: The table by primary key: one seek for each ID of a joined list, so that a transaction locks nothing else.
BY_ID = "AsynchronousTasks@{FORCE_INDEX=_BASE_TABLE}"
#: A join that seeks once for each row on its left.
SEEK = "JOIN@{FORCE_JOIN_ORDER=TRUE, JOIN_METHOD=APPLY_JOIN}"

#: A worker's row may be deleted this many seconds after the worker's last heartbeat.
FORGET_WORKER_SECONDS = 3600

#: The types of all parameters but those of a filter (`outbox_admin.tasks.selections`), whose values have their type.
_TYPES = {
    **dict.fromkeys(("after", "after_created", "end", "now", "since", "start", "until"), param_types.TIMESTAMP),
    **dict.fromkeys(("after_id", "from_topic", "id", "operation"), param_types.STRING),
    **dict.fromkeys(("principal", "token", "topic"), param_types.STRING),
    **dict.fromkeys(("below", "ceiling", "limit", "max_rows", "per_key", "per_range"), param_types.INT64),
    **dict.fromkeys(("after_sequence", "characters", "shard"), param_types.INT64),
    **dict.fromkeys(("highs", "ids", "keys", "lows", "range_topics", "topics"), param_types.Array(param_types.STRING)),
    **dict.fromkeys(("range_shards", "shards"), param_types.Array(param_types.INT64)),
    "skip_dead": param_types.BOOL,
}
_OF_VALUES = {str: param_types.STRING, int: param_types.INT64, bool: param_types.BOOL, datetime: param_types.TIMESTAMP}


def parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `execute_sql` for these parameters."""
    types = {name: _TYPES.get(name) or _OF_VALUES[type(value)] for name, value in values.items()}
    return {"params": dict(values), "param_types": types}


NOW = "SELECT CURRENT_TIMESTAMP()"


def workers(*more: str) -> str:
    """Return the statement for all heartbeats. Each row has these columns, and then `more`.

    The worker's ID, the milliseconds since its last heartbeat, the seconds for which a heartbeat makes it live, and the
    layouts that it polls. Reads a whole small table. Any program may write LivenessTimeoutSeconds, so the statement
    bounds it. A huge value would overflow, or make a dead worker live for ever, and no other would poll its shards.
    """
    columns = (
        "WorkerId",
        "TIMESTAMP_DIFF(CURRENT_TIMESTAMP(), SeenAt, MILLISECOND)",
        f"GREATEST(0, LEAST(LivenessTimeoutSeconds, {FORGET_WORKER_SECONDS}))",
        "Polls",
    )
    return f"SELECT {', '.join((*columns, *more))}\nFROM AsynchronousTaskWorkers"


WORKERS = workers()
#: The ordering keys to read. The n-th row has the n-th key of @keys, its topic from @topics and its shard from @shards.
KEYS = """(
    SELECT of_key, @topics[OFFSET(place)] AS of_topic, @shards[OFFSET(place)] AS in_shard
    FROM UNNEST(@keys) AS of_key WITH OFFSET AS place)"""
#: The condition for the unsent rows of AsynchronousTasksInOrder. With @skip_dead it leaves out dead tasks. It uses only
#: columns of the index, so that a LIMIT applies before any row of the table is read.
UNSENT_OF_KEY = (
    f"OrderingKey IS NOT NULL AND SentAt IS NULL AND NOT (@skip_dead AND COALESCE(AvailableAt >= {NEVER_SQL}, FALSE))"
)
#: The IDs of the first unsent tasks of each key, at most @per_key, due or not. One short range of the index per key.
FIRST_OF_KEYS = f"""
  SELECT first.Id FROM {KEYS}, UNNEST(ARRAY(
    SELECT AS STRUCT Id FROM {IN_ORDER}
    WHERE Shard = in_shard AND OrderingKey = of_key AND Topic = of_topic AND {UNSENT_OF_KEY}
    ORDER BY {IN_ORDER_ORDER} LIMIT @per_key)) AS first"""

#: The layouts of the table that hold all tasks: column and number of shards. Before the first reshard there is no row.
LAYOUTS = "SELECT ColumnName, Shards FROM AsynchronousTaskShards WHERE State = 'polled'"

#: A hint: lock what the statement reads, exclusively.
EXCLUSIVE = "@{LOCK_SCANNED_RANGES=exclusive}"
#: Whether the task @id is unsent, and its ordering key, with an exclusive lock of its row. It always returns one row.
LOCK_UNSENT = f"{EXCLUSIVE}\nSELECT COUNT(*) > 0, MAX(OrderingKey) FROM {BY_ID} WHERE Id = @id AND SentAt IS NULL"
#: The columns that a cancel writes, after the ID: the commit timestamp, and who cancels.
CANCEL_COLUMNS = ("SentAt", "CancelledBy")
#: The deferred tasks that become the first of their keys when the tasks @ids are taken out, each with the end of its
#: deferral, with exclusive locks. A retrying task that has expired blocks no task. A dead task does not count as a
#: head, because it may have expired, or workers may skip dead tasks. If it does block its key, workers defer the
#: released tasks again.
NEXT_OF_KEYS = f"""{EXCLUSIVE}
SELECT task.Id, task.AvailableAt FROM (
  SELECT first.Id AS next_id FROM (
    SELECT DISTINCT Topic AS of_topic, OrderingKey AS of_key, Shard AS in_shard
    FROM UNNEST(@ids) AS wanted {SEEK} {BY_ID} AS removed ON removed.Id = wanted
    WHERE OrderingKey IS NOT NULL), UNNEST(ARRAY(
      SELECT AS STRUCT Id FROM {IN_ORDER}
      WHERE Shard = in_shard AND OrderingKey = of_key AND Topic = of_topic AND OrderingKey IS NOT NULL
        AND SentAt IS NULL AND CancelledBy IS NULL AND NOT COALESCE(AvailableAt >= {NEVER_SQL}, FALSE)
        AND Id NOT IN UNNEST(@ids)
        AND NOT COALESCE(AvailableAt > CURRENT_TIMESTAMP() AND BlockedBy IS NULL
          AND ExpiresAt <= CURRENT_TIMESTAMP(), FALSE)
      ORDER BY {IN_ORDER_ORDER} LIMIT 1)) AS first)
{SEEK} {BY_ID} AS task ON task.Id = next_id
WHERE task.BlockedBy IS NOT NULL"""
#: The columns that a release writes, after the ID. It sets them to NULL.
RELEASED = ("AvailableAt", "BlockedBy")


def by_ids(columns: str, *, lock: bool = False) -> str:
    """Return the statement for `columns` of the tasks @ids, by one seek each, with exclusive locks if `lock`."""
    hint = EXCLUSIVE if lock else ""
    return f"{hint}\nSELECT {columns}\nFROM UNNEST(@ids) AS wanted\n{SEEK} {BY_ID} AS task ON task.Id = wanted"


def at_now(statement: str, now: str = "@now") -> str:
    """Return a statement for the time @now or another SQL expression, so that several statements mean the same time."""
    return statement.replace("CURRENT_TIMESTAMP()", now)


def as_structs(statement: str) -> str:
    """Return a statement as an array of its rows, so that one row of a larger statement holds all of them."""
    return f"ARRAY({statement.replace('SELECT', 'SELECT AS STRUCT', 1)})"

"""All SQL of the relay. Values are always parameters.

The poll reads ranges of the index AsynchronousTasksToSend (Shard, SentAt, Topic, AvailableAt, Priority DESC,
CreatedAt), and never the table. For each shard and topic the ready tasks are one range and the due tasks another, each
read with a limit. Aliases differ from column names, because names are compared without case and `Shard = shard` would
be true for every row.
"""

from outbox.storage.sql import BY_ID, IN_ORDER, NEVER, SEEK, TO_SEND

#: Seconds after its last heartbeat for which a worker counts as live. With the time until the others read heartbeats
#: again, they take over its shards within the liveness timeout of 15 s.
LIVENESS_TIMEOUT_SECONDS = 13
#: Seconds after its last heartbeat at which a worker's row may be deleted.
FORGET_WORKER_SECONDS = 3600

# Ready tasks by priority, then age.
_READY = f"""
SELECT task.* FROM UNNEST(@shards) AS in_shard, UNNEST(@topics) AS of_topic, UNNEST(ARRAY(
  SELECT AS STRUCT Id, Topic, Shard, Priority, CreatedAt, AvailableAt, OrderingKey, Bytes FROM {TO_SEND}
  WHERE Shard = in_shard AND SentAt IS NULL AND Topic = of_topic AND AvailableAt IS NULL
  ORDER BY Priority DESC, CreatedAt LIMIT @per_range)) AS task"""
# Ready tasks of lower priorities, for the fair share.
_LOWER = f"""
SELECT task.* FROM UNNEST(@shards) AS in_shard, UNNEST(@topics) AS of_topic, UNNEST(ARRAY(
  SELECT AS STRUCT Id, Topic, Shard, Priority, CreatedAt, AvailableAt, OrderingKey, Bytes FROM {TO_SEND}
  WHERE Shard = in_shard AND SentAt IS NULL AND Topic = of_topic AND AvailableAt IS NULL AND Priority < @below
  ORDER BY Priority DESC, CreatedAt LIMIT @per_range)) AS task"""
# Due tasks, the longest due first, which is the order of the index.
_DUE = f"""
SELECT task.* FROM UNNEST(@shards) AS in_shard, UNNEST(@topics) AS of_topic, UNNEST(ARRAY(
  SELECT AS STRUCT Id, Topic, Shard, Priority, CreatedAt, AvailableAt, OrderingKey, Bytes FROM {TO_SEND}
  WHERE Shard = in_shard AND SentAt IS NULL AND Topic = of_topic AND AvailableAt <= CURRENT_TIMESTAMP()
  ORDER BY AvailableAt, Priority DESC, CreatedAt LIMIT @per_range)) AS task"""
#: The poll, by whether it reads due tasks and ready tasks of lower priorities besides the ready ones.
POLLS = {
    (False, False): _READY,
    (False, True): f"{_READY} UNION ALL {_LOWER}",
    (True, False): f"{_READY} UNION ALL {_DUE}",
    (True, True): f"{_READY} UNION ALL {_LOWER} UNION ALL {_DUE}",
}

#: Topic discovery: one unsent row in each gap between the known topics. The n-th gap begins with the n-th of @lows and
#: ends before the n-th of @highs. The first gap holds the empty name, which another writer may have inserted. One seek
#: into AsynchronousTasksToSend for each shard and gap.
DISCOVER_TOPICS = f"""
SELECT found FROM UNNEST(@shards) AS in_shard, (
  SELECT low, high FROM UNNEST(@lows) AS low WITH OFFSET AS of_low
  JOIN UNNEST(@highs) AS high WITH OFFSET AS of_high ON of_low = of_high), UNNEST(ARRAY(
  SELECT Topic FROM {TO_SEND}
  WHERE Shard = in_shard AND SentAt IS NULL AND Topic >= low AND Topic < high
  LIMIT 1)) AS found"""

#: Pauses and limits: the whole of a small table, one row for each topic that an operator has paused or limited.
TOPIC_CONTROLS = "SELECT Topic, Paused, RatePerSecond, Burst, MaxInFlight FROM AsynchronousTaskTopics"

#: The seconds since each worker's last heartbeat: the whole of a small table, one row for each worker.
WORKERS = "SELECT WorkerId, TIMESTAMP_DIFF(CURRENT_TIMESTAMP(), SeenAt, SECOND) FROM AsynchronousTaskWorkers"

# The n-th key is the n-th of @topics, @keys and @shards.
_KEYS = """(
    SELECT of_key, @topics[OFFSET(place)] AS of_topic, @shards[OFFSET(place)] AS in_shard
    FROM UNNEST(@keys) AS of_key WITH OFFSET AS place)"""
# What holds its key back or may go: only columns of the index, so that the limit needs no look into the table.
_STANDS = f"OrderingKey IS NOT NULL AND SentAt IS NULL AND NOT (@skip_dead AND COALESCE(AvailableAt >= {NEVER}, FALSE))"


def _waiting(ids: str) -> str:
    """Return the statement that reads from the table what the index of the order does not hold."""
    return f"""
SELECT task.Topic, task.OrderingKey, task.Id, task.Bytes,
  task.AvailableAt IS NULL OR task.AvailableAt <= CURRENT_TIMESTAMP(),
  task.BlockedBy IS NOT NULL, COALESCE(task.ExpiresAt <= CURRENT_TIMESTAMP(), FALSE)
FROM ({ids}) AS front
{SEEK} {BY_ID} AS task
ON task.Id = front.Id
ORDER BY task.CreatedAt, task.Sequence, task.Id"""


#: The first unsent tasks of each key, due or not, in their order: a short range for each.
KEY_HEADS = _waiting(f"""
  SELECT first.Id FROM {_KEYS}, UNNEST(ARRAY(
    SELECT AS STRUCT Id FROM {IN_ORDER}
    WHERE Shard = in_shard AND OrderingKey = of_key AND Topic = of_topic AND {_STANDS}
    ORDER BY CreatedAt, Sequence, Id LIMIT @per_key)) AS first""")

#: All unsent tasks of the keys. If it gives @most rows some may be missing, of any key. The emulator reads the table
#: once for this, and once for each key for the other one.
WHOLE_KEYS = _waiting(f"""
  SELECT Id FROM {_KEYS}
  {SEEK} {IN_ORDER} ON Shard = in_shard AND OrderingKey = of_key AND Topic = of_topic
  WHERE {_STANDS} LIMIT @most""")

#: Makes a name the next one after it.
NEXT = "\0"
#: The next one after the last of all names that STRING(400) can hold: the upper edge of the last gap.
AFTER_ALL_TOPICS = "\U0010ffff" * 400 + NEXT

# The lock hint makes two workers wait for one another here instead of aborting each other at the commit. The others fix
# the plan, one seek into the table for each id, so that nothing else is ever locked; they spare the emulator scans, too
# (docs/decisions/0004-what-made-the-relay-fast.md). A row that was sent meanwhile gives no body. The result must be
# read to its end before the next statement (the client's rule).
LOCK = f"""
@{{LOCK_SCANNED_RANGES=exclusive}}
SELECT Id, Topic, IF(SentAt IS NULL, Data, NULL), OrderingKey, CreatedAt, AvailableAt, SentAt,
  AvailableAt IS NULL AND BlockedBy IS NULL AND ExpiresAt IS NULL AND LastError IS NULL AND Attempts = 0,
  Attempts, ExpiresAt, AtMostOnce, BlockedBy IS NOT NULL, TimesSent, CURRENT_TIMESTAMP()
FROM UNNEST(@ids) AS wanted
{SEEK} {BY_ID} ON Id = wanted"""

#: A sent task is clean, so that setting SentAt to NULL is all it takes to send it again. A failure writes the same
#: columns: an at-most-once task, which was marked before it was published, gets back what the mark took.
MARK_COLUMNS = ("Id", "SentAt", "TimesSent", "AvailableAt", "BlockedBy", "ExpiresAt", "LastError", "Attempts")
#: What is written of a task that was clean before: fewer cells to lock and to write.
MARK_CLEAN_COLUMNS = ("Id", "SentAt", "TimesSent")
#: What is written of a task that is put behind the head of its key.
DEFER_COLUMNS = ("Id", "AvailableAt", "BlockedBy")

HEARTBEAT_COLUMNS = ("WorkerId", "StartedAt", "SeenAt")

# Shard by shard, so that sent rows are not read: SentAt is the second column of the index.
_UNSENT_ROWS = f"UNNEST(@shards) AS in_shard JOIN {TO_SEND} AS task ON task.Shard = in_shard AND task.SentAt IS NULL"

# A deferred task waits for the head of its key, whatever its own attempts. The index does not tell it from a retrying
# one, so the table is read for the few tasks that may be either.
UNSENT = f"""
SELECT Topic, CASE
  WHEN AvailableAt >= {NEVER} THEN 'dead'
  WHEN Topic IN (SELECT Topic FROM AsynchronousTaskTopics WHERE Paused) THEN 'paused'
  WHEN AvailableAt IS NULL OR AvailableAt <= CURRENT_TIMESTAMP() THEN 'pending'
  WHEN Attempts > 0 AND NOT Deferred THEN 'retrying'
  ELSE 'scheduled' END AS State, COUNT(*), COUNT(OrderingKey)
FROM (
  SELECT task.Topic, task.AvailableAt, task.Attempts, task.OrderingKey,
    whole.BlockedBy IS NOT NULL AS Deferred
  FROM {_UNSENT_ROWS}
  LEFT JOIN@{{JOIN_METHOD=APPLY_JOIN}} {BY_ID} AS whole
  ON whole.Id = task.Id AND task.OrderingKey IS NOT NULL AND task.Attempts > 0
    AND task.AvailableAt > CURRENT_TIMESTAMP())
GROUP BY Topic, State ORDER BY Topic, State"""

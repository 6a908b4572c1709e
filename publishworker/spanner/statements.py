"""All SQL of the relay. Values are always parameters.

The poll reads ranges of the index AsynchronousTasksToSend (Shard, SentAt, Topic, AvailableAt, Priority DESC,
CreatedAt), and never the table. For each shard and topic the ready tasks are one range and the due tasks another, each
read with a limit. Aliases differ from column names, because names are compared without case and `Shard = shard` would
be true for every row.
"""

from functools import cache

from outbox.storage.sql import BY_ID, IN_ORDER, NEVER, SEEK, TO_SEND
from outbox.storage.task_states import DEFERRED

#: Seconds after its last heartbeat for which a worker counts as live. With the time until the others read heartbeats
#: again, they take over its shards within the liveness timeout of 15 s.
LIVENESS_TIMEOUT_SECONDS = 13
#: Seconds after its last heartbeat at which a worker's row may be deleted.
FORGET_WORKER_SECONDS = 3600

_COLUMNS = "Id, Topic, Shard, Priority, CreatedAt, AvailableAt, OrderingKey, Bytes"


def _range(condition: str, order: str) -> str:
    return f"""
SELECT task.* FROM UNNEST(@shards) AS in_shard, UNNEST(@topics) AS of_topic, UNNEST(ARRAY(
  SELECT AS STRUCT {_COLUMNS} FROM {TO_SEND}
  WHERE Shard = in_shard AND SentAt IS NULL AND Topic = of_topic AND {condition}
  ORDER BY {order} LIMIT @per_range)) AS task"""


# Ready tasks by priority, then age.
_READY = _range("AvailableAt IS NULL", "Priority DESC, CreatedAt")
# Ready tasks of lower priorities, for the fair share.
_LOWER = _range("AvailableAt IS NULL AND Priority < @below", "Priority DESC, CreatedAt")
# Due tasks, the longest due first, which is the order of the index.
_DUE = _range("AvailableAt <= CURRENT_TIMESTAMP()", "AvailableAt, Priority DESC, CreatedAt")

# Topic discovery: one unsent row in each gap between the known topics. The n-th gap begins with the n-th of @lows and
# ends before the n-th of @highs. The first gap holds the empty name, which another writer may have inserted.
_PROBES = f"""
SELECT NULL, found, in_shard, 0, NULL, NULL, NULL, 0
FROM UNNEST(@shards) AS in_shard, (
  SELECT low, high FROM UNNEST(@lows) AS low WITH OFFSET AS of_low
  JOIN UNNEST(@highs) AS high WITH OFFSET AS of_high ON of_low = of_high), UNNEST(ARRAY(
  SELECT Topic FROM {TO_SEND}
  WHERE Shard = in_shard AND SentAt IS NULL AND Topic >= low AND Topic < high
  LIMIT 1)) AS found"""

#: A row without CreatedAt is not a task. Its column Shard says what its column Topic is: a topic with unsent tasks (0
#: and more), a paused topic, a live worker, a worker that is long gone, or a topic with limits. The limits, also those
#: of a paused topic, are in the columns Priority (MaxInFlight), OrderingKey (RatePerSecond) and Bytes (Burst).
PAUSED, LIVING, GONE, LIMITED = -1, -2, -3, -4
_PAUSES = f"""
SELECT NULL, Topic, IF(Paused, {PAUSED}, {LIMITED}), MaxInFlight, NULL, NULL, CAST(RatePerSecond AS STRING), Burst
FROM AsynchronousTaskTopics
WHERE Paused OR RatePerSecond IS NOT NULL OR Burst IS NOT NULL OR MaxInFlight IS NOT NULL"""
_WORKERS = f"""
SELECT NULL, WorkerId, IF(Age < {LIVENESS_TIMEOUT_SECONDS}, {LIVING}, {GONE}), 0, NULL, NULL, NULL, 0
FROM (SELECT WorkerId, TIMESTAMP_DIFF(CURRENT_TIMESTAMP(), SeenAt, SECOND) AS Age FROM AsynchronousTaskWorkers)
WHERE Age < {LIVENESS_TIMEOUT_SECONDS} OR Age > {FORGET_WORKER_SECONDS}"""


@cache
def poll(*, due: bool, lower: bool, news: bool) -> str:
    """Return the poll's statement: ready tasks, and optionally due ones, those of lower priority, and news."""
    parts = [(True, _READY), (lower, _LOWER), (due, _DUE), (news, _PROBES), (news, _PAUSES), (news, _WORKERS)]
    return "\nUNION ALL".join(part for wanted, part in parts if wanted)


# The n-th key is the n-th of @topics and of @keys.
_KEYS = "(SELECT of_key, @topics[OFFSET(place)] AS of_topic FROM UNNEST(@keys) AS of_key WITH OFFSET AS place)"
# What holds its key back or may go: only columns of the index, so that the limit needs no look into the table.
_STANDS = f"OrderingKey IS NOT NULL AND SentAt IS NULL AND NOT (@skip_dead AND COALESCE(AvailableAt >= {NEVER}, FALSE))"


def _waiting(ids: str) -> str:
    """Return the statement that reads from the table what the index of the order does not hold."""
    return f"""
SELECT task.Topic, task.OrderingKey, task.Id, task.Bytes,
  task.AvailableAt IS NULL OR task.AvailableAt <= CURRENT_TIMESTAMP(),
  COALESCE(STARTS_WITH(task.LastError, '{DEFERRED}'), FALSE), COALESCE(task.ExpiresAt <= CURRENT_TIMESTAMP(), FALSE)
FROM ({ids}) AS front
{SEEK} {BY_ID} AS task
ON task.Id = front.Id
ORDER BY task.CreatedAt, task.Sequence, task.Id"""


#: The first unsent tasks of each key, due or not, in their order: a short range for each.
KEY_HEADS = _waiting(f"""
  SELECT first.Id FROM {_KEYS}, UNNEST(ARRAY(
    SELECT AS STRUCT Id FROM {IN_ORDER}
    WHERE OrderingKey = of_key AND Topic = of_topic AND {_STANDS}
    ORDER BY CreatedAt, Sequence, Id LIMIT @per_key)) AS first""")

#: All unsent tasks of the keys. If it gives @most rows some may be missing, of any key. The emulator reads the table
#: once for this, and once for each key for the other one.
WHOLE_KEYS = _waiting(f"""
  SELECT Id FROM {_KEYS}
  {SEEK} {IN_ORDER} ON OrderingKey = of_key AND Topic = of_topic
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
  AvailableAt IS NULL AND ExpiresAt IS NULL AND LastError IS NULL AND Attempts = 0, Attempts, ExpiresAt, AtMostOnce,
  COALESCE(STARTS_WITH(LastError, '{DEFERRED}'), FALSE), CURRENT_TIMESTAMP()
FROM UNNEST(@ids) AS wanted
{SEEK} {BY_ID} ON Id = wanted"""

#: A sent task is clean, so that setting SentAt to NULL is all it takes to send it again. A failure writes the same
#: columns: a task that was marked before it was published, at most once, gets back what the mark took.
MARK_COLUMNS = ("Id", "SentAt", "AvailableAt", "ExpiresAt", "LastError", "Attempts")
#: What is written of a task that was clean before: fewer cells to lock and to write.
MARK_CLEAN_COLUMNS = ("Id", "SentAt")
#: What is written of a task that is put behind the head of its key.
DEFER_COLUMNS = ("Id", "AvailableAt", "LastError")

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
    COALESCE(STARTS_WITH(whole.LastError, '{DEFERRED}'), FALSE) AS Deferred
  FROM {_UNSENT_ROWS}
  LEFT JOIN@{{JOIN_METHOD=APPLY_JOIN}} {BY_ID} AS whole
  ON whole.Id = task.Id AND task.OrderingKey IS NOT NULL AND task.Attempts > 0
    AND task.AvailableAt > CURRENT_TIMESTAMP())
GROUP BY Topic, State ORDER BY Topic, State"""

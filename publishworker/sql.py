"""Every statement of the relay. Parameters only, no text is ever put together from data.

The poll reads ranges of the index AsynchronousTasksToSend (Shard, SentAt, Topic, AvailableAt, Priority DESC,
CreatedAt) and nothing of the table: per shard and topic the ready tasks are one range, the due ones another, and each
is read with a limit. A paused topic is not asked for, so its tasks cost nothing. Aliases differ from column names:
names are compared without case, and `Shard = shard` would be true for every row.
"""

_INDEX = "AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksToSend}"
_COLUMNS = "Id, Topic, Shard, Priority, CreatedAt, AvailableAt, OrderingKey, Bytes"

# By priority, then age.
_READY = f"""
SELECT task.* FROM UNNEST(@shards) AS in_shard, UNNEST(@topics) AS of_topic, UNNEST(ARRAY(
  SELECT AS STRUCT {_COLUMNS} FROM {_INDEX}
  WHERE Shard = in_shard AND SentAt IS NULL AND Topic = of_topic AND AvailableAt IS NULL
  ORDER BY Priority DESC, CreatedAt LIMIT @per_range)) AS task"""

# Longest due first.
_DUE = f"""
SELECT task.* FROM UNNEST(@shards) AS in_shard, UNNEST(@topics) AS of_topic, UNNEST(ARRAY(
  SELECT AS STRUCT {_COLUMNS} FROM {_INDEX}
  WHERE Shard = in_shard AND SentAt IS NULL AND Topic = of_topic AND AvailableAt <= CURRENT_TIMESTAMP()
  ORDER BY AvailableAt LIMIT @per_range)) AS task"""

# One unsent row in each gap between the known topics: the n-th gap lies between the n-th of @lows and of @highs.
_PROBES = f"""
SELECT NULL, found, in_shard, 0, NULL, NULL, NULL, 0
FROM UNNEST(@shards) AS in_shard, (
  SELECT low, high FROM UNNEST(@lows) AS low WITH OFFSET AS of_low
  JOIN UNNEST(@highs) AS high WITH OFFSET AS of_high ON of_low = of_high), UNNEST(ARRAY(
  SELECT Topic FROM {_INDEX}
  WHERE Shard = in_shard AND SentAt IS NULL AND Topic > low AND Topic < high
  LIMIT 1)) AS found"""

#: Stands in the column of the shard where a row of POLL_ALL names a paused topic.
PAUSED = -1
_PAUSED = f"SELECT NULL, Topic, {PAUSED}, 0, NULL, NULL, NULL, 0 FROM AsynchronousTaskTopics WHERE Paused"

#: What the poll reads while there is a backlog.
POLL_READY = _READY
#: What it reads once in a poll interval: due tasks, new topics and paused ones as well.
POLL_ALL = f"{_READY}\nUNION ALL{_DUE}\nUNION ALL{_PROBES}\nUNION ALL\n{_PAUSED}"

#: The last of all names that STRING(400) can hold: the upper edge of the last gap.
LAST_TOPIC = "\U0010ffff" * 400

# The hint makes two workers wait for one another here instead of aborting each other at the commit. A row that was
# sent meanwhile gives no body. The result must be read to its end before the next statement (the client's rule).
LOCK = """
@{LOCK_SCANNED_RANGES=exclusive}
SELECT Id, Topic, IF(SentAt IS NULL, Data, NULL), OrderingKey, CreatedAt, AvailableAt, SentAt, CURRENT_TIMESTAMP()
FROM AsynchronousTasks WHERE Id IN UNNEST(@ids)"""

#: A sent task is clean, so that setting SentAt to NULL is all it takes to send it again.
MARK_COLUMNS = ("Id", "SentAt", "AvailableAt", "ExpiresAt", "LastError", "Attempts")

# Shard by shard, so that sent rows are not read: SentAt is the second column of the index.
_UNSENT_ROWS = f"UNNEST(@shards) AS in_shard JOIN {_INDEX} AS task ON task.Shard = in_shard AND task.SentAt IS NULL"

OLDEST_AGE = f"""
SELECT TIMESTAMP_DIFF(CURRENT_TIMESTAMP(), MIN(GREATEST(CreatedAt, COALESCE(AvailableAt, CreatedAt))), MICROSECOND)
FROM {_UNSENT_ROWS}
WHERE (AvailableAt IS NULL OR AvailableAt <= CURRENT_TIMESTAMP())
AND Topic NOT IN (SELECT Topic FROM AsynchronousTaskTopics WHERE Paused)"""

UNSENT = f"""
SELECT Topic, CASE
  WHEN AvailableAt >= TIMESTAMP '9999-12-31T00:00:00Z' THEN 'dead'
  WHEN Topic IN (SELECT Topic FROM AsynchronousTaskTopics WHERE Paused) THEN 'paused'
  WHEN AvailableAt IS NULL OR AvailableAt <= CURRENT_TIMESTAMP() THEN 'pending'
  WHEN Attempts > 0 THEN 'retrying'
  ELSE 'scheduled' END AS State, COUNT(*)
FROM {_UNSENT_ROWS} GROUP BY Topic, State ORDER BY Topic, State"""

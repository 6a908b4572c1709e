"""The statements that count tasks and read workers, topics and sent tasks. Values are parameters.

Tasks are read from ranges of the index AsynchronousTasksToSend (Shard, SentAt, Topic, AvailableAt, Priority DESC,
CreatedAt), each with a limit, so the cost of a query does not depend on the backlog. An alias in a WHERE clause must
not equal a column name: Spanner ignores case, so `shard` would mean the column.
"""

from collections.abc import Collection

from outbox.table.shared_sql import BY_ID, OF_TOPIC, SEEK, TO_SEND, TO_SEND_ORDER, at_now, workers
from outbox.table.states import FIRST_DUE_SQL, LATER_SQL, RANGES, STATE_SQL

#: The whole of a table with at most two rows.
RECORDED_SHARDS = "SELECT ColumnName, Shards, State FROM AsynchronousTaskShards ORDER BY ColumnName"

# The topics of the next @limit tasks of each shard, in the order of the index. A small backlog needs one query, and
# each topic with very many tasks another one.
NEXT_TOPICS = f"""
SELECT in_shard, part.Topic, part.number FROM UNNEST(@shards) AS in_shard, UNNEST(ARRAY(
  SELECT AS STRUCT Topic, COUNT(*) AS number FROM (
    SELECT Topic FROM {TO_SEND}
    WHERE Shard = in_shard AND SentAt IS NULL AND Topic >= @from_topic
    ORDER BY {TO_SEND_ORDER} LIMIT @limit)
  GROUP BY Topic)) AS part"""
TOPICS_WITH_UNSENT = f"""
SELECT name FROM UNNEST(@topics) AS name, UNNEST(ARRAY(
  SELECT 1 FROM {TO_SEND} WHERE Shard IN UNNEST(@shards) AND SentAt IS NULL AND Topic = name LIMIT 1))"""
#: Max characters that are read of an error, a name, a reason or a position.
MAX_TEXT = 1_000
#: The same of an Info. A worker writes at most 6 kB.
MAX_INFO = 8_000
#: Max workers that are read, those with the last heartbeats first.
MAX_WORKERS = 1_000


def at_most(column: str, characters: int = MAX_TEXT) -> str:
    """Return a text of any length as far as it is read: any program may write it. A JSON that is cut is no JSON."""
    return f"SUBSTR({column}, 1, {characters})"


# The n-th range has the n-th shard of @range_shards and the n-th topic of @range_topics.
_RANGES_TO_COUNT = """(
  SELECT in_shard, @range_topics[OFFSET(position)] AS of_topic
  FROM UNNEST(@range_shards) AS in_shard WITH OFFSET AS position)"""


_NO_TIME = "CAST(NULL AS TIMESTAMP)"
_IN_LAST_MINUTE = "> TIMESTAMP_SUB(@now, INTERVAL 1 MINUTE)"


def count_statement(
    rows: str,
    state: str = "''",
    *,
    index: str = TO_SEND,
    first_due: str = _NO_TIME,
    due: str = _NO_TIME,
    registered: str = f"CreatedAt {_IN_LAST_MINUTE}",
) -> str:
    """Return the statement that counts `rows` by topic and state at @now, at most @limit in each range.

    Each row also has the first-due time of the oldest task, the next `due` time, and the number `registered` in the
    last minute.
    """
    return at_now(f"""
SELECT in_shard, of_topic, part.topic, part.state, part.number, part.oldest, part.next_due, part.registered
FROM {_RANGES_TO_COUNT}, UNNEST(ARRAY(
  SELECT AS STRUCT topic, state, COUNT(*) AS number, MIN(IF(first_due <= @now, first_due, NULL)) AS oldest,
    MIN(due) AS next_due, COUNTIF(is_new) AS registered FROM (
    SELECT Topic AS topic, {state} AS state, {first_due} AS first_due, {due} AS due,
      {registered} AS is_new
    FROM {index} WHERE {rows} LIMIT @limit)
  GROUP BY topic, state)) AS part""")


#: The start of the age of a task. Deferred tasks have none, because they wait for the head of their key, which has one.
_AGED_FROM = f"IF(BlockedBy IS NULL, {FIRST_DUE_SQL}, NULL)"
COUNT_READY = count_statement(
    f"{OF_TOPIC} AND AvailableAt IS NULL ORDER BY {TO_SEND_ORDER}", "'pending'", first_due=_AGED_FROM
)
COUNT_DUE = count_statement(
    f"{OF_TOPIC} AND AvailableAt <= @now ORDER BY {TO_SEND_ORDER}", "'pending'", first_due=_AGED_FROM
)
COUNT_LATER = count_statement(
    f"{OF_TOPIC} AND {LATER_SQL} ORDER BY {TO_SEND_ORDER}",
    STATE_SQL,
    first_due=_AGED_FROM,
    due="IF(BlockedBy IS NULL, AvailableAt, NULL)",
)
COUNT_DEAD = count_statement(f"{OF_TOPIC} AND {RANGES['dead'][0]}", "'dead'")
COUNT_SENT = count_statement(
    f"Shard = in_shard AND SentAt {_IN_LAST_MINUTE} AND CancelledBy IS NULL", "'sent_last_minute'"
)
#: The workers with their Info. A worker of an older version has no Info. SAFE: a text of more than
#: 1 MiB would be an error.
WORKERS_AT = f"""{at_now(workers("StartedAt", "SeenAt", at_most("SAFE.TO_JSON_STRING(Info)", MAX_INFO)))}
ORDER BY SeenAt DESC LIMIT {MAX_WORKERS}"""


#: The columns of `sent_after`.
SENT_COLUMNS = ("SentAt", "CreatedAt", "Sequence", "Id", "Topic", "Priority", "OrderingKey", "Bytes")


def sent_after(names: Collection[str]) -> str:
    """Return the statement for the first @limit tasks sent at @after or later, by SentAt.

    The index has no Sequence, so Sequence is read only for the tasks in the result.
    """
    of_topic = " AND Topic = @topic" if "topic" in names else ""
    return f"""
SELECT {", ".join(SENT_COLUMNS)} FROM (
  SELECT task.Id AS found FROM UNNEST(@shards) AS in_shard, UNNEST(ARRAY(
    SELECT AS STRUCT SentAt, Id FROM {TO_SEND}
    WHERE Shard = in_shard AND SentAt >= @after AND CancelledBy IS NULL{of_topic}
    ORDER BY {TO_SEND_ORDER} LIMIT @limit)) AS task
  ORDER BY SentAt LIMIT @limit)
{SEEK} {BY_ID} ON Id = found"""

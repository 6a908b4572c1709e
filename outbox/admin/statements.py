"""The statements of the operators' commands. Values are always parameters, never part of the text.

Tasks are read from ranges of the index AsynchronousTasksToSend (Shard, SentAt, Topic, AvailableAt, Priority DESC,
CreatedAt), each with a limit, so the cost of a query does not depend on the backlog. Aliases differ from column names,
because names are case-insensitive.
"""

import json
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from google.cloud.spanner_v1 import param_types

from outbox.shared.times import shown
from outbox.storage.task_states import STATES

_INDEX = "AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksToSend}"
_NEVER = "TIMESTAMP '9999-12-31T00:00:00Z'"
_IS_DEFERRED = "BlockedBy IS NOT NULL"
_WAITS = f"AvailableAt > CURRENT_TIMESTAMP() AND AvailableAt < {_NEVER}"
_RETRIES = f"{_WAITS} AND Attempts > 0 AND BlockedBy IS NULL"
_SCHEDULED = f"{_WAITS} AND (Attempts = 0 OR {_IS_DEFERRED})"
_IS_EXPIRED = "(SentAt IS NULL AND COALESCE(ExpiresAt <= CURRENT_TIMESTAMP(), FALSE))"
_DEAD = f"AvailableAt >= {_NEVER}"

#: The rows of each state, as a condition for DML.
CONDITIONS = {
    "pending": "SentAt IS NULL AND (AvailableAt IS NULL OR AvailableAt <= CURRENT_TIMESTAMP())",
    "retrying": f"SentAt IS NULL AND {_RETRIES}",
    "scheduled": f"SentAt IS NULL AND {_SCHEDULED}",
    "dead": f"SentAt IS NULL AND {_DEAD}",
    "sent": "SentAt IS NOT NULL",
}
IS_DEFERRED = f"{CONDITIONS['scheduled']} AND {_IS_DEFERRED}"
_STATE = "CASE {} END".format(" ".join(f"WHEN {CONDITIONS[state]} THEN '{state}'" for state in STATES))

# In the index, a state is one range for each shard and topic. Pending tasks are two ranges.
_RANGES = {
    "pending": ("AvailableAt IS NULL", "AvailableAt <= CURRENT_TIMESTAMP()"),
    "retrying": (_RETRIES,),
    "scheduled": (_SCHEDULED,),
    "dead": (_DEAD,),
}
_AS_INDEXED = "AvailableAt, Priority DESC, CreatedAt"
_PENDING_ORDER = "Priority DESC, CreatedAt"

TYPES = {
    "after": param_types.TIMESTAMP,
    "after_id": param_types.STRING,
    "belows": param_types.Array(param_types.INT64),
    "error": param_types.STRING,
    "from_topic": param_types.STRING,
    "id": param_types.STRING,
    "ids": param_types.Array(param_types.STRING),
    "keys": param_types.Array(param_types.STRING),
    "limit": param_types.INT64,
    "names": param_types.Array(param_types.STRING),
    "now": param_types.TIMESTAMP,
    "places": param_types.Array(param_types.INT64),
    "shard": param_types.INT64,
    "shards": param_types.Array(param_types.INT64),
    "since": param_types.TIMESTAMP,
    "topic": param_types.STRING,
    "topics": param_types.Array(param_types.STRING),
    "until": param_types.TIMESTAMP,
}

NOW = "SELECT CURRENT_TIMESTAMP()"

# The topics of the next @limit tasks of each shard, in the order of the index. A small backlog needs one query, a topic
# with very many tasks needs one of its own.
NEXT_TOPICS = f"""
SELECT in_shard, part.Topic, part.number FROM UNNEST(@shards) AS in_shard, UNNEST(ARRAY(
  SELECT AS STRUCT Topic, COUNT(*) AS number FROM (
    SELECT Topic FROM {_INDEX}
    WHERE Shard = in_shard AND SentAt IS NULL AND Topic >= @from_topic
    ORDER BY Topic LIMIT @limit)
  GROUP BY Topic)) AS part"""
CONTROLLED_TOPICS = "SELECT Topic FROM AsynchronousTaskTopics"
WAITING_TOPICS = f"""
SELECT name FROM UNNEST(@topics) AS name, UNNEST(ARRAY(
  SELECT 1 FROM {_INDEX} WHERE Shard IN UNNEST(@shards) AND SentAt IS NULL AND Topic = name LIMIT 1))"""
PAUSED_TOPICS = "SELECT Topic FROM AsynchronousTaskTopics WHERE Paused ORDER BY Topic LIMIT @limit"
CONTROLS = "SELECT Topic, Paused, RatePerSecond, Burst, MaxInFlight FROM AsynchronousTaskTopics ORDER BY Topic"

#: Workers whose liveness timeout of 15 s (docs/architecture/workers.md) has not passed.
LIVE_WORKERS = "SELECT COUNT(*) FROM AsynchronousTaskWorkers WHERE SeenAt > TIMESTAMP_SUB(@now, INTERVAL 15 SECOND)"


def _counted(places: str, rows: str) -> str:
    """Return the statement that counts `rows` by topic, priority and state, at most @limit in each shard and place.

    `oldest` is when the oldest of the tasks became ready or due.
    """
    return f"""
SELECT in_shard, part.topic, part.priority, part.state, part.number, part.oldest
FROM UNNEST(@shards) AS in_shard{places}, UNNEST(ARRAY(
  SELECT AS STRUCT topic, priority, state, COUNT(*) AS number, MIN(ready_since) AS oldest
  FROM ({rows} LIMIT @limit) GROUP BY topic, priority, state)) AS part"""


# Priorities above `below` have already been counted for the topic.
_TOPICS = """, (
  SELECT of_topic, @belows[OFFSET(place)] AS below FROM UNNEST(@topics) AS of_topic WITH OFFSET AS place)"""
_OF_TOPIC = "Shard = in_shard AND SentAt IS NULL AND Topic = of_topic"

# The n-th place consists of the n-th shard in @places, the n-th topic in @names and the n-th priority in @belows.
_PLACES = """(
  SELECT in_shard, @names[OFFSET(place)] AS of_topic, @belows[OFFSET(place)] AS below
  FROM UNNEST(@places) AS in_shard WITH OFFSET AS place)"""
_READY_BELOW = f"{_OF_TOPIC} AND AvailableAt IS NULL AND Priority <= below ORDER BY Priority DESC, CreatedAt"

OLDEST_READY = f"""
SELECT in_shard, of_topic, first.Priority, first.CreatedAt FROM {_PLACES}, UNNEST(ARRAY(
  SELECT AS STRUCT Priority, CreatedAt FROM {_INDEX} WHERE {_READY_BELOW} LIMIT 1)) AS first"""
# For very many priorities: the oldest of the first @limit tasks of each place.
OLDEST_OF_SOME_READY = f"""
SELECT MIN(next.CreatedAt) FROM {_PLACES}, UNNEST(ARRAY(
  SELECT AS STRUCT CreatedAt FROM {_INDEX} WHERE {_READY_BELOW} LIMIT @limit)) AS next"""
# A task whose AvailableAt was already past at registration has been due since CreatedAt, so the first @limit tasks are
# read, not only the first.
OLDEST_DUE = f"""
SELECT MIN(GREATEST(first.CreatedAt, first.AvailableAt))
FROM UNNEST(@shards) AS in_shard, UNNEST(@topics) AS of_topic, UNNEST(ARRAY(
  SELECT AS STRUCT CreatedAt, AvailableAt FROM {_INDEX}
  WHERE {_OF_TOPIC} AND AvailableAt <= @now ORDER BY AvailableAt LIMIT @limit)) AS first"""

COUNT_READY = _counted(
    _TOPICS,
    f"""
    SELECT Topic AS topic, Priority AS priority, 'pending' AS state, CreatedAt AS ready_since FROM {_INDEX}
    WHERE {_OF_TOPIC} AND AvailableAt IS NULL AND Priority <= below
    ORDER BY Priority DESC, CreatedAt""",
)
COUNT_DUE = _counted(
    ", UNNEST(@topics) AS of_topic",
    f"""
    SELECT Topic AS topic, Priority AS priority, 'pending' AS state, GREATEST(CreatedAt, AvailableAt) AS ready_since
    FROM {_INDEX} WHERE {_OF_TOPIC} AND AvailableAt <= @now
    ORDER BY AvailableAt""",
)
# A deferred task counts as scheduled, even after failed attempts. The index does not distinguish it from a retrying
# task, so the table is read for the few tasks that may be either.
COUNT_WAITING = _counted(
    ", UNNEST(@topics) AS of_topic",
    f"""
    SELECT task.Topic AS topic, task.Priority AS priority,
      IF(task.Attempts = 0 OR whole.BlockedBy IS NOT NULL, 'scheduled', 'retrying') AS state,
      CAST(NULL AS TIMESTAMP) AS ready_since
    FROM {_INDEX} AS task
    LEFT JOIN@{{JOIN_METHOD=APPLY_JOIN}} AsynchronousTasks@{{FORCE_INDEX=_BASE_TABLE}} AS whole
    ON whole.Id = task.Id AND task.OrderingKey IS NOT NULL AND task.Attempts > 0
    WHERE task.Shard = in_shard AND task.SentAt IS NULL AND task.Topic = of_topic
      AND task.AvailableAt > @now AND task.AvailableAt < {_NEVER}""",
)
COUNT_DEAD = _counted(
    ", UNNEST(@topics) AS of_topic",
    f"""
    SELECT Topic AS topic, Priority AS priority, 'dead' AS state, CAST(NULL AS TIMESTAMP) AS ready_since
    FROM {_INDEX} WHERE {_OF_TOPIC} AND {_DEAD}""",
)
COUNT_SENT = _counted(
    "",
    f"""
    SELECT Topic AS topic, Priority AS priority, 'sent' AS state, CAST(NULL AS TIMESTAMP) AS ready_since
    FROM {_INDEX} WHERE Shard = in_shard AND SentAt > TIMESTAMP_SUB(@now, INTERVAL 1 MINUTE)""",
)


def narrowed(state: str | None, names: Collection[str]) -> str:
    """Return the conditions for `topic`, `since`, `until` and `error`, if in `names`. Each begins with AND.

    Times are compared with SentAt of sent tasks, and with CreatedAt of others.
    """
    time = {"sent": "SentAt", None: "COALESCE(SentAt, CreatedAt)"}.get(state, "CreatedAt")
    conditions = {
        "topic": "Topic = @topic",
        "since": f"{time} >= @since",
        "until": f"{time} < @until",
        "error": "STRPOS(LOWER(LastError), LOWER(@error)) > 0",
        "unexpired": f"NOT {_IS_EXPIRED}",
    }
    return "".join(f" AND {condition}" for name, condition in conditions.items() if name in names)


def _parts(state: str, columns: str, names: Collection[str]) -> list[str]:
    more = narrowed(state, names)
    if state == "sent":
        return [
            f"SELECT {columns} FROM {_INDEX} WHERE Shard = in_shard AND SentAt IS NOT NULL{more} ORDER BY SentAt DESC"
        ]
    orders = (_PENDING_ORDER, _AS_INDEXED) if state == "pending" else (_AS_INDEXED,)
    return [
        f"SELECT {columns} FROM {_INDEX} WHERE {_OF_TOPIC} AND {each}{more} ORDER BY {order}"
        for each, order in zip(_RANGES[state], orders, strict=True)
    ]


def _places(state: str) -> str:
    return "" if state == "sent" else ", UNNEST(@topics) AS of_topic"


def listed(state: str, columns: str, names: Collection[str]) -> str:
    """Return the statement for `columns` of the first @limit tasks in a state at @now. Sent tasks are newest first."""
    order = {"pending": _PENDING_ORDER, "sent": "SentAt DESC"}.get(state, _AS_INDEXED)
    # The arrays hold only the columns for sorting. The other columns are read only for the tasks in the result.
    union = "\nUNION ALL".join(
        f"""
  SELECT task.* FROM UNNEST(@shards) AS in_shard{_places(state)}, UNNEST(ARRAY(
    {part.replace("SELECT", "SELECT AS STRUCT", 1)} LIMIT @limit)) AS task"""
        for part in _parts(state, "Id, SentAt, AvailableAt, Priority, CreatedAt", names)
    )
    statement = f"""
SELECT {columns} FROM (
  SELECT Id AS found FROM ({union})
  ORDER BY {order}, Id LIMIT @limit)
JOIN@{{FORCE_JOIN_ORDER=TRUE, JOIN_METHOD=APPLY_JOIN}} AsynchronousTasks@{{FORCE_INDEX=_BASE_TABLE}} ON Id = found
ORDER BY {order}, Id"""
    # Each state has its own query. With CURRENT_TIMESTAMP(), a task could be in none of them, or in two.
    return statement.replace("CURRENT_TIMESTAMP()", "@now")


def counted(state: str, names: Collection[str]) -> str:
    """Return the statement that counts the tasks of a state, up to @limit in each shard and topic, one row for each."""
    # Without ORDER BY, because a count needs no order and sorting costs time.
    return "\nUNION ALL".join(
        f"""
SELECT part.number FROM UNNEST(@shards) AS in_shard{_places(state)}, UNNEST(ARRAY(
  SELECT AS STRUCT COUNT(*) AS number FROM ({part.partition(" ORDER BY ")[0]} LIMIT @limit))) AS part"""
        for part in _parts(state, "Id", names)
    )


def next_ids(state: str, names: Collection[str]) -> str:
    """Return the statement for the next @limit tasks (Id, SentAt) of @shard, and of @topics unless the state is sent.

    Sent tasks are in index order, starting at @after, because all earlier tasks have been changed. Other tasks start
    after @after_id, so that a task that fails and is dead again is not selected twice.
    """
    more = narrowed(state, names)
    if state == "sent":
        return f"""
SELECT Id, SentAt FROM {_INDEX} WHERE Shard = @shard AND SentAt >= @after{more}
ORDER BY SentAt, Topic, AvailableAt, Priority DESC, CreatedAt, Id LIMIT @limit"""
    [range_] = _RANGES[state]
    return f"""
SELECT Id, SentAt FROM UNNEST(@topics) AS of_topic
JOIN {_INDEX} ON Shard = @shard AND SentAt IS NULL AND Topic = of_topic AND {range_}
WHERE Id > @after_id{more}
ORDER BY Id LIMIT @limit"""


def sent_after(names: Collection[str]) -> str:
    """Return the statement for the first @limit tasks that were sent after the position (@after, @after_id)."""
    return f"""
SELECT task.* FROM UNNEST(@shards) AS in_shard, UNNEST(ARRAY(
  SELECT AS STRUCT SentAt, Id, Topic, Priority, OrderingKey, Bytes, CreatedAt FROM {_INDEX}
  WHERE Shard = in_shard AND SentAt >= @after AND (SentAt > @after OR Id > @after_id){narrowed("sent", names)}
  ORDER BY SentAt, Id LIMIT @limit)) AS task
ORDER BY SentAt, Id LIMIT @limit"""


def by_ids(condition: str) -> str:
    """Return the statement that reads tasks by @ids. The plan makes one seek for each, so it locks no other rows.

    Further states here are `deferred`, and `expired`: not pending, and ExpiresAt has passed.
    """
    return f"""
SELECT Id, Topic, OrderingKey, Shard,
  CASE WHEN {IS_DEFERRED} THEN 'deferred' WHEN {_IS_EXPIRED} AND NOT ({CONDITIONS["pending"]}) THEN 'expired'
    ELSE {_STATE} END,
  COALESCE({condition}, FALSE), CURRENT_TIMESTAMP(), IF(ExpiresAt > CURRENT_TIMESTAMP(), ExpiresAt, NULL)
FROM UNNEST(@ids) AS wanted
JOIN@{{FORCE_JOIN_ORDER=TRUE, JOIN_METHOD=APPLY_JOIN}} AsynchronousTasks@{{FORCE_INDEX=_BASE_TABLE}} ON Id = wanted"""


def locked(condition: str) -> str:
    """Return `by_ids` with an exclusive lock, so that no worker publishes these tasks at the same time."""
    return "@{LOCK_SCANNED_RANGES=exclusive}" + by_ids(condition)


# The first tasks whose ID begins with each of @ids. The task with that ID itself comes first.
BEGINNING_WITH = """
SELECT prefix, task.Id FROM UNNEST(@ids) AS prefix, UNNEST(ARRAY(
  SELECT AS STRUCT Id FROM AsynchronousTasks@{FORCE_INDEX=_BASE_TABLE}
  WHERE Id BETWEEN prefix AND CONCAT(prefix, '\\U0010FFFF') ORDER BY Id LIMIT @limit)) AS task"""


def task(columns: str) -> str:
    """Return the statement for the `columns` and the state of the task @id."""
    return f"SELECT {columns}, {_STATE} FROM AsynchronousTasks WHERE Id = @id"


# The n-th key consists of the n-th topic in @topics, the n-th ordering key in @keys and its shard in @shards.
KEY_HEADS = """
SELECT first.Id FROM (
  SELECT of_key, @topics[OFFSET(place)] AS of_topic, @shards[OFFSET(place)] AS in_shard
  FROM UNNEST(@keys) AS of_key WITH OFFSET AS place), UNNEST(ARRAY(
  SELECT AS STRUCT Id FROM AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksInOrder}
  WHERE OrderingKey IS NOT NULL AND Shard = in_shard AND OrderingKey = of_key AND Topic = of_topic AND SentAt IS NULL
  ORDER BY CreatedAt, Sequence, Id LIMIT 1)) AS first"""

RETRY = """\
UPDATE AsynchronousTasks
SET SentAt = NULL, ExpiresAt = IF(ExpiresAt > CURRENT_TIMESTAMP(), ExpiresAt, NULL), BlockedBy = NULL, Attempts = 0,
  AvailableAt = CURRENT_TIMESTAMP()"""
DELETE = "DELETE FROM AsynchronousTasks"


def written_out(statement: str, condition: str, values: Mapping[str, Any]) -> str:
    """Return DML with literals instead of parameters, to be read by people and run in any client."""
    return f"{statement}\nWHERE " + re.sub(r"@(\w+)", lambda match: _literal(values[match[1]]), condition)


def _literal(value: Any) -> str:
    if isinstance(value, datetime):
        return f"TIMESTAMP '{shown(value)}'"
    if isinstance(value, str):
        # GoogleSQL accepts JSON's escapes. Single quotes, because a shell often has the statement in double quotes.
        text = json.dumps(value, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'")
        return "'" + "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text) + "'"
    return f"({', '.join(map(_literal, value))})"

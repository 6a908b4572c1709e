"""The statements of the operators' commands. Values are parameters.

Tasks are read from ranges of the index AsynchronousTasksToSend (Shard, SentAt, Topic, AvailableAt, Priority DESC,
CreatedAt), each with a limit, so the cost of a query does not depend on the backlog. An alias in a WHERE clause must
not equal a column name: Spanner ignores case, so `shard` would mean the column.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

from outbox.base.values import MAX_JSON
from outbox.table.shared_sql import (
    BY_ID,
    EACH_TOPIC,
    IN_ORDER,
    IN_ORDER_ORDER,
    OF_TOPIC,
    SEEK,
    TO_RESTORE,
    TO_SEND,
    TO_SEND_ORDER,
    at_now,
    workers,
)
from outbox.table.shared_sql import by_ids as of_ids
from outbox.table.states import CANCELLED, CONDITIONS, FIRST_DUE_SQL, LATER_SQL, NO_SEQUENCE, RANGES, STATE_SQL

#: UUIDs, and words with a digit: numbers, IDs, times and addresses. Errors that differ only in them are of one group.
#: The reason at the beginning of LastError has none, so errors of different reasons never are. Python and Spanner read
#: the expression alike.
_IDS = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|\w*[0-9]\w*"
_CHARACTERS = 200
_LINE = "SPLIT(LastError, '\\n')[SAFE_OFFSET(0)]"
#: What groups errors, and an error as an example of its group.
_ERROR_GROUP = f"SUBSTR(REGEXP_REPLACE({_LINE}, r'{_IDS}', '#'), 1, {_CHARACTERS})"
_ERROR = f"SUBSTR({_LINE}, 1, {_CHARACTERS})"
_IS_EXPIRED = "(SentAt IS NULL AND COALESCE(ExpiresAt <= CURRENT_TIMESTAMP(), FALSE))"
#: Of a task read by its ID: it is deferred, and an unsent task of its key that has not expired is where BlockedBy says.
#: Otherwise the head was deleted or changed by SQL, and blocks the task no more.
HELD = f"""{RANGES["blocked"][0]} AND EXISTS (
    SELECT 1 FROM {BY_ID} AS head
    WHERE head.Id = task.BlockedBy AND head.Topic = task.Topic AND head.OrderingKey = task.OrderingKey
      AND head.SentAt IS NULL AND COALESCE(head.ExpiresAt > CURRENT_TIMESTAMP(), TRUE))"""
#: The ranges of each state. Due tasks are a part of the pending ones.
_RANGES = RANGES | {"due": RANGES["pending"][1:]}
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
#: Max characters that are read of an error, a name, a reason or a position, and of an Info, which has at most 12 kB.
#: Max rows of workers, those with the last heartbeats first.
MAX_TEXT, MAX_INFO, MAX_WORKERS = 1_000, 16_000, 1_000


def at_most(column: str, characters: int = MAX_TEXT) -> str:
    """Return a text of any length as far as it is read: any program may write it. A JSON that is cut is no JSON."""
    return f"SUBSTR({column}, 1, {characters})"


def listed_columns(names: Iterable[str]) -> str:
    """Return the columns of a task as they are read."""
    return ", ".join(at_most(name) if name == "LastError" else name for name in names)


_OPERATIONS = "AsynchronousTaskOperations@{FORCE_INDEX=_BASE_TABLE}"
_OPERATION_COLUMNS = f"""OperationId, Operation, StartedAt, FinishedAt, {at_most("Principal")},
  {at_most("Selection", MAX_JSON)}, Tasks, {at_most("Reason")}, Selected,
  SeenAt, StoppedAt, {at_most("Position", MAX_JSON)}"""
OPERATION = f"SELECT {_OPERATION_COLUMNS} FROM {_OPERATIONS} WHERE OperationId = @id"
PROGRESS = f"SELECT Tasks, {at_most('Position')} FROM {_OPERATIONS} WHERE OperationId = @id"
#: The number of tasks of an operation, with an exclusive lock.
LOCK_TASKS = f"@{{LOCK_SCANNED_RANGES=exclusive}}\nSELECT Tasks FROM {_OPERATIONS} WHERE OperationId = @id"
#: A range for each first digit of an ID. The last operations of a range come first (`operations.new_id`).
_ID_RANGES = "ARRAY<STRUCT<low STRING, high STRING>>[{}]".format(
    ", ".join(f"('{low}', '{high}')" for low, high in pairwise(["", *"123456789abcdef", "\\U0010FFFF"]))
)


def error_group(error: str | None) -> str:
    """Return what groups an error, as in SQL: the beginning of its first line, without IDs and numbers."""
    return re.sub(_IDS, "#", (error or "").split("\n")[0], flags=re.ASCII)[:_CHARACTERS]


def latest_operations(names: Collection[str], *, views: bool = True) -> str:
    """Return the statement for the last @limit operations with the conditions in `names`, which are of parameters.

    @topic is quoted as in JSON. Of each range, only the first @ceiling operations are compared.
    """
    conditions = {
        "operation": "Operation = @operation",
        "topic": "STRPOS(Selection, @topic) > 0",
        "principal": "STRPOS(LOWER(Principal), LOWER(@principal)) > 0",
    }
    kinds = "TRUE" if views else "Operation != 'view'"
    where = " AND ".join([kinds, *(condition for name, condition in conditions.items() if name in names)])
    compared_columns = [column for column in ("Selection", "Principal") if column in where]
    return f"""
SELECT {_OPERATION_COLUMNS} FROM (
  SELECT part.OperationId AS found FROM UNNEST({_ID_RANGES}) AS ids, UNNEST(ARRAY(
    SELECT AS STRUCT OperationId, StartedAt FROM (
      SELECT {", ".join(["OperationId, StartedAt, Operation", *compared_columns])} FROM {_OPERATIONS}
      WHERE OperationId >= ids.low AND OperationId < ids.high ORDER BY OperationId LIMIT @ceiling)
    WHERE {where})) AS part
  ORDER BY part.StartedAt DESC, part.OperationId LIMIT @limit)
{SEEK} {_OPERATIONS} ON OperationId = found
ORDER BY StartedAt DESC, OperationId"""


# The n-th range has the n-th shard of @range_shards, the n-th topic of @range_topics and the n-th max priority.
_RANGES_TO_COUNT = """(
  SELECT in_shard, @range_topics[OFFSET(position)] AS of_topic, @max_priorities[OFFSET(position)] AS max_priority
  FROM UNNEST(@range_shards) AS in_shard WITH OFFSET AS position)"""


_NO_TIME = "CAST(NULL AS TIMESTAMP)"
_IN_LAST_MINUTE = "> TIMESTAMP_SUB(@now, INTERVAL 1 MINUTE)"


def counted(
    rows: str,
    state: str = "''",
    *,
    index: str = TO_SEND,
    priority: str = "Priority",
    first_due: str = _NO_TIME,
    due: str = _NO_TIME,
    registered: str = f"CreatedAt {_IN_LAST_MINUTE}",
) -> str:
    """Return the statement that counts `rows` by topic, priority and state at @now, at most @limit in each range.

    Also when the oldest of the tasks should first have been sent, when the next one will be `due`, and how many of them
    were `registered` in the last minute.
    """
    return at_now(f"""
SELECT in_shard, of_topic, part.topic, part.priority, part.state, part.number, part.oldest, part.next_due,
  part.registered
FROM {_RANGES_TO_COUNT}, UNNEST(ARRAY(
  SELECT AS STRUCT topic, priority, state, COUNT(*) AS number, MIN(IF(first_due <= @now, first_due, NULL)) AS oldest,
    MIN(due) AS next_due, COUNTIF(is_new) AS registered FROM (
    SELECT Topic AS topic, {priority} AS priority, {state} AS state, {first_due} AS first_due, {due} AS due,
      {registered} AS is_new
    FROM {index} WHERE {rows} LIMIT @limit)
  GROUP BY topic, priority, state)) AS part""")


#: The start of the age of a task. Deferred tasks have none, because they wait for the head of their key, which has one.
_AGED_FROM = f"IF(BlockedBy IS NULL, {FIRST_DUE_SQL}, NULL)"
COUNT_READY = counted(
    f"{OF_TOPIC} AND AvailableAt IS NULL AND Priority <= max_priority ORDER BY {TO_SEND_ORDER}",
    "'pending'",
    first_due=_AGED_FROM,
)
COUNT_DUE = counted(f"{OF_TOPIC} AND AvailableAt <= @now ORDER BY {TO_SEND_ORDER}", "'pending'", first_due=_AGED_FROM)
COUNT_LATER = counted(
    f"{OF_TOPIC} AND {LATER_SQL} ORDER BY {TO_SEND_ORDER}",
    STATE_SQL,
    first_due=_AGED_FROM,
    due="IF(BlockedBy IS NULL, AvailableAt, NULL)",
)
COUNT_DEAD = counted(f"{OF_TOPIC} AND {RANGES['dead'][0]}", "'dead'")
COUNT_SENT = counted(f"Shard = in_shard AND SentAt {_IN_LAST_MINUTE} AND CancelledBy IS NULL", "'sent_last_minute'")
#: The workers, with what they say about themselves. A worker of an older version has no Info. SAFE: a text of more than
#: 1 MiB would be an error.
WORKERS_AT = f"""{at_now(workers("StartedAt", "SeenAt", at_most("SAFE.TO_JSON_STRING(Info)", MAX_INFO)))}
ORDER BY SeenAt DESC LIMIT {MAX_WORKERS}"""


#: The states of tasks that are in the order of SentAt, and in no range of a topic.
ENDED = ("sent", CANCELLED)
#: The state of a cancelled task whose SentAt another program has set to NULL. No worker publishes it.
MADE_UNSENT = "cancelled_and_made_unsent"


def narrowed(state: str | None, names: Collection[str]) -> str:
    """Return the conditions in `names`, which are names of parameters, or `unexpired`. Each begins with AND.

    `since` and `until` are compared with SentAt of sent and cancelled tasks, and with CreatedAt of others.
    """
    time = "SentAt" if state in ENDED else "CreatedAt" if state else "COALESCE(SentAt, CreatedAt)"
    conditions = {
        "topic": "Topic = @topic",
        "since": f"{time} >= @since",
        "until": f"{time} < @until",
        "error": "STRPOS(LOWER(LastError), LOWER(@error)) > 0",
        "ordering_key": "OrderingKey = @ordering_key AND OrderingKey IS NOT NULL",
        "id_prefix": "STARTS_WITH(Id, @id_prefix)",
        "operation": "CancelledBy = @operation",
        "unexpired": f"NOT {_IS_EXPIRED}",
    }
    return "".join(f" AND {condition}" for name, condition in conditions.items() if name in names)


def _index(names: Collection[str], state: str = "") -> tuple[str, str]:
    """Return the index to read for these conditions, and its key.

    The tasks of an ordering key and cancelled tasks are in indexes of their own. All other conditions but the topic and
    the state are compared with each row of a range.
    """
    if "ordering_key" in names:
        return IN_ORDER, IN_ORDER_ORDER
    return (TO_RESTORE, "Shard, SentAt") if state == CANCELLED else (TO_SEND, TO_SEND_ORDER)


def _number(rows: str, index: str) -> str:
    """Return the statement that counts `rows`. It reads only columns that each index has."""
    return counted(rows, index=index, priority="0", registered="FALSE")


def _ranges_of(state: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the ranges that hold the narrowed tasks of a state: what to repeat each one for, and its condition."""
    narrowing = narrowed(state, names)
    if state in ENDED:
        return [("UNNEST(@shards) AS in_shard", f"Shard = in_shard AND {CONDITIONS[state]}{narrowing}")]
    return [(EACH_TOPIC, f"{OF_TOPIC} AND {range_}{narrowing}") for range_ in _RANGES[state]]


def _beyond(place: Mapping[str, str], *, newest: bool = False) -> str:
    """Return the condition for the rows behind a place: the parameter of each column that they are sorted by."""
    sign, condition = "<" if newest else ">", ""
    for parameter, column in reversed([*place.items()]):
        more = f" OR {column} = @{parameter} AND {condition}" if condition else ""
        condition = f"({column} {sign} @{parameter}{more})"
    return condition


def _listed(time: str) -> dict[str, str]:
    """Return the place of a task in a list."""
    return {"after": time, "after_created": "CreatedAt", "after_id": "Id"}


def _compared(state: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the rows of the index that a list of a state compares, each with the condition for the listed tasks.

    The rows are limited, and the condition follows the limit, so a read ends however few rows match.
    """
    of_key = " AND OrderingKey = @ordering_key AND OrderingKey IS NOT NULL" if "ordering_key" in names else ""
    parts = [(LATER_SQL if LATER_SQL in range_ else range_, range_) for range_ in _RANGES[state]]
    return [
        (
            f"{OF_TOPIC}{of_key} AND {part} ORDER BY {_index(names)[1]}",
            f"TRUE{range_.removeprefix(part)}{narrowed(state, names)}",
        )
        for part, range_ in parts
    ]


def listed_unsent(
    states: Collection[str], columns: str, names: Collection[str], *, newest: bool, attempts: bool = False
) -> str:
    """Return the statement for state and `columns` of the next @limit tasks by CreatedAt and Id, at @now.

    With `attempts`, those with most failed attempts come first.

    The index is not sorted by age, so of each range only the first @ceiling tasks are compared.
    """
    direction = " DESC" if newest else ""
    first = "Attempts DESC, " if attempts else ""
    more = {"error": "LastError", "unexpired": "SentAt, ExpiresAt"}  # The index does not have these.
    narrowing = [column for name, column in more.items() if name in names]
    compared_columns = ", ".join(["Id, Topic, CreatedAt, OrderingKey, Attempts, BlockedBy", *narrowing])
    # The arrays hold only the columns for sorting. The other columns are read only for the tasks in the result.
    union = "\nUNION ALL".join(
        f"""
  SELECT '{state}' AS in_state, task.* FROM {EACH_TOPIC}, UNNEST(ARRAY(
    SELECT AS STRUCT Id, CreatedAt, Attempts FROM (
      SELECT {compared_columns} FROM {_index(names)[0]} WHERE {rows} LIMIT @ceiling)
    WHERE {condition})) AS task"""
        for state in states
        for rows, condition in _compared(state, names)
    )
    # All states are those at one time. With CURRENT_TIMESTAMP(), a task could be in none of them, or in two.
    return at_now(f"""
SELECT in_state, {columns} FROM (
  SELECT in_state, Id AS found FROM ({union})
  WHERE {_beyond(_listed("CreatedAt"), newest=newest)}
  ORDER BY {first}CreatedAt{direction}, Id{direction} LIMIT @limit)
{SEEK} {BY_ID} ON Id = found""")


def listed_ended(ended: str, columns: str, names: Collection[str], *, newest: bool) -> str:
    """Return the statement for state and `columns` of the next @limit sent, or cancelled, tasks in the order of SentAt.

    Tasks with the same SentAt are in the order of CreatedAt and Id.
    """
    place = _listed("SentAt")
    order = ", ".join(f"{name} DESC" if newest else name for name in place.values())
    [(places, where)] = _ranges_of(ended, names)
    return f"""
SELECT '{ended}', {columns} FROM (
  SELECT task.Id AS found FROM {places}, UNNEST(ARRAY(
    SELECT AS STRUCT SentAt, CreatedAt, Id FROM {_index(names, ended)[0]}
    WHERE {where} AND {_beyond(place, newest=newest)}
    ORDER BY {order} LIMIT @limit)) AS task
  ORDER BY {order} LIMIT @limit)
{SEEK} {BY_ID} ON Id = found"""


def compared(states: Collection[str], names: Collection[str]) -> list[str]:
    """Return the statements that count the tasks that `listed_unsent` compares."""
    rows = dict.fromkeys(rows for state in states for rows, _ in _compared(state, names))
    return [_number(each, _index(names)[0]) for each in rows]


def first_ended(ended: str) -> str:
    """Return the statement for when the first task was sent, or cancelled, for each shard that has such a task."""
    index, key = _index((), ended)
    return f"""
SELECT task.SentAt FROM UNNEST(@shards) AS in_shard, UNNEST(ARRAY(
  SELECT AS STRUCT SentAt FROM {index} WHERE Shard = in_shard AND {CONDITIONS[ended]}
  ORDER BY {key} LIMIT 1)) AS task"""


def counts_of_state(state: str, names: Collection[str]) -> list[str]:
    """Return the statements that count the narrowed tasks of a state.

    With one @now, the counts of several selections add up, however long they take.
    """
    # Without ORDER BY, because a count needs no order and sorting costs time.
    return [_number(where, _index(names, state)[0]) for _, where in _ranges_of(state, names)]


def blocked_heads(columns: str) -> str:
    """Return the statement for the @limit heads that block most tasks: ID, number, state and `columns`."""
    # All tasks behind a head are in one shard and topic. Of a head that is gone, all columns are NULL.
    return at_now(f"""
SELECT head_id, number, {STATE_SQL}, {columns} FROM (
  SELECT part.head_id, part.number FROM {EACH_TOPIC}, UNNEST(ARRAY(
    SELECT AS STRUCT BlockedBy AS head_id, COUNT(*) AS number FROM (
      SELECT BlockedBy FROM {TO_SEND} WHERE {OF_TOPIC} AND {LATER_SQL} ORDER BY {TO_SEND_ORDER} LIMIT @ceiling)
    WHERE BlockedBy IS NOT NULL GROUP BY BlockedBy)) AS part
  ORDER BY part.number DESC, part.head_id LIMIT @limit)
LEFT {SEEK} {BY_ID} ON Id = head_id
ORDER BY number DESC, head_id""")


def grouped(state: str, names: Collection[str]) -> str:
    """Return the statement for the @limit largest groups of tasks at @now by topic and error, with an example of it."""
    groups = "\nUNION ALL".join(
        f"""
  SELECT part.of_task, part.pattern, part.error FROM {places}, UNNEST(ARRAY(
    SELECT AS STRUCT Topic AS of_task, {_ERROR_GROUP} AS pattern, {_ERROR} AS error
    FROM {_index(names, state)[0]} WHERE {where})) AS part"""
        for places, where in _ranges_of(state, names)
    )
    return at_now(f"""
SELECT of_task, MIN(error), COUNT(*) AS number FROM ({groups})
GROUP BY of_task, pattern ORDER BY number DESC, of_task, pattern LIMIT @limit""")


_SEQUENCE = f"COALESCE(Sequence, {NO_SEQUENCE})"


def order(state: str, *, by_key: bool) -> dict[str, str]:
    """Return what a change of a state sorts the tasks of a shard by: the column of each parameter of a place.

    `by_key`: those of an ordering key are in its order, as cancelled tasks always are.
    """
    if by_key or state == CANCELLED:
        return {"after_created": "CreatedAt", "after_sequence": _SEQUENCE, "after_id": "Id"}
    return {"after": "SentAt", "after_id": "Id"} if state == "sent" else {"after_id": "Id"}


def next_ids(state: str, names: Collection[str], *, by_key: bool = False) -> str:
    """Return the statement for the next @limit tasks of @shard at @now, and of @topics unless they are sent.

    A row has Bytes and its place in the `order`, Id last. Each page begins after the place of the last row before it.
    """
    place, index = order(state, by_key=by_key), _index(names, state)[0]
    columns = ", ".join(place.values())
    if state in ENDED:
        after = "" if "after" not in place else " AND SentAt >= @after"
        rows = f"{index} WHERE Shard = @shard AND {CONDITIONS[state]}{after}"
    else:
        range_ = " OR ".join(RANGES[state])
        rows = f"""UNNEST(@topics) AS of_topic
{SEEK} {index} ON Shard = @shard AND SentAt IS NULL AND Topic = of_topic AND ({range_})
WHERE TRUE"""
    return at_now(f"""
SELECT Bytes, {columns} FROM {rows} AND {_beyond(place)}{narrowed(state, names)}
ORDER BY {columns} LIMIT @limit""")


def messages(condition: str) -> str:
    """Return the statement for the messages of the tasks @ids, with whether each is sent and meets the condition."""
    return of_ids(f"Id, OrderingKey, Data, CreatedAt, SentAt IS NOT NULL, COALESCE({condition}, FALSE)")


#: The columns of `sent_after`.
SENT_COLUMNS = ("SentAt", "CreatedAt", "Sequence", "Id", "Topic", "Priority", "OrderingKey", "Bytes")


def sent_after(names: Collection[str]) -> str:
    """Return the statement for the first @limit tasks sent at @after or later, by SentAt.

    The index has no Sequence, so Sequence is read only for the tasks in the result.
    """
    return f"""
SELECT {", ".join(SENT_COLUMNS)} FROM (
  SELECT task.Id AS found FROM UNNEST(@shards) AS in_shard, UNNEST(ARRAY(
    SELECT AS STRUCT SentAt, Id FROM {TO_SEND}
    WHERE Shard = in_shard AND SentAt >= @after AND CancelledBy IS NULL{narrowed("sent", names)}
    ORDER BY {TO_SEND_ORDER} LIMIT @limit)) AS task
  ORDER BY SentAt LIMIT @limit)
{SEEK} {BY_ID} ON Id = found"""


def by_ids(condition: str, *, lock: bool = False) -> str:
    """Return the statement that reads tasks by @ids, at @now. With `lock`, it reads them now, and locks them.

    A condition with HELD also makes a seek for the head of each deferred task.

    Further states here are MADE_UNSENT and `expired`: neither blocked nor pending, and ExpiresAt has passed. The column
    before the last two is the start of the age of a task that keeps its age when it is retried: one that the workers
    have not given up.
    """
    columns = f"""Id, Topic, OrderingKey, CASE WHEN SentAt IS NULL AND CancelledBy IS NOT NULL THEN '{MADE_UNSENT}'
    WHEN {_IS_EXPIRED} AND NOT ({CONDITIONS["pending"]}) AND NOT ({CONDITIONS["blocked"]})
    THEN 'expired' ELSE {STATE_SQL} END,
  COALESCE({condition}, FALSE), CURRENT_TIMESTAMP(), IF(ExpiresAt > CURRENT_TIMESTAMP(), ExpiresAt, NULL), BlockedBy,
  {_ERROR}, IF({CONDITIONS["retrying"]} OR {CONDITIONS["blocked"]}, {FIRST_DUE_SQL}, NULL), AvailableAt, Bytes"""
    statement = of_ids(columns, lock=lock)
    return statement if lock else at_now(statement)


#: The topics of the tasks @ids, and their places by ordering key.
PLACES = of_ids(f"Id, Topic, CreatedAt, {_SEQUENCE}")


#: How many of the cancelled tasks @ids would follow a later task of their key that was sent since.
OVERTAKEN = f"""
SELECT COUNTIF(task.OrderingKey IS NOT NULL AND EXISTS (
    SELECT 1 FROM {IN_ORDER} AS later
    WHERE later.Shard = task.Shard AND later.OrderingKey = task.OrderingKey AND later.OrderingKey IS NOT NULL
      AND later.Topic = task.Topic AND later.SentAt >= task.SentAt AND later.CancelledBy IS NULL
      AND (later.CreatedAt > task.CreatedAt OR later.CreatedAt = task.CreatedAt
        AND COALESCE(later.Sequence, {NO_SEQUENCE}) > COALESCE(task.Sequence, {NO_SEQUENCE}))))
FROM UNNEST(@ids) AS wanted {SEEK} {BY_ID} AS task ON task.Id = wanted"""


#: The ID and SentAt of tasks, with exclusive locks.
LOCK_SENT_AT = of_ids("Id, SentAt", lock=True)

#: The first tasks whose ID begins with each of @ids.
BEGINNING_WITH = f"""
SELECT prefix, found FROM UNNEST(@ids) AS prefix, UNNEST(ARRAY(
  SELECT Id FROM {BY_ID} WHERE Id BETWEEN prefix AND CONCAT(prefix, '\\U0010FFFF')
  ORDER BY Id LIMIT @limit)) AS found"""


def task(columns: str) -> str:
    """Return the statement for the `columns` and the state of the task @id."""
    return f"SELECT CURRENT_TIMESTAMP(), {STATE_SQL}, {columns} FROM {BY_ID} WHERE Id = @id"

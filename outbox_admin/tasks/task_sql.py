"""The statements that select, list and show tasks. Values are parameters.

Tasks are read from ranges of the index AsynchronousTasksToSend (Shard, SentAt, Topic, AvailableAt, Priority DESC,
CreatedAt). Lists and counts limit each range. A preview and an exact count read all tasks that match. An alias in a
WHERE clause must not equal a column name: Spanner ignores case, so `shard` would mean the column.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from outbox.rows.counts_sql import at_most, count_statement
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
)
from outbox.table.shared_sql import by_ids as of_ids
from outbox.table.states import CANCELLED, CONDITIONS, FIRST_DUE_SQL, LATER_SQL, NO_SEQUENCE, RANGES, STATE_SQL
from outbox_admin.change_kinds import MADE_UNSENT
from outbox_admin.tasks.selections import ENDED, FILTERS

#: UUIDs, and words with a digit: numbers, IDs, times and addresses. Errors that differ only in them are of one group.
#: The reason at the beginning of LastError has none, so errors of different reasons never are. Python and Spanner read
#: the expression alike.
_IDS = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|\w*[0-9]\w*"
_CHARACTERS = 200
_LINE = "SPLIT(LastError, '\\n')[SAFE_OFFSET(0)]"
#: What groups errors, and an error as an example of its group.
ERROR_GROUP = f"SUBSTR(REGEXP_REPLACE({_LINE}, r'{_IDS}', '#'), 1, {_CHARACTERS})"
ERROR = f"SUBSTR({_LINE}, 1, {_CHARACTERS})"
_IS_EXPIRED = "(SentAt IS NULL AND COALESCE(ExpiresAt <= CURRENT_TIMESTAMP(), FALSE))"
UNEXPIRED = f"NOT {_IS_EXPIRED}"
#: Of a task read by its ID: it is deferred, and an unsent task of its key that has not expired is where BlockedBy says.
#: Otherwise the head was deleted or changed by SQL, and blocks the task no more.
STILL_BLOCKED = f"""{RANGES["blocked"][0]} AND EXISTS (
    SELECT 1 FROM {BY_ID} AS head
    WHERE head.Id = task.BlockedBy AND head.Topic = task.Topic AND head.OrderingKey = task.OrderingKey
      AND head.SentAt IS NULL AND COALESCE(head.ExpiresAt > CURRENT_TIMESTAMP(), TRUE))"""
#: The ranges of each state. Due tasks are a part of the pending ones.
_RANGES = RANGES | {"due": RANGES["pending"][1:]}


def listed_columns(names: Iterable[str]) -> str:
    """Return the columns of a task as they are read."""
    return ", ".join(at_most(name) if name == "LastError" else name for name in names)


def error_group(error: str | None) -> str:
    """Return what groups an error, as in SQL: the beginning of its first line, without IDs and numbers."""
    return re.sub(_IDS, "#", (error or "").split("\n")[0], flags=re.ASCII)[:_CHARACTERS]


def narrowed(state: str | None, names: Collection[str]) -> str:
    """Return the conditions in `names`, which are names of filters, or `unexpired`. Each begins with AND."""
    time = "SentAt" if state in ENDED else "CreatedAt" if state else "COALESCE(SentAt, CreatedAt)"
    conditions = {name: each.condition.format(time=time) for name, each in FILTERS.items()}
    conditions["unexpired"] = UNEXPIRED
    return "".join(f" AND {condition}" for name, condition in conditions.items() if name in names)


def index_for(names: Collection[str], state: str = "") -> tuple[str, str]:
    """Return the index to read for these conditions, and its key.

    The tasks of an ordering key and cancelled tasks are in indexes of their own. All other conditions but the topic and
    the state are compared with each row of a range.
    """
    if "ordering_key" in names:
        return IN_ORDER, IN_ORDER_ORDER
    return (TO_RESTORE, "Shard, SentAt") if state == CANCELLED else (TO_SEND, TO_SEND_ORDER)


def _number(rows: str, index: str) -> str:
    """Return the statement that counts `rows`. It reads only columns that each index has."""
    return count_statement(rows, index=index, registered="FALSE")


def ranges_of_state(state: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the ranges that hold the narrowed tasks of a state: what to repeat each one for, and its condition."""
    narrowing = narrowed(state, names)
    if state in ENDED:
        return [("UNNEST(@shards) AS in_shard", f"Shard = in_shard AND {CONDITIONS[state]}{narrowing}")]
    return [(EACH_TOPIC, f"{OF_TOPIC} AND {range_}{narrowing}") for range_ in _RANGES[state]]


def beyond(place: Mapping[str, str], *, newest: bool = False) -> str:
    """Return the condition for the rows behind a place: the parameter of each column that they are sorted by."""
    sign, condition = "<" if newest else ">", ""
    for parameter, column in reversed([*place.items()]):
        more = f" OR {column} = @{parameter} AND {condition}" if condition else ""
        condition = f"({column} {sign} @{parameter}{more})"
    return condition


def _listed(time: str) -> dict[str, str]:
    return {"after": time, "after_created": "CreatedAt", "after_id": "Id"}


def _compared(state: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the rows of the index that a list of a state compares, each with the condition for the listed tasks.

    The rows are limited, and the condition follows the limit, so a read ends however few rows match.
    """
    of_key = f" AND {FILTERS['ordering_key'].condition}" if "ordering_key" in names else ""
    parts = [(LATER_SQL if LATER_SQL in range_ else range_, range_) for range_ in _RANGES[state]]
    return [
        (
            f"{OF_TOPIC}{of_key} AND {part} ORDER BY {index_for(names)[1]}",
            f"TRUE{range_.removeprefix(part)}{narrowed(state, names)}",
        )
        for part, range_ in parts
    ]


def listed_unsent(states: Collection[str], columns: str, names: Collection[str], *, newest: bool) -> str:
    """Return the statement for state and `columns` of the next @limit tasks by CreatedAt and Id, at @now.

    The index is not sorted by age, so of each range only the first @ceiling tasks are compared.
    """
    direction = " DESC" if newest else ""
    more = {name: each.columns for name, each in FILTERS.items()} | {"unexpired": "SentAt, ExpiresAt"}
    narrowing = [more[name] for name in sorted(names) if more[name]]
    compared_columns = ", ".join(["Id, Topic, CreatedAt, OrderingKey, Attempts, BlockedBy", *narrowing])
    # The arrays hold only the columns for sorting. The other columns are read only for the tasks in the result.
    union = "\nUNION ALL".join(
        f"""
  SELECT '{state}' AS in_state, task.* FROM {EACH_TOPIC}, UNNEST(ARRAY(
    SELECT AS STRUCT Id, CreatedAt FROM (
      SELECT {compared_columns} FROM {index_for(names)[0]} WHERE {rows} LIMIT @ceiling)
    WHERE {condition})) AS task"""
        for state in states
        for rows, condition in _compared(state, names)
    )
    # All states are those at one time. With CURRENT_TIMESTAMP(), a task could be in none of them, or in two.
    return at_now(f"""
SELECT in_state, {columns} FROM (
  SELECT in_state, Id AS found FROM ({union})
  WHERE {beyond(_listed("CreatedAt"), newest=newest)}
  ORDER BY CreatedAt{direction}, Id{direction} LIMIT @limit)
{SEEK} {BY_ID} ON Id = found""")


def listed_ended(ended: str, columns: str, names: Collection[str], *, newest: bool) -> str:
    """Return the statement for state and `columns` of the next @limit sent, or cancelled, tasks in the order of SentAt.

    Tasks with the same SentAt are in the order of CreatedAt and Id.
    """
    place = _listed("SentAt")
    order = ", ".join(f"{name} DESC" if newest else name for name in place.values())
    [(places, where)] = ranges_of_state(ended, names)
    return f"""
SELECT '{ended}', {columns} FROM (
  SELECT task.Id AS found FROM {places}, UNNEST(ARRAY(
    SELECT AS STRUCT SentAt, CreatedAt, Id FROM {index_for(names, ended)[0]}
    WHERE {where} AND {beyond(place, newest=newest)}
    ORDER BY {order} LIMIT @limit)) AS task
  ORDER BY {order} LIMIT @limit)
{SEEK} {BY_ID} ON Id = found"""


def compared(states: Collection[str], names: Collection[str]) -> list[str]:
    """Return the statements that count the tasks that `listed_unsent` compares."""
    rows = dict.fromkeys(rows for state in states for rows, _ in _compared(state, names))
    return [_number(each, index_for(names)[0]) for each in rows]


def first_ended(ended: str) -> str:
    """Return the statement for when the first task was sent, or cancelled, for each shard that has such a task."""
    index, key = index_for((), ended)
    return f"""
SELECT task.SentAt FROM UNNEST(@shards) AS in_shard, UNNEST(ARRAY(
  SELECT AS STRUCT SentAt FROM {index} WHERE Shard = in_shard AND {CONDITIONS[ended]}
  ORDER BY {key} LIMIT 1)) AS task"""


def counts_of_state(state: str, names: Collection[str]) -> list[str]:
    """Return the statements that count the narrowed tasks of a state.

    With one @now, the counts of several selections add up, however long they take.
    """
    # Without ORDER BY, because a count needs no order and sorting costs time.
    return [_number(where, index_for(names, state)[0]) for _, where in ranges_of_state(state, names)]


def blocked_heads(columns: str) -> str:
    """Return the statement for the @limit heads that block most tasks: ID, topic, number, state and `columns`."""
    # All tasks behind a head are in one shard and topic. Of a head that is gone, all columns are NULL.
    return at_now(f"""
SELECT head_id, of_topic, number, {STATE_SQL}, {columns} FROM (
  SELECT part.head_id, of_topic, part.number FROM {EACH_TOPIC}, UNNEST(ARRAY(
    SELECT AS STRUCT BlockedBy AS head_id, COUNT(*) AS number FROM (
      SELECT BlockedBy FROM {TO_SEND} WHERE {OF_TOPIC} AND {LATER_SQL} ORDER BY {TO_SEND_ORDER} LIMIT @ceiling)
    WHERE BlockedBy IS NOT NULL GROUP BY BlockedBy)) AS part
  ORDER BY part.number DESC, part.head_id LIMIT @limit)
LEFT {SEEK} {BY_ID} ON Id = head_id
ORDER BY number DESC, head_id""")


SEQUENCE = f"COALESCE(Sequence, {NO_SEQUENCE})"


def by_ids(condition: str, *, lock: bool = False) -> str:
    """Return the statement that reads tasks by @ids, at @now. With `lock`, it reads them now, and locks them.

    A condition with STILL_BLOCKED also makes a seek for the head of each deferred task.

    Further states here are MADE_UNSENT and `expired`: neither blocked nor pending, and ExpiresAt has passed. The column
    before the last two is the start of the age of a task that keeps its age when it is retried: one that the workers
    have not given up.
    """
    columns = f"""Id, Topic, OrderingKey, CASE WHEN SentAt IS NULL AND CancelledBy IS NOT NULL THEN '{MADE_UNSENT}'
    WHEN {_IS_EXPIRED} AND NOT ({CONDITIONS["pending"]}) AND NOT ({CONDITIONS["blocked"]})
    THEN 'expired' ELSE {STATE_SQL} END,
  COALESCE({condition}, FALSE), CURRENT_TIMESTAMP(), IF(ExpiresAt > CURRENT_TIMESTAMP(), ExpiresAt, NULL), BlockedBy,
  {ERROR}, IF({CONDITIONS["retrying"]} OR {CONDITIONS["blocked"]}, {FIRST_DUE_SQL}, NULL), AvailableAt, Bytes"""
    statement = of_ids(columns, lock=lock)
    return statement if lock else at_now(statement)


#: The first tasks whose ID begins with each of @ids.
BEGINNING_WITH = f"""
SELECT prefix, found FROM UNNEST(@ids) AS prefix, UNNEST(ARRAY(
  SELECT Id FROM {BY_ID} WHERE Id BETWEEN prefix AND CONCAT(prefix, '\\U0010FFFF')
  ORDER BY Id LIMIT @limit)) AS found"""


def task(columns: str) -> str:
    """Return the statement for the `columns` and the state of the task @id."""
    return f"SELECT CURRENT_TIMESTAMP(), {STATE_SQL}, {columns} FROM {BY_ID} WHERE Id = @id"

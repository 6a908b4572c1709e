"""The statements that preview and change many tasks. Values are parameters."""

from collections.abc import Collection

from outbox.table.shared_sql import BY_ID, IN_ORDER, SEEK, at_now
from outbox.table.shared_sql import by_ids as of_ids
from outbox.table.states import CANCELLED, CONDITIONS, NO_SEQUENCE, RANGES
from outbox_admin.tasks.selections import ENDED
from outbox_admin.tasks.task_sql import (
    ERROR,
    ERROR_GROUP,
    SEQUENCE,
    UNEXPIRED,
    beyond,
    index_for,
    narrowed,
    ranges_of_state,
)


def grouped(state: str, names: Collection[str]) -> str:
    """Return the statement that counts the tasks at @now: all of them in the first row, and then by topic and error.

    There are @limit rows, the largest groups first. A row has the topic, one of the errors, the number, and how many
    more there are without the condition `unexpired`. All rows come from one scan, which groups the tasks of each range
    first.
    """
    is_selected = UNEXPIRED if "unexpired" in names else "TRUE"
    ranges = "\nUNION ALL".join(
        f"""
  SELECT part.* FROM {places}, UNNEST(ARRAY(
    SELECT AS STRUCT of_task, pattern, MIN(IF(is_selected, error, NULL)) AS error, COUNTIF(is_selected) AS number,
      COUNTIF(NOT is_selected) AS expired FROM (
      SELECT Topic AS of_task, {ERROR_GROUP} AS pattern, {ERROR} AS error, {is_selected} AS is_selected
      FROM {index_for(names, state)[0]} WHERE {where})
    GROUP BY of_task, pattern)) AS part"""
        for places, where in ranges_of_state(state, {*names} - {"unexpired"})
    )
    return at_now(f"""
SELECT of_group, MIN(error), SUM(number) AS tasks, SUM(expired) FROM (
  SELECT is_total, IF(is_total, NULL, of_task) AS of_group, IF(is_total, NULL, pattern) AS pattern, error, number,
    expired FROM ({ranges}), UNNEST([TRUE, FALSE]) AS is_total)
GROUP BY is_total, of_group, pattern HAVING is_total OR tasks > 0
ORDER BY is_total DESC, tasks DESC, of_group, pattern LIMIT @limit""")


def order(state: str, *, by_key: bool) -> dict[str, str]:
    """Return what a change of a state sorts the tasks of a shard by: the column of each parameter of a place.

    `by_key`: those of an ordering key are in its order, as cancelled tasks always are.
    """
    if by_key or state == CANCELLED:
        return {"after_created": "CreatedAt", "after_sequence": SEQUENCE, "after_id": "Id"}
    return {"after": "SentAt", "after_id": "Id"} if state == "sent" else {"after_id": "Id"}


def next_ids(state: str, names: Collection[str], *, by_key: bool = False) -> str:
    """Return the statement for the next @limit tasks of @shard at @now, and of @topics unless they are sent.

    A row has Bytes and its place in the `order`, Id last. Each page begins after the place of the last row before it.
    """
    place, index = order(state, by_key=by_key), index_for(names, state)[0]
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
SELECT Bytes, {columns} FROM {rows} AND {beyond(place)}{narrowed(state, names)}
ORDER BY {columns} LIMIT @limit""")


def messages(condition: str) -> str:
    """Return the statement for the messages of the tasks @ids, with whether each is sent and meets the condition."""
    return of_ids(f"Id, OrderingKey, Data, CreatedAt, SentAt IS NOT NULL, COALESCE({condition}, FALSE)")


#: The topics of the tasks @ids, and their places by ordering key.
PLACES = of_ids(f"Id, Topic, CreatedAt, {SEQUENCE}")


#: How many of the cancelled tasks @ids would follow a later task of their key that was sent since.
OVERTAKEN = f"""
SELECT COUNTIF(task.OrderingKey IS NOT NULL AND EXISTS (
    SELECT 1 FROM {IN_ORDER} AS later
    WHERE later.Shard = task.Shard AND later.OrderingKey = task.OrderingKey AND later.OrderingKey IS NOT NULL
      AND later.Topic = task.Topic AND later.SentAt >= task.SentAt AND later.CancelledBy IS NULL
      AND (later.CreatedAt > task.CreatedAt OR later.CreatedAt = task.CreatedAt
        AND COALESCE(later.Sequence, {NO_SEQUENCE}) > COALESCE(task.Sequence, {NO_SEQUENCE}))))
FROM UNNEST(@ids) AS wanted {SEEK} {BY_ID} AS task ON task.Id = wanted"""

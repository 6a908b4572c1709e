"""All SQL of the relay, and the conversion of its rows. Values are always parameters.

For each step of a task: `POLLS` and `candidates`, `KEY_HEADS` and `key_heads`, `lock`, `write_changes`. The final text
of each statement is in docs/reference/statements.md.

The poll reads ranges of the index AsynchronousTasksToSend (Shard, SentAt, Topic, AvailableAt, Priority DESC,
CreatedAt), and never the table. For each shard and topic the ready tasks are one range and the due tasks another, each
read with a limit. Aliases differ from column names, because names are compared without case and `Shard = shard` would
be true for every row.

The Spanner client decodes each value with a function for its type and a datetime class of its own. The functions here
need about half of that CPU: 2 us instead of 4 us for a candidate, and 5 us instead of 8 us for a locked row. A task
takes about 55 us of the worker's CPU (`python -m tools.benchmarks --only costs`, docs/benchmarks.md).
"""

from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from google.api_core.exceptions import Aborted
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, Mutation
from google.protobuf.struct_pb2 import ListValue, Value

from outbox.table.controls import CONTROLS
from outbox.table.ddl import CHANGE_STREAM
from outbox.table.shared_sql import (
    BY_ID,
    EACH_TOPIC,
    FIRST_OF_KEYS,
    LAYOUTS,
    OF_TOPIC,
    SEEK,
    TO_SEND,
    TO_SEND_ORDER,
    WORKERS,
    as_structs,
    by_ids,
    parameters,
)
from outbox.table.states import LEFT_TO_SEND, NEVER_SQL, RANGES, TASKS_TABLE, first_due
from publishworker.spanner.write_errors import SERVICE_ERRORS, NotWritten, describe
from publishworker.types import (
    MAX_INT64,
    Candidate,
    Deferred,
    EndedAgain,
    LockedRow,
    NotSent,
    Published,
    QueuedTask,
    RowChange,
    TopicKey,
)


def _tasks(range_: str) -> str:
    """Return the statement for the first @per_range tasks of a range of each shard and topic.

    It reads from `UNNEST(@shards) AS in_shard, UNNEST(@topics) AS of_topic`, where `Shard = in_shard AND SentAt IS NULL
    AND Topic = of_topic`, in AsynchronousTasksToSend and in the order of this index.
    """
    return f"""
SELECT task.* FROM {EACH_TOPIC}, UNNEST(ARRAY(
  SELECT AS STRUCT Id, Topic, Shard, Priority, CreatedAt, AvailableAt, OrderingKey, Bytes FROM {TO_SEND}
  WHERE {OF_TOPIC} AND {range_}
  ORDER BY {TO_SEND_ORDER} LIMIT @per_range)) AS task"""


# Ready tasks by priority, then age. For the fair share, also those of lower priorities.
_READY = _tasks("AvailableAt IS NULL")
_LOWER = _tasks("AvailableAt IS NULL AND Priority < @below")
# Due tasks by AvailableAt, the order of the index, so that the task that has been due for longest comes first.
_DUE = _tasks("AvailableAt <= CURRENT_TIMESTAMP()")
# OUT-LOSS-2: a task that is ready or due is in one of these ranges until its SentAt is committed.
#: The statements of a poll by two flags: whether the poll also reads due tasks, and whether it reads the ready tasks of
#: lower priorities separately.
POLLS = {
    (False, False): _READY,
    (False, True): f"{_READY} UNION ALL {_LOWER}",
    (True, False): f"{_READY} UNION ALL {_DUE}",
    (True, True): f"{_READY} UNION ALL {_LOWER} UNION ALL {_DUE}",
}

# Topic discovery: one unsent row in each gap between the known topics. The n-th gap begins with the n-th of @lows and
# ends before the n-th of @highs. The first gap begins with the empty name, which only other programs can insert. One
# seek into AsynchronousTasksToSend for each shard and gap.
_TOPICS = f"""
  SELECT found FROM UNNEST(@shards) AS in_shard, (
    SELECT low, high FROM UNNEST(@lows) AS low WITH OFFSET AS of_low
    JOIN UNNEST(@highs) AS high WITH OFFSET AS of_high ON of_low = of_high), UNNEST(ARRAY(
    SELECT Topic FROM {TO_SEND}
    WHERE Shard = in_shard AND SentAt IS NULL AND Topic >= low AND Topic < high
    LIMIT 1)) AS found"""
_REST = ", ".join(map(as_structs, (WORKERS, LAYOUTS, CONTROLS)))
#: Unknown topics, workers, layouts and topic controls in one request. The last three are whole small tables, with one
#: row for each worker, up to two rows for layouts, and one for each topic with controls.
DISCOVER = f"SELECT ARRAY({_TOPICS}), {_REST}"
#: The same without workers and layouts, for very many workers.
DISCOVER_NO_WORKERS = f"SELECT ARRAY({_TOPICS}), {as_structs(CONTROLS)}"
#: The same without topics, for a worker that polls a layout whose index has been dropped.
DISCOVER_NO_TOPICS = f"SELECT ARRAY<STRING>[], {_REST}"

#: The earliest AvailableAt of tasks that have one and are not dead. It may be in the past. One seek into
#: AsynchronousTasksToSend for each shard and topic.
NEXT_DUE = f"""
SELECT MIN(next_at), CURRENT_TIMESTAMP() FROM {EACH_TOPIC}, UNNEST(ARRAY(
  SELECT AvailableAt FROM {TO_SEND}
  WHERE {OF_TOPIC} AND AvailableAt < {NEVER_SQL}
  ORDER BY {TO_SEND_ORDER} LIMIT 1)) AS next_at"""

#: The records of a partition of the change stream. A partition without changes returns a record every 1,000 ms, the
#: minimum that Spanner allows: https://cloud.google.com/spanner/docs/change-streams/details
CHANGES = f"SELECT ChangeRecord FROM READ_{CHANGE_STREAM}(@start, @end, @token, 1000)"


def queued(ids: str) -> str:
    """Return the statement that reads tasks from the table, one seek each. `ids` is the statement for their IDs.

    A cancelled task that another program has made unsent counts as due, because the worker that claims it ends it.
    """
    return f"""
SELECT task.Topic, task.OrderingKey, task.Id, task.Bytes,
  task.AvailableAt IS NULL OR task.AvailableAt <= CURRENT_TIMESTAMP() OR task.CancelledBy IS NOT NULL,
  task.BlockedBy IS NOT NULL, COALESCE(task.ExpiresAt <= CURRENT_TIMESTAMP(), FALSE)
FROM ({ids}) AS unsent
{SEEK} {BY_ID} AS task ON task.Id = unsent.Id
ORDER BY task.CreatedAt, task.Sequence, task.Id"""


#: The first unsent tasks of each key, due or not, in the order of the key.
KEY_HEADS = queued(FIRST_OF_KEYS)

#: A topic name followed by this is the next possible name.
NEXT_NAME_SUFFIX = "\0"
#: The first string after all names that STRING(400) can hold: the end of the last gap.
AFTER_ALL_TOPICS = "\U0010ffff" * 400 + NEXT_NAME_SUFFIX

# The claim. The lock hint makes a second worker wait here until the first has committed. Without it, both would read,
# and one would be aborted at its commit. The other hints fix the plan: one seek into the table for each ID, so no other
# row is ever locked (docs/decisions.md, 0004): `by_ids` adds `FROM UNNEST(@ids) AS wanted JOIN AsynchronousTasks ON
# Id = wanted`. Data is not read from a row that was sent since the poll.
# The client requires that the result is read to its end before the next statement.
# The last column is NULL for most rows, because each value of a row costs CPU (docs/decisions.md, 0009).
_CLEAN = """COALESCE(AvailableAt, DueAt, ExpiresAt) IS NULL AND COALESCE(BlockedBy, LastError, CancelledBy) IS NULL
    AND Attempts = 0"""
LOCK = by_ids(
    f"""Id, Topic, IF(SentAt IS NULL OR CancelledBy IS NOT NULL, Data, NULL), OrderingKey, CreatedAt, TimesSent,
  CURRENT_TIMESTAMP(),
  IF({_CLEAN} AND SentAt IS NULL AND NOT AtMostOnce, NULL,
    [STRUCT(AvailableAt, SentAt, {_CLEAN}, Attempts, ExpiresAt, AtMostOnce, BlockedBy IS NOT NULL, DueAt,
      CancelledBy)])""",
    lock=True,
)

#: The columns of a mark. A mark resets all columns after TimesSent to their defaults, so that an operator only has to
#: set SentAt to NULL to send the task again. A failed attempt writes the same columns. For an at-most-once task, the
#: failed attempt undoes the mark that was committed before the publish.
MARK_COLUMNS = (
    "Id", "SentAt", "TimesSent", "CancelledBy", "AvailableAt", "DueAt", "BlockedBy", "ExpiresAt", "LastError",
    "Attempts",
)  # fmt: skip
#: The columns of a mark if the other columns still have their defaults. Fewer cells are locked and written.
MARK_CLEAN_COLUMNS = ("Id", "SentAt", "TimesSent")
#: The columns that polls and claims read in addition to those of a mark.
READ_COLUMNS = ("Topic", "Data", "Bytes", "Priority", "OrderingKey", "Sequence", "CreatedAt", "AtMostOnce")
#: Reads the columns that the worker needs, to test whether it may.
CHECK_COLUMNS = f"SELECT {', '.join((*MARK_COLUMNS, *READ_COLUMNS))} FROM {BY_ID} WHERE Id = @id"
#: The columns of a deferral.
DEFER_COLUMNS = ("Id", "AvailableAt", "DueAt", "BlockedBy")
#: The columns of a cancelled task that was made unsent.
END_COLUMNS = ("Id", "SentAt")

WORKERS_TABLE = "AsynchronousTaskWorkers"
HEARTBEAT_COLUMNS = ("WorkerId", "StartedAt", "SeenAt", "LivenessTimeoutSeconds", "Polls", "Info")

_LEFT_TO_SEND = " OR ".join(range_ for state in LEFT_TO_SEND for range_ in RANGES[state])
#: For `drain` and `check`: the topics with tasks that workers send without an operator, and whether the first of them
#: in a shard have keys. It reads only the index.
TOPICS_TO_SEND = f"""
SELECT of_topic, LOGICAL_OR(ordered) FROM {EACH_TOPIC}, UNNEST(ARRAY(
  SELECT OrderingKey IS NOT NULL FROM {TO_SEND} WHERE {OF_TOPIC} AND ({_LEFT_TO_SEND}) LIMIT 100)) AS ordered
GROUP BY of_topic"""


def candidates(values: Iterable[Sequence[Any]], first_shard: int = 0) -> dict[str, Candidate]:
    """Return the poll's candidates by ID, because two of its reads may return the same task."""
    found = {}
    for id, topic, shard, priority, created_at, available_at, ordering_key, size in values:
        found[id.string_value] = Candidate(
            id.string_value,
            topic.string_value,
            first_shard + int(shard.string_value),
            int(priority.string_value),
            datetime.fromisoformat(created_at.string_value),
            time_of(available_at),
            ordering_key.string_value or None,
            int(size.string_value),
        )
    return found


def key_heads(values: Iterable[Sequence[Any]]) -> dict[TopicKey, list[QueuedTask]]:
    found: dict[TopicKey, list[QueuedTask]] = {}
    for topic, key, id, size, is_due, deferred, expired in values:
        due = is_due.bool_value
        task = QueuedTask(
            id.string_value,
            int(size.string_value),
            sendable=due or (deferred.bool_value and not expired.bool_value),
            deferred=deferred.bool_value,
            expired_before_due=expired.bool_value and not due,
        )
        found.setdefault(TopicKey(topic.string_value, key.string_value), []).append(task)
    return found


def lock(transaction: Any, ids: Sequence[str], request: Mapping[str, Any]) -> tuple[list[LockedRow], datetime]:
    """Return the locked rows and the database's time. Without rows, the time has no meaning. Raises NotWritten.

    IDs are sorted so that workers lock in the same order.
    """
    values = {"ids": ListValue(values=[Value(string_value=id) for id in sorted(ids)])}  # half of the CPU of a list
    try:
        return _locked(list(transaction.execute_sql(LOCK, **parameters(values), **request, lazy_decode=True)))
    except Aborted:
        raise
    except SERVICE_ERRORS as error:
        raise NotWritten(describe(error)) from error


def _locked(values: Iterable[Sequence[Any]]) -> tuple[list[LockedRow], datetime]:
    now = None
    rows = []
    for id, topic, data, key, created, times_sent, current, others in values:
        now = now or time_of(current)
        rows.append(
            LockedRow(
                id.string_value,
                topic.string_value,
                b64decode(data.string_value),
                key.string_value or None,
                datetime.fromisoformat(created.string_value),
                *_others(others, int(times_sent.string_value)),
            )
        )
    return rows, now or datetime.min.replace(tzinfo=UTC)


def _others(value: Any, times_sent: int) -> tuple[Any, ...]:
    """Return the fields of a LockedRow from `available_at` on."""
    if not value.HasField("list_value"):
        return None, None, True, 0, None, False, False, None, times_sent
    available, sent, clean, attempts, expires, once, deferred, due, by = value.list_value.values[0].list_value.values
    times, numbers = (time_of(available), time_of(sent)), (clean.bool_value, int(attempts.string_value))
    last = once.bool_value, deferred.bool_value, time_of(due), times_sent, by.string_value or None
    return *times, *numbers, time_of(expires), *last


def time_of(value: Any) -> datetime | None:
    text = value.string_value  # empty for NULL
    return datetime.fromisoformat(text) if text else None


def mark_row(id: str, times: int) -> tuple[Any, ...]:
    """Return the values of MARK_COLUMNS of a mark that clears all other columns."""
    return id, COMMIT_TIMESTAMP, times, *[None] * 6, 0


def write_changes(transaction: Any, locked: Sequence[LockedRow], changes: Mapping[str, RowChange]) -> None:
    clean: list[tuple[str, int]] = []
    others: list[tuple[Any, ...]] = []
    deferred: list[tuple[Any, ...]] = []
    ended: list[tuple[Any, ...]] = []
    for row in locked:
        match changes.get(row.id):
            case Published() if row.clean:
                clean.append((row.id, times_sent(row, sent=True)))
            case Published():
                others.append(mark_row(row.id, times_sent(row, sent=True)))
            case NotSent() as change:
                times = change.available_at, change.due_at, None, change.expires_at
                others.append((row.id, None, times_sent(row, sent=False), None, *times, change.error, change.attempts))
            case Deferred() as deferral:
                deferred.append((row.id, deferral.available_at, first_due(row), deferral.head))
            case EndedAgain():
                ended.append((row.id, COMMIT_TIMESTAMP))
    if clean:
        # The client's `update` takes eight times the CPU (docs/decisions.md, 0009).
        transaction._mutations.append(_clean_marks(clean))  # noqa: SLF001 - no public method takes a mutation
    for columns, values in ((MARK_COLUMNS, others), (DEFER_COLUMNS, deferred), (END_COLUMNS, ended)):
        if values:  # an update without rows is an error
            transaction.update(TASKS_TABLE, columns, values)


def times_sent(row: LockedRow, *, sent: bool) -> int:
    """Return the TimesSent to write to a row that becomes sent or unsent.

    Another writer may have set the column to an end of int64. If the count would overflow, it changes in the other
    direction, because a mark must change it: see `Version`.
    """
    change = int(sent) - row.is_sent
    number = row.times_sent + change
    return number if -MAX_INT64 - 1 <= number <= MAX_INT64 else row.times_sent - change


def _clean_marks(tasks: Iterable[tuple[str, int]]) -> Mutation:
    """Return the mutation that sets SentAt and TimesSent, from the ID and TimesSent of each task."""
    mutation = Mutation()
    update: Any = Mutation.pb(mutation).update
    update.table = TASKS_TABLE
    update.columns.extend(MARK_CLEAN_COLUMNS)
    for id, number in tasks:
        values = update.values.add().values
        values.add().string_value = id
        values.add().string_value = COMMIT_TIMESTAMP
        values.add().string_value = str(number)
    return mutation

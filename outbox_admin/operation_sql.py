"""The statements about the record of operations. Values are parameters."""

from collections.abc import Collection
from itertools import pairwise

from outbox.rows.counts_sql import at_most
from outbox.table.shared_sql import SEEK

_OPERATIONS = "AsynchronousTaskOperations@{FORCE_INDEX=_BASE_TABLE}"
_OPERATION_COLUMNS = f"""OperationId, Operation, StartedAt, FinishedAt, {at_most("Principal")},
  SUBSTR(Selection, 1, @characters), Tasks, {at_most("Reason")}, Selected,
  SeenAt, StoppedAt, SUBSTR(Position, 1, @characters)"""
OPERATION = f"SELECT {_OPERATION_COLUMNS} FROM {_OPERATIONS} WHERE OperationId = @id"
#: The IDs of the first operations whose ID begins with @prefix.
BEGINNING_WITH = f"""
SELECT OperationId FROM {_OPERATIONS} WHERE OperationId BETWEEN @prefix AND CONCAT(@prefix, '\\U0010FFFF')
ORDER BY OperationId LIMIT @limit"""
#: The number of tasks of an operation, with an exclusive lock.
LOCK_TASKS = f"@{{LOCK_SCANNED_RANGES=exclusive}}\nSELECT Tasks FROM {_OPERATIONS} WHERE OperationId = @id"
#: A range for each first digit of an ID. The last operations of a range come first (`operations.new_id`).
_ID_RANGES = "ARRAY<STRUCT<low STRING, high STRING>>[{}]".format(
    ", ".join(f"('{low}', '{high}')" for low, high in pairwise(["", *"123456789abcdef", "\\U0010FFFF"]))
)


def latest_operations(names: Collection[str], *, views: bool = True) -> str:
    """Return the statement for the last @limit operations with the conditions in `names`, which are of parameters.

    @topic is quoted as in JSON. Of each range, only the first @ceiling operations are compared. Of each JSON text, it
    reads @characters.
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

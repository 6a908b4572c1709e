"""Assertions about registered tasks."""

from collections.abc import Mapping

from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database

from outbox.message import TASK_ID_ATTRIBUTE
from outbox.registration import COLUMNS, TABLE
from outbox.table.values import plain
from outbox.testing.fakes import RecordingTransaction, RegisteredTask, task_of

#: How many tasks a failure lists, and how many bytes of each.
_MAX_TASKS, _MAX_BYTES = 20, 100


def assert_registered(
    transaction: RecordingTransaction | Database,
    *,
    topic: str | None = None,
    attributes: Mapping[str, str] | None = None,
    times: int = 1,
) -> list[RegisteredTask]:
    """Assert that `times` tasks are registered, and return them in the order of their registration.

    Args:
        transaction: the fake, or a database, whose whole table is read, with the tasks that are already sent.
        topic: as it was registered. Default: any topic.
        attributes: each task has all of these, and may have others.
        times: the exact number of tasks.

    Raises:
        AssertionError: another number of tasks is registered. Its message lists the registered tasks.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    tasks = transaction.tasks if isinstance(transaction, RecordingTransaction) else _committed(transaction)
    wanted = {plain(name): plain(value) for name, value in (attributes or {}).items()}
    matching = [
        task
        for task in tasks
        if topic in (None, task.topic) and wanted.items() <= dict(task.message.attributes).items()
    ]
    if len(matching) != times:
        asked = f"topic={topic!r}, attributes={attributes!r}; expected {times}"
        lines = [f"{len(matching)} of {len(tasks)} registered tasks match {asked}. Registered:"]
        lines += map(_line, tasks[:_MAX_TASKS])
        if len(tasks) > _MAX_TASKS:
            lines.append(f"and {len(tasks) - _MAX_TASKS} more")
        raise AssertionError("\n  ".join(lines))
    return matching


def _committed(database: Database) -> list[RegisteredTask]:
    with database.snapshot() as snapshot:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in snapshot.read(TABLE, COLUMNS, KeySet(all_=True))]
    return [task_of(row) for row in sorted(rows, key=lambda row: (row["CreatedAt"], row["Sequence"] or 0, row["Id"]))]


def _line(task: RegisteredTask) -> str:
    attributes = {name: value for name, value in task.message.attributes.items() if name != TASK_ID_ATTRIBUTE}
    return f"{task.topic} {attributes} {task.message.data[:_MAX_BYTES]!r} (task {task.id})"

"""Registers rows in a Spark task: checks each row like `outbox.register`, inserts rows in chunks, and writes rejects.

Spark can run a Spark task again, and a row can occur twice. A row whose task exists is not inserted again. If the
existing task is different, the row is rejected.
"""

import contextlib
import itertools
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyarrow.fs import FileSystem
from pyspark import TaskContext

from outbox import InvalidMessage, OutboxError, Priority, Task
from outbox.message import parsed
from outbox.program.settings import DatabaseSettings, SettingType
from outbox.registration import COLUMNS, task_row
from outbox_pipeline import job_settings, schemas
from outbox_pipeline.jobs.register.rows import json_line
from outbox_pipeline.spanner import COMMIT_BYTES, Table, open_table
from outbox_pipeline.spark.spark_tasks import Pace, Rows

#: Max tasks in one commit. If one ID exists, the whole chunk is tried again.
REGISTER_ROWS = 100
#: Bytes of rejected rows that are written at once.
_FILE_BYTES = 1_000_000
_TAG = "outbox-pipeline-register"

COUNTS = ("registered", "existing", "repeated", "rejected")
ANSWER = schemas.counts(*COUNTS)

_ID, _TOPIC, _DATA, _KEY = 0, 1, 2, 4
#: The columns in which an existing task is compared with a row. They never change after the insert.
_SAME = ("Id", "Topic", "Data", "OrderingKey", "CreatedAt")
_Row = tuple[Any, ...]
_Reject = Callable[[dict[str, Any]], None]


def _folder(text: str) -> str:
    """Return a URL, or the absolute path of a folder of the driver. Raises ValueError if pyarrow does not know it."""
    path = text if ":" in text.partition("/")[0] else str(Path(text).absolute())
    FileSystem.from_uri(path)
    return path


#: The folder of rejected rows, in which each run has a folder.
REJECTS = SettingType(_folder, job_settings.REJECTS.allowed)


def new_run() -> str:
    """Return a unique name for the folder of a run."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"


def register_rows(
    database: DatabaseSettings, began: datetime, rate: float, rejects: str | None, batches: Iterator[Rows]
) -> Iterator[Rows]:
    """Register rows of `schemas.INPUT` in a Spark task, and yield their counts, a row of ANSWER.

    `began` is the start of the job by the database's clock. `rate` is rows per second of this Spark task, 0 is no
    limit. `rejects` is the folder for rejected rows. Without it, raises OutboxError for the first rejected row.
    """
    with _rejecting(rejects) as reject:
        writer = Writer(open_table(database), began, reject, Pace(rate))
        for row in itertools.chain.from_iterable(batches):
            writer.add(row)
        writer.flush()
    yield [writer.counts]


@contextlib.contextmanager
def _rejecting(folder: str | None) -> Iterator[_Reject]:
    """Yield a function that writes a row with its reason to the file of this Spark task.

    The file gets its name when the Spark task ends, so an attempt that is killed does not damage that of another one.
    """
    with contextlib.ExitStack() as files:
        file: Any = None

        def reject(row: dict[str, Any]) -> None:
            nonlocal file
            if folder is None:
                raise OutboxError(
                    f"A row is rejected: {row['reason']}. The row is "
                    f"{(row['line'] or json_line(row | {'reason': None}))[:1000]}. "
                    "Correct it, or pass the option rejects, a folder for rejected rows"
                )
            file = file or files.enter_context(_open(folder))
            file.write(f"{json_line(row)}\n".encode())

        yield reject


@contextlib.contextmanager
def _open(folder: str) -> Iterator[Any]:
    task: Any = TaskContext.get()
    system, path = FileSystem.from_uri(folder)
    system.create_dir(path, recursive=True)
    name = f"{path}/part-{task.partitionId():05}.json"
    unfinished = f"{name}.{task.taskAttemptId()}"
    with system.open_output_stream(unfinished, buffer_size=_FILE_BYTES) as file:
        yield file
    system.move(unfinished, name)


@dataclass
class Writer:
    """Collects rows, writes them in chunks, and counts the outcomes."""

    table: Table
    began: datetime
    reject: _Reject
    pace: Pace = field(default_factory=Pace)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    _chunk: list[tuple[_Row, Mapping[str, Any]]] = field(default_factory=list)
    _bytes: int = 0
    #: Whether to read before inserting: for the first chunk, and while chunks contain existing tasks.
    _read_first: bool = True
    #: The tasks of the last chunk as the table has them, with the outcome of a row that is equal.
    _known: dict[str, tuple[_Row, str]] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one row of `schemas.INPUT`."""
        try:
            task = _task(row)
        except (InvalidMessage, TypeError) as error:
            self._reject(row, str(error))
            return
        if task[_ID] in self._known:
            self._compare(task, row)
            return
        self._chunk.append((task, row))
        self._bytes += len(task[_DATA])
        if len(self._chunk) >= self.pace.chunk(REGISTER_ROWS) or self._bytes >= COMMIT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows. Raises NotReached, OutboxError."""
        if not self._chunk:
            return
        chunk, self._chunk, self._bytes, self._known = self._chunk, [], 0, {}
        new: dict[str, _Row] = {}
        for task, _ in chunk:
            new.setdefault(task[_ID], task)
        self.pace.wait(len(new))
        while True:
            if self._read_first:
                self._read_first = self._remove_existing(new)
            if not new or self.table.insert(COLUMNS, list(new.values()), _TAG):
                break
            self._read_first = True
        self._known |= {id: (task, "registered") for id, task in new.items()}
        for task, row in chunk:
            self._compare(task, row)

    def _remove_existing(self, new: dict[str, _Row]) -> bool:
        """Remove the tasks that exist. Return whether there were any."""
        found = self.table.read_ids(_SAME, new, _TAG)
        for id, topic, data, key, created in found:
            del new[id]
            # A task that was created since the job began was written by an earlier attempt of this Spark task.
            self._known[id] = (id, topic, data, None, key), "registered" if created >= self.began else "existing"
        return bool(found)

    def _compare(self, task: _Row, row: Mapping[str, Any]) -> None:
        """Count a row, or reject it, by the task that the table has. Only the first equal row is not `repeated`."""
        id = task[_ID]
        known, outcome = self._known[id]
        if _same(task, known):
            self.counts[outcome] += 1
            self._known[id] = known, "repeated"
        elif outcome == "repeated":
            self._reject(row, f"task ID {id!r} occurs twice, with different messages, topics or ordering keys")
        else:
            self._reject(row, f"task {id!r} exists with another message, topic or ordering key")

    def _reject(self, row: Mapping[str, Any], reason: str) -> None:
        self.counts["rejected"] += 1
        self.reject({**row, "reason": reason})


def _task(row: Mapping[str, Any]) -> _Row:
    """Return the row to insert. Raises InvalidMessage or TypeError if `outbox.register` refuses it."""
    if row["reason"] is not None:
        raise InvalidMessage(row["reason"])
    if row["task_id"] is None:
        raise InvalidMessage("task_id is NULL")
    if row["data"] is None:
        raise InvalidMessage("data is NULL. For a message without data, pass an empty string")
    task = Task(
        row["topic"],
        row["data"],
        dict(row["attributes"] or ()),
        priority=Priority.NORMAL if row["priority"] is None else row["priority"],
        ordering_key=row["ordering_key"] or "",
        available_at=row["available_at"],
        expires_at=row["expires_at"],
        at_most_once=bool(row["at_most_once"]),
        task_id=row["task_id"],
    )
    return task_row(task)


def _same(one: _Row, other: _Row) -> bool:
    """Tell whether two rows with the same ID are the same task, even if their messages are serialized differently."""
    if (one[_TOPIC], one[_KEY]) != (other[_TOPIC], other[_KEY]):
        return False
    return one[_DATA] == other[_DATA] or parsed(b64decode(one[_DATA])) == parsed(b64decode(other[_DATA]))

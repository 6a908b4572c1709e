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

    Another attempt of the Spark task replaces the file.
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


def _open(folder: str) -> Any:
    task: Any = TaskContext.get()
    system, path = FileSystem.from_uri(folder)
    system.create_dir(path, recursive=True)
    return system.open_output_stream(f"{path}/part-{task.partitionId():05}.json", buffer_size=_FILE_BYTES)


@dataclass
class Writer:
    """Collects rows, writes them in chunks, and counts the outcomes."""

    table: Table
    began: datetime
    reject: _Reject
    pace: Pace = field(default_factory=Pace)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    _chunk: dict[str, tuple[_Row, Mapping[str, Any]]] = field(default_factory=dict)
    _bytes: int = 0
    #: Whether to read before inserting: for the first chunk, and while chunks contain existing tasks.
    _read_first: bool = True
    _last: _Row | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one row of `schemas.INPUT`."""
        try:
            task = _task(row)
        except (InvalidMessage, TypeError) as error:
            self._reject(row, str(error))
            return
        before = self._chunk[task[_ID]][0] if task[_ID] in self._chunk else self._last
        if before is not None and before[_ID] == task[_ID]:
            self._repeated(task, row, before)
            return
        self._chunk[task[_ID]] = (task, row)
        self._bytes += len(task[_DATA])
        if len(self._chunk) >= REGISTER_ROWS or self._bytes >= COMMIT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows. Raises NotReached, OutboxError."""
        chunk, self._chunk, self._bytes = self._chunk, {}, 0
        if not chunk:
            return
        self.pace.wait(len(chunk))
        self._last = next(reversed(chunk.values()))[0]
        while True:
            if self._read_first:
                self._read_first = self._remove_existing(chunk)
            rows = [row for row, _ in chunk.values()]
            if not rows or self.table.insert(COLUMNS, rows, _TAG):
                self.counts["registered"] += len(rows)
                return
            self._read_first = True

    def _remove_existing(self, chunk: dict[str, tuple[_Row, Mapping[str, Any]]]) -> bool:
        """Remove the rows whose tasks exist from the chunk. Return whether there were any."""
        found = self.table.read_ids(_SAME, chunk, _TAG)
        for id, topic, data, key, created in found:
            task, row = chunk.pop(id)
            if not _same(task, (id, topic, data, None, key)):
                self._reject(row, f"task {id!r} exists with another message, topic or ordering key")
            else:
                # A task that was created since the job began was written by an earlier attempt of this Spark task.
                self.counts["registered" if created >= self.began else "existing"] += 1
        return bool(found)

    def _repeated(self, task: _Row, row: Mapping[str, Any], before: _Row) -> None:
        if _same(task, before):
            self.counts["repeated"] += 1
        else:
            self._reject(row, f"task ID {task[_ID]!r} occurs twice, with different messages, topics or ordering keys")

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

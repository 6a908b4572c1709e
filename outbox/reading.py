"""Read sent tasks in the order of SentAt: `outbox.reader` for programs, and the pages that `outbox tail` prints.

A page is one strong read. Spanner says at which timestamp it read. A mark is the commit that sets SentAt. The page has
every mark that was committed up to then, or the first of them if there are many. Each later mark gets a later commit
timestamp. So a reader that goes on after that timestamp misses no task, in whatever order the marks of several workers
commit. A strong read waits for marks that are being committed, usually for milliseconds.
https://cloud.google.com/spanner/docs/true-time-external-consistency
"""

import dataclasses
import math
import threading
import time
from base64 import b64decode
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Self

from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

from outbox.base.schedules import FOLLOW
from outbox.base.values import chunked, in_utc, shown
from outbox.errors import PositionExpired
from outbox.message import check_topic, parsed
from outbox.rows import counts_sql
from outbox.rows.task_table import SCAN_SECONDS, SCHEMA_OPTIONS, LayoutChanged, TaskTable
from outbox.table import schema
from outbox.table.shared_sql import by_ids
from outbox.table.states import LONG_AGO, NO_SEQUENCE

#: Max tasks of a page (more if they share a SentAt), and max bytes of messages in memory. A larger message is alone.
PAGE_ROWS, BUFFER_BYTES = 1_000, 8_000_000
#: No retention is shorter.
_MIN_RETENTION = timedelta(days=1)
_MICROSECOND = timedelta(microseconds=1)
_TAG = "outbox-reader"

#: A sent task without its message, by column name.
SentRow = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a reader is: after one task or, with `sent_at` alone, before the first task with this or a later SentAt.

    The tasks of a batch share a SentAt. CreatedAt, Sequence and Id are the order in which those of a key are published.
    """

    sent_at: datetime = LONG_AGO
    created_at: datetime = LONG_AGO
    sequence: int = NO_SEQUENCE
    id: str = ""

    @classmethod
    def of(cls, row: SentRow) -> "Position":
        """Return the position after a task."""
        sequence = NO_SEQUENCE if row["Sequence"] is None else row["Sequence"]
        return cls(row["SentAt"], row["CreatedAt"], sequence, row["Id"])

    @classmethod
    def read(cls, since: str | datetime) -> "Position":
        """Return the position that a text or an aware time describes. Raises ValueError."""
        try:
            sent_at, *task = since.split(" ", 3) if isinstance(since, str) else [since.isoformat()]
            created_at, sequence, id = task or (str(LONG_AGO), str(NO_SEQUENCE), "")
            sent, created = datetime.fromisoformat(sent_at), datetime.fromisoformat(created_at)
            if sent.tzinfo is not None and created.tzinfo is not None:
                return cls(in_utc(sent), in_utc(created), int(sequence), id)
        except (ValueError, AttributeError, OverflowError):
            pass
        raise ValueError(f"since is {since!r}. It must be the position of a reader, or a time with a time zone")

    def __str__(self) -> str:
        """Return the text that `read` reads."""
        task = f" {shown(self.created_at)} {self.sequence} {self.id}" if self.id else ""
        return shown(self.sent_at) + task


@dataclasses.dataclass(frozen=True, slots=True)
class SentPage:
    """The next sent tasks, and the position after them. Unless `more`, these are all that were sent up to `read_at`."""

    rows: list[SentRow]
    read_at: datetime
    end: Position
    more: bool


class SentTasks:
    """The sent tasks after `position`, page by page. The caller sets `position` to the end of a page."""

    def __init__(self, table: TaskTable, position: Position, topic: str | None, *, resumes: bool = False) -> None:
        """Begin at `position`. `resumes`: an earlier reader has stopped there, so no task after it may be missing."""
        self.table, self.position = table, position
        self._names = {} if topic is None else {"topic": topic}
        self._is_continuous = resumes

    def page(self) -> SentPage:
        """Return the next page. Raises PositionExpired, NotReached, OutboxError."""
        limit = PAGE_ROWS
        while True:
            rows, read_at = self._read(limit)
            self._check_retention(read_at)
            new = [row for row in rows if Position.of(row) > self.position]
            if len(rows) < limit:
                # A position in the future stays: it never decreases.
                return SentPage(new, read_at, max(self.position, Position(read_at + _MICROSECOND)), more=False)
            # The limit may have divided the tasks with the last SentAt.
            last = rows[-1]["SentAt"]
            if whole := [row for row in new if row["SentAt"] < last]:
                return SentPage(whole, read_at, Position(last), more=True)
            limit *= 2

    def _read(self, limit: int) -> tuple[list[SentRow], datetime]:
        while True:
            values = self._names | {"after": self.position.sent_at, "limit": limit}
            try:
                found, read_at = self.table.strong_query(counts_sql.sent_after(self._names), _TAG, values)
            except LayoutChanged:
                continue
            rows = [dict(zip(counts_sql.SENT_COLUMNS, each, strict=True)) for each in found]
            return sorted(rows, key=Position.of), read_at

    def _check_retention(self, read_at: datetime) -> None:
        """Raise PositionExpired if tasks after the position may have been deleted before `read_at`.

        A new reader may begin before the retention, with the oldest task that is left. It can miss a task only after it
        has caught up with the retention once.
        """
        behind = read_at - self.position.sent_at
        if behind > _MIN_RETENTION:
            retention = schema.retention(self.table.database, request_options=SCHEMA_OPTIONS)
            if retention is not None and behind > retention:
                if not self._is_continuous:
                    return
                kept = shown(read_at - retention)
                raise PositionExpired(
                    f"The reader is at {shown(self.position.sent_at)}, but tasks that were sent before {kept} may have "
                    f"been deleted: the retention of the table is {retention.days} days. Begin again without `since`, "
                    f"or pass since=datetime.fromisoformat('{kept}') to go on without the deleted tasks"
                )
        self._is_continuous = True


@dataclasses.dataclass(frozen=True, slots=True)
class SentTask:
    """A sent task. `message` is None if Data holds no PubsubMessage. Without a key, `ordering_key` is empty."""

    id: str
    topic: str
    message: PubsubMessage | None
    priority: int
    ordering_key: str
    created_at: datetime
    sent_at: datetime


class Reader(Iterator[SentTask]):
    """An iterator over sent tasks that waits for new ones. One thread reads; any thread may call `close`.

    A context manager, which closes the reader at the end of the block.
    """

    def __init__(self, sent: SentTasks) -> None:
        """Read the tasks of `sent`."""
        self._sent, self._position = sent, sent.position
        self._tasks: deque[tuple[SentTask, Position]] = deque()
        self._next_page = 0.0
        self._closed = threading.Event()

    @property
    def position(self) -> str:
        """Return the position after the last returned task, or after the last page if that had no task.

        Store it together with the effect of that task, and pass it as `since` after a restart.
        """
        return str(self._position)

    def read(self, timeout: float | None = None) -> SentTask | None:
        """Return the next task. Return None after `timeout` seconds without one, or when the reader is closed.

        After an error, `position` is unchanged, and the next call tries again.

        Args:
            timeout: max seconds to wait for a task; None waits until there is one.

        Raises:
            PositionExpired: tasks after the position may have been deleted, because they are older than the retention.
            NotReached: Spanner does not answer, or a permission is missing.
            OutboxError: Spanner refused the request.
            ValueError: `timeout` is no number.
        """
        if timeout is not None and (not isinstance(timeout, int | float) or math.isnan(timeout)):
            raise ValueError(f"timeout is {timeout!r}. It must be a number of seconds, or None")
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._closed.is_set():
            if not self._tasks and time.monotonic() >= self._next_page:
                self._fill()
            if self._tasks:
                task, self._position = self._tasks.popleft()
                return task
            if (now := time.monotonic()) >= end:
                break
            self._closed.wait(max(0.0, min(self._next_page, end) - now))
        return None

    def __next__(self) -> SentTask:
        """Return the next task when there is one. Ends when the reader is closed. Raises the errors of `read`."""
        task = self.read()
        if task is None:
            raise StopIteration
        return task

    def close(self) -> None:
        """End `read` and the iteration, from any thread. A wait ends at once, a running request is finished first."""
        self._closed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _fill(self) -> None:
        self._next_page = time.monotonic() + FOLLOW.first
        page = self._sent.page()
        rows = next(chunked(page.rows, PAGE_ROWS, BUFFER_BYTES, lambda row: row["Bytes"]), [])
        messages = self._messages([row["Id"] for row in rows], page.read_at)
        self._tasks.extend((_task(row, messages[row["Id"]]), Position.of(row)) for row in rows)
        is_whole = len(rows) == len(page.rows)
        self._sent.position = page.end if is_whole else Position.of(rows[-1])
        if page.more or not is_whole:
            self._next_page = 0.0
        if not rows:
            self._position = page.end

    def _messages(self, ids: list[str], at: datetime) -> dict[str, Any]:
        """Return the messages of tasks as they were when their page was read."""
        if not ids:
            return {}
        rows = self._sent.table.query(by_ids("Id, Data"), _TAG, {"ids": ids}, at=at, seconds=SCAN_SECONDS)
        return {id: parsed(b64decode(data)) for id, data in rows}


def _task(row: SentRow, message: Any) -> SentTask:
    return SentTask(
        id=row["Id"],
        topic=row["Topic"],
        message=None if message is None else PubsubMessage.wrap(message),
        priority=row["Priority"],
        ordering_key=row["OrderingKey"] or "",
        created_at=row["CreatedAt"],
        sent_at=row["SentAt"],
    )


def reader(database: Database, since: str | datetime | None = None, topic: str | None = None) -> Reader:
    """Return a reader of sent tasks, in the order of SentAt. It only reads, and any number of readers may run at once.

    For projections, rebuilds and inspection by programs that may read the table, not a second way of delivery. It
    misses no task and returns none twice, also after a restart with its `position` and while the number of shards
    changes. It sees a task about a second after it was sent: it reads once a second, at LOW priority, and each read
    waits for marks that are being committed.

    - A task that is sent again gets another SentAt, so it is returned again.
    - An at-most-once task is returned when it is marked, before its message is published.
    - The tasks of an ordering key that were sent in one batch are in the order in which they were published.
    - A task that `outbox purge` or `outbox-pipeline archive --purge` deletes before the reader has read it is missed.
    - Other programs must write only the commit timestamp to SentAt. A task with another SentAt may be missed.

    Args:
        database: the outbox's database. Its database role, if it has one, needs SELECT on AsynchronousTasks.
        since: the `position` of an earlier reader, or an aware time: tasks that were sent at that time or later.
            Without it, the reader begins with the oldest sent task that the table still has.
        topic: read only tasks with this Topic.

    Raises:
        ValueError: `since` is neither a position nor an aware time, or `topic` is not a name that Pub/Sub allows.
        NotReached: Spanner does not answer, or the table or a permission is missing.
    """
    position = Position() if since is None else Position.read(since)
    resumes = isinstance(since, str) and position > Position()
    topic = None if topic is None else check_topic(topic)
    return Reader(SentTasks(TaskTable(database), position, topic, resumes=resumes))

"""Read tasks: a list, or one task with its message."""

import dataclasses
import json
from base64 import b64decode, urlsafe_b64decode, urlsafe_b64encode
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from google.api_core.datetime_helpers import DatetimeWithNanoseconds

from outbox.base.values import chunked
from outbox.errors import SettingError
from outbox.message import parsed
from outbox.rows.backlog import MAX_TOTAL, Backlog, count, range_limit, ranges_of
from outbox.rows.task_table import SCAN_SECONDS, TaskTable
from outbox.table import ddl
from outbox.table.states import LONG_AGO, NEVER, UNSENT
from outbox_admin.tasks import task_sql
from outbox_admin.tasks.selected import CHUNK
from outbox_admin.tasks.selections import ENDED, TaskSelection

_COLUMNS = (
    "Id", "Topic", "Priority", "OrderingKey", "Sequence", "CreatedAt", "AvailableAt", "BlockedBy", "ExpiresAt",
    "Attempts", "LastError", "SentAt", "CancelledBy", "Bytes",
)  # fmt: skip
_ALL_COLUMNS = tuple(dict.fromkeys((*_COLUMNS, *ddl.columns())))

#: Time windows that are searched for sent tasks, one after the other, before all sent tasks are read.
WINDOWS = tuple(timedelta(minutes=8**power) for power in range(6))
#: Max tasks of a state that are read to count their errors.
ERRORS_READ = 1_000
#: What a person must know of a count that is `at_least`.
OF_PART = f"Of a state with more than {ERRORS_READ:,} tasks, the oldest and the newest {ERRORS_READ // 2} are counted"
#: The selection of all tasks of a state.
ALL = TaskSelection()
_RESOLUTION = timedelta(microseconds=1)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A row by column name, and the state of the task, as they were at `as_of`."""

    state: str
    columns: Mapping[str, Any]
    as_of: datetime

    @property
    def message(self) -> Any | None:
        """Return the PubsubMessage in the column Data, or None if the column holds none."""
        return parsed(self.columns["Data"])


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _Place:
    """The place of a task in a list: by SentAt, or CreatedAt if it is unsent, and then by CreatedAt and Id."""

    time: datetime
    created_at: datetime = LONG_AGO
    id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskList:
    """Tasks of a list as they were at `as_of`, and the cursor of the next page, or None if this is the last one.

    Unless `whole`, a shard and topic has more tasks of a state than one read compares. Then the list has those that
    workers take first.
    """

    tasks: list[Task]
    as_of: datetime
    next: str | None
    whole: bool


@dataclasses.dataclass(frozen=True, slots=True)
class BlockedHead:
    """A task behind which tasks of its ordering key are blocked. `head` is None if the task does not exist."""

    id: str
    topic: str
    blocked: int
    head: Task | None


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorCount:
    """A number of unsent tasks with the same state and error, of all `topics`. If `at_least`, there may be more.

    `topics` are those with most of the tasks first. `error` is the LastError of one of the tasks. `first` and `last`
    are when the first and the last of them were registered, because the table has no times of failures.
    """

    topics: Mapping[str, int]
    state: str
    error: str | None
    tasks: int
    at_least: bool
    first: datetime
    last: datetime

    @property
    def of(self) -> str:
        """Return the topics as a text, the first three of many."""
        more = f" and {len(self.topics) - 3:,} more" if len(self.topics) > 3 else ""
        return ", ".join([*self.topics][:3]) + more

    @property
    def part(self) -> str:
        """Return the longest part of the error without IDs and numbers, which all of the tasks have."""
        return max(task_sql.error_group(self.error).split("#"), key=len).strip()


#: Before the first task of a list, oldest and newest first.
_BEGIN, _END = _Place(LONG_AGO), _Place(NEVER)


def find(
    table: TaskTable,
    states: Collection[str] = UNSENT,
    selection: TaskSelection = ALL,
    *,
    newest: bool = False,
    after: str | None = None,
    limit: int = 100,
) -> TaskList:
    """Return the oldest, or newest, tasks of some states: by SentAt, or by CreatedAt of unsent tasks.

    The fields of the `selection` that narrow it are used. `after` is the cursor of a page in the same order. A task
    keeps its place while it is unsent, so one that stays in the list is on one page if all pages are `whole`.

    Raises NotReached, and SettingError if the cursor is not from a page in this order.
    """
    position, at = _position(after, newest=newest), table.now()
    reader = _Reader(table, selection, position, newest, limit + 1, at)
    unsent = [state for state in UNSENT if state in states]
    tasks, whole = reader.unsent(unsent) if unsent else ([], True)
    tasks += [task for state in ENDED if state in states for task in reader.ended(state)]
    tasks = sorted(tasks, key=_place, reverse=newest)
    page = tasks[:limit]
    return TaskList(
        tasks=sorted(page, key=lambda task: _publish_place(task.columns), reverse=newest),
        as_of=at,
        next=_cursor(_place(page[-1]), newest=newest) if len(tasks) > limit else None,
        whole=whole,
    )


def count_errors(tasks: Iterable[Task], *, at_least: bool = False) -> list[ErrorCount]:
    """Return the number of tasks with the same state and error, highest first."""
    groups: dict[tuple[str, str], list[Task]] = defaultdict(list)
    for task in tasks:
        groups[task.state, task_sql.error_group(task.columns["LastError"])].append(task)
    counts = []
    for (state, _), found in groups.items():
        topics = dict(Counter(task.columns["Topic"] for task in found).most_common())
        times = [task.columns["CreatedAt"] for task in found]
        error = found[0].columns["LastError"]
        counts.append(ErrorCount(topics, state, error, len(found), at_least, min(times), max(times)))
    return sorted(counts, key=lambda each: (-each.tasks, each.of))


def errors(table: TaskTable, backlog: Backlog) -> list[ErrorCount]:
    """Return the errors of all unsent tasks as of a backlog, highest count first. Raises NotReached, OutboxError.

    Of a state with more than ERRORS_READ tasks, the oldest half and the newest half of so many are read: otherwise old
    errors would hide a new one. A recorded failure sets AvailableAt. So of the pending tasks, only
    the due ones are read, however many are ready.
    """
    found: list[ErrorCount] = []
    lines = backlog.topics()
    oldest, newest = (
        _Reader(table, ALL, _END if newest else _BEGIN, newest=newest, limit=ERRORS_READ // 2, at=backlog.as_of)
        for newest in (False, True)
    )
    for state in UNSENT:
        if topics := [topic for topic, line in lines.items() if getattr(line, state)]:
            range_ = "due" if state == "pending" else state
            ceiling = max(ERRORS_READ, range_limit(ranges_of(table.shards, topics)))
            tasks = oldest.of_ranges([range_], topics, ceiling)
            if is_part := len(tasks) == ERRORS_READ // 2:
                tasks += newest.of_ranges([range_], topics, ceiling)
            read = {task.columns["Id"]: dataclasses.replace(task, state=state) for task in tasks}.values()
            failed = [task for task in read if task.columns["LastError"]]
            found += count_errors(failed, at_least=is_part and len(read) == len(tasks))
    return sorted(found, key=lambda count: -count.tasks)


def blocked_heads(table: TaskTable, backlog: Backlog, limit: int = 100) -> list[BlockedHead]:
    """Return the tasks that block most others, as of a backlog. Raises NotReached, OutboxError.

    If `at_least` of a topic's line names `blocked`, not all of its blocked tasks are counted.
    """
    topics = [topic for topic, line in backlog.topics().items() if line.blocked]
    reader = _Reader(table, ALL, _BEGIN, newest=False, limit=limit, at=backlog.as_of)
    values = {"topics": topics, "ceiling": range_limit(ranges_of(table.shards, backlog.topics())), "limit": limit}
    rows = reader.query(task_sql.blocked_heads(task_sql.listed_columns(_COLUMNS)), values)
    return [
        BlockedHead(id, topic, number, _task(reader.at, row) if row[1] else None) for id, topic, number, *row in rows
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the first `limit` tasks behind a position, as they were `at` a time."""

    table: TaskTable
    selection: TaskSelection
    position: _Place
    newest: bool
    limit: int
    at: datetime

    def unsent(self, states: Sequence[str]) -> tuple[list[Task], bool]:
        """Return tasks, and whether all tasks of the states were compared."""
        topic = self.selection.topic
        topics = [topic] if topic is not None else self.table.topics(at=self.at)
        # A filter may hold for few of the tasks, so more of them are read.
        most = MAX_TOTAL if self.selection.names - {"topic"} else None
        ranges = ranges_of(self.table.shards, topics)
        ceiling = max(self.limit, range_limit(ranges, most))
        counting = task_sql.compared(states, self.selection.names)
        counts = (count(self.query, each, ranges, ceiling) for each in counting)
        return self.of_ranges(states, topics, ceiling), not any(full for _, full in counts)

    def of_ranges(self, states: Sequence[str], topics: Sequence[str], ceiling: int) -> list[Task]:
        """Return unsent tasks, of which at most `ceiling` of a shard, topic and state are compared."""
        names = self.selection.names
        statement = task_sql.listed_unsent(states, task_sql.listed_columns(_COLUMNS), names, newest=self.newest)
        return self._tasks(statement, {"topics": topics, "ceiling": ceiling})

    def ended(self, state: str) -> list[Task]:
        """Search growing time windows, because there may be millions of sent, or cancelled, tasks."""
        tasks: list[Task] = []
        for window in self._windows(state):
            columns = task_sql.listed_columns(_COLUMNS)
            statement = task_sql.listed_ended(state, columns, window.names, newest=self.newest)
            tasks = self._tasks(statement, window.values)
            if len(tasks) >= self.limit:
                break
        return tasks

    def _windows(self, state: str) -> Iterator[TaskSelection]:
        since, until = self.selection.since or LONG_AGO, self.selection.until or NEVER
        if self.newest:
            until = min(until, self.position.time + _RESOLUTION)
            edge = min(until, self.at + timedelta(seconds=1))
            parts = [(max(since, edge - window), until) for window in WINDOWS]
        else:
            first = [sent_at for (sent_at,) in self.query(task_sql.first_ended(state), {})]
            since = max(since, self.position.time, min(first, default=LONG_AGO))
            parts = [(since, min(until, since + window)) for window in WINDOWS]
        for part in dict.fromkeys([*parts, (since, until)]):
            yield dataclasses.replace(self.selection, since=part[0], until=part[1])

    def _tasks(self, statement: str, values: Mapping[str, Any]) -> list[Task]:
        after = dict(zip(("after", "after_created", "after_id"), dataclasses.astuple(self.position), strict=True))
        return [_task(self.at, row) for row in self.query(statement, {**values, **after, "limit": self.limit})]

    def query(self, statement: str, values: Mapping[str, Any]) -> list[list[Any]]:
        given = {**self.selection.values, **values}
        return self.table.query(statement, "outbox-list", given, at=self.at, seconds=SCAN_SECONDS)


def _task(as_of: datetime, row: Sequence[Any]) -> Task:
    return Task(row[0], dict(zip(_COLUMNS, row[1:], strict=True)), as_of)


def _time(columns: Mapping[str, Any]) -> Any:
    return columns["SentAt"] or columns["CreatedAt"]


def _place(task: Task) -> _Place:
    return _Place(_time(task.columns), task.columns["CreatedAt"], task.columns["Id"])


def _cursor(position: _Place, *, newest: bool) -> str:
    # The client returns times with nanoseconds, which another program may have written.
    times: tuple[Any, ...] = (position.time, position.created_at)
    text = json.dumps([newest, *(each.rfc3339() for each in times), position.id], ensure_ascii=False)
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _position(cursor: str | None, *, newest: bool) -> _Place:
    if cursor is None:
        return _END if newest else _BEGIN
    parse: Any = DatetimeWithNanoseconds.from_rfc3339
    try:
        of_newest, sent_at, created_at, id = json.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        place = _Place(parse(sent_at), parse(created_at), id)
        # At both ends of the calendar, there is no time a window later or earlier.
        is_ours = 1 < place.time.year < 9999 and _cursor(place, newest=of_newest) == cursor
    except (ValueError, TypeError, RecursionError):
        is_ours = False
    if not is_ours or not isinstance(of_newest, bool) or not isinstance(id, str):
        raise SettingError(f"{cursor[:80]!r} is not a cursor from the end of a list. Copy the whole cursor")
    if of_newest != newest:
        order = "newest" if of_newest else "oldest"
        raise SettingError(f"the cursor is from a list of the {order} tasks. Continue with the {order}")
    return place


def beginning_with(table: TaskTable, prefixes: Sequence[str], limit: int) -> dict[str, list[str]]:
    """Return the IDs of the first `limit` tasks that begin with each of `prefixes`, sorted, if there are any."""
    matches: dict[str, list[str]] = defaultdict(list)
    for ids in chunked(prefixes, CHUNK):
        for prefix, id in table.query(task_sql.BEGINNING_WITH, "outbox-show", {"ids": list(ids), "limit": limit}):
            matches[prefix].append(id)
    return {prefix: sorted({*ids}) for prefix, ids in matches.items()}


def task(table: TaskTable, id: str, *, data: bool = True) -> Task | None:
    """Return one task with all columns, or None if it does not exist. `Data` is bytes, and missing without `data`."""
    names = [name for name in _ALL_COLUMNS if data or name != "Data"]
    rows = table.query(task_sql.task(task_sql.listed_columns(names)), "outbox-show", {"id": id})
    if not rows:
        return None
    as_of, state, *values = rows[0]
    columns: dict[str, Any] = dict(zip(names, values, strict=True))
    if data:
        columns["Data"] = b64decode(columns["Data"])  # the client returns BYTES in base64
    return Task(state, columns, as_of)


def _publish_place(columns: Mapping[str, Any]) -> tuple[Any, ...]:
    sequence = columns["Sequence"]
    return _time(columns), columns["CreatedAt"], sequence is not None, sequence or 0, columns["Id"]

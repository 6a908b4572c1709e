"""The known facts about tasks with ordering keys, and the rules that must never be broken."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.storage.task_states import NEVER
from publishworker.pubsub.errors import FailureKind, kind_of
from publishworker.types import Deferred, FailedAttempt, Mark, Sent
from tests.support.fakes import FakeStore, StoredTask
from tests.support.order_charges import LONGEST_BACKOFF
from tests.support.order_pubsub import Request

_NO_SEQUENCE = -(2**63)
_PREFIX = "projects/test-project/topics/"


@dataclass(kw_only=True)
class Task:
    id: str
    topic: str = "orders"
    key: str | None = "k"
    sequence: int | None = None
    priority: int = 50
    available_at: datetime | None = None
    expires_at: datetime | None = None
    bad: bool = False  # Pub/Sub refuses its content
    once: bool = False  # to be sent at most once
    created_at: datetime | None = None  # None: not committed
    published: int = 0
    deleted: bool = False
    retried: int = 0  # how often an operator had it sent again
    owed: int = 1  # the min number of publishes in the end
    risked: bool = False  # a fault met the worker that marked it, so an at-most-once task may be lost
    #: It was skipped once, so it may be published after the tasks behind it.
    excused: bool = False

    @property
    def place(self) -> tuple[datetime | None, int, str]:
        return self.created_at, _NO_SEQUENCE if self.sequence is None else self.sequence, self.id


def is_dead(row: StoredTask | None) -> bool:
    return row is not None and row.sent_at is None and row.available_at is not None and row.available_at >= NEVER


class Ledger:
    """All tasks and publishes; `broken` lists the broken promises."""

    def __init__(self, store: FakeStore, *, skip_dead: bool) -> None:
        self._rows_of = store
        self.skip_dead = skip_dead
        self.tasks: dict[str, Task] = {}
        self.keys: dict[tuple[str, str | None], list[Task]] = {}
        self.touched: dict[str, datetime] = {}  # when each row was last written
        self.published: list[str] = []
        self.broken: list[str] = []

    def is_excused(self, task: Task) -> bool:
        expired = task.expires_at is not None and task.expires_at <= self._rows_of.now
        return task.excused or task.deleted or expired

    def check_order(self, request: Request) -> None:
        for n, id in enumerate(request.ids):
            task = self.tasks.get(id)
            if task is None:
                self.broken.append(f"{id} was never committed")
            elif (_PREFIX + task.topic, {task.key or ""}) != (request.topic, request.keys):
                self.broken.append(f"{id} goes to {request.topic} with {request.keys}")
            elif task.key is not None and not task.published:
                for each in self._before(task):
                    if not (each.published or each.id in request.ids[:n] or self.is_excused(each)):
                        self.broken.append(f"{id} overtakes {each.id}")

    def check_heads(self, request: Request, heads_at: datetime) -> None:
        for id in request.ids:
            if (mine := self._rows_of.rows.get(id)) is not None and mine.sent_at is not None:
                self.broken.append(f"{id} goes out and was marked as sent before")
            for each in self._before(self.tasks[id]) if id in self.tasks and request.keys != {""} else ():
                row = self._rows_of.rows.get(each.id)
                if row is None or row.sent_at is not None or (row.last_error or "").startswith("deferred"):
                    continue
                waits = row.available_at is not None and row.available_at > self._rows_of.now
                since = self.touched[each.id] <= heads_at
                if waits and since and not self._is_passed_over(row):
                    self.broken.append(f"{id} goes out behind {each.id}, which is not due")

    def _is_passed_over(self, row: StoredTask) -> bool:
        expired = row.expires_at is not None and row.expires_at <= self._rows_of.now
        return expired or (self.skip_dead and is_dead(row))

    def _before(self, task: Task) -> list[Task]:
        its = self.keys[task.topic, task.key]
        return its[: its.index(task)]

    def check_marks(self, marks: Mapping[str, Mark]) -> None:
        latest = self._rows_of.now + timedelta(seconds=LONGEST_BACKOFF)
        recorded: set[tuple[str, str | None]] = set()
        for id, mark in marks.items():
            task = self.tasks[id]
            if isinstance(mark, Sent) and not task.published and not task.once:
                self.broken.append(f"{id} is marked as sent and was not")
            if isinstance(mark, Deferred) and not mark.available_at <= latest:
                self.broken.append(f"{id} is deferred until {mark.available_at}")
            if isinstance(mark, FailedAttempt) and (mark.error or "").startswith("invalid_argument") and not task.bad:
                self.broken.append(f"{id} pays for another task, which is bad")
            if isinstance(mark, FailedAttempt) and mark.error is not None:  # else it is only released
                task.excused = task.excused or self.is_excused(task) or (mark.dead and self.skip_dead)
                # If dead tasks are skipped, each task may have a failure of its own.
                own = self.skip_dead and kind_of(mark.error.partition(":")[0]) is FailureKind.CONTENT
                if task.key is not None and not own and not mark.error.startswith("expired"):
                    if (task.topic, task.key) in recorded:
                        self.broken.append(f"{id} is recorded behind another task of its key")
                    recorded.add((task.topic, task.key))

    def check_all_sent(self, *, but_held: bool) -> None:
        for (_, key), tasks in self.keys.items():
            for task in tasks:
                row = self._rows_of.rows.get(task.id)
                if row is None:
                    continue
                if row.sent_at is None and but_held and is_dead(row):
                    if key is None or self.skip_dead or self.is_excused(task):
                        continue
                    break
                if row.sent_at is None or not (task.published >= task.owed or (task.once and task.risked)):
                    self.broken.append(f"{task.id} is lost: {row}")

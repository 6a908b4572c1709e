"""Programs that follow the sent tasks with the product's reader, and the judge of what they read."""

from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from outbox import reading
from outbox.admin import operator_sql
from outbox.reading import Reader, SentTask, SentTasks
from outbox.table.shared_sql import by_ids
from tests.simulation.client import Commands, attribute
from tests.simulation.clockwork import Clockwork, Event

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Tasks of a page, instead of a thousand: fewer than large batches have.
PAGE_ROWS = 20


class Sent(Commands):
    """The table as a reader uses it."""

    def strong_query(
        self, statement: str, tag: str, parameters: Mapping[str, Any], **_more: Any
    ) -> tuple[list[list[Any]], datetime]:
        """Return the first sent tasks after a position, and the time of the read."""
        assert statement == operator_sql.sent_after([name for name in ("topic",) if name in parameters])
        self._spanner.clockwork.sleep(self._spanner.drawn(self._spanner.latencies.read))
        topic, after, table = parameters.get("topic"), parameters["after"], self._spanner.table
        found = sorted(
            (row.sent_at, row.id)
            for row in table.rows.values()
            if row.sent_at is not None and row.sent_at >= after and topic in (None, row.topic)
        )[: parameters["limit"]]
        rows = [table.rows[id] for _, id in found]
        self._data = {row.id: row.data for row in rows}
        names = [attribute(name) for name in operator_sql.SENT_COLUMNS[:-1]]
        return [[*(getattr(row, name) for name in names), len(row.data)] for row in rows], table.time()

    def query(self, statement: str, *arguments: Any, **_more: Any) -> list[list[Any]]:
        """Return the messages of tasks as of the last page."""
        assert statement == by_ids("Id, Data")
        self._spanner.clockwork.sleep(self._spanner.drawn(self._spanner.latencies.read))
        return [[id, b64encode(self._data[id])] for id in arguments[1]["ids"]]


class Follower:
    """One program. It stops and begins again from its position, again and again."""

    def __init__(self, world: "World") -> None:
        self._world, self._audit, self._random = world, world.audit, Random(f"{world.plan.seed}/reader")
        self._topic = self._random.choice([None, *world.topics])
        #: The tasks that it has read, each with its SentAt. The last one is at the end.
        self._seen: dict[tuple[str, datetime], None] = {}
        #: When it last began a read that found no task.
        self.caught_up = 0.0

    def run(self) -> None:
        clockwork, position = self._world.clockwork, str(reading.Position(self._world.spanner.table.epoch))
        while True:
            table = Sent(self._world.spanner, self._audit)
            with Reader(SentTasks(table, reading.Position.read(position), self._topic, resumes=True)) as reader:
                for _ in range(self._random.choice([1, 5, 50])):
                    began = clockwork.now
                    if (task := reader.read(self._random.choice([0.5, 10.0]))) is None:
                        self.caught_up = began
                    else:
                        self._judge(task)
                    position = reader.position

    def _judge(self, task: SentTask) -> None:
        known, read = self._audit.tasks.get(task.id), (task.id, task.sent_at)
        if known is None or task.sent_at not in self._audit.sent[task.id]:
            self._audit.problem(f"{task.id} was read as sent at {task.sent_at}, and was not")
        elif read in self._seen:
            self._audit.problem(f"{task.id} of {task.sent_at} was read twice")
        elif self._seen:
            id, sent_at = next(reversed(self._seen))
            last = self._audit.tasks[id]
            of_key = bool(known.key) and (last.topic, last.key, sent_at) == (known.topic, known.key, task.sent_at)
            if task.sent_at < sent_at or (of_key and known.position < last.position):
                self._audit.problem(f"{task.id} was read after {id}, which was sent later")
        self._seen[read] = None

    def end(self) -> None:
        """Judge whether it has read each task that is sent now."""
        for row in self._world.spanner.table.rows.values():
            if row.sent_at and self._topic in (None, row.topic) and (row.id, row.sent_at) not in self._seen:
                self._audit.problem(f"{row.id} was sent at {row.sent_at}, and was never read")


@contextmanager
def virtual_time(clockwork: Clockwork) -> Iterator[None]:
    """Let readers wait in virtual time."""
    threads = SimpleNamespace(Event=lambda: Event(clockwork))
    clock = SimpleNamespace(monotonic=lambda: clockwork.now)
    with mock.patch.multiple(reading, threading=threads, time=clock, PAGE_ROWS=PAGE_ROWS):
        yield

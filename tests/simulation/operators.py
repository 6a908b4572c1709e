"""What applications and operators change in a history, and programs that follow the sent tasks."""

import contextlib
import dataclasses
import functools
import itertools
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from google.cloud.spanner_v1 import KeySet

import outbox
from outbox import reading
from outbox.errors import OutboxError
from outbox.reading import Reader, SentTask, SentTasks
from outbox.rows import counts_sql
from outbox.table.controls import LIMITS, NO_CONTROLS, POLICY
from outbox.table.shared_sql import by_ids
from outbox.table.states import CANCELLED, TASKS_TABLE, UNSENT, is_dead
from outbox_admin import operations
from outbox_admin.change_kinds import ANY_UNSENT, KINDS, MADE_UNSENT
from outbox_admin.changes import execution
from outbox_admin.operations import UNNAMED, NotContinued, new_id
from outbox_admin.tasks.selections import TaskSelection
from tests.simulation.audit import GOOD, Known
from tests.simulation.client import Commands, Work, attribute, transact
from tests.simulation.clockwork import Clockwork, Event
from tests.simulation.spanner import Aborted
from tests.support.fakes import StoredTask

if TYPE_CHECKING:
    from tests.simulation.world import World


#: Tasks of a chunk of an operation, instead of hundreds.
CHUNK = 3
#: Part of the cancellations that are of the first unsent tasks of one key.
OF_KEY = 0.3


class RolledBack(Exception):
    """The application has changed its mind."""


class Operators:
    """The applications' changes and the operators of one history."""

    def __init__(self, world: "World") -> None:
        self.world, self.plan, self.audit = world, world.plan, world.audit
        self.spanner, self.table, self.clockwork = world.spanner, world.spanner.table, world.clockwork
        self._replacements = 0
        #: Draws filters, stops and continuations.
        self._more = Random(f"{world.plan.seed}/more")
        #: The tasks whose rows were deleted.
        self.purged = world.spanner.table.purged
        #: The archived rows, by ID.
        self.archive: dict[str, StoredTask] = {}

    def start(self) -> None:
        """Begin all that the plan has."""
        plan, spawn = self.plan, functools.partial(self.clockwork.spawn, self.world.application)
        for topic in self.world.topics if plan.limit else ():
            self._limit(topic, float(plan.limit), plan.limit)
        spawn(self.mend)
        rates = ((plan.cancels, self.change), (plan.bulk, self.bulk), (plan.replays, self.archive_or_replay))
        others = ((plan.controls, self.control), (plan.restores, self.restore), (plan.repeats, self.repeat))
        for rate, action in (*rates, *others):
            if rate:
                spawn(functools.partial(self._repeat, action, rate))

    def _repeat(self, action: Callable[[Random], None], rate: float) -> None:
        """Begin the action so many times a second."""
        random = Random(f"{self.plan.seed}/{action.__name__}")
        while self.clockwork.now < self.plan.seconds:
            self.clockwork.sleep(random.expovariate(rate))
            self.clockwork.spawn(self.world.application, functools.partial(self._try, action, random))

    @staticmethod
    def _try(action: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(Aborted, OutboxError, RolledBack):  # it is given up
            action(*arguments)

    def mend(self) -> None:
        """Send tasks again, pause topics, mend or delete dead tasks; after the history only mend."""
        random, table, world = Random(f"{self.plan.seed}/operator"), self.table, self.world
        while self.clockwork.now < self.plan.seconds:
            self.clockwork.sleep(random.expovariate(1 / 2))
            latest = [*itertools.islice(reversed(table.rows.values()), 100)]
            sent = [row.id for row in latest if row.sent_at is not None]
            dead = [row.id for row in latest if is_dead(row.available_at) and row.sent_at is row.cancelled_by is None]
            topic = random.choice(world.topics)
            match random.randrange(8):
                case 0:
                    world.set_paused(topic, paused=not table.controls.get(topic, NO_CONTROLS).paused)
                case 1 | 2 if dead:
                    self._repair(random.choice(dead), delete=random.random() < 0.5)
                case _ if sent:
                    self._retry(random.choice(sent))
        for topic in world.topics:
            world.set_paused(topic, paused=False)
            self._limit(topic, **dict.fromkeys((*LIMITS, *POLICY)))
        table.refused.clear()
        while True:
            self.clockwork.sleep(5.0)
            for row in [row for row in table.unsent_rows() if is_dead(row.available_at)]:
                if row.cancelled_by is None:
                    self._repair(row.id, delete=False)
                else:  # no poll finds it, and an operator cancels it again
                    self.table.change(row.id, sent_at=self.table.commit_time())

    def _repair(self, id: str, *, delete: bool) -> None:
        """Delete a dead task, or repair it and make it ready, unless a commit is writing it. Claims lose its lock."""
        if not self._wound(id):
            return
        if delete:
            self.audit.deleted(id)
            self.table.delete(id)
        else:
            self.audit.mended(id)
            self.table.change(id, data=GOOD, available_at=None, attempts=0, expires_at=None)

    def _retry(self, id: str) -> None:
        """As `UPDATE AsynchronousTasks SET SentAt = NULL`, also of cancelled tasks, which workers end again."""
        if self._wound(id) and self.table.rows[id].sent_at is not None:
            self.table.change(id, sent_at=None)
            if self.table.rows[id].cancelled_by is None:
                self.audit.reset(id)

    def _wound(self, id: str) -> bool:
        """Take the row's lock, of which a claim may be robbed; return False if one is just being committed."""
        locks = self.spanner.locks
        for holder in list(locks.holders(id)):
            if holder.commits:
                return False
            locks.wound(holder)
        return True

    def change(self, random: Random) -> None:
        """One transaction of an application: it reads rows, and cancels, replaces and registers tasks.

        The longer it reads before it cancels, the more claims are younger, and lose their locks to it.
        """
        latest = [*itertools.islice(reversed(self.table.rows.values()), random.choice([3, 100]))]
        reads = random.choice([0.0, 0.02, 0.1, 0.5])
        of_key, replaces, tries_own = (random.random() < part for part in (OF_KEY, 0.3, 0.1))
        chosen = random.sample(latest, min(len(latest), random.choice([1, 1, 3])))
        if of_key and chosen:
            key = chosen[0].ordering_key
            chosen = [row for row in reversed(latest) if row.ordering_key == key and row.sent_at is None][:3]
        ids = [row.id for row in chosen]
        answers: dict[str, bool] = {}

        def work(attempt: Any) -> None:
            self.clockwork.sleep(reads)
            answers.clear()
            answers.update({id: outbox.cancel(attempt, id) for id in ids})
            if replaces and answers.get(ids[0]):
                new = self._register(attempt, random, ids[0])
                if tries_own:
                    answers[new] = outbox.cancel(attempt, new)
            if random.random() < 0.1:
                raise RolledBack

        if ids:
            transact(self.spanner, self.audit, work)
            for id, was_unsent in answers.items():
                if not was_unsent and id in self.table.rows and self.table.rows[id].sent_at is None:
                    self.audit.problem(f"cancel of {id} returned False, and the task is unsent")

    def _register(self, attempt: Work, random: Random, replaced: str) -> str:
        """Register a task instead of a cancelled one, as the recipe of the guide does."""
        former = self.table.rows[replaced]
        self._replacements += 1
        id = f"{replaced}+{self._replacements}"
        data = f"instead of {replaced}".encode()
        now = self.clockwork.now
        attempt.known[id] = Known(former.topic, former.ordering_key or "", now, now, data=data)
        return outbox.register(attempt, former.topic, data, ordering_key=former.ordering_key or "", task_id=id)

    def repeat(self, random: Random) -> None:
        """A job registers again what it has registered. It finds the row, also of a cancelled task."""
        id = random.choice([*self.audit.tasks, ""])
        former = self.audit.tasks.get(id)
        if former is None or former.bad or former.once or former.data != b"data":
            return
        existed = id in self.table.rows
        answers: list[bool] = []

        def work(attempt: Any) -> None:
            now = self.clockwork.now
            attempt.known[id] = Known(former.topic, former.key, now, now)
            options: Any = {"ordering_key": former.key}
            answers.append(outbox.register_once(attempt, former.topic, b"data", task_id=id, **options))

        transact(self.spanner, self.audit, work)
        if answers[-1] and existed and id not in self.purged:
            self.audit.problem(f"{id} was registered again, although its row existed")

    def bulk(self, random: Random) -> None:
        """As `outbox retry`, `cancel` and `purge`: a preview that a person reads, and then chunk after chunk.

        Some processes end after a chunk, or a person stops the operation. Then others continue it, sometimes two.
        """
        name = random.choice(["retry", "cancel", "purge"])
        others = set() if self.plan.restores else {"pending"}
        state = random.choice([each for each in KINDS[name].states if each not in others])
        now = self.table.time()
        selection = TaskSelection(state=state, topic=random.choice([*self.world.topics, None]), as_of=now)
        if state == "sent":
            selection = dataclasses.replace(selection, since=now - timedelta(seconds=5), until=now)
        selection = self._narrowed(name, selection)
        commands = Commands(self.spanner, self.audit, selection)
        self.clockwork.sleep(random.choice([0.0, 1.0, 3.0]))
        id, changed = new_id(), set[str]()

        def execute(outcomes: Iterable[execution.Outcome]) -> None:
            for outcome in outcomes:
                for each in changed.intersection(outcome.changed):
                    self.audit.problem(f"{each} was changed twice by one {name}")
                changed.update(outcome.changed)
                self.clockwork.sleep(random.choice([0.0, 0.0, 0.2]))

        outcomes = execution.change(commands, name, selection, id=id)
        ends_after = self._more.choice([None, None, 1, 3])
        try:
            execute(itertools.islice(outcomes, ends_after))
            if not operations.found(commands, id).has_ended:
                self._continue(commands, id, execute)
        except NotContinued:
            self.audit.problem(f"nobody else worked on the operation {id}, and it ended early")
        self._judge_bulk(commands, name, selection, changed)

    def _narrowed(self, name: str, selection: TaskSelection) -> TaskSelection:
        """Return the selection, some with a filter or of IDs."""
        match self._more.randrange(8):
            case 0:
                return dataclasses.replace(selection, ordering_key=f"key-{self._more.randrange(5)}")
            case 1:
                return dataclasses.replace(selection, id_prefix=str(self._more.randrange(10)))
            case 2 if selection.state in ("dead", "retrying"):
                return dataclasses.replace(selection, error="invalid")
            case 3 if (of_ids := KINDS[name].of_ids) and self.table.rows:
                ids = self._more.sample([*self.table.rows], min(5, len(self.table.rows)))
                return TaskSelection(state=of_ids, ids=tuple(ids), until=selection.until, as_of=selection.as_of)
        return selection

    def _continue(self, commands: Commands, id: str, execute: Callable[[Iterable[execution.Outcome]], None]) -> None:
        """Continue an operation whose process has ended, perhaps after a stop, and perhaps by two processes."""
        if self._more.random() < 0.5:
            operations.stop(commands, id, UNNAMED)
            with contextlib.suppress(NotContinued):
                execute(execution.resume(commands, id))
                self.audit.problem(f"the operation {id} was stopped, and executed further")
            operations.proceed(commands, id, UNNAMED)

        if self._more.random() < 0.5:
            resume = functools.partial(self._try, lambda: execute(execution.resume(commands, id)))
            self.clockwork.spawn(self.world.application, resume)
            resume()
        else:
            execute(execution.resume(commands, id))

    def _judge_bulk(self, commands: Commands, name: str, selection: TaskSelection, changed: set[str]) -> None:
        seen, state = commands.seen.keys(), selection.state
        for id in changed - seen:
            self.audit.problem(f"{id} was changed by a {name} of {state} tasks, and not in its preview")
        fitting = (
            {*UNSENT, MADE_UNSENT} if state == ANY_UNSENT else {state, *({MADE_UNSENT} if name == "cancel" else ())}
        )
        for id in changed & {id for id, each in commands.states.items() if each not in fitting}:
            self.audit.problem(f"{id} was {commands.states[id]}, and was changed by a {name} of {state} tasks")
        released = {row["Id"] for _, _, row in commands.writes if [*row] == ["Id", "AvailableAt", "BlockedBy"]}
        for id in (released & seen) - changed if state == "blocked" else ():
            self.audit.problem(f"{id} was released by the {name} that had selected it")

    def restore(self, random: Random) -> None:
        """As `outbox restore` of a cancel, which may still be running: the tasks that it has cancelled so far."""
        found = [*dict.fromkeys(row.cancelled_by for row in self.table.rows.values() if row.cancelled_by)]
        if found:
            selection = TaskSelection(state=CANCELLED, cancelled_by=random.choice(found), as_of=self.table.time())
            if self._more.random() < 0.2:
                ids = [row.id for row in self.table.rows.values() if row.cancelled_by]
                ids = [*self._more.sample(ids, min(4, len(ids))), *itertools.islice(self.table.rows, 1)]
                selection = TaskSelection(state=CANCELLED, ids=tuple(ids), as_of=selection.as_of)
            commands = Commands(self.spanner, self.audit, selection)
            for _ in execution.change(commands, "restore", selection):
                self.clockwork.sleep(random.choice([0.0, 0.0, 0.2]))

    def archive_or_replay(self, random: Random) -> None:
        """Archive ended tasks and delete their rows, or replay from the archive; Spark repeats some Spark tasks.

        Some sent tasks are deleted before they are archived. A replay can then insert them twice with one TimesSent.
        """
        from outbox_pipeline.jobs import replay as job  # most histories need no PySpark, which is slow

        before = self.table.time() - timedelta(seconds=2)
        if random.random() < 0.5:
            ended = [row for row in self.table.rows.values() if row.sent_at is not None and row.sent_at < before]
            is_late = random.random() < 0.5
            self.archive |= {row.id: dataclasses.replace(row) for row in ended if row.cancelled_by or not is_late}
            transact(self.spanner, self.audit, functools.partial(self._delete, random.sample(ended, len(ended) // 2)))
            return
        sent = [row for row in self.archive.values() if row.cancelled_by is None]
        chosen = random.sample(sent, min(len(sent), random.choice([1, 3, 9])))
        rows = sorted(chosen, key=lambda row: (row.created_at, row.id))
        commands, started_at = Commands(self.spanner, self.audit), self.table.commit_time()
        columns = {name: attribute(name) for name in job.ARCHIVED_COLUMNS}
        chunks = [rows[n : n + CHUNK] for n in range(0, len(rows), CHUNK)]
        for chunk in chunks + chunks[: random.choice([0, 1])]:
            values = [{name: getattr(row, own) for name, own in columns.items()} for row in chunk]
            job.replay_chunk(commands, values, started_at)  # type: ignore[arg-type]  # as the job's table
            self.clockwork.sleep(random.choice([0.0, 1.0, 5.0]))

    @staticmethod
    def _delete(rows: list[StoredTask], attempt: Work) -> None:
        """Delete the rows that are still sent, as Spanner's row deletion policy does."""
        found = attempt.query(by_ids("Id, SentAt", lock=True), {"ids": [row.id for row in rows]})
        attempt.delete(TASKS_TABLE, KeySet(keys=[[id] for id, sent_at in found if sent_at is not None]))

    def _limit(self, topic: str, rate_per_second: float | None, burst: int | None, **more: Any) -> None:
        self.table.control(topic, rate_per_second=rate_per_second, burst=burst, **more)
        self.audit.rates.set(self.clockwork.now, topic, rate_per_second, burst)

    def control(self, random: Random) -> None:
        """Set or remove a limit or a retry policy of a topic, or its route."""
        topic = random.choice(self.world.topics)
        match random.randrange(3):
            case 0:
                rate, burst = random.choice([(None, None), (5.0, 1), (5.0, 20), (50.0, 100)])
                self._limit(topic, rate, burst, max_in_flight=random.choice([None, 1, 5]))
            case 1:
                self.table.control(topic, backoff_initial_seconds=random.choice([0.1, 30.0]))
            case 2:
                self._limit(topic, **dict.fromkeys((*LIMITS, *POLICY)))


#: Tasks of a page, instead of a thousand: fewer than large batches have.
PAGE_ROWS = 20


class Sent(Commands):
    """The table as a reader uses it."""

    def strong_query(
        self, statement: str, tag: str, parameters: Mapping[str, Any], **_more: Any
    ) -> tuple[list[list[Any]], datetime]:
        """Return the first sent tasks after a position, and the time of the read."""
        assert statement == counts_sql.sent_after([name for name in ("topic",) if name in parameters])
        self._spanner.wait(self._spanner.latencies.read)
        topic, after, table = parameters.get("topic"), parameters["after"], self._spanner.table
        found = sorted(
            (row.sent_at, row.id)
            for row in table.rows.values()
            if row.sent_at is not None and row.sent_at >= after and row.cancelled_by is None
            if topic in (None, row.topic)
        )[: parameters["limit"]]
        rows = [table.rows[id] for _, id in found]
        self._data = {row.id: row.data for row in rows}
        names = [attribute(name) for name in counts_sql.SENT_COLUMNS[:-1]]
        return [[*(getattr(row, name) for name in names), len(row.data)] for row in rows], table.read_time()

    def query(self, statement: str, *arguments: Any, **_more: Any) -> list[list[Any]]:
        """Return the messages of tasks as of the last page."""
        assert statement == by_ids("Id, Data")
        self._spanner.wait(self._spanner.latencies.read)
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
            is_wanted = row.sent_at and row.cancelled_by is None and self._topic in (None, row.topic)
            if row.sent_at and is_wanted and (row.id, row.sent_at) not in self._seen:
                self._audit.problem(f"{row.id} was sent at {row.sent_at}, and was never read")


@contextmanager
def virtual_time(clockwork: Clockwork) -> Iterator[None]:
    """Let readers wait in virtual time."""
    threads = SimpleNamespace(Event=lambda: Event(clockwork))
    clock = SimpleNamespace(monotonic=lambda: clockwork.now)
    with mock.patch.multiple(reading, threading=threads, time=clock, PAGE_ROWS=PAGE_ROWS):
        yield

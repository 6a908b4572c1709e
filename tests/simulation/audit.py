"""What the auditor knows: which tasks were committed, and which messages were received. It judges every history."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from math import inf
from typing import Any

from outbox.table.states import KEY_CHECK_SECONDS, first_due
from publishworker.delivery.marking import MAX_MARKING_SECONDS
from publishworker.pubsub.failures import FailureKind, failure_kind
from publishworker.types import Deferred, LockedRow, NotSent, Published, RowChange, TopicKey, Version
from tests.simulation.clockwork import Clockwork, Process
from tests.simulation.duplicates import Message, Messages
from tests.support.fakes import serialized

#: Max seconds for which the first unsent task of a key may be deferred: a few turns.
FEW_TURNS = 5.0
#: The messages of the applications, and those that Pub/Sub refuses.
GOOD, BAD = serialized(), serialized(attributes={"bad": "yes"})
#: Seconds after which no worker publishes a task that is registered in a paused topic, or to the end of a former route.
PAUSE_SECONDS = 10.0
#: Seconds for which requests within a rate limit may be under way, so that they arrive together.
UNDER_WAY_SECONDS = 3.0


@dataclass(slots=True)
class Known:
    """A committed task. Times are seconds."""

    topic: str
    key: str
    at: float
    available_at: float
    due: float = 0.0  # when it should first be sent
    expires_at: float = inf
    bad: bool = False  # Pub/Sub refuses its content
    once: bool = False  # to be sent at most once
    position: int = 0  # among the tasks of its key
    excused: bool = False  # tasks behind it may be sent first
    received: int = 0
    last_at: float = -inf
    extra: int = 0  # duplicates
    resets: int = 0
    reset_at: float = -inf
    cancelled_at: float = -inf
    told_at: float = inf  # when a mark has told that it was published before it was cancelled
    row: dict[str, Any] = field(default_factory=dict)  # as it was when it was cancelled
    put_back_at: float = -inf
    put_back_by: str = ""  # the cancel that a restore has taken back
    data: bytes = b"data"

    @property
    def cancelled(self) -> bool:
        return self.cancelled_at > -inf


class Rates:
    """Judges the rate limits of topics: what they allow, all workers together, and a little for requests under way."""

    def __init__(self) -> None:
        #: The rate and burst of a topic, and when an operator has set them.
        self._limits: dict[str, tuple[float, float, float]] = {}
        #: The tasks beyond the rate that were published, by topic, and when that was counted.
        self._beyond: dict[str, tuple[float, float]] = {}
        self._workers = 0

    def set(self, now: float, topic: str, rate: float | None, burst: int | None) -> None:
        """An operator has set or removed the limit of a topic."""
        self._beyond.pop(topic, None)
        self._limits.pop(topic, None)
        if rate is not None and burst is not None:
            self._limits[topic] = rate, burst, now

    def started(self) -> None:
        """A worker has started, and may publish its part of each burst."""
        self._workers += 1
        self._beyond.clear()

    def exceeded(self, now: float, topic: str) -> bool:
        """Count a task that is published. Tell whether the limit of its topic is exceeded."""
        rate, burst, since = self._limits.get(topic, (0.0, 0.0, inf))
        if now < since + PAUSE_SECONDS:
            return False
        beyond, at = self._beyond.get(topic, (0.0, now))
        beyond = max(0.0, beyond - (now - at) * rate) + 1
        self._beyond[topic] = beyond, now
        return beyond > burst + self._workers + rate * UNDER_WAY_SECONDS


@dataclass(slots=True)
class Audit:
    """Broken promises of a history, as they are seen."""

    clockwork: Clockwork
    skip_dead: bool = False
    problems: list[str] = field(default_factory=list)
    tasks: dict[str, Known] = field(default_factory=dict)
    duplicates: int = 0
    #: Cancelled tasks that were received nevertheless, and those that workers have named or given up.
    cancelled_received: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    #: When each task was marked as sent.
    sent: dict[str, set[datetime]] = field(default_factory=lambda: defaultdict(set))
    rates: Rates = field(default_factory=Rates)
    #: By task ID, the data of the message that the subscriber has processed: its inbox drops each later one.
    effects: dict[str, bytes] = field(default_factory=dict)
    messages: Messages = field(default_factory=Messages)
    #: When a commit has last written marks.
    marked_at: float = -inf
    _of_key: dict[tuple[str, str], list[Known]] = field(default_factory=lambda: defaultdict(list))
    #: How many of the first tasks of each key are received or excused.
    _settled: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: How often a worker was told of an outage of a task, and of trouble of a topic.
    _outages: Counter[tuple[Process, str]] = field(default_factory=Counter)
    _troubles: Counter[tuple[Process, str]] = field(default_factory=Counter)
    #: When Spanner last read the task for a worker as one of the first of its key. It locks the row later.
    _chosen: dict[tuple[Process, str], float] = field(default_factory=dict)
    #: The rows as each worker last locked them, and as they were when it learned that Pub/Sub has the task.
    _claimed: dict[tuple[Process, str], LockedRow] = field(default_factory=dict)
    _unfit: dict[tuple[Process, str], str] = field(default_factory=dict)
    _acknowledged: dict[tuple[Process, str], tuple[float, Version]] = field(default_factory=dict)
    #: The deferred first task of each key, with the time since which it is so.
    _deferred: dict[TopicKey, tuple[str, float]] = field(default_factory=dict)
    #: When an operator last deleted or restored a task of the key. Its first task may then wait KEY_CHECK_SECONDS.
    _released_later_from: dict[TopicKey, float] = field(default_factory=dict)
    #: When each paused topic was paused.
    _paused_at: dict[str, float] = field(default_factory=dict)
    #: When the route of each topic was last changed, and where its messages go since. None: nowhere.
    _routed: dict[str, tuple[float, str | None]] = field(default_factory=dict)
    #: All topics in which the tasks of a topic may be received.
    _destinations: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _digest: Any = field(default_factory=hashlib.sha256)

    def committed(self, id: str, task: Known) -> None:
        of_key = self._of_key[task.topic, task.key]
        task.position, task.due = len(of_key), max(task.at, task.available_at)
        self.tasks[id] = task
        self.messages.begin_life(id)
        if task.key:
            of_key.append(task)

    def reset(self, id: str, due: float | None = None) -> None:
        """An operator has set SentAt to NULL. The mark has cleared the other columns. A command makes it `due`."""
        task = self.tasks[id]
        task.resets, task.due = task.resets + 1, task.at if due is None else due
        task.reset_at, task.available_at, task.expires_at = self.clockwork.now, -inf, inf
        self.messages.begin_life(id)

    def set_paused(self, topic: str, *, paused: bool) -> None:
        """An operator has paused or resumed a topic."""
        self._paused_at.pop(topic, None)
        if paused:
            self._paused_at[topic] = self.clockwork.now

    def set_route(self, topic: str, to: str | None) -> None:
        """An operator has routed a topic, or ended its route. None: the route is invalid."""
        self._routed[topic] = self.clockwork.now, to
        if to is not None:
            self._destinations[topic].add(to)

    def restored(self, id: str, created_at: float, due: float) -> None:
        """A replay has inserted a task from the archive, whose row was deleted. Its ID may have had a later row."""
        self.tasks[id].cancelled_at, self.tasks[id].at = -inf, created_at
        self.cancelled_received.discard(id)  # it is a task again, whose messages are expected
        self.reset(id, due)

    def mended(self, id: str) -> None:
        """An operator has made a dead task good and ready."""
        task = self.tasks[id]
        if not task.bad and task.expires_at > self.clockwork.now:
            self.problem(f"{id} is dead, and nothing is wrong with it")
        self.retried(id)
        task.bad, task.expires_at, task.data = False, inf, b"data"

    def retried(self, id: str, due: float | None = None) -> None:
        """An operator has made an unsent task ready, and perhaps new: `due`. An expired one no longer expires."""
        task = self.tasks[id]
        task.due, task.put_back_by = task.due if due is None else due, ""
        task.excused, task.available_at = self._is_excused(task), -inf
        if task.expires_at <= self.clockwork.now:
            task.expires_at = inf

    def deleted(self, id: str) -> None:
        """An operator has deleted a dead task."""
        self.mended(id)
        self._released_later_from[TopicKey(self.tasks[id].topic, self.tasks[id].key)] = self.clockwork.now
        self.tasks[id].excused = True
        self.tasks[id].received += 1  # nothing is owed any more

    def cancelled(self, id: str, row: Any, *, follows_a_batch: bool) -> None:
        """An unsent task was cancelled. It may be received only if a worker had published it, and names it.

        The batch may know it as the next of its key, and then releases none (docs/architecture/ordering.md).
        """
        task = self.tasks[id]
        if follows_a_batch:
            self._released_later_from[TopicKey(task.topic, task.key)] = self.clockwork.now
        task.cancelled_at, task.excused, task.row = self.clockwork.now, True, asdict(row)
        if task.received > task.resets + task.extra:
            self.cancelled_received.add(id)

    def put_back(self, id: str, row: Any, operation: str) -> None:
        """An operator restores a task whose row is this. A cancel changes two columns, so it is as it was."""
        task = self.tasks[id]
        now = {name: value for name, value in asdict(row).items() if name not in ("shards", "sent_at", "cancelled_by")}
        if differs := {name for name, value in now.items() if value != task.row[name]}:
            self.problem(f"{id} is restored with other {sorted(differs)}")
        task.put_back_by = operation
        task.cancelled_at, task.put_back_at = -inf, self.clockwork.now
        self.cancelled_received.discard(id)
        # The commit that ended the deferrals of its key may have been before, so its own one ends within a minute.
        self._released_later_from[TopicKey(task.topic, task.key)] = self.clockwork.now

    def _is_excused(self, task: Known) -> bool:
        return task.excused or task.expires_at <= self.clockwork.now or (task.bad and self.skip_dead)

    def locked(self, rows: Iterable[LockedRow], now: datetime) -> None:
        for row in rows:
            late = (now - first_due(row)).total_seconds() - (self.clockwork.now - self.tasks[row.id].due)
            if row.sent_at is None and abs(late) > 1:
                self.problem(f"{row.id} looks {late:.1f} s older than it is")

    def chosen(self, process: Process, ids: Iterable[str]) -> None:
        self._chosen.update(((process, id), self.clockwork.now) for id in ids)

    def claimed(self, process: Process, rows: Iterable[LockedRow], now: datetime) -> None:
        for row in rows:
            self._claimed[process, row.id] = row
            is_early = not (row.is_due(now) or row.deferred)
            self._unfit[process, row.id] = (
                "cancelled" if row.cancelled_by else "sent" if row.sent_at else "expired" if row.is_expired(now)
                else "not due" if is_early else ""
            )  # fmt: skip

    def answered(self, process: Process, ids: Sequence[str], reason: str) -> None:
        """The worker knows that Pub/Sub has these tasks (`reason` is "ok"), or that it failed."""
        kind = None if reason == "ok" else failure_kind(reason)
        for id in ids:
            if kind is None:
                self._acknowledged[process, id] = self.clockwork.now, Version.of(self._claimed[process, id])
            self._outages[process, id] += kind is FailureKind.OUTAGE
        self._troubles[process, self.tasks[ids[0]].topic] += kind in (FailureKind.OUTAGE, FailureKind.TARGET)

    def marked(self, process: Process, marks: Mapping[str, RowChange], committed: datetime, latest: datetime) -> None:
        """A commit writes these marks. `latest` is the latest time of a deferral."""
        recorded: set[tuple[str, str]] = set()
        self.marked_at = self.clockwork.now
        for id, mark in marks.items():
            task = self.tasks[id]
            if isinstance(mark, Published):
                self._marked_as_sent(process, id, task, committed)
            if isinstance(mark, Published) and not task.once and task.last_at < max(0.0, task.reset_at):
                self.problem(f"{id} is marked as sent and was not received")
            if isinstance(mark, Deferred):
                self._deferral(id, task, mark, latest)
            if isinstance(mark, NotSent) and mark.error is not None and not task.once:
                for problem in self._wrong_failure(process, id, task, mark.error.partition(":")[0]):
                    self.problem(f"{id} has a failed attempt ({mark.error}), {problem}")
                own = self.skip_dead and failure_kind(mark.error.partition(":")[0]) is FailureKind.CONTENT
                if task.key and not own and not mark.error.startswith("expired"):
                    if (task.topic, task.key) in recorded:
                        self.problem(f"{id} has a failed attempt, and so has a task before it of its key")
                    recorded.add((task.topic, task.key))

    def _marked_as_sent(self, process: Process, id: str, task: Known, committed: datetime) -> None:
        if task.once:
            self.messages.marked_first(process, id)
        self._explain(id, explained=self.messages.marked(process, id))
        self.sent[id].add(committed)
        if task.cancelled:  # the row tells that a worker had published it
            task.cancelled_at, task.told_at = -inf, self.clockwork.now

    def _deferral(self, id: str, task: Known, mark: Deferred, latest: datetime) -> None:
        if task.cancelled:  # another program has made it unsent, and its deferral ends
            task.row |= {"available_at": mark.available_at, "blocked_by": mark.head}
        if mark.available_at > latest:
            self.problem(f"{id} is deferred until {mark.available_at}")

    def _wrong_failure(self, process: Process, id: str, task: Known, reason: str) -> Iterator[str]:
        kind = failure_kind(reason)
        if reason == "expired" and task.expires_at > self.clockwork.now:
            yield "and is not expired"
        if kind is FailureKind.CONTENT and reason != "expired" and not task.bad:
            yield "and nothing is wrong with it"
        if kind is FailureKind.OUTAGE and self._outages[process, id] < 2:
            yield "by the first outage that it met"
        if kind is FailureKind.TARGET and self._troubles[process, task.topic] < 2:
            yield "by its topic, whose circuit was not open before"

    def _explain(self, id: str, *, explained: bool) -> None:
        if not explained:
            self.problem(f"{id} was received twice, and no fault met its first message before its mark")

    def received(
        self, process: Process, topic: str, messages: Sequence[tuple[str, str, bytes]], sent: Sequence[Message]
    ) -> None:
        now = self.clockwork.now
        for (id, key, data), message in zip(messages, sent, strict=True):
            self._digest.update(f"{now:.9f} {process.name} {id}\n".encode())
            task = self.tasks.get(id)
            if task is None:
                self.problem(f"{id} was received and never committed")
                continue
            self._explain(id, explained=self.messages.arrived(message))
            self.effects.setdefault(id, data)
            if self.rates.exceeded(now, task.topic):
                self.problem(f"{id} was received beyond the rate limit of {task.topic}")
            if topic not in {task.topic, *self._destinations[task.topic]} or task.key != key:
                self.problem(f"{id} was received in topic {topic} with key {key!r}")
            if now < task.available_at - 1e-6:
                self.problem(f"{id} was received {task.available_at - now:.3f} s before its time")
            # A message may be of the time before the last reset, so only the numbers tell a duplicate.
            if task.received - task.resets > task.extra:
                task.extra += 1
                self.duplicates += 1
                if task.once:
                    self.problem(f"{id} was received {task.received + 1} times, and is to be sent at most once")
            if task.cancelled:
                self.cancelled_received.add(id)
            elif key and not task.received:
                self._in_order(id, task)
                self._restored_in_order(id, task, self._chosen.get((process, id), -inf))
            task.received += 1
            task.last_at = now

    def requested(self, process: Process, topic: str, ids: Sequence[str]) -> list[Message]:
        """A worker sends a publish request to a topic, which may be executed much later."""
        for id in ids:
            row = self._claimed[process, id]
            if row.attempts and len(ids) > 1:
                self.problem(f"{id} has failed before, and shares a request with others")
            if state := self._unfit[process, id]:
                self.problem(f"{id} was {state} when {process.name} claimed it, and was published")
            at, version = self._acknowledged.get((process, id), (float("-inf"), None))
            task, known_for = self.tasks[id], self.clockwork.now - at
            if (
                version
                and at > max(task.reset_at, task.put_back_at)
                and version.has_message_of(row)
                and known_for < MAX_MARKING_SECONDS
            ):
                self.problem(f"{process.name} knew that Pub/Sub has {id}, and published it again")
            late = max(task.at, task.reset_at) - self._paused_at.get(task.topic, inf)
            if late > PAUSE_SECONDS:
                self.problem(f"{id} was registered or reset {late:.1f} s after a pause of {task.topic}, and published")
            changed_at, destination = self._routed.get(task.topic, (inf, None))
            if max(task.at, task.reset_at) - changed_at > PAUSE_SECONDS and topic != destination:
                self.problem(f"{id} was published to {topic}, long after {task.topic} was routed to {destination}")
        return self.messages.requested(process, ids)

    def heads(self, deferred: Mapping[TopicKey, str]) -> None:
        """The first unsent task of these keys is deferred. No task blocks it, so this must end within a few turns."""
        now = self.clockwork.now
        for key, id in deferred.items():
            since = self._deferred[key][1] if self._deferred.get(key, ("",))[0] == id else now
            excuse = self._released_later_from.get(key, -inf) + KEY_CHECK_SECONDS
            if now > max(since, excuse) + FEW_TURNS:
                self.problem(f"{id} is the first unsent task of its key, and deferred since {since:.3f}")
                since = inf
            self._deferred[key] = id, since
        for key in self._deferred.keys() - deferred.keys():
            del self._deferred[key]

    def _in_order(self, id: str, task: Known) -> None:
        of_key, settled = self._of_key[task.topic, task.key], self._settled[task.topic, task.key]
        while settled < task.position and (of_key[settled].received or self._is_excused(of_key[settled])):
            settled += 1
        self._settled[task.topic, task.key] = settled
        if settled < task.position:
            self.problem(f"{id} was received before an earlier task of its key, number {settled}")

    def _restored_in_order(self, id: str, task: Known, chosen_at: float) -> None:
        """Judge the tasks that one restore has put back: a batch that is chosen later sends them in order."""
        now, before = self.clockwork.now, self._of_key[task.topic, task.key][: task.position if task.put_back_by else 0]
        for each in before:
            together = each.put_back_by == task.put_back_by and each.put_back_at <= min(task.put_back_at, chosen_at)
            if (
                together
                and not (each.received or each.cancelled)
                and each.expires_at > now
                and not (each.bad and self.skip_dead)
            ):
                self.problem(f"{id} was received before an earlier task of its key that was restored with it")

    def end(self, rows: Mapping[str, Any], *, faults: bool) -> None:
        """Judge the whole history, after faults have ended and all should be sent.

        After a fault of the worker that marked it, an at-most-once task may be lost.
        """
        for id, task in self.tasks.items():
            if task.cancelled or (task.once and faults):
                continue
            if task.received < 1:
                self.problem(f"{id} was lost: committed at {task.at:.3f} and never received")
            elif task.last_at < task.reset_at:
                self.problem(f"{id} was lost: reset at {task.reset_at:.3f} and not received since")
        for row in (row for row in rows.values() if row.sent_at is None):
            self.problem(f"{row.id} is not sent at the end: {row.available_at}, {row.last_error}")
        self._end_of_cancelled(rows)
        self._effects()

    def _end_of_cancelled(self, rows: Mapping[str, Any]) -> None:
        """Judge the cancelled tasks that were received: the worker that has published one names it, and marks it."""
        for id in sorted(self.cancelled_received):
            task, found = self.tasks[id], self._acknowledged.items()
            since = max(task.reset_at, task.at)
            if knew := [
                who.name for (who, of), (at, _) in found if of == id and who.alive and since < at < task.told_at
            ]:
                if id not in self.named:
                    self.problem(f"{id} was cancelled and received. {knew[0]} published it, and does not name it")
                elif task.cancelled and id in rows and id not in self.given_up:
                    self.problem(f"{id} was cancelled and received. {knew[0]} published it, and does not mark it")

    def _effects(self) -> None:
        """Judge what subscribers have processed."""
        for id, data in self.effects.items():
            wanted = self.tasks[id]
            if not wanted.cancelled and data != wanted.data:
                self.problem(f"{id} was processed with {data!r} instead of {wanted.data!r}")

    def digest(self) -> str:
        return str(self._digest.hexdigest())

    def problem(self, text: str) -> None:
        """Note a broken promise."""
        if len(self.problems) < 20:
            self.problems.append(f"{self.clockwork.now:.3f}: {text}")

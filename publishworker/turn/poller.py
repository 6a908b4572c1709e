"""Decide which shards, topics and rows a turn reads, and apply what a discovery finds.

A range is the ready or the due tasks of one topic in one shard.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from publishworker.host import Host
from publishworker.spanner.store import Discovery, SpannerStore
from publishworker.spanner.write_errors import TimedOut
from publishworker.topics.availability import FORGET_TOPIC_SECONDS, Topics
from publishworker.turn.in_flight import InFlight
from publishworker.turn.membership import Membership
from publishworker.types import Candidate, PollRequest

#: Max rows of a poll. It is also the max number of ranges, because a poll asks for at least one row of each. A row
#: takes 2.8 kB of memory.
MAX_POLL_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Polled:
    """The candidates of one poll."""

    candidates: Sequence[Candidate] = ()
    #: The seconds that the poll took, or None if it read nothing.
    seconds: float | None = None


class Poller:
    """Reads ready tasks at each poll, and due tasks while there may be some."""

    def __init__(
        self, store: SpannerStore, membership: Membership, topics: Topics, in_flight: InFlight, host: Host
    ) -> None:
        """A poll aims at as many rows as tasks can be in flight."""
        self._store = store
        self._membership = membership
        self._topics = topics
        self._in_flight = in_flight
        self._host = host
        self.known = KnownTopics(host.clock)
        #: Limits the ranges of one read of the index AsynchronousTasksToSend: a poll, a discovery, or a search for the
        #: next due task.
        self.read_size = ReadSize(MAX_POLL_ROWS)
        self._poll_size = PollSize(in_flight.limits.max_tasks, len(membership.shards))

    def poll(self, below_priority: int | None = None) -> Polled:
        """Return candidates, except those of unavailable topics and the tasks in flight. Raises StoreError.

        The poll reads nothing if no task may start now. With `below_priority`, it reads the ready ranges a second time,
        for lower priorities, because more urgent tasks may fill the first read.
        """
        # Leave out tasks also if their batches end during the poll: it may have read them before their marks.
        room, in_flight = self._in_flight.room, self._in_flight.ids()
        if not room:
            return Polled()
        began, unavailable = self._host.clock(), self._topics.unavailable
        request = PollRequest(
            shards=self._membership.shards,
            topics=self.known.polled.difference(unavailable),  # OUT-DELAY-3
            per_range=self._poll_size.per_range,
            due=self.known.may_be_due,
            below_priority=below_priority,
        )
        part = self._part(request)
        part = replace(part, per_range=max(1, min(part.per_range, MAX_POLL_ROWS // max(1, part.ranges))))
        with self.read_size.reading(part.ranges):
            candidates = self._store.poll(part) if part.topics else []
        found = [each for each in candidates if each.id not in in_flight]
        self._poll_size.adapt(_by_range(candidates), len(found), room)
        self.known.note_candidates(each.topic for each in candidates)
        self.known.may_be_due = any(each.available_at is not None for each in candidates)
        return Polled(found, seconds=self._host.clock() - began if part.topics else None)

    def shards_for(self, number: int) -> tuple[int, ...]:
        """Return the worker's shards, or `number` of them, drawn at random. Later reads cover the others.

        OUT-LOSS-2: so tasks of every shard are sent even if the database is too slow for one read of all.
        """
        shards, number = self._membership.shards, max(1, number)
        return shards if number >= len(shards) else tuple(self._host.random.sample(shards, number))

    def find_next_due(self) -> float | None:
        """Return the seconds until a task of an available topic is due, 0 if one is already, or None if none will be.

        Unless the result is None, the next poll also reads due tasks. Raises StoreError.
        """
        shards, topics = self._membership.shards, self.known.polled.difference(self._topics.unavailable)
        if (ranges := len(shards) * len(topics)) > self.read_size.limit:
            seconds: float | None = 0.0  # too many ranges for one read: polls read them part by part
        else:
            with self.read_size.reading(ranges):
                seconds = self._store.seconds_until_due(shards, topics) if topics else None
        self.known.may_be_due |= seconds is not None
        return seconds

    def _part(self, request: PollRequest) -> PollRequest:
        """Return the request, cut to what one read may cover: some of the shards, or some of the topics of one."""
        max_pairs = max(1, self.read_size.limit * request.pairs // max(1, request.ranges))
        if request.pairs <= max_pairs:
            return request
        if (number := len(request.topics)) <= max_pairs:
            return replace(request, shards=self.shards_for(max_pairs // number))
        topics = self._host.random.sample(sorted(request.topics), max_pairs)
        return replace(request, shards=self.shards_for(1), topics=frozenset(topics))


def _by_range(candidates: Iterable[Candidate]) -> Counter[tuple[str, int, bool]]:
    return Counter((each.topic, each.shard, each.available_at is None) for each in candidates)


class PollSize:
    """Keeps a poll near `target` rows, whether one range holds the backlog or hundreds do.

    Without it, polls would read ten rows for each task if 16 topics have a backlog, and a backlog of a single shard
    would take seven times as long (tests/simulation/test_promises.py).

    `per_range` doubles after a poll that returned `per_range` rows of a range and found fewer tasks than there is room
    for. It halves after a poll that returned more than twice the target.
    """

    def __init__(self, target: int, shards: int) -> None:
        self._target = target
        self.per_range = max(1, -(-target // max(1, shards)))  # the first poll assumes that one topic has all tasks

    def adapt(self, by_range: Mapping[tuple[str, int, bool], int], found: int, room: int) -> None:
        """Adapt to the last poll: the rows of each range, how many tasks it `found`, and how many may start (`room`).

        If the poll read a range a second time, for lower priorities, the range may have more rows than `per_range`.
        """
        if sum(min(count, self.per_range) for count in by_range.values()) > 2 * self._target:
            self.per_range = max(1, self.per_range // 2)
        elif found < room and any(count >= self.per_range for count in by_range.values()):
            self.per_range = min(self._target, self.per_range * 2)


#: Seconds for which a topic without candidates is still polled. Then it costs nothing until discovery finds it again.
#: If discovery finds it and polls do not, because all its tasks are scheduled or dead, the time doubles. Otherwise one
#: dead task would cost an idle worker 50 % more requests.
KEEP_POLLING_SECONDS = 5.0


@dataclass(slots=True)
class _Topic:
    seen_at: float
    keep_polling_seconds: float = KEEP_POLLING_SECONDS
    polled: bool = True


class KnownTopics:
    """The topics that polls read, and those that metrics still name. The database has no list of topics."""

    def __init__(self, clock: Callable[[], float]) -> None:
        #: Whether the next poll also reads due tasks: at first, after each discovery, after `find_next_due` has found
        #: a due task, and as long as polls find some.
        self.may_be_due = True
        self._clock = clock
        self._by_name: dict[str, _Topic] = {}

    @property
    def polled(self) -> frozenset[str]:
        return frozenset(name for name, topic in self._by_name.items() if topic.polled)

    @property
    def recent(self) -> frozenset[str]:
        """Return the topics that have, or recently had, unsent tasks."""
        return frozenset(self._by_name)

    def note_candidates(self, topics: Iterable[str]) -> None:
        """Note the topics of the candidates of a poll."""
        self._by_name |= {name: _Topic(self._clock()) for name in topics}

    def note_discovered(self, names: Iterable[str]) -> None:
        """Note topics that a discovery has found: they have unsent tasks."""
        self.may_be_due = True
        for name in names:
            known = self._by_name.get(name)
            seconds = KEEP_POLLING_SECONDS if known is None else 2 * known.keep_polling_seconds
            self._by_name[name] = _Topic(self._clock(), min(seconds, FORGET_TOPIC_SECONDS))

    def forget_old(self, unavailable: Iterable[str]) -> None:
        """Stop polling topics that have been without candidates for long.

        No poll has read the `unavailable` ones, so they stay.
        """
        now = self._clock()
        for name in unavailable:
            if name in self._by_name:
                self._by_name[name].seen_at = now
        for topic in self._by_name.values():
            topic.polled = now - topic.seen_at <= topic.keep_polling_seconds
        oldest = now - FORGET_TOPIC_SECONDS
        self._by_name = {name: topic for name, topic in self._by_name.items() if topic.seen_at > oldest}


class ReadSize:
    """Limits reads to `limit` ranges, or ordering keys.

    OUT-LOSS-2: otherwise no task would be sent while reads time out.
    After a read times out, the limit is a quarter of its ranges. Each larger read that succeeds raises it by a tenth.
    """

    def __init__(self, max_ranges: int) -> None:
        self.limit = self._max_ranges = max_ranges

    @contextmanager
    def reading(self, ranges: int) -> Iterator[None]:
        """Return a context for one read of this many ranges."""
        try:
            yield
        except TimedOut:
            self.limit = max(1, ranges // 4)
            raise
        if 2 * ranges > self.limit:  # a smaller read says nothing about larger ones
            self.limit = min(self._max_ranges, self.limit + 1 + self.limit // 10)


#: Before batches start, workers, layouts and controls are read again if the last read is older than this. This happens
#: after a slow read or a suspension of the process.
MAX_READ_AGE_SECONDS = 2.0


class Discoverer:
    """Applies what it reads to the membership, the topic controls and the known topics. Its methods raise StoreError.

    A discovery reads workers, layouts, controls and the names of unknown topics. `read_controls_if_old` does not read
    the topics, so it also works while a reshard drops an index.
    """

    def __init__(
        self,
        store: SpannerStore,
        membership: Membership,
        topics: Topics,
        poller: Poller,
        clock: Callable[[], float],
        *,
        seconds: float,
    ) -> None:
        """Discover every `seconds`."""
        self._store = store
        self._membership = membership
        self._topics = topics
        self._poller, self._known, self._read_size = poller, poller.known, poller.read_size
        self._clock = clock
        self._seconds = seconds
        #: When the last read began.
        self._read_at = clock()
        self._discovered_at = float("-inf")
        self._discovered_shards: tuple[int, ...] = ()
        self._failed = False
        #: True from `note_insert` until the next discovery.
        self._insert_reported = False

    @property
    def active_topics(self) -> frozenset[str]:
        """Return the topics that have, or recently had, unsent tasks, except paused ones. Callable on any thread."""
        return self._known.recent - self._topics.paused

    def note_insert(self) -> None:
        """Note that a task was inserted, perhaps one of an unknown topic."""
        self._insert_reported = True

    def discover_if_due(self, *, nothing_in_flight: bool) -> bool:
        """Discover every `seconds`, after a change of the worker's shards, and after an insert if nothing is in flight.

        If the last discovery failed, read the controls first, because a reshard may have dropped an index that it
        reads. Return whether the next turn must discover again.
        """
        if self._failed:
            self._read_at = float("-inf")
            self.read_controls_if_old()
        is_time = self._clock() - self._discovered_at >= self._seconds or (self._insert_reported and nothing_in_flight)
        if not is_time and self._membership.shards == self._discovered_shards:
            return False
        # Stop polling topics that have long had no candidates. If they have tasks, the discovery finds them.
        self._known.forget_old(self._topics.unavailable)
        self._failed = True
        again = self._discover()
        self._failed = False
        return again

    def read_controls_if_old(self) -> None:
        """Read workers, layouts and controls if the last read of them is outdated."""
        if (began := self._clock()) - self._read_at > MAX_READ_AGE_SECONDS:
            self._apply(self._store.discover((), ()), began)

    def _discover(self) -> bool:
        """Discover. Return whether it has found topics, or other shards for this worker.

        The next discovery then follows at once, because one read finds, in each shard, at most one new topic between
        two neighboring known names.
        """
        shards, known, began = self._membership.shards, self._known.polled, self._clock()
        part = self._poller.shards_for(self._read_size.limit // (len(known) + 1))
        with self._read_size.reading(len(part) * (len(known) + 1)):
            found = self._store.discover(part, known, workers=self._membership.reads_workers)
        self._known.note_discovered(found.topics)
        again = bool(found.topics)
        self._discovered_at = float("-inf") if again else self._clock()
        self._discovered_shards, self._insert_reported = shards, False
        self._apply(found, began)
        return again or shards != self._membership.shards

    def _apply(self, found: Discovery, began: float) -> None:
        if found.workers is not None:
            self._membership.assign(found.workers)
        self._topics.apply(found.controls, self._membership.size)
        self._read_at = began

"""Decide what each poll reads: which shards and topics, and how many rows of each range.

A range is the ready or the due tasks of one topic in one shard.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from publishworker.spanner.store import Store
from publishworker.spanner.write_errors import TimedOut
from publishworker.topics.availability import Topics
from publishworker.turn.membership import Membership
from publishworker.types import FORGET_TOPIC_SECONDS, MAX_POLL_ROWS, Candidate, PollRequest


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the next poll is to find."""

    #: The number of tasks that may start now. The poll reads nothing if it is 0.
    room: int
    #: The tasks in flight, which no poll returns.
    in_flight: Collection[str] = ()
    #: Read ready ranges a second time, for priorities below this, because more urgent tasks may fill the first read.
    below_priority: int | None = None


@dataclass(frozen=True, slots=True)
class Polled:
    """The candidates of one poll. `cut_off` holds the topics that may have more tasks than the poll read."""

    candidates: Sequence[Candidate] = ()
    cut_off: frozenset[str] = frozenset()
    #: The poll has read only some of its ranges. Further polls must read the rest.
    unread: bool = False
    #: The seconds that the poll took, or None if it read nothing.
    seconds: float | None = None


class Poller:
    """Reads ready tasks at each poll, and due tasks while there may be some."""

    def __init__(
        self, store: Store, membership: Membership, topics: Topics, clock: Callable[[], float], target_rows: int
    ) -> None:
        """A poll aims at `target_rows` rows."""
        self._store = store
        self._membership = membership
        self._topics = topics
        self.known = KnownTopics(clock)
        #: Limits the ranges that one read of the index AsynchronousTasksToSend has: a poll, a discovery, or the next
        #: due time.
        self.read_size = ReadSize(MAX_POLL_ROWS)
        self._poll_size = PollSize(target_rows, len(membership.shards))
        self._clock = clock
        #: Where the next poll continues if it reads only a part of the shards or topics.
        self._shards, self._first_topic = Rotation(), 0
        #: If one poll can read only a part of the ranges, several polls make a round. For the current round: the number
        #: of pairs of shard and topic still to read, the topics found, and whether due tasks were found.
        self._left_pairs = 0
        self._seen: set[str] = set()
        self._seen_due = False

    def poll(self, wanted: Wanted) -> Polled:
        """Return candidates, except those of unavailable topics. Raises StoreError."""
        if not wanted.room:
            return Polled()
        began, unavailable = self._clock(), self._topics.unavailable
        request = PollRequest(
            shards=self._membership.shards,
            topics=self.known.polled.difference(unavailable),  # OUT-DELAY-3
            per_range=self._poll_size.per_range,
            due=self.known.may_be_due,
            below_priority=wanted.below_priority,
        )
        part = self._next_part(request)
        self._poll_size.lower_to(MAX_POLL_ROWS // max(1, part.ranges))
        part = replace(part, per_range=self._poll_size.per_range)
        with self.read_size.reading(part.ranges):
            candidates = self._store.poll(part) if part.topics else []
        found = [each for each in candidates if each.id not in wanted.in_flight]
        self._poll_size.adapt(_by_range(candidates), len(found), wanted.room)
        self._left_pairs = (self._left_pairs or request.pairs) - part.pairs if part.pairs < request.pairs else 0
        self._note(candidates, unavailable)
        return Polled(found, self._poll_size.cut_off, unread=self._left_pairs > 0, seconds=self._clock() - began)

    def _note(self, candidates: Sequence[Candidate], unavailable: Collection[str]) -> None:
        """Note the topics of the candidates.

        After the last part, decide whether to read due tasks, and stop polling topics without candidates.
        """
        self._seen.update(each.topic for each in candidates)
        self._seen_due |= any(each.available_at is not None for each in candidates)
        if self._left_pairs > 0:
            return
        self._left_pairs = 0
        self.known.note_candidates(self._seen)
        self.known.forget_old(unavailable)
        self.known.may_be_due = self._seen_due
        self._seen, self._seen_due = set(), False

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

    def _next_part(self, request: PollRequest) -> PollRequest:
        """Return the request, or the next part: some of the shards, or some of the topics of one shard."""
        max_pairs = max(1, self.read_size.limit * request.pairs // max(1, request.ranges))
        topics = sorted(request.topics)
        if request.pairs <= max_pairs:
            return request
        if len(topics) <= max_pairs:
            return replace(request, shards=self._shards.next(request.shards, max_pairs // len(topics)))
        first = self._first_topic if self._first_topic < len(topics) else 0
        self._first_topic = first + max_pairs
        shards = self._shards.next(request.shards, 1, stay=first + max_pairs < len(topics))
        return replace(request, shards=shards, topics=frozenset(topics[first : first + max_pairs]))


def _by_range(candidates: Iterable[Candidate]) -> Counter[tuple[str, int, bool]]:
    return Counter((each.topic, each.shard, each.available_at is None) for each in candidates)


class PollSize:
    """Keeps a poll near `target` rows, whether one range holds the backlog or hundreds do.

    Without it, polls would read ten rows for each task if 16 topics have a backlog, and a backlog of a single shard
    would take seven times as long (tests/simulation/test_shares.py).

    `per_range` doubles after a poll that cut ranges off and found fewer tasks than there is room for, because the
    others were in flight. It halves after a poll that returned more than twice the target.
    """

    def __init__(self, target: int, shards: int) -> None:
        self._target = target
        self.per_range = max(1, -(-target // max(1, shards)))  # the first poll assumes that one topic has all tasks
        #: The topics that may have more tasks than the last poll read.
        self.cut_off: frozenset[str] = frozenset()

    def lower_to(self, per_range: int) -> None:
        """Lower the max rows of each range, because all ranges together have too many."""
        self.per_range = max(1, min(self.per_range, per_range))

    def adapt(self, by_range: Mapping[tuple[str, int, bool], int], found: int, room: int) -> None:
        """Adapt to the last poll: the rows of each range, how many tasks it `found`, and how many may start (`room`).

        If the poll read a range a second time, for lower priorities, the range may have more rows than `per_range`.
        """
        self.cut_off = frozenset(topic for (topic, *_), count in by_range.items() if count >= self.per_range)
        if sum(min(count, self.per_range) for count in by_range.values()) > 2 * self._target:
            self.per_range = max(1, self.per_range // 2)
        elif self.cut_off and found < room:
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
        #: one, and as long as polls find some.
        self.may_be_due = True
        self._clock = clock
        self._topics: dict[str, _Topic] = {}

    @property
    def polled(self) -> frozenset[str]:
        """Return the topics that a poll reads."""
        return frozenset(name for name, topic in self._topics.items() if topic.polled)

    @property
    def recent(self) -> frozenset[str]:
        """Return the topics that have, or recently had, unsent tasks."""
        return frozenset(self._topics)

    def note_candidates(self, topics: Iterable[str]) -> None:
        """Note topics of which a poll returned candidates."""
        self._topics |= {name: _Topic(self._clock()) for name in topics}

    def note_discovered(self, names: Iterable[str]) -> None:
        """Note topics that a discovery has found: they have unsent tasks."""
        self.may_be_due = True
        for name in names:
            topic = self._topics.setdefault(name, _Topic(self._clock(), KEEP_POLLING_SECONDS / 2))  # doubled below
            topic.keep_polling_seconds = min(2 * topic.keep_polling_seconds, FORGET_TOPIC_SECONDS)
            topic.seen_at, topic.polled = self._clock(), True

    def forget_old(self, unavailable: Iterable[str]) -> None:
        """Stop polling topics that have been without candidates for long.

        No poll has read the `unavailable` ones, so they stay.
        """
        now = self._clock()
        for name in unavailable:
            if name in self._topics:
                self._topics[name].seen_at = now
        for topic in self._topics.values():
            topic.polled = now - topic.seen_at <= topic.keep_polling_seconds
        oldest = now - FORGET_TOPIC_SECONDS
        self._topics = {name: topic for name, topic in self._topics.items() if topic.seen_at > oldest}


class ReadSize:
    """Limits reads to `limit` ranges. OUT-LOSS-2: otherwise a database that is too slow for a read would send no task.

    After a read times out, the limit is a quarter of its ranges. Each read that does not raises it by a tenth.
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


class Rotation:
    """Chooses shards if one read cannot have all of them. Each read continues where the last one ended (OUT-LOSS-2)."""

    def __init__(self) -> None:
        self._first = 0

    def next(self, shards: tuple[int, ...], number: int, *, stay: bool = False) -> tuple[int, ...]:
        """Return `number` of the shards, at least one. If the next read is to `stay`, it begins with the same shard."""
        number = min(max(1, number), len(shards))
        first = self._first % len(shards)
        self._first = first if stay else first + number
        return (*shards[first:], *shards[:first])[:number]

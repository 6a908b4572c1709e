"""What each poll reads: which shards, topics and ranges, and how many rows."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from publishworker.membership import Membership
from publishworker.spanner.store import Store
from publishworker.topics.discovery import KnownTopics
from publishworker.types import Candidate, Discovery, PollRequest

#: Max rows, ready or due, that a deep read of one topic returns. 5,000 rows take about 25 MB while they are decoded.
DEEP_ROWS = 2_500


@dataclass(frozen=True, slots=True)
class Polled:
    """The candidates of one poll.

    `cut_off` are the topics whose tasks the poll did not read to the end. `skipped` says that nothing was read, because
    no further batch may start.
    """

    candidates: Sequence[Candidate] = ()
    cut_off: frozenset[str] = frozenset()
    skipped: bool = False


class Poller:
    """Reads the store: ready tasks at each poll, due tasks and what else a worker must know at an interval."""

    def __init__(
        self,
        store: Store,
        membership: Membership,
        *,
        target_rows: int,
        discovery_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Poll this worker's shards for about `target_rows` rows.

        `discover` reads every `discovery_seconds`, and when other shards are assigned. So are due tasks, at least.
        """
        self._store = store
        self._membership = membership
        self._size = PollSize(target_rows, len(membership.shards))
        self._discovery_seconds = discovery_seconds
        self._clock = clock
        self._topics = KnownTopics(clock)
        self._discovered_at = float("-inf")
        self._discovered_in: tuple[int, ...] = ()
        #: The first poll reads them, the first one after each discovery, and all as long as they find some.
        self._reads_due_tasks = True
        self._next_shard = 0

    @property
    def topics(self) -> frozenset[str]:
        """Return the topics that have, or recently had, unsent tasks."""
        return self._topics.recent

    @property
    def polled(self) -> frozenset[str]:
        """Return the topics that the next poll reads, after a discovery also those with only scheduled tasks."""
        return self._topics.polled

    def discover(self) -> Discovery | None:
        """Read live workers, topic controls and unknown topics, if it is time for it. Raises StoreError.

        If there are unknown topics, it is time again at once: there may be more of them between the same known topics.
        """
        shards = self._membership.shards
        if self._clock() - self._discovered_at < self._discovery_seconds and shards == self._discovered_in:
            return None
        known = self._topics.polled
        found = self._store.discover(shards, known)
        self._topics.discover(found.topics - known)
        self._reads_due_tasks = True
        if not found.topics - known:
            self._discovered_at, self._discovered_in = self._clock(), shards
        return replace(found, topics=found.topics - known)

    def poll(
        self,
        room: int,
        below: int | None,
        without: Collection[str],
        unavailable: Collection[str] = frozenset(),
        depths: Mapping[str, int] = MappingProxyType({}),
    ) -> Polled:
        """Read candidates, except the IDs in `without` and the topics in `unavailable`. Raises StoreError.

        `room` tasks may start now. With `below`, ready tasks of a lower priority than that are read as well. If a topic
        in `depths` needs more rows of each range than the others, a query of its own reads them.
        """
        request = PollRequest(
            shards=self._membership.shards,
            topics=self._topics.polled.difference(unavailable),
            per_range=self._size.per_range,
            due=self._reads_due_tasks,
            below=below,
        )
        candidates, cut_off = self._read(request, room, without, depths)
        if request.due:
            self._reads_due_tasks = any(each.available_at is not None for each in candidates)
        self._topics.see({each.topic for each in candidates})
        self._topics.forget(unavailable)
        return Polled([each for each in candidates if each.id not in without], cut_off)

    def _read(
        self, request: PollRequest, room: int, without: Collection[str], depths: Mapping[str, int]
    ) -> tuple[list[Candidate], frozenset[str]]:
        """Return the candidates, and the topics of which tasks are left in the table.

        If one failing topic decided how deep all topics are read, candidates of the others would fill the memory.
        """
        deep = {topic: depths[topic] for topic in request.topics & depths.keys() if depths[topic] > request.per_range}
        others = replace(request, topics=request.topics - deep.keys())
        candidates = list(self._store.poll(others)) if others.topics else []
        self._size.adapt(_by_range(candidates), _startable(candidates, without), room)
        cut_off = self._size.cut_off
        for topic, depth in sorted(deep.items()):
            shards = self._next_shards(request.shards, DEEP_ROWS // depth)
            found = self._store.poll(replace(request, shards=shards, topics=frozenset({topic}), per_range=depth))
            candidates += found
            if max(_by_range(found).values(), default=0) >= depth:
                cut_off |= {topic}
        return candidates, cut_off

    def _next_shards(self, shards: tuple[int, ...], number: int) -> tuple[int, ...]:
        """Return `number` of the shards, at least one, beginning behind those of the last deep read."""
        number = min(max(1, number), len(shards))
        first = self._next_shard % len(shards)
        self._next_shard = first + number
        return (*shards[first:], *shards[:first])[:number]


def _by_range(candidates: Iterable[Candidate]) -> Counter[tuple[str, int, bool]]:
    """Count candidates by range: topic, shard, and whether they are ready or due."""
    return Counter((each.topic, each.shard, each.available_at is None) for each in candidates)


def _startable(candidates: Sequence[Candidate], in_flight: Collection[str]) -> int:
    """Count the candidates of the highest priority that are not in flight."""
    highest = max((each.priority for each in candidates), default=0)
    return len({each.id for each in candidates if each.priority == highest} - set(in_flight))


class PollSize:
    """Keeps a poll near `target` rows, whether one range holds the backlog or hundreds do.

    `per_range` doubles while ranges are cut off and the poll returned fewer tasks than may start. It halves when the
    poll returned twice the target. Up to four times the target, only tasks of the highest priority that are not in
    flight count, so that no less urgent task starts before an urgent one that the poll did not reach.
    """

    def __init__(self, target: int, shards: int) -> None:
        """Aim at `target` rows; begin as if one topic had all of them, spread over the shards."""
        self._target = target
        self.per_range = max(1, -(-target // max(1, shards)))
        #: The topics of which the last poll left rows in some range.
        self.cut_off: frozenset[str] = frozenset()

    def adapt(self, by_range: Mapping[tuple[str, int, bool], int], startable: int, room: int) -> None:
        """Learn from the last poll: how many rows each range gave, and how many tasks could start in the `room`.

        A range is a topic, a shard, and whether its tasks are ready or due. In two parts of a poll it may count twice.
        """
        total = sum(min(count, self.per_range) for count in by_range.values())
        self.cut_off = frozenset(topic for (topic, *_), count in by_range.items() if count >= self.per_range)
        most = (2 if startable >= room else 4) * self._target
        if total > most:
            self.per_range = max(1, self.per_range // 2)
        elif self.cut_off and startable < room and total <= most // 2:
            self.per_range = min(self._target, self.per_range * 2)

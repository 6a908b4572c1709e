"""What each poll reads: which shards, topics and ranges, how many rows, and what the worker learns from the answer."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from publishworker.membership import Membership
from publishworker.spanner.store import Store
from publishworker.topics.discovery import KnownTopics
from publishworker.topics.rate_limit import RateLimits
from publishworker.types import Candidate, News, PollRequest

_log = logging.getLogger("publishworker")


@dataclass(frozen=True, slots=True)
class Polled:
    """The candidates of one poll.

    `discovered` says that the next poll should follow at once: new topics were found, or other shards are assigned.
    `cut_off` are the topics of which the poll left tasks in the table. `skipped` says that nothing was read, because
    no further batch may start.
    """

    candidates: Sequence[Candidate] = ()
    discovered: bool = False
    cut_off: frozenset[str] = frozenset()
    skipped: bool = False


class Poller:
    """Reads candidates from the store: ready tasks at each poll, due tasks and topic controls at an interval."""

    def __init__(
        self,
        store: Store,
        membership: Membership,
        rate_limits: RateLimits,
        *,
        target_rows: int,
        discovery_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Poll this worker's shards for about `target_rows` rows.

        Due tasks, unknown topics, topic controls and live workers are read every `discovery_seconds`. `rate_limits` and
        `membership` learn from them.
        """
        self._store = store
        self._membership = membership
        self._size = PollSize(target_rows, len(membership.shards))
        self._rate_limits = rate_limits
        self._discovery_seconds = discovery_seconds
        self._clock = clock
        self._topics = KnownTopics(clock)
        self._discovered_at = float("-inf")
        self._due_tasks_wait = False  # then every poll reads them

    @property
    def topics(self) -> frozenset[str]:
        """Return the topics that it polls."""
        return self._topics.open

    def poll(
        self, below: int | None, without: Collection[str], unavailable: Collection[str] = frozenset(), depth: int = 0
    ) -> Polled:
        """Read candidates, except the IDs in `without` and the topics in `unavailable`. Raises StoreError.

        With `below`, ready tasks of a lower priority than that are read as well. At least `depth` rows are read from
        each range.
        """
        discovers = self._clock() - self._discovered_at >= self._discovery_seconds
        request = PollRequest(
            shards=self._membership.shards,
            topics=self._topics.open.difference(unavailable),
            per_range=max(self._size.per_range, depth),
            due=discovers or self._due_tasks_wait,
            below=below,
            known=self._topics.known if discovers else None,
        )
        poll = self._store.poll(request)
        self._size.adapt(Counter((each.topic, each.shard, each.available_at is None) for each in poll.candidates))
        if request.due:
            self._due_tasks_wait = any(each.available_at is not None for each in poll.candidates)
        self._topics.see({each.topic for each in poll.candidates})
        discovered = poll.news is not None and self._learn(poll.news)
        topics, shards = self._topics.open, frozenset(self._membership.shards)  # as the news left them
        mine = (each for each in poll.candidates if each.topic in topics and each.shard in shards)
        return Polled([each for each in mine if each.id not in without], discovered, self._size.cut_off)

    def _learn(self, news: News) -> bool:
        """Take in the news; return whether there is more to look at."""
        unknown = news.topics - self._topics.known
        self._topics.see(news.topics)
        for topics, what in (
            (news.paused - self._topics.paused, "paused"),
            (self._topics.paused - news.paused, "resumed"),
        ):
            for topic in sorted(topics):
                _log.info("%s is %s", topic, what, extra={"action": what})
        self._topics.paused = news.paused
        reassigned = self._membership.learn(news.living, news.gone)
        self._rate_limits.learn(news.limits, self._membership.size)
        if reassigned or unknown:  # a probe finds one topic in each gap
            return True
        self._discovered_at = self._clock()
        self._topics.forget()
        return False


class PollSize:
    """Keeps a poll near `target` rows, whether one range holds the backlog or hundreds do.

    Doubles while ranges are cut off and the poll is short of the target, halves when it brought twice the target.
    """

    def __init__(self, target: int, shards: int) -> None:
        """Aim at `target` rows; begin as if one topic had all of them, spread over the shards."""
        self._target = target
        self.per_range = max(1, -(-target // max(1, shards)))
        #: The topics of which the last poll left rows in some range.
        self.cut_off: frozenset[str] = frozenset()

    def adapt(self, found: Mapping[tuple[str, int, bool], int]) -> None:
        """Learn from the last poll: how many rows each range gave, or more if another part of the poll read it, too.

        A range is a topic, a shard, and whether its tasks are ready or due.
        """
        total = sum(min(count, self.per_range) for count in found.values())
        self.cut_off = frozenset(topic for (topic, *_), count in found.items() if count >= self.per_range)
        if total > 2 * self._target:
            self.per_range = max(1, self.per_range // 2)
        elif self.cut_off and total < self._target:
            self.per_range = min(self._target, self.per_range * 2)

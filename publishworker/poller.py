"""What each poll reads, and what the worker learns from it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from publishworker.membership import Membership
from publishworker.poll_size import PollSize
from publishworker.spanner.store import Store
from publishworker.topics.discovery import Topics
from publishworker.topics.rate_limit import RateLimits
from publishworker.types import Candidate, News, PollRequest

_log = logging.getLogger("publishworker")


@dataclass(frozen=True, slots=True)
class Found:
    """Tasks that may be taken, and whether to look again at once: for topics or shards that the poll told of."""

    candidates: Sequence[Candidate] = ()
    discovered: bool = False


class Poller:
    """Asks the store for candidates: ready tasks always, due ones and news now and then."""

    def __init__(
        self,
        store: Store,
        membership: Membership,
        window: PollSize,
        throttle: RateLimits,
        *,
        discovery_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Poll the fleet's shards for `window` rows, and for news every `discovery_seconds`.

        What the news say of limits is told to `throttle`.
        """
        self._store = store
        self._membership = membership
        self._window = window
        self._rate_limits = throttle
        self._discovery_seconds = discovery_seconds
        self._clock = clock
        self._topics = Topics(clock)
        self._discovered_at = float("-inf")
        self._due_tasks_wait = False  # then every poll reads them

    @property
    def topics(self) -> frozenset[str]:
        """Return the topics that it asks for."""
        return self._topics.open

    @property
    def cut_off(self) -> frozenset[str]:
        """Return the topics of which the last poll left tasks behind in the table."""
        return self._window.cut_off

    def poll(
        self, below: int | None, without: Collection[str], held: Collection[str] = frozenset(), depth: int = 0
    ) -> Found:
        """Find candidates but for the ids `without`; with ready tasks of lower priority than `below` in any case.

        The topics in `held` are not asked for. Of each range at least `depth` rows are read. Raises StoreError.
        """
        further = self._clock() - self._discovered_at >= self._discovery_seconds
        look = PollRequest(
            shards=self._membership.shards,
            topics=self._topics.open.difference(held),
            per_range=max(self._window.per_range, depth),
            due=further or self._due_tasks_wait,
            below=below,
            known=self._topics.known if further else None,
        )
        poll = self._store.poll(look)
        self._window.adapt(Counter((each.topic, each.shard, each.available_at is None) for each in poll.candidates))
        if look.due:
            self._due_tasks_wait = any(each.available_at is not None for each in poll.candidates)
        self._topics.see({each.topic for each in poll.candidates})
        discovered = poll.news is not None and self._learn(poll.news)
        topics, shards = self._topics.open, frozenset(self._membership.shards)  # as the news left them
        mine = (each for each in poll.candidates if each.topic in topics and each.shard in shards)
        return Found([each for each in mine if each.id not in without], discovered)

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

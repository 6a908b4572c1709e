"""What each poll reads, and what the worker learns from it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from publishworker.membership import Fleet
from publishworker.poll_size import Window
from publishworker.spanner.store import Store
from publishworker.topics.discovery import Topics
from publishworker.topics.rate_limit import Throttle
from publishworker.types import Candidate, Look, News

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
        fleet: Fleet,
        window: Window,
        throttle: Throttle,
        *,
        look_further_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Poll the fleet's shards for `window` rows, and for news every `look_further_seconds`.

        What the news say of limits is told to `throttle`.
        """
        self._store = store
        self._fleet = fleet
        self._window = window
        self._throttle = throttle
        self._look_further_seconds = look_further_seconds
        self._clock = clock
        self._topics = Topics(clock)
        self._looked_further_at = float("-inf")
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
        further = self._clock() - self._looked_further_at >= self._look_further_seconds
        look = Look(
            shards=self._fleet.shards,
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
        topics, shards = self._topics.open, frozenset(self._fleet.shards)  # as the news left them
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
        reassigned = self._fleet.learn(news.living, news.gone)
        self._throttle.learn(news.limits, self._fleet.size)
        if reassigned or unknown:  # a probe finds one topic in each gap
            return True
        self._looked_further_at = self._clock()
        self._topics.forget()
        return False

"""Reads what a turn needs to know besides tasks: live workers, layouts, topic controls, and names of unknown topics."""

from collections.abc import Callable

from publishworker.spanner.store import Store
from publishworker.topics.availability import Topics
from publishworker.turn.membership import Membership
from publishworker.turn.poller import Poller, Rotation
from publishworker.types import Discovery

#: If the workers, layouts and controls of the last read are older than this, they are read again before a poll and
#: before a batch starts. They are old after a long pause, a slow read, or a suspension of the process.
MAX_READ_AGE_SECONDS = 2.0


class Discoverer:
    """Applies what it reads to the membership, the topic controls and the known topics. Its methods raise StoreError.

    A discovery reads all of it. A refresh reads the small tables (workers, layouts and controls) but no topics, so it
    also works while a reshard drops an index.
    """

    def __init__(
        self,
        store: Store,
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
        self._known, self._read_size = poller.known, poller.read_size
        self._clock = clock
        self._seconds = seconds
        #: When the last read began. Before its first discovery, a new relay polls no topic, so it need not read first.
        self._read_at = clock()
        self._discovered_at = float("-inf")
        self._discovered_shards: tuple[int, ...] = ()
        self._shards = Rotation()
        #: The number of shards that the current round of discoveries has not read.
        self._undiscovered = 0
        #: True from `wake` until the next discovery.
        self._woken = False
        #: True during a turn, and afterwards if a read has failed.
        self._turn_failed = False
        #: Whether this turn has discovered before its poll, and has found nothing.
        self._is_done = False

    @property
    def topics(self) -> frozenset[str]:
        """Return the topics that have, or recently had, unsent tasks, except paused ones."""
        return self._known.recent - self._topics.paused

    def wake(self) -> None:
        """Note that a task was inserted, perhaps one of an unknown topic."""
        self._woken = True

    def begin_turn(self) -> None:
        """Discover if the last read is outdated. After a turn that failed, refresh first."""
        failed, self._turn_failed, self._is_done = self._turn_failed, True, False
        if failed:
            self._read_at = float("-inf")
            self.refresh()
        if self._is_outdated():
            # Give up topics without candidates for long, because the discovery finds them if they have tasks.
            self._known.forget(self._topics.unavailable)
            self._is_done = not self._discover()

    def refresh(self) -> None:
        """Read the small tables if the last read of them is outdated."""
        if self._is_outdated():
            began = self._clock()
            self._apply(self._store.discover((), ()), began)

    def end_turn(self, *, found_nothing: bool) -> bool:
        """Discover if it is time. Tell whether there are new topics or shards to poll.

        It is time every `seconds`, when the worker's shards have changed, and when a turn after `wake` has
        `found_nothing` to start although it had room.
        """
        is_time = (
            self._clock() - self._discovered_at >= self._seconds
            or self._membership.shards != self._discovered_shards
            or (self._woken and found_nothing)
        )
        is_new = is_time and not self._is_done and self._discover()
        self._turn_failed = False
        return is_new

    def _is_outdated(self) -> bool:
        return self._clock() - self._read_at > MAX_READ_AGE_SECONDS

    def _discover(self) -> bool:
        """Tell whether there are new topics or shards to poll.

        If the discovery has found topics, the next one follows at once, because one read finds at most one new topic
        between two neighboring known names.
        """
        shards, known, began = self._membership.shards, self._known.polled, self._clock()
        if shards != self._discovered_shards or not self._undiscovered:
            self._undiscovered = len(shards)
        part = self._shards.next(shards, self._read_size.limit // (len(known) + 1))
        with self._read_size.reading(len(part) * (len(known) + 1)):
            found = self._store.discover(part, known)
        self._undiscovered = max(0, self._undiscovered - len(part))
        self._known.discover(found.topics)
        again = bool(found.topics or self._undiscovered)
        self._discovered_at = float("-inf") if again else self._clock()
        self._discovered_shards, self._woken = shards, False
        self._apply(found, began)
        return again or shards != self._membership.shards

    def _apply(self, found: Discovery, began: float) -> None:
        self._membership.assign(found.workers)
        self._topics.apply(found.controls, self._membership.size)
        self._read_at = began

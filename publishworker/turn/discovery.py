"""Read what a turn needs besides tasks: live workers, layouts, topic controls, and topics that no poll reads yet."""

from collections.abc import Callable

from publishworker.spanner.store import Store
from publishworker.topics.availability import Topics
from publishworker.turn.membership import Membership
from publishworker.turn.poller import Poller, Rotation
from publishworker.types import Discovery

#: Before a poll and before batches start, workers, layouts and controls are read again if the last read is older than
#: this. This happens after a long pause, a slow read, or a suspension of the process.
MAX_READ_AGE_SECONDS = 2.0


class Discoverer:
    """Applies what it reads to the membership, the topic controls and the known topics. Its methods raise StoreError.

    A discovery reads workers, layouts, controls and the names of unknown topics. A refresh reads all but the topics, so
    it also works while a reshard drops an index.
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
        #: When the last read began. A new relay knows no topics, so its first poll reads nothing and needs no controls.
        self._read_at = clock()
        self._discovered_at = float("-inf")
        self._discovered_shards: tuple[int, ...] = ()
        self._rotation = Rotation()
        #: The shards that are left to read. A discovery may read only a part of the shards, and the next ones read the
        #: rest.
        self._shards_left = 0
        #: True from `note_insert` until the next discovery.
        self._insert_reported = False
        #: True from `begin_turn` to `end_turn`. If it is still true at the next `begin_turn`, the last turn failed.
        self._in_turn = False
        #: Whether `begin_turn` has discovered and found nothing new. Then `end_turn` does not discover again.
        self._discovered_nothing = False

    @property
    def topics(self) -> frozenset[str]:
        """Return the topics that have, or recently had, unsent tasks, except paused ones."""
        return self._known.recent - self._topics.paused

    def note_insert(self) -> None:
        """Note that a task was inserted, perhaps one of an unknown topic."""
        self._insert_reported = True

    def begin_turn(self) -> None:
        """Discover if the last read is outdated. After a failed turn, refresh instead.

        A reshard may have dropped an index that a discovery reads.
        """
        failed, self._in_turn, self._discovered_nothing = self._in_turn, True, False
        if failed:
            self._read_at = float("-inf")
            self.refresh()
        if self._is_outdated():
            # Stop polling topics that have long had no candidates. If they have tasks, the discovery finds them.
            self._known.forget_old(self._topics.unavailable)
            self._discovered_nothing = not self._discover()

    def refresh(self) -> None:
        """Read workers, layouts and controls if the last read of them is outdated."""
        if self._is_outdated():
            began = self._clock()
            self._apply(self._store.discover((), ()), began)

    def end_turn(self, *, started_nothing: bool) -> bool:
        """Discover if it is time. Return whether there are new topics or shards to poll.

        It is time every `seconds`, after a change of the worker's shards, and after a reported insert if this turn had
        room but started no batch (`started_nothing`).
        """
        is_time = (
            self._clock() - self._discovered_at >= self._seconds
            or self._membership.shards != self._discovered_shards
            or (self._insert_reported and started_nothing)
        )
        poll_again = is_time and not self._discovered_nothing and self._discover()
        self._in_turn = False
        return poll_again

    def _is_outdated(self) -> bool:
        return self._clock() - self._read_at > MAX_READ_AGE_SECONDS

    def _discover(self) -> bool:
        """Discover. Return whether there are new topics or shards to poll, or shards that are not read yet.

        If the discovery has found topics, the next one follows at once, because one read finds at most one new topic
        between two neighboring known names.
        """
        shards, known, began = self._membership.shards, self._known.polled, self._clock()
        if shards != self._discovered_shards or not self._shards_left:
            self._shards_left = len(shards)
        part = self._rotation.next(shards, self._read_size.limit // (len(known) + 1))
        with self._read_size.reading(len(part) * (len(known) + 1)):
            found = self._store.discover(part, known, workers=self._membership.reads_workers)
        self._shards_left = max(0, self._shards_left - len(part))
        self._known.note_discovered(found.topics)
        again = bool(found.topics or self._shards_left)
        self._discovered_at = float("-inf") if again else self._clock()
        self._discovered_shards, self._insert_reported = shards, False
        self._apply(found, began)
        return again or shards != self._membership.shards

    def _apply(self, found: Discovery, began: float) -> None:
        if found.workers is not None:
            self._membership.assign(found.workers)
        self._topics.apply(found.controls, self._membership.size)
        self._read_at = began

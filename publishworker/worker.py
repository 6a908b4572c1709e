"""The loop around the turns: when to poll again, what to do when Spanner is away, how to stop."""

import logging
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Protocol

from publishworker.in_flight import StuckBatch
from publishworker.membership import Membership
from publishworker.spanner.store import StoreError
from publishworker.types import Turn

_log = logging.getLogger("publishworker")

#: Seconds of the first wait after work; each further wait is twice as long, up to the poll interval.
FIRST_WAIT = 0.05
#: Seconds of the longest wait while Spanner is away.
MAX_OUTAGE_WAIT_SECONDS = 5.0


class HasTurn(Protocol):
    """What the loop needs of a relay."""

    def turn(self, stopping: Callable[[], bool]) -> Turn:
        """Do one turn, and once `stopping` says so take nothing.

        Raises StoreError if the store does not answer, StuckBatch if a batch does not end.
        """

    def finish(self) -> Turn:
        """Wait for what is in flight."""


class Pause:
    """How long to wait: doubling from `first` to `longest`, each with jitter so that workers do not keep step."""

    def __init__(self, first: float, longest: float, random: Random) -> None:
        """Measure in seconds."""
        self._first = first
        self._longest = longest
        self._random = random
        self._next = first

    def reset(self) -> None:
        """Begin again with the shortest."""
        self._next = self._first

    def next(self) -> float:
        """Return the seconds of the next wait: between 0.85 and 1 of the nominal, which doubles up to the longest."""
        nominal = min(self._next, self._longest)
        self._next = nominal * 2
        return nominal * self._random.uniform(0.85, 1)


class Worker:
    """Turn after turn until told to stop. Everything mutable here belongs to the thread that calls `run`."""

    def __init__(
        self,
        relay: HasTurn,
        membership: Membership,
        *,
        poll_interval: float,
        beat: Callable[[], None],
        report: Callable[[], None] = lambda: None,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wait at most `poll_interval` seconds between polls.

        `beat` and `report` are called at each turn, also while Spanner is away.
        """
        self._relay = relay
        self._membership = membership
        self._beat = beat
        self._report = report
        self._clock = clock
        self._idle = Pause(FIRST_WAIT, poll_interval, random)
        self._outage = Pause(FIRST_WAIT * 4, MAX_OUTAGE_WAIT_SECONDS, random)
        self._away = False

    def run(self, stop: threading.Event, until: Callable[[Turn], bool] = lambda _turn: False) -> None:
        """Turn until `stop` is set or `until` says so of a turn; then finish what is in flight.

        Raises StuckBatch, after the others have ended.
        """
        try:
            self._turn_until(stop, until)
        except StuckBatch as stuck:
            try:
                self._end()
            except StuckBatch as others:
                raise StuckBatch((*stuck.batches, *others.batches), stuck.seconds) from None
            raise
        self._end()

    def _end(self) -> None:
        # First, so that others have the shards at once. What is in flight is locked.
        self._membership.leave()
        self._relay.finish()

    def _turn_until(self, stop: threading.Event, until: Callable[[Turn], bool]) -> None:
        self._membership.beat()
        while not stop.is_set():
            self._beat()
            self._report()
            try:
                turn = self._relay.turn(stop.is_set)
                finished = not stop.is_set() and until(turn)
            except StoreError as error:
                self._beat()  # the poll alone may have taken half a minute
                self._say_away(error)
                stop.wait(self._outage.next())
                continue
            self._say_back()
            if finished or stop.is_set():
                return
            self._membership.beat()  # only here: a worker whose turns fail must lose its shards
            if turn.made_progress:
                self._idle.reset()
            elif not turn.waits:
                rest = self._idle.next()
                self._rest(stop, rest if turn.again_in is None else min(rest, turn.again_in))

    def _rest(self, stop: threading.Event, seconds: float) -> None:
        """Wait, and keep up the heartbeat meanwhile."""
        end = self._clock() + seconds
        while (left := end - self._clock()) > 0 and not stop.wait(min(left, self._membership.seconds_to_beat)):
            self._beat()
            self._report()
            self._membership.beat()

    def _say_away(self, error: StoreError) -> None:
        if not self._away:
            self._away = True
            _log.error(
                "Spanner does not serve the relay, trying on: %s", error, extra={"action": "spanner_unavailable"}
            )

    def _say_back(self) -> None:
        if self._away:
            self._away = False
            self._outage.reset()
            _log.info("Spanner serves the relay again", extra={"action": "spanner_available"})

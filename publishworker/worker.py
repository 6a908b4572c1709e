"""The worker's loop: when the next turn runs, what happens while Spanner is unavailable, how it stops."""

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

#: Seconds of the first wait after work. Each further wait is twice as long, up to the poll interval.
FIRST_WAIT = 0.05
#: Max seconds between two turns while Spanner is unavailable.
MAX_OUTAGE_WAIT_SECONDS = 5.0


class HasTurn(Protocol):
    """What the worker needs of a relay."""

    def turn(self, stopping: Callable[[], bool]) -> Turn:
        """Run one turn. Start no batch once `stopping()` is true.

        Raises StoreError if the store does not answer, StuckBatch if a batch does not end.
        """

    def finish(self) -> Turn:
        """Wait for the batches in flight."""


class Pause:
    """Waits that double from `first` to `longest`, with jitter, so that workers do not act in step."""

    def __init__(self, first: float, longest: float, random: Random) -> None:
        """Measure in seconds."""
        self._first = first
        self._longest = longest
        self._random = random
        self._next = first

    def reset(self) -> None:
        """Begin again with the shortest wait."""
        self._next = self._first

    def next(self) -> float:
        """Return the seconds of the next wait, with jitter between 0.85 and 1."""
        nominal = min(self._next, self._longest)
        self._next = nominal * 2
        return nominal * self._random.uniform(0.85, 1)


class Worker:
    """Runs turns until it is told to stop. All its state belongs to the thread that calls `run`."""

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

        `beat` and `report` are called at each turn, even while Spanner is unavailable.
        """
        self._relay = relay
        self._membership = membership
        self._beat = beat
        self._report = report
        self._clock = clock
        self._idle = Pause(FIRST_WAIT, poll_interval, random)
        self._outage = Pause(FIRST_WAIT * 4, MAX_OUTAGE_WAIT_SECONDS, random)
        self._unavailable = False

    def run(self, stop: threading.Event, until: Callable[[Turn], bool] = lambda _turn: False) -> None:
        """Run turns until `stop` is set or `until(turn)` is true. Then finish the batches in flight.

        Raises StuckBatch, after the other batches have ended.
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
        # First, so that other workers take over the shards at once. The tasks in flight are locked.
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
                self._beat()  # the poll alone may have taken 30 s
                self._log_unavailable(error)
                stop.wait(self._outage.next())
                continue
            self._log_available()
            if finished or stop.is_set():
                return
            self._membership.beat()  # only here, because a worker whose turns fail must lose its shards
            if turn.made_progress:
                self._idle.reset()
            elif not turn.waits:
                pause = self._idle.next()
                self._pause(stop, pause if turn.again_in is None else min(pause, turn.again_in))

    def _pause(self, stop: threading.Event, seconds: float) -> None:
        """Wait, and keep sending heartbeats."""
        end = self._clock() + seconds
        while (left := end - self._clock()) > 0 and not stop.wait(min(left, self._membership.seconds_to_beat)):
            self._beat()
            self._report()
            self._membership.beat()

    def _log_unavailable(self, error: StoreError) -> None:
        if not self._unavailable:
            self._unavailable = True
            _log.error("Spanner is unavailable; retrying: %s", error, extra={"action": "spanner_unavailable"})

    def _log_available(self) -> None:
        if self._unavailable:
            self._unavailable = False
            self._outage.reset()
            _log.info("Spanner is available again", extra={"action": "spanner_available"})

"""The worker's loop: when the next turn runs, what happens while Spanner is unavailable, how it stops."""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from random import Random

from outbox.base.schedules import OUTAGE, TURN, Backoff
from publishworker.log import log
from publishworker.spanner.write_errors import StoreError, lasting_reason
from publishworker.turn.membership import Membership
from publishworker.turn.relay import Relay
from publishworker.types import Next, Turn

#: Seconds after which the worker ends if it cannot work until a person acts, so that its platform shows it. A restart
#: also reads a key file that was replaced.
MAX_USELESS_SECONDS = 240.0


class Worker:
    """Runs turns until it is stopped. All its state belongs to the thread that calls `run`.

    When it ends, it deletes its heartbeat and waits for the in-flight batches.
    """

    def __init__(
        self,
        relay: Relay,
        membership: Membership,
        *,
        poll_interval: float,
        idle_interval: Callable[[], float] | None = None,
        touch_file: Callable[[], None],
        report: Callable[[], None] = lambda: None,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Poll at least every `poll_interval`, or every `idle_interval()` seconds if inserts wake the relay.

        `touch_file` tells the liveness probe that the worker runs.
        """
        self._relay = relay
        self._membership = membership
        self._touch_file = touch_file
        self._report = report
        self._clock = clock
        self._poll_interval = poll_interval
        self._idle_interval = idle_interval or (lambda: poll_interval)
        self._pauses = Backoff(TURN, random)
        self._outage_pauses = Backoff(OUTAGE, random)
        #: Whether the last turn left something to try again.
        self._unfinished = False
        #: Why the last turn failed, or None if it did not.
        self.failure: StoreError | None = None
        self._useless_since: float | None = None

    @property
    def is_useless(self) -> bool:
        """Tell whether turns fail until a person acts, so that the liveness probe must fail. Callable on any thread."""
        return self._useless_since is not None

    def run(self, stop: threading.Event, until: Callable[[Turn], bool] = lambda _turn: False) -> None:
        """Run turns until `stop` or `until(turn)`, and finish.

        Raises StuckBatch, and StoreError if for MAX_USELESS_SECONDS only a person could end the failures.
        """
        try:
            self._run_turns(stop, until)
        except Exception:
            with contextlib.suppress(Exception):
                self._shut_down()
            raise
        self._shut_down()

    def _shut_down(self) -> None:
        """Let other workers take over the shards now, and wait for the batches.

        A batch may publish until its time limit, and mark until the shutdown timeout. While its transaction lasts, row
        locks keep other workers from publishing its tasks.
        """
        self._membership.delete_heartbeat()
        self._relay.finish()

    def _run_turns(self, stop: threading.Event, until: Callable[[Turn], bool]) -> None:
        self._membership.heartbeat()
        while not stop.is_set():
            self._touch_file()
            self._report()
            try:
                turn = self._relay.turn(stop.is_set)
                is_done = not stop.is_set() and until(turn)
                seconds = self._choose_pause(turn)
            except StoreError as error:
                self._touch_file()  # the poll alone may have taken 30 s
                self._note_outage(error)
                self._membership.turn_failed = True
                stop.wait(self._outage_pauses.next())
                continue
            self._note_success()
            if is_done or stop.is_set():
                return
            began = self._clock()
            self._membership.heartbeat()  # not after a StoreError: a worker whose turns fail must lose its shards
            self._pause(stop, began, seconds)

    def _choose_pause(self, turn: Turn) -> float:
        """Return the seconds until the next turn, and tell the membership whether this worker is idle."""
        self._membership.idle = False
        unfinished = turn.next is not Next.LATER
        if turn.made_progress or (unfinished and not self._unfinished):
            self._pauses.reset()  # a first failure is retried soon, repeated ones more and more slowly
        self._unfinished = unfinished
        if turn.next in (Next.AT_ONCE, Next.STILL_WAITING):
            return 0.0
        seconds = self._pauses.next(self._idle_interval())
        if seconds > self._poll_interval:
            seconds = self._limit_long_pause(seconds, turn)
        return min(seconds, turn.seconds_to_change)

    def _limit_long_pause(self, seconds: float, turn: Turn) -> float:
        """Shorten the pause to the next event that no change stream reports: a due task, or a worker that times out."""
        if turn.next is Next.SOON:
            return self._poll_interval
        due = self._relay.find_next_due()
        self._membership.idle = due is None and turn.seconds_to_change == math.inf
        if due is not None:
            seconds = min(seconds, due or self._poll_interval)  # 0: a task is due already, or one read cannot tell
        return min(seconds, max(self._poll_interval, self._membership.seconds_to_next_timeout))

    def _pause(self, stop: threading.Event, began: float, seconds: float) -> None:
        """Pause until `seconds` after `began`, an insert is reported, or the idle interval is over. Send heartbeats."""
        while not stop.is_set() and (left := began + min(seconds, self._idle_interval()) - self._clock()) > 0:
            if self._relay.pause(min(left, self._membership.seconds_to_heartbeat, self._poll_interval)):
                if not stop.is_set():  # so that the next poll also finds tasks that are registered just after
                    stop.wait(max(0.0, TURN.first - (self._clock() - began)))
                return
            self._touch_file()
            self._report()
            self._membership.heartbeat()

    def _note_outage(self, error: StoreError) -> None:
        """Log the beginning of an outage. Raise the error if it has long needed a person."""
        if not self.failure:
            log.error("A request to Spanner failed; retrying: %s", error, extra={"action": "spanner_unavailable"})
        self.failure = error
        since = self._clock() if self._useless_since is None else self._useless_since
        self._useless_since = since if lasting_reason(error) else None
        if self._useless_since is not None and self._clock() - since >= MAX_USELESS_SECONDS:
            raise error

    def _note_success(self) -> None:
        self._useless_since = None
        if self.failure:
            self.failure = None
            self._outage_pauses.reset()
            log.info("Spanner is available again", extra={"action": "spanner_available"})

"""One turn of the relay: collect reports, poll, resolve ordering keys, choose batches, start them, wait."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from publishworker.delivery.delivery import Tools
from publishworker.telemetry.reporter import Reporter, turn_counts
from publishworker.topics.availability import Topics
from publishworker.turn.in_flight import InFlight, Limits
from publishworker.turn.membership import Membership
from publishworker.turn.ordering import Ordering
from publishworker.turn.poller import Discoverer, Polled, Poller
from publishworker.turn.selection import Selector
from publishworker.types import Claim, Delivered, Next, Turn


class Relay:
    """Moves tasks from a store to their topics. One thread runs its turns. Any thread may call `wake` and `stop`."""

    def __init__(
        self,
        tools: Tools,
        limits: Limits,
        membership: Membership,
        reporter: Reporter,
        *,
        discovery_seconds: float,
    ) -> None:
        """Turns and batches use `tools`. While turns run, topics are discovered at least every `discovery_seconds`."""
        store, host = tools.store, tools.host
        self._reporter = reporter
        # Set by `wake`. The worker then ends its pause.
        self._woken = host.threads.event()
        self.topics = Topics(host)
        self.in_flight = InFlight(tools, limits, reporter)
        self._poller = Poller(store, membership, self.topics, self.in_flight, host)
        self.discoverer = Discoverer(
            store, membership, self.topics, self._poller, host.clock, seconds=discovery_seconds
        )
        self._ordering = Ordering(store, self.in_flight, tools.policy, host)
        self._selector = Selector(self.in_flight, self.topics, host.random)

    def turn(self, stopping: Callable[[], bool] = lambda: False) -> Turn:
        """Run one turn and return its counts. Start no batch once `stopping()` is true.

        Raises StoreError if Spanner does not answer a read, and StuckBatch if a batch does not end. After a
        StoreError, in-flight batches keep running, and a later turn reports them.
        """
        if self._woken.is_set():
            self._woken.clear()  # before the poll, so that an insert during this turn starts another turn
            self.discoverer.note_insert()
        earlier = self.in_flight.collect()
        poll_again = self._handle_reports(earlier, stopping)
        # Read live workers, controls and new topics.
        poll_again |= self.discoverer.discover_if_due(nothing_in_flight=not self.in_flight)
        polled = self._poller.poll(self._selector.fair_share.below_priority)
        # Keep the tasks without an ordering key. Of each key, keep only the first tasks, if they may be sent now.
        resolved = self._ordering.resolve(polled.candidates)
        batches, should_wait = ((), False) if stopping() else self._selector.select(resolved)
        self._start(batches)  # each on a thread of its own
        later = self.in_flight.wait() if should_wait else self.in_flight.collect()
        poll_again |= self._handle_reports(later, stopping)
        return self._end_turn(polled, earlier + later, should_wait=should_wait, poll_again=poll_again)

    def find_next_due(self) -> float | None:
        """See `Poller.find_next_due`."""
        return self._poller.find_next_due()

    def pause(self, seconds: float) -> bool:
        """Wait until `wake`, at most `seconds`. Return whether `wake` ended the wait."""
        return self._woken.wait(seconds)

    def wake(self) -> None:
        """End the pause of the worker, because a task may have been inserted. Callable on any thread."""
        self._woken.set()

    def stop(self) -> None:
        """End the pause of the worker. From now on, batches have only the shutdown time to mark.

        Callable on any thread.
        """
        self.in_flight.shut_down()
        self.wake()

    def finish(self) -> Turn:
        """Wait until no batch is in flight, and return the counts of the reports. Raises StuckBatch."""
        delivered: list[Delivered] = []
        self.in_flight.shut_down()
        try:
            # OUT-LOSS-5. Handle each report at once: if another batch is stuck, StuckBatch ends this loop.
            while len(self.in_flight):
                reports = self.in_flight.wait_for_one()
                self._handle_reports(reports, stopping=lambda: True)
                delivered += reports
            return turn_counts(delivered)
        finally:
            self._reporter.log_summary()

    def _handle_reports(self, delivered: Sequence[Delivered], stopping: Callable[[], bool]) -> bool:
        """Pass the reports to the topics and the reporter.

        Start batches for the at-most-once tasks that the reported batches have skipped, because polls do not read
        AtMostOnce. Tasks that cannot start now are polled again.

        Return whether the next poll may find more tasks.
        """
        poll_again = False
        for each in delivered:
            change = self.topics.observe(each)
            self._reporter.report_batch(each, change)
            poll_again |= change is not None or each.has_written()
        if not stopping():
            claims = [claim for each in delivered if (claim := self.topics.admit_at_most_once(each)) is not None]
            self._start(claims[: self.in_flight.free])
        return poll_again

    def _start(self, batches: Sequence[Claim]) -> None:
        if batches:
            self.discoverer.read_controls_if_old()  # the poll may have taken long
        for batch in batches:
            if (permitted := self.topics.permit(batch)) is not None:  # None: the topic is paused
                self.in_flight.start(permitted)

    def _end_turn(self, polled: Polled, delivered: Sequence[Delivered], *, should_wait: bool, poll_again: bool) -> Turn:
        next_turn = Next.SOON if polled.candidates or delivered or self.in_flight else Next.LATER
        if poll_again:
            next_turn = Next.AT_ONCE
        elif should_wait and not delivered and self.in_flight.unreported:
            next_turn = Next.STILL_WAITING
        turn = replace(
            turn_counts(delivered),
            polled=len(polled.candidates),
            poll_seconds=polled.seconds,
            in_flight=len(self.in_flight),
            next=next_turn,
            seconds_to_change=self.topics.seconds_to_change,
        )
        self._reporter.report_turn(turn)
        return turn

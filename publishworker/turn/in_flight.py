"""In-flight batches: each on a thread of its own, so that a slow one delays no other."""

import contextlib
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from outbox.base.values import counted, listed
from publishworker.delivery.delivery import Delivery, Tools
from publishworker.delivery.kinds import Deferral, MarkFirst
from publishworker.host import Queue, Thread
from publishworker.telemetry.reporter import Reporter
from publishworker.types import Cancelled, Claim, Delivered, Kind, TopicKey, Unmarked

#: A batch that has begun no transaction for this many seconds is stuck. A transaction, and the pause before the next
#: one, take less. The liveness probe and the watchdog of `process.app` notice turns that hang, but not a single batch.
STUCK_SECONDS = 120.0
#: Of the time between two checks for stuck batches, at most this many seconds count. If more have passed, the process
#: was probably suspended, so its batches did not run.
MAX_COUNTED_SECONDS = 45.0
#: Seconds between two checks for stuck batches during a wait without a time limit. Each also calls `Host.progress`.
WATCH_SECONDS = 1.0
#: Max seconds that a turn waits for its batches. Then the turn ends, so that the worker can send its heartbeat.
MAX_TURN_WAIT_SECONDS = 0.25
#: Max batches that take no place because they are aside (see InFlight).
MAX_ASIDE = 100
#: Max bytes of messages in flight: four full batches. In memory a message takes several
#: times its size, because Spanner's response, the decoded value, the message, the publish request and its serialized
#: form each hold a copy.
MAX_IN_FLIGHT_BYTES = 32_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Max tasks and bytes of one batch, the number of places, and how places are shared."""

    batch_size: int
    batch_bytes: int
    #: The number of places. Each batch in flight takes one, unless it is aside (see InFlight).
    places: int
    #: Part of the batches (0 to 0.5) for lower priorities while tasks of higher ones wait.
    fair_share: float = 0.0

    @property
    def max_tasks(self) -> int:
        return self.places * self.batch_size


class StuckBatch(Exception):
    """Some batches do not end. Their threads cannot be stopped, but their process can."""

    def __init__(self, claims: Sequence[Claim], seconds: float) -> None:
        first = claims[0]
        others = f" (the first of {len(claims)} stuck batches)" if len(claims) > 1 else ""
        super().__init__(
            f"Batch of {counted(len(first.ids), 'task')} of topic {first.topic} has begun no transaction for "
            f"{seconds:.0f} s: {listed(first.ids)}{others}"
        )


#: The selection creates claims of the kind PUBLISH, and the ordering those of the kind DEFER. A claim of the kind
#: MARK_FIRST is for the at-most-once tasks that a batch has skipped.
_KINDS = {Kind.PUBLISH: Delivery, Kind.MARK_FIRST: MarkFirst, Kind.DEFER: Deferral}


def delivery_of(claim: Claim, tools: Tools) -> Delivery:
    return _KINDS[claim.kind](claim, tools)


@dataclass(eq=False, slots=True)
class _Entry:
    """One in-flight batch. Compared by identity, because two entries may have equal claims."""

    delivery: Delivery
    seconds_since_begin: float = 0.0  # since its last transaction began, as of the last check
    transactions: int = 0
    reported: bool = False  # its Delivered is reported; if it is still in flight, it marks tasks again


class InFlight:
    """Starts batches, which run on threads of their own, and collects their reports.

    One thread uses it. Any thread may ask for its length, and call `shut_down` and `report_in_doubt`.

    A batch reports what became of its tasks. A batch is in flight until its tasks are marked or given up. While it
    marks again, it keeps its place. If all commits fail, the worker soon has no free place, and publishes nothing new.
    If Spanner refuses all remaining rows of a batch while other batches commit, the batch is aside and needs no place.
    """

    def __init__(self, tools: Tools, limits: Limits, reporter: Reporter) -> None:
        """`reporter` gets what batches report after their Delivered, while they mark again."""
        self.limits = limits
        self._delivery_of = partial(delivery_of, tools=tools)
        self._marking = tools.marking
        self._reporter = reporter
        self._host = tools.host
        self._clock = tools.host.clock
        self._running: dict[_Entry, Thread] = {}
        self._started: list[_Entry] = []  # since the last `wait`
        self._checked_at = self._clock()
        #: Pairs of an entry and a report: a Delivered, then any Unmarked and Cancelled, then None. If the batch fails,
        #: its last report is the exception.
        self._reports: Queue = self._host.threads.queue()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def unreported(self) -> list[Claim]:
        """Return the claims of batches that have not reported what became of their tasks."""
        return [entry.delivery.claim for entry in self._running if not entry.reported]

    @property
    def free(self) -> int:
        return max(0, self.limits.places - self.places_by_topic().total())

    @property
    def utilization(self) -> float:
        """Return the part of the places that is taken, from 0 to 1."""
        return 1 - self.free / self.limits.places

    @property
    def room(self) -> int:
        """Return the number of tasks that may start now, within the limits of batches and bytes."""
        return self.free * self.limits.batch_size if self.bytes_in_flight() < MAX_IN_FLIGHT_BYTES else 0

    def ids(self) -> frozenset[str]:
        """Return the IDs of the tasks in flight. No other batch may claim them."""
        left = [each.delivery.unmarked if each.reported else each.delivery.claim.ids for each in self._running]
        return frozenset(id for ids in left for id in ids)

    def places_by_topic(self) -> Counter[str]:
        """Return, by topic, the number of places that are taken."""
        aside = [entry for entry in self._running if entry.delivery.aside][:MAX_ASIDE]
        return Counter(entry.delivery.claim.topic for entry in self._running if entry not in aside)

    def bytes_in_flight(self) -> int:
        """Return the bytes of the messages of batches that have not reported."""
        return sum(claim.bytes for claim in self.unreported)

    def free_to_defer(self, *, nothing_else: bool) -> int:
        """Return the number of batches that may start to defer tasks.

        They get at most a quarter of the places, or half if there is `nothing_else` to start.
        """
        places = max(1, self.limits.places // 2) if nothing_else else self.limits.places // 4
        deferring = sum(claim.kind is Kind.DEFER for claim in self.unreported)
        return max(0, min(self.free, places - deferring))

    def busy_keys(self) -> frozenset[TopicKey]:
        """Return the keys that no other batch may claim now. A deferring batch that marks again holds no key."""
        claims = (
            entry.delivery.claim.part(entry.delivery.unmarked) if entry.reported else entry.delivery.claim
            for entry in self._running
            if not (entry.reported and entry.delivery.claim.kind is Kind.DEFER)
        )
        return frozenset(key for claim in claims for key in claim.keys)

    def start(self, claim: Claim) -> None:
        """Start a batch. Raises RuntimeError if the process may have no further thread."""
        entry = _Entry(self._delivery_of(claim))
        thread = self._host.threads.thread("batch", self._run, entry)  # OUT-DELAY-2
        thread.start()  # only then, because nothing would end a batch whose thread has not started
        self._running[entry] = thread
        self._started.append(entry)

    def raise_if_stuck(self) -> None:
        """Raise StuckBatch if batches have begun no transaction for STUCK_SECONDS. Forget these batches."""
        passed, self._checked_at = min(self._clock() - self._checked_at, MAX_COUNTED_SECONDS), self._clock()
        for entry in self._running:
            begun = entry.transactions != entry.delivery.transactions
            entry.seconds_since_begin = 0.0 if begun else entry.seconds_since_begin + passed
            entry.transactions = entry.delivery.transactions
        overdue = [entry for entry in self._running if entry.seconds_since_begin > STUCK_SECONDS]
        stuck = [entry for entry in overdue if self._running[entry].is_alive()]  # the others only have to be collected
        for entry in stuck:
            del self._running[entry]
            self._give_up(entry)
        if stuck:
            raise StuckBatch([entry.delivery.claim for entry in stuck], stuck[0].seconds_since_begin)

    def collect(self) -> list[Delivered]:
        """Return the reports of batches, without waiting. Raises StuckBatch."""
        self.raise_if_stuck()
        return self._wait(lambda _reports: True)

    def wait_for_one(self) -> list[Delivered]:
        """Wait until a batch reports or all have ended, and return the reports."""
        return self._wait(lambda reports: len(reports) > 0)

    def shut_down(self) -> None:
        """Let each batch try to mark at least once more, and give up after the shutdown timeout."""
        self._marking.shut_down()

    def wait(self) -> list[Delivered]:
        """Wait for the batches started since the last wait, and for one report, at most MAX_TURN_WAIT_SECONDS."""
        started, self._started = self._started, []

        def enough(reports: Sequence[Delivered]) -> bool:
            awaited = any(entry in self._running and not entry.reported for entry in started)
            return not awaited and (len(reports) > 0 or not self.unreported)

        return self._wait(enough, MAX_TURN_WAIT_SECONDS)

    def _wait(self, enough: Callable[[Sequence[Delivered]], bool], max_seconds: float | None = None) -> list[Delivered]:
        """Wait until the reports are `enough`, no batch is in flight, or `max_seconds` seconds have passed.

        If a batch raised an exception, pass on the reports so far, and raise it. Without `max_seconds`, raises
        StuckBatch if a batch does not end.
        """
        reports: list[Delivered] = []
        end = None if max_seconds is None else self._clock() + max_seconds
        while self._running:
            is_enough = enough(reports)
            seconds = WATCH_SECONDS if end is None else max(0.0, end - self._clock())
            try:
                entry, report = self._reports.get(timeout=0 if is_enough else seconds)
            except queue.Empty:
                if is_enough or end is not None:
                    break
                self._host.progress()
                self.raise_if_stuck()
                continue
            if entry not in self._running:  # the batch was removed before: it left nothing unmarked, or was stuck
                continue
            if isinstance(report, BaseException):
                del self._running[entry]
                self._give_up(entry)
                for each in reports:
                    self._reporter.report_batch(each)
                raise report
            if report is None or (isinstance(report, Delivered) and not report.unmarked):
                del self._running[entry]
            entry.reported = True
            if isinstance(report, Delivered):
                reports.append(report)
            elif report is not None:
                self._reporter.report_later(report)
        return reports

    def report_in_doubt(self) -> None:
        """Report the tasks of batches in flight that are in doubt, because the process ends. Callable on any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                entry, report = self._reports.get(timeout=0)
                if isinstance(report, Delivered):
                    entry.reported = True
                    self._reporter.report_batch(report)
                elif isinstance(report, Unmarked | Cancelled):
                    self._reporter.report_later(report)
        for entry in list(self._running):
            self._give_up(entry)
        self._reporter.log_summary()

    def _give_up(self, entry: _Entry) -> None:
        claim = entry.delivery.claim
        if entry.reported:
            for unmarked in entry.delivery.give_up():
                self._reporter.report_later(unmarked)
        elif claim.kind is Kind.MARK_FIRST:
            self._reporter.report_later(Unmarked(claim, "the worker has ended", "marked", given_up=True))

    def _run(self, entry: _Entry) -> None:
        try:
            for report in entry.delivery.reports():
                self._reports.put((entry, report))
            self._reports.put((entry, None))
        except BaseException as error:
            self._reports.put((entry, error))

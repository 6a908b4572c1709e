"""The worker: when it polls again, its logs and reports while Spanner is unavailable, how it ends."""

import logging
import threading
from collections.abc import Callable
from itertools import pairwise
from math import inf
from random import Random
from typing import Any

import pytest

from publishworker.spanner.write_errors import DatabaseMissing, StoreError
from publishworker.turn.in_flight import StuckBatch
from publishworker.turn.membership import HEARTBEAT_INTERVAL_SECONDS, Membership
from publishworker.turn.worker import MAX_MISSING_SECONDS, Worker
from publishworker.types import Next, Turn, Workers
from tests.support.fakes import FakeStore
from tests.support.parts import claim_of

WORK, IDLE, AWAY = Turn(published=1, next=Next.AT_ONCE), Turn(), StoreError("connection refused")


class Stop(threading.Event):
    """A stop event that records waits instead of waiting, and the clock that they move."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.seconds, self.at = 0.0, inf

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.seconds += timeout
        if self.seconds >= self.at:
            self.set()
        return self.is_set()


class Script:
    """A relay that does as written, one step a turn, and then stops the loop around it."""

    def __init__(self, *steps: Turn | Exception, end: Exception | None = None, seconds: float = 0.0) -> None:
        self.stop, self.store = Stop(), FakeStore()
        self.woken: threading.Event = self.stop  # it is set when the worker stops
        self.due: float | None = None
        self.events: list[str] = []
        self._steps, self._end, self._seconds = list(steps), end, seconds

    def turn(self, stopping: Callable[[], bool]) -> Turn:
        assert stopping == self.stop.is_set
        self.events.append("turn" if "me" in self.store.seen_at else "turn without shards")
        self.stop.seconds += self._seconds
        step = self._steps.pop(0)
        if not self._steps:
            self.stop.set()
        if isinstance(step, Exception):
            raise step
        return step

    def find_next_due(self) -> float | None:
        return self.due

    def pause(self, seconds: float) -> bool:
        return self.woken.wait(seconds)

    def finish(self) -> Turn:
        self.events.append("finish" if "me" not in self.store.seen_at else "finish with shards")
        if self._end:
            raise self._end
        return IDLE

    def run(
        self, *, interval: float = 1.0, beats: bool = False, idle: Callable[[], float] | None = None
    ) -> list[float]:
        """Run the loop and return its waits; with `beats` time passes for the heartbeat row, too."""

        def clock() -> float:
            return self.stop.seconds if beats else 0.0

        membership = Membership(self.store, "me", clock=clock)
        membership.assign(Workers({"me": inf}))
        Worker(
            self,
            membership,
            poll_interval=interval,
            idle_interval=idle,
            touch_file=lambda: self.events.append("beat"),
            report=lambda: self.events.append("report"),
            random=Random(1),
            clock=lambda: self.stop.seconds,
        ).run(self.stop)
        return self.stop.waits


def near(*nominal: float) -> list[Any]:
    """Return values that equal waits of these seconds, each up to 15 % shorter."""
    return [pytest.approx(each * 0.925, abs=each * 0.0751) for each in nominal]


def test_without_work_the_wait_doubles_up_to_the_interval() -> None:
    """Low delay right after work, a poll a second when idle; each wait has jitter. Work makes the wait short again."""
    waits = Script(*[IDLE] * 10).run()
    assert waits == near(0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1, 1)
    assert len(set(waits)) == len(waits)
    assert Script(*[IDLE] * 6, WORK, IDLE, IDLE).run()[-1] == near(0.05)[0]


def test_a_first_failure_is_retried_soon_and_repeated_ones_more_and_more_slowly() -> None:
    unfinished = Turn(polled=1, next=Next.SOON)
    waits = Script(*[IDLE] * 6, *[unfinished] * 6, IDLE, unfinished, IDLE).run()
    assert waits[6:] == near(0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 0.05)


def test_a_turn_can_shorten_but_not_lengthen_the_wait() -> None:
    """A topic that soon has tokens is polled then; one that has none for long delays no other."""
    assert Script(Turn(seconds_to_change=0.01), Turn(seconds_to_change=60.0), IDLE).run() == [0.01, near(0.1)[0]]


@pytest.mark.parametrize(("turn", "due"), [(IDLE, 0.0), (Turn(next=Next.SOON), None)])
def test_a_task_that_is_due_already_or_left_is_polled_after_the_poll_interval(turn: Turn, due: float | None) -> None:
    """The change stream does not report it. It may wait for something else, so polls at once would be many."""
    script = Script(*[turn] * 8)
    script.due = due
    script.run(idle=lambda: 15.0)
    assert script.stop.seconds == pytest.approx(0.05 + 0.1 + 0.2 + 0.4 + 0.8 + 1 + 1, rel=0.15)


def test_an_outage_is_logged_once_and_followed_by_growing_waits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "publishworker"):
        waits = Script(WORK, *[AWAY] * 8, WORK, AWAY, WORK).run()
    assert waits == near(0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 0.2)
    away = ("ERROR", "A request to Spanner failed; retrying: connection refused", "spanner_unavailable")
    back = ("INFO", "Spanner is available again", "spanner_available")
    lines = [(each.levelname, each.getMessage(), vars(each)["action"]) for each in caplog.records]
    assert lines == [away, back, away, back]


ROUND = ["beat", "report"]


def test_the_heartbeat_file_is_written_while_idle_and_during_outages() -> None:
    """A turn that failed may have taken long, so a heartbeat follows it, too. A waiting worker beats and reports."""
    script = Script(AWAY, AWAY)
    script.run()
    assert script.events == [*[*ROUND, "turn", "beat"] * 2, "finish"]
    script = Script(WORK, IDLE, IDLE)
    script.run()
    assert script.events == [*ROUND, "turn", *ROUND, "turn", *ROUND, *ROUND, "turn", "finish"]
    script = Script(*[IDLE] * 12)
    waits = script.run(interval=30, beats=True)
    assert script.events.count("beat") == script.events.count("report") == 12 + len(waits)
    script = Script(IDLE, IDLE)
    script.stop.at = 0.04
    assert script.run() == near(0.05)
    assert script.events == [*ROUND, "turn", "finish"]


@pytest.mark.parametrize("others", [None, StuckBatch([claim_of("invoices", "b")], 122)])
@pytest.mark.parametrize("error", [StuckBatch([claim_of("orders", "a")], 121), ZeroDivisionError("a defect")])
def test_an_error_ends_the_worker_after_its_batches(error: Exception, others: StuckBatch | None) -> None:
    """The worker leaves its shards first; then the caller gets the error, also if another batch is stuck."""
    script = Script(error, end=others)
    with pytest.raises(type(error), match=r"1 task of topic orders has begun no transaction for 121 s|a defect"):
        script.run(beats=True)
    assert script.events[-2:] == ["turn", "finish"]
    assert script.store.seen_at == {}


def test_a_missing_database_ends_the_worker_after_minutes() -> None:
    """So that its pod restarts and shows it. A database that comes back in time, or an outage, does not end it."""
    gone = DatabaseMissing("404 Database not found")
    script = Script(*[gone] * 200)
    with pytest.raises(DatabaseMissing, match="Database not found"):
        script.run()
    assert MAX_MISSING_SECONDS <= script.stop.seconds < MAX_MISSING_SECONDS + 10
    for back in (IDLE, AWAY):
        script = Script(*[*[gone] * 50, back] * 4, seconds=1)
        script.run()
        assert script.stop.seconds > MAX_MISSING_SECONDS


def test_the_heartbeat_row_is_written_in_long_waits() -> None:
    """A poll interval of 30 s must not make the other workers think that this one is gone."""
    script = Script(*[IDLE] * 14)
    beats: list[float] = []
    heartbeat = script.store.heartbeat

    def noted(*arguments: Any, **options: Any) -> None:
        beats.append(script.stop.seconds)
        heartbeat(*arguments, **options)

    script.store.heartbeat = noted
    script.run(interval=30, beats=True)
    assert script.stop.seconds > 60
    assert max(later - earlier for earlier, later in pairwise(beats)) <= HEARTBEAT_INTERVAL_SECONDS + 0.01


def test_a_worker_that_is_never_idle_writes_its_heartbeat_row() -> None:
    script = Script(*[WORK] * 20, seconds=2)
    assert script.run(beats=True) == []
    assert script.store.heartbeats >= 40 / (HEARTBEAT_INTERVAL_SECONDS + 2)


def test_a_worker_whose_turns_fail_writes_no_heartbeat_row() -> None:
    """It would keep its shards without sending their tasks, so the others must get them."""
    script = Script(*[AWAY] * 20)
    script.run(beats=True)
    assert script.stop.seconds > 15
    assert script.store.heartbeats == 1

"""The loop: when it polls again, what it says while Spanner is away, how it ends."""

import logging
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from publishworker.heartbeat import Heartbeat
from publishworker.spanner.store import StoreError
from publishworker.task import Group, Turn
from publishworker.turn.fleet import HEARTBEAT_SECONDS, Fleet
from publishworker.turn.flights import StuckGroup
from publishworker.worker import HasTurn, Loop, Pause
from tests.support.fakes import FakeStore

WORK, IDLE = Turn(published=1), Turn()


class Stop(threading.Event):
    """A stop event that records waits instead of waiting, and the clock that they move."""

    def __init__(self) -> None:
        """Nothing waited for."""
        super().__init__()
        self.waits: list[float] = []
        self.seconds = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        """Record and return at once."""
        assert timeout is not None
        self.waits.append(timeout)
        self.seconds += timeout
        return self.is_set()


class Script:
    """A relay that does as written, then stops the loop."""

    def __init__(self, stop: Stop, *steps: Turn | StoreError) -> None:
        """Take one step a turn."""
        self._stop = stop
        self._steps = list(steps)
        self.finished = False

    def turn(self, stopping: Callable[[], bool]) -> Turn:
        """See HasTurn."""
        step = self._steps.pop(0)
        if not self._steps:
            self._stop.set()
        if isinstance(step, StoreError):
            raise step
        return step

    def finish(self) -> Turn:
        """See HasTurn."""
        self.finished = True
        return IDLE


def run(
    *steps: Turn | StoreError,
    until: Callable[[Turn], bool] = lambda _turn: False,
    beat: Callable[[], None] = lambda: None,
) -> list[float]:
    """Run the steps and return the waits between them."""
    stop = Stop()
    loop_of(Script(stop, *steps), stop, beat=beat).run(stop, until)
    return stop.waits


def loop_of(
    relay: HasTurn,
    stop: Stop,
    store: FakeStore | None = None,
    *,
    poll_interval: float = 1.0,
    beat: Callable[[], None] = lambda: None,
    report: Callable[[], None] = lambda: None,
    clock: Callable[[], float] | None = None,
    beats: bool = False,
) -> Loop:
    """Return a loop around `relay` whose time passes in its waits; with `beats` also for the heartbeat row."""
    store = store or FakeStore()
    clock = clock or (lambda: stop.seconds)
    fleet = Fleet(store, "me", store.shards, clock=clock if beats else lambda: 0.0)
    return Loop(relay, fleet, poll_interval=poll_interval, beat=beat, report=report, random=Random(1), clock=clock)


def test_after_work_it_polls_again_at_once() -> None:
    """There may be more."""
    assert run(WORK, WORK, WORK) == []


def test_without_work_the_wait_doubles_up_to_the_interval() -> None:
    """Low delay right after work, a poll a second when idle; each wait with jitter, so workers do not keep step."""
    waits = run(*[IDLE] * 10)
    nominal = [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1, 1]
    for wait, expected in zip(waits, nominal, strict=True):
        assert expected * 0.85 <= wait <= expected
    assert len(set(waits)) == len(waits)


def test_work_resets_the_wait() -> None:
    """The next idle wait is short again."""
    waits = run(*[IDLE] * 6, WORK, IDLE, IDLE)
    assert waits[-1] < 0.1


def test_an_outage_is_said_once_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """One line when it goes, one when it is back; the waits grow, so no busy loop."""
    away = StoreError("connection refused")
    with caplog.at_level(logging.INFO, "publishworker"):
        waits = run(IDLE, *[away] * 8, IDLE, away, IDLE)
    actions = [record.__dict__["action"] for record in caplog.records]
    assert actions == ["spanner_away", "spanner_back", "spanner_away", "spanner_back"]
    assert "connection refused" in caplog.records[0].getMessage()
    assert max(waits) > 3.7
    assert sum(waits[1:9]) > 12


def test_the_heart_beats_while_idle_and_while_spanner_is_away() -> None:
    """Liveness is that the loop turns; an outage must not restart the fleet."""
    for step in (IDLE, StoreError("away")):
        beats: list[None] = []
        run(step, step, beat=lambda beats=beats: beats.append(None))
        assert len(beats) >= 2


def test_the_heart_beats_after_a_turn_that_failed() -> None:
    """It may have taken as long as a poll may last; the wait comes on top."""
    told: list[str] = []
    stop = Stop()
    script = Script(stop, StoreError("away"), StoreError("away"))
    turn = script.turn

    def tell(stopping: Callable[[], bool]) -> Turn:
        told.append("turn")
        return turn(stopping)

    script.turn = tell
    loop_of(script, stop, beat=lambda: told.append("beat")).run(stop)
    assert told == ["beat", "turn", "beat", "beat", "turn", "beat"]


def test_a_heartbeat_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The relay goes on; one that can be written is touched."""
    with caplog.at_level(logging.WARNING, "publishworker"):
        heartbeat = Heartbeat(tmp_path / "missing" / "heartbeat")
        heartbeat(), heartbeat(), heartbeat()
    assert [record.__dict__["action"] for record in caplog.records] == ["heartbeat"]
    Heartbeat(tmp_path / "heartbeat")()
    assert (tmp_path / "heartbeat").exists()


def test_published_but_uncommitted_is_no_progress() -> None:
    """Commits that are refused for good must not make a busy loop of duplicates."""
    assert not Turn(published=10, uncommitted=10).made_progress
    assert Turn(published=10, uncommitted=9).made_progress


def test_it_ends_when_the_condition_says_so() -> None:
    """What `drain` is made of."""
    seen = []
    run(WORK, IDLE, WORK, until=lambda turn: (seen.append(turn), len(seen) == 2)[1])
    assert seen == [WORK, IDLE]


def test_it_reports_at_every_turn_also_while_spanner_is_away() -> None:
    """Else nobody would tell a worker that waits from one that is gone."""
    reports: list[str] = []
    stop = Stop()
    script = Script(stop, WORK, IDLE, StoreError("away"), StoreError("away"))
    loop_of(script, stop, report=lambda: reports.append("")).run(stop)
    assert len(reports) >= 4


def test_all_stuck_groups_are_named() -> None:
    """Also those that are found while the others end."""

    class Stuck:
        def turn(self, stopping: Callable[[], bool]) -> Turn:
            raise StuckGroup([Group("orders", ("a",))], 121)

        def finish(self) -> Turn:
            raise StuckGroup([Group("orders", ("b",)), Group("invoices", ("c",))], 122)

    stop = Stop()
    with pytest.raises(StuckGroup, match=r"stuck for 121 s .*, and 2 more") as caught:
        loop_of(Stuck(), stop).run(stop)
    assert [group.ids for group in caught.value.groups] == [("a",), ("b",), ("c",)]


def test_a_stuck_group_ends_the_loop_when_the_others_have_ended() -> None:
    """The shards are given away first; then the fault is told to whoever runs the loop."""
    told: list[str] = []

    class Stuck:
        def turn(self, stopping: Callable[[], bool]) -> Turn:
            raise StuckGroup([Group("orders", ("a",))], 121)

        def finish(self) -> Turn:
            told.append("finished")
            return IDLE

    stop, store = Stop(), FakeStore()
    with pytest.raises(StuckGroup, match="1 tasks of orders is stuck for 121 s"):
        loop_of(Stuck(), stop, store, beats=True).run(stop)
    assert told == ["finished"]
    assert store.workers == {}


def test_a_defect_ends_the_loop() -> None:
    """It is not retried for ever."""

    class Broken:
        def turn(self, stopping: Callable[[], bool]) -> Turn:
            raise ZeroDivisionError

        def finish(self) -> Turn:
            raise AssertionError

    stop = Stop()
    with pytest.raises(ZeroDivisionError):
        loop_of(Broken(), stop).run(stop)


def test_the_heartbeat_row_is_kept_up_in_long_waits() -> None:
    """A poll interval of 30 s must not make the others think that the worker is gone."""
    stop, store = Stop(), FakeStore()
    beats: list[float] = []
    heartbeat = store.heartbeat

    def at_this_time(*arguments: Any) -> None:
        beats.append(stop.seconds)
        heartbeat(*arguments)

    store.heartbeat = at_this_time
    loop_of(Script(stop, *[IDLE] * 14), stop, store, poll_interval=30, beats=True).run(stop)
    assert stop.seconds > 60
    assert len(beats) >= 12
    assert max(later - earlier for earlier, later in pairwise(beats)) <= HEARTBEAT_SECONDS + 0.01


def test_a_turn_that_waited_in_vain_is_not_followed_by_a_rest() -> None:
    """A backlog must not wait a poll interval for groups that took a moment longer than the turn."""
    assert run(IDLE, IDLE, Turn(in_flight=8, waits=True), WORK) == pytest.approx([0.05, 0.1], rel=0.15)


def test_a_worker_that_is_never_idle_beats_as_well() -> None:
    """Between turns, without a rest."""
    stop, store = Stop(), FakeStore()
    script = Script(stop, *[WORK] * 20)
    turn = script.turn

    def long_turn(stopping: Callable[[], bool]) -> Turn:
        stop.seconds += 2
        return turn(stopping)

    script.turn = long_turn
    loop_of(script, stop, store, beats=True).run(stop)
    assert stop.waits == []
    assert store.beats >= 6


def test_a_worker_whose_turns_fail_does_not_beat() -> None:
    """It would keep its shards and serve nobody: the others must have them."""
    stop, store = Stop(), FakeStore()
    loop_of(Script(stop, *[StoreError("no permission")] * 20), stop, store, beats=True).run(stop)
    assert stop.seconds > 15
    assert store.beats == 1


def test_at_the_end_the_worker_leaves_and_then_finishes_what_is_in_flight() -> None:
    """The others have its shards at once; nothing that was begun is dropped."""
    stop, store = Stop(), FakeStore()
    script = Script(stop, WORK)
    seen: list[bool] = []
    turn = script.turn
    script.turn = lambda stopping: (seen.append("me" in store.workers), turn(stopping))[1]
    script.finish = lambda: (seen.append("me" in store.workers), IDLE)[1]
    loop_of(script, stop, store).run(stop)
    assert seen == [True, False]


def test_two_workers_do_not_keep_step() -> None:
    """Different seeds, different waits (A20)."""
    one, other = (Pause(1, 1, Random(seed)) for seed in (1, 2))
    assert [one.next() for _ in range(5)] != [other.next() for _ in range(5)]

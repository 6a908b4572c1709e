"""The worker: its loop and its heartbeats, and how its process ends."""

import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import PermissionDenied, RetryError, ServiceUnavailable, Unauthenticated
from google.auth.exceptions import RefreshError

from outbox.table.ddl import Layout
from publishworker import process
from publishworker.host import Threads
from publishworker.process import app as app_module
from publishworker.process import healthcheck
from publishworker.process.app import App, Stalled, run_on_thread
from publishworker.process.commands import heartbeat_file, stop_on_signals
from publishworker.spanner.store import SpannerStore, Workers, any_to_send
from publishworker.spanner.write_errors import DatabaseMissing, StoreError
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics
from publishworker.turn.in_flight import StuckBatch
from publishworker.turn.membership import HEARTBEAT_INTERVAL_SECONDS, Membership
from publishworker.turn.worker import MAX_USELESS_SECONDS, Worker
from publishworker.types import Next, TopicKey, Turn
from tests.support.fakes import Counted, FakePublisher, FakeStore, serialized
from tests.support.parts import claim_of, poll_request, relay_of

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
        return self.stop.wait(seconds)  # an insert or the end of the worker would end it

    def finish(self) -> Turn:
        self.events.append("finish" if "me" not in self.store.seen_at else "finish with shards")
        if self._end:
            raise self._end
        return IDLE

    def run(
        self, *, interval: float = 1.0, beats: bool = False, idle: Callable[[], float] | None = None
    ) -> list[float]:
        """Run the loop and return its waits; with `beats` time passes for the heartbeat row, too."""
        membership = Membership(self.store, "me", clock=lambda: self.stop.seconds if beats else 0.0)
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


def caused_by(cause: Exception) -> StoreError:
    error = StoreError(str(cause))
    error.__cause__ = cause
    return error


NO_TOKEN = ServiceUnavailable("Getting metadata from plugin failed with error: invalid_grant")
#: Failures that only a person can end.
LASTING = (
    DatabaseMissing("404 Database not found"),
    *map(caused_by, (PermissionDenied("no"), Unauthenticated("no"), RefreshError("no"), NO_TOKEN)),
    caused_by(RetryError("Timeout of 3 s exceeded", cause=NO_TOKEN)),
)


@pytest.mark.parametrize("lasting", LASTING, ids=lambda error: repr(error.__cause__ or error)[:40])
def test_a_worker_that_cannot_work_until_a_person_acts_ends_within_five_minutes(lasting: StoreError) -> None:
    """So that its platform restarts it and shows it. One that can work in between, or an outage, does not end it."""
    script = Script(*[lasting] * 200)
    with pytest.raises(StoreError, match=str(lasting)):
        script.run()
    assert MAX_USELESS_SECONDS <= script.stop.seconds < 300 - 30  # and a read takes up to 30 s
    for back in (IDLE, AWAY, caused_by(ServiceUnavailable("no"))):
        script = Script(*[*[lasting] * 40, back] * 5, seconds=1)
        script.run()
        assert script.stop.seconds > MAX_USELESS_SECONDS


def test_the_heartbeat_file_is_left_to_age_while_a_worker_cannot_work() -> None:
    app, touched = mock.MagicMock(App), mock.Mock()
    app._steps, app._touch_file, app._worker = 0, touched, mock.Mock()
    for app._worker.is_useless in (False, True, False):
        App._progress(app)
    assert (app._steps, touched.call_count) == (3, 2)


class OneThreadLess(Threads):
    """Threads of which the first cannot start, as with a limit of processes."""

    def __init__(self) -> None:
        self.left = 1

    def thread(self, name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = super().thread(name, target, *arguments)
        self.left -= 1
        if self.left == 0:
            thread.start = mock.Mock(side_effect=RuntimeError("can't start new thread"))  # type: ignore[method-assign]
        return thread


def test_a_batch_whose_thread_cannot_start_ends_the_worker_at_once() -> None:
    """Nothing would ever end that batch. The others are finished, and no task of it was claimed."""
    store, stop = FakeStore(), threading.Event()
    for id in "abc":
        store.insert(id, "orders", serialized(b""))
    relay = relay_of(store, FakePublisher(), size=1, batches=3, threads=OneThreadLess())
    membership = Membership(store, "worker")
    worker = Worker(relay, membership, poll_interval=1, touch_file=lambda: None, random=Random(1))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        worker.run(stop)
    assert len(relay.in_flight) == 0


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


def test_the_health_check_reports_fresh_old_and_missing_heartbeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "heartbeat"
    monkeypatch.setenv("OUTBOX_HEARTBEAT_FILE", str(file))
    assert healthcheck.main([]) == 1
    assert "No heartbeat" in capsys.readouterr().err
    heartbeat_file(file)()
    assert healthcheck.main([]) == 0
    os.utime(file, (0, 0))
    assert healthcheck.main([]) == 1
    assert "s old; the limit is 45 s" in capsys.readouterr().err


def test_the_health_check_of_a_machine_reports_the_worst_of_its_running_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each worker has a file of its own, so that no other one hides that it hangs."""
    pattern = str(tmp_path / "publishworker.*.heartbeat")
    (tmp_path / "publishworker.999999999.heartbeat").touch()  # of a worker that was killed
    assert healthcheck.main(["--heartbeat-file", pattern]) == 1
    assert "No heartbeat" in capsys.readouterr().err
    own, parent = (Path(pattern.replace("*", str(id))) for id in (os.getpid(), os.getppid()))
    own.touch(), parent.touch()
    assert healthcheck.main(["--heartbeat-file", pattern]) == 0
    os.utime(own, (0, 0))
    assert healthcheck.main(["--heartbeat-file", pattern]) == 1


def test_a_heartbeat_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "publishworker"):
        heartbeat = heartbeat_file(tmp_path / "missing" / "heartbeat")
        heartbeat(), heartbeat(), heartbeat()
    assert [record.__dict__["action"] for record in caplog.records] == ["heartbeat"]


def test_each_read_begins_with_a_heartbeat() -> None:
    """A turn has several reads, and each may take 30 s. A drain then reads all unsent tasks, part by part."""
    beats: list[str] = []
    database = mock.Mock(snapshot=mock.Mock(side_effect=ServiceUnavailable("no")))
    store = SpannerStore(database, Layout(10), before_read=lambda: beats.append("beat"))
    for read in (
        lambda: store.poll(poll_request("orders")),
        lambda: store.discover((), ()),
        lambda: store.discover((1,), ("orders",)),
        lambda: store.seconds_until_due((1,), ("orders",)),
        lambda: store.key_heads({TopicKey("orders", "k"): 1}, 1, skip_dead=False),
        lambda: any_to_send(store),
    ):
        beats.clear()
        with pytest.raises(StoreError):
            read()
        assert beats == ["beat"]


def test_a_worker_on_a_thread_ends_in_time_and_raises_its_defect() -> None:
    """After the stop it has its timeout and no more. A defect ends the command: there is no silent half-worker."""
    stop, release = threading.Event(), threading.Event()
    woken: list[bool] = []
    steps = itertools.count()
    assert run_on_thread(stop.set, stop, 5, lambda: woken.append(stop.is_set()), lambda: next(steps))
    assert woken == [True]
    assert not run_on_thread(lambda: release.wait(30), stop, 0.01, lambda: None, lambda: next(steps))
    release.set()

    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_on_thread(work, threading.Event(), 5, lambda: None, lambda: next(steps))


def test_a_worker_that_hangs_is_noticed_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process then ends by itself, without a liveness probe."""
    monkeypatch.setattr(app_module, "MAX_AGE", 0.5)
    steps, release = itertools.chain(range(10), itertools.repeat(10)), threading.Event()
    with pytest.raises(Stalled, match=r"release\.wait"):
        run_on_thread(lambda: release.wait(60) and None, threading.Event(), 5, lambda: None, lambda: next(steps))
    release.set()


def test_the_first_signal_asks_to_stop_and_the_handlers_are_restored() -> None:
    """The Spark task of a drain continues in a process whose handlers are not the worker's."""
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(
    ("run", "in_flight", "code", "action"),
    [
        (StuckBatch([claim_of("orders", "a")], 121), 1, process.FAILED, "stuck"),
        (DatabaseMissing("no database"), 0, process.NOT_REACHED, "missing"),
        (caused_by(PermissionDenied("no")), 0, process.NOT_REACHED, "no_access"),
        (Stalled("a stack"), 1, process.FAILED, "stalled"),
        (ZeroDivisionError(), 0, process.FAILED, "died"),
        (None, 0, process.DONE, "stopped"),
        ("hangs", 1, 9, "shutdown_timeout"),
        ("hangs", 0, process.DONE, "stopped"),  # in a read, which takes up to 30 s. The worker has claimed nothing then
    ],
)
def test_the_end_of_a_worker_has_an_exit_code_and_a_line(
    run: Any, in_flight: int, code: int, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only batches in flight exceed the shutdown timeout."""
    app, counted, stop, answered = mock.MagicMock(App), Counted(), threading.Event(), threading.Event()
    run, seconds = (lambda *_: answered.wait(60), 0) if run == "hangs" else (run, 5)
    app._settings = SimpleNamespace(project="p", instance="i", database="d", shutdown_timeout=seconds)
    app._worker, app.relay, app.store, app._metrics = mock.Mock(), mock.MagicMock(), mock.Mock(), Metrics(counted)
    app._steps, app._on_stall = 0, mock.Mock()
    app.store.layouts, app._background = [Layout(10)], [mock.Mock()]
    app._worker.run.side_effect, app.relay.in_flight.__bool__.return_value = run, in_flight > 0
    caplog.set_level("INFO", "publishworker")
    stop.set()
    assert App.until_stopped(app, stop, lambda _turn: False, timeout_exit_code=9) == code
    assert [vars(line)["action"] for line in caplog.records] == ["start", action]
    assert counted.counts[m.FORCED_STOP.name] == (action in {"stuck", "stalled", "shutdown_timeout"})
    app.relay.in_flight.report_in_doubt.assert_called_once_with()  # so that no task is lost without a log line
    app._background[0].stop.assert_called_once_with()
    answered.set()

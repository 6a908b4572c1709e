"""The process around a worker: its heartbeat file, signals, and a thread that ends in time or not."""

import logging
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from google.api_core.exceptions import ServiceUnavailable

from outbox.table.layouts import Layout
from publishworker.process import exits, healthcheck
from publishworker.process.app import App, run_on_thread
from publishworker.process.commands import heartbeat_file, stop_on_signals
from publishworker.spanner.store import SpannerStore
from publishworker.spanner.unsent import any_to_send
from publishworker.spanner.write_errors import DatabaseMissing, StoreError
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics
from publishworker.turn.in_flight import StuckBatch
from publishworker.types import TopicKey
from tests.support.fakes import Counted
from tests.support.parts import claim_of, poll_request


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
    assert run_on_thread(stop.set, stop, 5, lambda: woken.append(stop.is_set()))
    assert woken == [True]
    assert not run_on_thread(lambda: release.wait(30), stop, 0.01, lambda: None)
    release.set()

    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_on_thread(work, threading.Event(), 5, lambda: None)


def test_the_first_signal_asks_to_stop_and_the_handlers_are_restored() -> None:
    """The Spark task of a drain continues in a process whose handlers are not the worker's."""
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(
    ("error", "code", "action"),
    [
        (StuckBatch([claim_of("orders", "a")], 121), exits.FAILED, "stuck"),
        (DatabaseMissing("no database"), exits.NOT_REACHED, "missing"),
        (ZeroDivisionError(), exits.FAILED, "died"),
        (None, exits.DONE, "stopped"),
    ],
)
def test_the_end_of_a_worker_has_an_exit_code_and_a_line(
    error: Exception | None, code: int, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, counted = app_and_counts()
    app._worker.run.side_effect = error
    caplog.set_level("INFO", "publishworker")
    assert stopped(app) == code
    assert [vars(line)["action"] for line in caplog.records] == ["start", action]
    assert counted.counts[m.FORCED_STOP.name] == (action == "stuck")
    app.relay.report_in_doubt.assert_called_once_with()  # so that no task is lost without a log line
    app._background[0].stop.assert_called_once_with()


@pytest.mark.parametrize(
    ("in_flight", "code", "action"), [(1, 9, "shutdown_timeout"), (0, exits.DONE, "stopped")], ids=["batch", "read"]
)
def test_only_batches_in_flight_exceed_the_shutdown_timeout(
    in_flight: int, code: int, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A read that Spanner does not answer takes up to 30 s. The worker then has claimed nothing."""
    app, counted = app_and_counts()
    answered = threading.Event()
    app._worker.run.side_effect = lambda *_: answered.wait(60)
    app._settings.shutdown_timeout = 0.0
    app.relay.load.batches = in_flight
    caplog.set_level("INFO", "publishworker")
    assert stopped(app) == code
    assert [vars(line)["action"] for line in caplog.records] == ["start", action]
    assert counted.counts[m.FORCED_STOP.name] == in_flight
    answered.set()


def app_and_counts() -> tuple[Any, Counted]:
    app, counted = mock.MagicMock(App), Counted()
    app._settings = SimpleNamespace(project="p", instance="i", database="d", shutdown_timeout=5)
    app._worker, app.relay, app.store, app._metrics = mock.Mock(), mock.MagicMock(), mock.Mock(), Metrics(counted)
    app.store.layouts, app._background = [Layout(10)], [mock.Mock()]
    return app, counted


def stopped(app: Any) -> int:
    stop = threading.Event()
    stop.set()
    return App.until_stopped(app, stop, lambda _turn: False, timeout_exit_code=9)

"""Signals become an event, work on a thread ends in time or not."""

import signal
import threading

import pytest

from publishworker.process.app import run_on_thread
from publishworker.process.commands import stop_on_signals


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

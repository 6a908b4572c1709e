"""The window, the doubts, the threads, the health check, the logs: one idea each."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.api_core.exceptions import DeadlineExceeded

from outbox.logs import JsonFormatter, TextFormatter
from publishworker import healthcheck
from publishworker.connection import Deadline
from publishworker.heartbeat import Heartbeat
from publishworker.stopping import run_on_thread, stop_on_signals
from publishworker.task import Group, Row, Version
from publishworker.telemetry.complaints import Complaints
from publishworker.turn.doubts import MAX_TASKS, Doubts
from publishworker.turn.sampling import Limits
from publishworker.turn.window import Window


def polls(window: Window, backlog: dict[str, int], count: int) -> list[int]:
    """Let the window adapt to a steady backlog, by range; return the rows of each poll."""
    totals = []
    for _ in range(count):
        found = {name: min(rows, window.per_range) for name, rows in backlog.items()}
        totals.append(sum(found.values()))
        window.adapt(found)
    return totals


@pytest.mark.parametrize("ranges", [1, 3, 10, 100, 1000])
def test_a_poll_stays_near_its_target_however_the_backlog_is_spread(ranges: int) -> None:
    """One hot range or a thousand: a poll brings enough to work on, and never much more than twice that."""
    totals = polls(Window(target=400, shards=10), {str(n): 10**6 for n in range(ranges)}, 20)
    assert all(200 <= total <= max(800, 2 * ranges) for total in totals[-5:])


def test_a_small_backlog_does_not_widen_the_window() -> None:
    """Ranges that are not cut off say nothing about more."""
    window = Window(target=400, shards=10)
    before = window.per_range
    polls(window, {str(n): 3 for n in range(10)}, 10)
    assert window.per_range == before


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ROW = Row("a", "orders", b"", None, NOON, None, None)
AT_NOON = Version.of(ROW)


def test_doubts_are_bounded_and_stay_until_they_are_marked() -> None:
    """The oldest beyond 10,000 are forgotten; groups keep the limits of a turn."""
    doubts = Doubts(lambda: 0.0)
    doubts.remember("orders", {str(n): AT_NOON for n in range(MAX_TASKS + 5)})
    assert len(doubts.ids()) == MAX_TASKS
    groups = doubts.groups(Limits(1000, 1, 4))
    assert [len(group.ids) for group in groups] == [1000] * 4
    assert groups[0].ids[0] == "5"
    for group in groups:
        doubts.forget(group.ids)
    assert len(doubts.ids()) == MAX_TASKS - 4000


def test_what_is_in_no_doubt_may_be_forgotten() -> None:
    """It was too old, for example, when its mark was committed."""
    doubts = Doubts(lambda: 0.0)
    doubts.forget(["a"])
    assert not doubts.ids()


def test_a_doubt_lasts_for_a_minute() -> None:
    """To its end; after that its task is published again."""
    seconds = [0.0]
    doubts = Doubts(lambda: seconds[0])
    doubts.remember("orders", {"a": AT_NOON})
    seconds[0] = 60.0
    assert doubts.ids() == {"a"}
    seconds[0] = 60.001
    assert doubts.ids() == frozenset()


def test_doubts_of_two_topics_make_two_groups() -> None:
    """A group holds one topic."""
    doubts = Doubts(lambda: 0.0)
    doubts.remember("orders", {"a": AT_NOON})
    doubts.remember("invoices", {"b": AT_NOON})
    assert doubts.groups(Limits(10, 1, 9)) == [Group("orders", ("a",)), Group("invoices", ("b",))]


@pytest.mark.parametrize(
    "columns",
    [
        {"id": "b"},
        {"created_at": NOON + timedelta(seconds=1)},
        {"available_at": NOON},
        {"available_at": NOON + timedelta(days=1)},
        {"attempts": 1},
        {"parked": True},
        {"topic": "invoices"},
        {"ordering_key": "k"},
        {"expires_at": NOON},
    ],
)
def test_a_doubt_is_about_one_row_as_it_was(columns: dict[str, Any]) -> None:
    """A task that was registered again under its id has not been sent; one that was written since perhaps not."""
    doubts = Doubts(lambda: 0.0)
    doubts.remember("orders", {"a": AT_NOON})
    assert doubts.is_about(ROW)
    assert not doubts.is_about(replace(ROW, **columns))


def test_the_same_complaint_is_logged_once_a_minute_with_the_count(caplog: pytest.LogCaptureFixture) -> None:
    """Another topic or reason is another complaint."""
    seconds = [0.0]
    complaints = Complaints(lambda: seconds[0])
    with caplog.at_level(logging.WARNING, "publishworker"):
        for _ in range(5):
            complaints.say("publish_failed", "orders", "orders fail")
        complaints.say("publish_failed", "invoices", "invoices fail")
        seconds[0] = 61.0
        complaints.say("publish_failed", "orders", "orders fail")
    assert [record.getMessage() for record in caplog.records] == [
        "orders fail",
        "invoices fail",
        "orders fail [and 4 times more since the last such line]",
    ]


class Timed:
    """A clock that moves only where a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_what_was_kept_back_is_told_when_another_thing_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Also if it has gone silent since."""
    seconds = [0.0]
    complaints = Complaints(lambda: seconds[0])
    for _ in range(5000):
        complaints.say("dead", "orders", "a task is dead", most=100)
    seconds[0] = 61
    caplog.clear()
    complaints.say("dead", "invoices", "another one")
    assert [record.getMessage() for record in caplog.records] == [
        "dead: orders, 4900 times more than was logged",
        "another one",
    ]


def test_a_text_line_is_one_line() -> None:
    """Ids and topics are other people's text."""
    record = logging.LogRecord("publishworker", logging.INFO, "", 0, "task %s", ("a\n12:00:00 CRITICAL \x1b[2J",), None)
    line = TextFormatter().format(record)
    assert line.endswith("task a\\n12:00:00 CRITICAL \\u001b[2J")
    assert line.isprintable()


def test_a_deadline_holds_over_all_restarts_of_a_stream() -> None:
    """The client restarts a broken stream with the full timeout each time; ours is what is left of the whole."""
    clock = Timed()
    deadline = Deadline(10, clock)
    seen: list[float] = []

    def note(timeout: float) -> None:
        seen.append(timeout)

    call = deadline(note)
    call()
    clock.now = 9.999
    call()
    clock.now = 10.0
    with pytest.raises(DeadlineExceeded):
        deadline(note)()
    assert seen == [10.0, pytest.approx(0.001)]


def test_a_loop_that_dies_is_raised_where_the_worker_sees_it() -> None:
    """Never a silent half-worker: the command ends with an error."""

    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_on_thread(work, threading.Event(), 5)


def test_a_loop_that_does_not_end_in_time_is_told_from_one_that_does() -> None:
    """After the stop it has its time, and no more."""
    stop, release = threading.Event(), threading.Event()
    assert run_on_thread(stop.set, stop, 5)
    assert not run_on_thread(lambda: release.wait(30), stop, 0.01)
    release.set()


def test_the_first_signal_asks_to_stop_and_the_handlers_are_given_back() -> None:
    """Both signals that a supervisor or a terminal sends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        before = signal.getsignal(number)
        with stop_on_signals() as stop:
            assert not stop.is_set()
            signal.raise_signal(number)
            assert stop.is_set()
        assert signal.getsignal(number) == before


def test_the_health_check_tells_young_old_and_missing_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 0, 1, 1, with a sentence."""
    file = tmp_path / "heartbeat"
    monkeypatch.setenv("OUTBOX_HEARTBEAT_FILE", str(file))
    assert healthcheck.main([]) == 1
    assert "no heartbeat" in capsys.readouterr().err
    Heartbeat(file)()
    assert healthcheck.main([]) == 0
    os.utime(file, (0, 0))
    assert healthcheck.main([]) == 1
    assert "old, 45 s are allowed" in capsys.readouterr().err
    for wrong in ("nan", "inf", "0", "-1", "soon"):
        with pytest.raises(SystemExit, match="2"):
            healthcheck.main(["--max-age", wrong])
        assert f"{wrong!r} is not allowed" in capsys.readouterr().err


def test_the_health_check_imports_the_standard_library_only(tmp_path: Path) -> None:
    """A probe that imports the clients costs half a second of CPU, every few seconds, for ever."""
    code = (
        "import sys\nfrom publishworker.cli import main\n"
        f"main(['healthcheck', '--heartbeat-file', {str(tmp_path / 'none')!r}])\nprint(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = set(sys.stdlib_module_names) | {"publishworker", "__main__"}
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    foreign = {
        name for name in loaded - allowed if not name.startswith(("_", "a1_coverage", "coverage", "sitecustomize"))
    }
    assert "publishworker" in loaded
    assert not foreign


def make_record(make: Callable[[], object] | None = None) -> logging.LogRecord:
    """Return a record, with an exception if `make` raises."""
    info = None
    if make is not None:
        try:
            make()
        except ZeroDivisionError:
            info = sys.exc_info()
    record = logging.LogRecord("publishworker", logging.WARNING, __file__, 1, "%d tasks\nfailed", (3,), info)
    record.action = "publish_failed"
    return record


def test_a_log_line_is_one_json_object_with_the_fields_that_mean_something() -> None:
    """One line, whatever is in the message."""
    line = JsonFormatter().format(make_record())
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["status"], entry["message"], entry["action"]) == ("warning", "3 tasks\nfailed", "publish_failed")
    assert entry["logger.name"] == "publishworker"


def test_an_exception_is_in_fields_of_its_own() -> None:
    """Kind, message and stack."""
    entry = json.loads(JsonFormatter().format(make_record(lambda: 1 // 0)))
    assert entry["error.kind"] == "ZeroDivisionError"
    assert "1 // 0" in entry["error.stack"]

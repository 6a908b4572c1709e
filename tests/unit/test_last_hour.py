"""The last hour: what workers write of their minutes, and what operators read of it."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest

from outbox.errors import OutboxError
from outbox.program.terminal import bars
from outbox.rows.backlog import Backlog, Line
from outbox.rows.workers import MINUTES, SeenWorker
from outbox_admin.status import last_hour as histories
from outbox_admin.status import status_commands
from outbox_admin.status.last_hour import History, Values
from publishworker.process.gauges import MAX_BYTES, worker_info
from publishworker.telemetry.history import WorkerHistory
from publishworker.types import Turn
from tests.support.parts import worker_settings, working_relay

NOW = datetime(2026, 11, 26, 12, 0, 30, tzinfo=UTC)


class Hour:
    """A worker that started an hour before `now`."""

    def __init__(self, id: str = "a", now: datetime = NOW) -> None:
        self.id, self.end = id, now.timestamp()
        self.seconds = self.end - 60 * (MINUTES - 1)
        self.ring = WorkerHistory(lambda: self.seconds)

    def at(self, ago: int) -> "Hour":
        """Go on to the minute that began `ago` minutes before the current one."""
        self.seconds = self.end - 60 * ago
        return self

    def publish(self, number: int, topic: str = "orders", seconds: float = 0.1, *, failed: bool = False) -> None:
        counts = Turn(failed=number) if failed else Turn(published=number)
        self.ring.add(topic, counts, {} if failed else {str(n): seconds for n in range(number)})

    def worker(self, age: float = 1.0, timeout: float = 14.0, **more: Any) -> SeenWorker:
        """Return what operators read after the heartbeat went through the database."""
        self.at(0)
        info = json.loads(json.dumps({"history": self.ring.as_json(3_500)}))
        started_at = NOW - timedelta(minutes=MINUTES - 1)
        return SeenWorker(self.id, age, started_at, NOW - timedelta(seconds=age), info | more, timeout)


def history(
    *workers: SeenWorker, last: History | None = None, lines: list[Line] | None = None, at: datetime = NOW
) -> History:
    live, silent = ([each for each in workers if each.is_live is wanted] for wanted in (True, False))
    backlog = Backlog(at, live, lines or [], silent=silent)
    return histories.read(mock.Mock(), backlog, last or History(at, {}, {}))


def known(values: Values) -> dict[int, float]:
    """Return the values that are neither 0 nor unknown, by the number of minutes ago."""
    return {MINUTES - 1 - place: value for place, value in enumerate(values) if value}


def test_the_histories_of_workers_are_added_up() -> None:
    first, second = Hour("a"), Hour("b")
    first.at(30).publish(10)
    first.at(5).publish(20)
    first.publish(3, failed=True)
    second.at(5).publish(2, "mails")
    second.publish(4, failed=True)
    second.publish(1, failed=True)
    found = history(first.worker(), second.worker())
    assert known(found.published()) == {30: 10, 5: 22}
    assert known(found.published("orders")) == {30: 10, 5: 20}
    assert known(found.failed()) == {5: 8}
    assert known(found.failed("mails")) == {}
    assert found.published("mails")[0] == 0  # not a gap: it was counted


def test_a_minute_is_a_gap_until_all_workers_have_sent_it_and_where_no_worker_was() -> None:
    hour = Hour()
    hour.at(0).publish(9)
    assert history(hour.worker()).published()[-1] is None
    assert history(hour.worker(age=40, timeout=60)).published()[-2:] == [None, None]
    assert set(history().published()) == {None}


def test_minutes_survive_a_clock_that_jumps() -> None:
    """Back: they stay the last ones. Forward: the minutes in between are a gap, and no zeros."""
    hour = Hour()
    hour.at(31).publish(1)
    hour.at(30).publish(2)
    hour.at(50).publish(3)
    assert hour.ring.as_json(8_000)["all"]["published"] == [1, 2, 3]
    hour.at(46).publish(4)
    assert hour.ring.as_json(8_000)["all"]["published"] == [1, 2, 3, None, None, None, 4]


def test_the_latency_is_that_of_the_slowest_worker() -> None:
    """However few tasks it has. Of these, a slow twentieth does not count."""
    quick, slow = Hour("a"), Hour("b")
    quick.at(5).publish(900, seconds=0.1)
    for seconds in (*[20] * 19, 50):
        slow.at(5).publish(5, seconds=seconds)
    quick.at(3).publish(1, seconds=0.1)
    found = known(history(quick.worker(), slow.worker()).latency())
    assert found == {5: pytest.approx(20, rel=0.06), 3: pytest.approx(0.1, rel=0.06)}


def test_tasks_that_a_later_minute_counts_as_sent_are_not_registered() -> None:
    hour = Hour()
    for ago, unsent, published in ((5, 100, 5), (4, 105, 5), (3, 105, 95), (2, 15, 5), (1, 15, 5)):
        hour.at(ago).ring.add_backlog({"orders": unsent}, {"orders": unsent})
        hour.publish(published)
    assert history(hour.worker()).registered("orders")[-5:-1] == [10, 10, 0, 5]


def test_the_backlog_is_that_of_the_worker_that_counts_it() -> None:
    """A topic without tasks is 0 in a minute that was counted. Registered tasks follow from the others."""
    hour = Hour()
    for ago, unsent in ((4, 0), (3, 50), (2, 80)):
        hour.at(ago).ring.add_backlog({"orders": unsent} if unsent else {}, {"orders": unsent} if unsent else {})
        hour.ring.add_ages({"orders": 60.0} if unsent else {}, 60.0 if unsent else 0.0)
        hour.publish(10)
    found = history(hour.worker(), Hour("b").worker(), lines=[Line("orders", pending=80)])
    assert found.pending("orders")[-6:-1] == [None, 0, 50, 80, None]
    assert found.oldest()[-6:-1] == [None, 0, 60, 60, None]
    assert found.registered("orders")[-6:-1] == [None, None, 60, 40, 0]
    hour.at(2).ring.add_backlog({"orders": 10_000}, {"orders": None})
    bound = history(hour.worker(), lines=[Line("orders", pending=10_000, at_least={"pending"})])
    assert (bound.pending("orders")[-3], bound.registered("orders")[-3]) == (10_000, None)
    hour.at(1).ring.add_backlog({}, {"scheduled": 5})
    hour.ring.add_ages({}, 0.0)
    assert history(hour.worker()).oldest("scheduled")[-2] == 0


def test_a_backlog_that_workers_count_every_few_minutes_still_tells_what_was_registered() -> None:
    """On average, between two counts. After a longer gap it is unknown."""
    hour = Hour()
    for ago in range(30, -1, -1):
        hour.at(ago).publish(10)
        if ago % 3 == 0 and not 9 < ago < 21:
            hour.ring.add_backlog(*({"orders": 100 * (30 - ago)} for _ in range(2)))
    found = history(hour.worker(), lines=[Line("orders", pending=3_000)])
    assert found.pending("orders")[-7:-2] == [2_400, None, None, 2_700, None]
    assert found.registered("orders")[-8:-1] == [110] * 7
    assert {*found.registered("orders")[-21:-9]} == {None}


def test_what_a_process_reads_itself_fills_the_gaps() -> None:
    line = Line("orders", pending=7, oldest=NOW - timedelta(seconds=90))
    before = history(lines=[line], at=NOW - timedelta(minutes=3))
    found = history(last=before)
    assert known(found.pending("orders")) == known(found.pending()) == {3: 7}
    assert found.pending("orders")[-1] == 0
    assert found.pending()[-3:-1] == [None, None]


def test_the_minutes_in_which_a_worker_died_or_left_are_incomplete() -> None:
    """A worker that says goodbye has no row any more, and one that died has a silent one."""
    gone, silent = Hour("gone").worker(), Hour("silent").worker(age=61)
    first = history(gone, silent)
    assert [(seen.worker.id, seen.said_goodbye) for seen in first.left] == [("silent", False)]
    later = history(silent, last=first, at=NOW + timedelta(seconds=90))
    assert [(seen.worker.id, seen.said_goodbye) for seen in later.left] == [("gone", True), ("silent", False)]
    assert later.incomplete == {56, 57, 58, 59}
    assert later.left[0].gone_at == later.as_of
    assert history(last=later, at=NOW + timedelta(hours=1, minutes=2)).left == []


def test_the_first_read_finds_the_workers_of_the_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spanner has no version of the first minutes, because the table is younger."""
    hour = Hour()
    hour.at(20).publish(5)
    worker = hour.worker()

    def rows_at(_table: object, at: datetime) -> list[SeenWorker]:
        if at < NOW - timedelta(minutes=30):
            raise OutboxError("too old")
        return [worker] if at < NOW - timedelta(minutes=12) else []

    monkeypatch.setattr(histories, "rows_at", rows_at)
    found = histories.read(mock.Mock(), Backlog(NOW, [], []))
    assert known(found.published()) == {20: 5}
    assert [seen.said_goodbye for seen in found.left] == [True]


@pytest.mark.parametrize("topic", ["t", "\N{GRINNING FACE}" * 200], ids=["short", "long"])
def test_a_history_is_an_hour_long_and_fits_into_a_heartbeat(topic: str) -> None:
    """With 40 busy topics, failures and large numbers. The largest topics are those that fit."""
    hour = Hour()
    for ago in range(70, -1, -1):
        hour.at(ago)
        for number in range(40):
            hour.publish(1 + (number == 7), f"{topic}{number}", seconds=1.07 ** (number % 80))
        hour.publish(8, failed=True)
        hour.ring.add_backlog(*({f"{topic}{number}": 10**7 + number for number in range(40)} for _ in range(2)))
    info = worker_info(worker_settings(), working_relay(), hour.ring, ())
    assert len(json.dumps(info, separators=(",", ":"))) <= MAX_BYTES
    found: Mapping[str, Any] = info["history"]  # type: ignore[assignment]  # of a dict of objects
    assert {len(values) for values in found["all"].values()} == {MINUTES}
    assert found["topics_left_out"] > 10
    assert topic != "t" or len(found["topics"]) > 0
    assert known(history(hour.worker()).published())[1] == 41


WRONG = (
    3, [], {"minute": "x", "all": 3}, {"minute": True, "all": {"published": 5}},
    {"minute": 10**30, "all": {"published": [1]}}, {"minute": 29_729_520, "all": {"published": [None, "x", -1, 1e300]}},
    {"minute": 29_729_520, "all": {"pending": [1] * 900}, "topics": {"orders": [1]}, "topics_left_out": "x"},
    {"minute": 29_729_520, "all": {"pending": 3}},
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_history_that_no_worker_writes_is_left_out(wrong: Any) -> None:
    hour = Hour()
    hour.at(5).publish(10)
    found = history(hour.worker(), SeenWorker("x", 1, NOW, NOW, {"history": wrong}))
    for topic in (None, "orders"):
        assert known(found.published(topic)) == {5: 10}
        figures = (
            found.pending(topic),
            found.registered(topic),
            found.failed(topic),
            found.oldest(topic),
            found.latency(),
        )
        assert {len(values) for values in figures} == {MINUTES}


def test_bars_show_the_course_of_a_figure() -> None:
    assert bars([0, None, 1, 50, 100]) == "\u2581 \u2582\u2585\u2588"
    assert bars([None, 0]) == " \u2581"


def test_status_shows_the_hour_as_bars_with_the_last_value_and_its_age() -> None:
    hour = Hour()
    hour.at(9).publish(40, seconds=2)
    hour.at(3).publish(80, seconds=0.1)
    found = {line.split("  ")[0]: line.split() for line in status_commands._curves(history(hour.worker())).splitlines()}
    assert found["published/min"][-2:] == ["80", "0"]
    assert found["slowest p95"][-4:] == ["2.0s", "0.1s", "(3m", "ago)"]
    assert found["failed/min"][-2:] == ["0", "0"]

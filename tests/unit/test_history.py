"""What workers and the table say about the last hour and now, and what operators make of it."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from outbox import __version__
from outbox.errors import OutboxError
from outbox.program.terminal import bars
from outbox.rows import backlog
from outbox.rows.backlog import Backlog, Line
from outbox.rows.workers import MINUTES, Worker
from outbox_admin.status import last_hour as histories
from outbox_admin.status import status_commands
from outbox_admin.status.last_hour import History, Values
from publishworker.process.gauges import MAX_BYTES, MAX_OTHER_BYTES, worker_info
from publishworker.process.worker_settings import WorkerSettings
from publishworker.telemetry.history import History as Ring
from publishworker.topics.availability import CircuitState
from publishworker.turn.relay import Load
from publishworker.types import Answer, Delivered, Failed, Published
from tests.support.parts import claim_of

NOW = datetime(2026, 11, 26, 12, 0, 30, tzinfo=UTC)


class Hour:
    """A worker that started an hour before `now`."""

    def __init__(self, id: str = "a", now: datetime = NOW) -> None:
        self.id, self.end = id, now.timestamp()
        self.seconds = self.end - 60 * (MINUTES - 1)
        self.ring = Ring(lambda: self.seconds)

    def at(self, ago: int) -> "Hour":
        """Go on to the minute that began `ago` minutes before the current one."""
        self.seconds = self.end - 60 * ago
        return self

    def publish(self, number: int, topic: str = "orders", seconds: float = 0.1, reason: str = "") -> None:
        answer: Answer = Failed(reason, "404") if reason else Published("1")
        ids = [str(n) for n in range(number)]
        latencies = {} if reason else dict.fromkeys(ids, seconds)
        self.ring.add(Delivered(claim_of(topic, *ids), dict.fromkeys(ids, answer), latencies=latencies))

    def worker(self, age: float = 1.0, timeout: float = 14.0, **more: Any) -> Worker:
        """Return what operators read after the heartbeat went through the database."""
        self.at(0)
        info = json.loads(json.dumps({"history": self.ring.as_json(3_500)}))
        started_at = NOW - timedelta(minutes=MINUTES - 1)
        return Worker(self.id, age, started_at, NOW - timedelta(seconds=age), info | more, timeout)


def history(
    *workers: Worker, last: History | None = None, lines: list[Line] | None = None, at: datetime = NOW
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
    first.publish(3, reason="not_found")
    second.at(5).publish(2, "mails")
    second.publish(4, reason="not_found")
    second.publish(1, reason="unavailable")
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

    def rows_at(_table: object, at: datetime) -> list[Worker]:
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
        for reason in "abcdefgh":
            hour.publish(1, reason=reason)
        hour.ring.add_backlog(*({f"{topic}{number}": 10**7 + number for number in range(40)} for _ in range(2)))
    info = worker_info(settings(), View(), hour.ring, ())
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
    found = history(hour.worker(), Worker("x", 1, NOW, NOW, {"history": wrong}))
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


MISSING = CircuitState(Failed("not_found", "404 Topic not found"), 25.04, 3.21)


class View:
    """A relay with three batches in flight, as far as a heartbeat asks for it."""

    def __init__(self, **circuits: CircuitState) -> None:
        self.batches, self.load = 3, Load(3, 0.375, circuits)


def settings(**flags: str) -> WorkerSettings:
    return WorkerSettings.read({"project": "my-project", "instance": "main", "database": "shop", **flags}, {})


def worker(info: Any, id: str = "a", age: float = 2) -> Worker:
    """Return a worker whose Info went through the database."""
    return Worker(id, age, NOW, NOW - timedelta(seconds=age), json.loads(json.dumps(info)))


def test_a_worker_says_what_it_does() -> None:
    changed = settings(batch_size="100", wake="change-stream", poll_interval="1.0", heartbeat_file="/tmp/mine")
    info = worker_info(changed, View(orders=MISSING), Ring(), (0, 1, 2, 5, 32000))
    host = info.pop("host")
    assert isinstance(host, str)
    assert info.pop("history")["all"] == {}
    assert info == {
        "version": __version__,
        "shards": [(0, 2), (5, 5), (32000, 32000)],
        "shards_left_out": 0,
        "in_flight": 3,
        "utilization": 0.38,
        "settings": {"batch_size": 100, "wake": "change-stream"},
        "circuits": [
            {"topic": "orders", "reason": "not_found", "error": "404 Topic not found", "open_seconds": 25.0,
             "seconds_to_probe": 3.2},
        ],
        "circuits_left_out": 0,
    }  # fmt: skip


@pytest.mark.parametrize("error", ["e" * 1_000, "\N{GRINNING FACE}" * 1_000], ids=["ascii", "emoji"])
def test_lists_that_do_not_fit_are_cut_and_counted(error: str) -> None:
    """With every second shard of 1,000, a long setting and a hundred circuits: never more than 2.5 kB without it."""
    circuits = {f"topic-{n}": CircuitState(Failed("not_found", error), 1, 1) for n in range(100)}
    info = worker_info(
        settings(allowed_topics=",".join(["orders-*"] * 500)), View(**circuits), Ring(), range(0, 1000, 2)
    )
    del info["history"]
    assert len(json.dumps(info, separators=(",", ":"))) <= MAX_OTHER_BYTES
    shown = worker(info)
    assert len(shown.shards) + shown.number("shards_left_out") == 500
    assert len(shown.circuits) + shown.number("circuits_left_out") == 100
    assert error.isascii() == (len(shown.circuits) > 0)
    assert 100 < len(shown.shards) < 500


def test_an_info_that_no_worker_writes_breaks_no_command() -> None:
    """Any program may write the column."""
    for info, topics in (
        ({"shards": 5, "circuits": 5, "settings": 5, "in_flight": "x", "host": None}, []),
        ({"shards": [5, [1], [1, "2"], [0, 10**9], [5, 1], [True, 2]], "circuits": [5, None], "in_flight": -1}, []),
        ({"circuits": [{"topic": 5, "open_seconds": 1e300, "seconds_to_probe": None}]}, ["5"]),
    ):
        found = worker(info)
        assert (found.shards, found.settings, found.number("in_flight")) == ([], {}, 0)
        assert [(each.topic, each.since) for each in found.circuits] == [(topic, found.seen_at) for topic in topics]


def test_a_worker_tells_no_secret() -> None:
    """Endpoints are hosts and ports: a setting refuses anything else. The file of one worker is not compared."""
    own = settings(pubsub_endpoint="10.0.0.1:443", heartbeat_file="/tmp/x")
    assert worker_info(own, View(), Ring(), ())["settings"] == {"pubsub_endpoint": "10.0.0.1:443"}


def test_a_request_has_a_limited_number_of_ranges():
    """Spanner limits a request to 10 MiB. The rows of all requests are added up."""
    numbers: list[int] = []

    def query(_statement: str, parameters: Mapping[str, Any]) -> list[list[Any]]:
        shards, topics = parameters["range_shards"], parameters["range_topics"]
        assert len(shards) == len(topics)
        numbers.append(len(shards))
        return [[shards[0], topics[0], topics[0], "pending", 1, NOW, None, 0]]

    ranges = [(shard, f"topic-{number}") for number in range(1_000) for shard in range(25)]
    rows, full = backlog.count(query, "", ranges, 1)
    assert numbers == [10_000, 10_000, 5_000]
    assert full == {(0, "topic-0"), (0, "topic-400"), (0, "topic-800")}
    assert sum(row.number for row in rows) == 3


@pytest.mark.parametrize(("shards", "topics", "large"), [(10, 1, 1), (10, 1_000, 1), (400, 100, 1), (400, 100, 100)])
def test_the_autoscaler_can_request_a_worker_for_each_shard(shards: int, topics: int, large: int):
    """Small topics do not reduce what is counted of others. Reads stay bounded: a part of the large ones at most."""
    waiting = {f"topic-{number}": 10**6 if number < large else 3 for number in range(topics)}
    read: list[int] = []

    def query(_statement: str, values: Mapping[str, Any]) -> list[list[Any]]:
        places = zip(values["range_shards"], values["range_topics"], strict=True)
        rows = [
            (*place, place[1], "pending", min(values["limit"], waiting[place[1]]), NOW, None, 0) for place in places
        ]
        read.append(sum(row[4] for row in rows))
        return [list(row) for row in rows]

    ranges = [(shard, topic) for shard in range(shards) for topic in waiting]
    rows, full = backlog.count(query, "", ranges)
    path = Path(__file__).parents[2] / "k8s/components/autoscaling/horizontalpodautoscaler.yaml"
    [metric] = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["metrics"]
    target = int(metric["external"]["target"]["averageValue"])
    assert sum(row.number for row in rows) >= shards * target
    assert {topic for _, topic in full} == {topic for topic, number in waiting.items() if number > 3}
    assert sum(read) <= 2 * max(backlog.MAX_TOTAL, shards * backlog.COUNT_LIMIT) + len(ranges) * backlog.MIN_COUNT_LIMIT


def test_pending_tasks_of_a_paused_topic_are_in_no_total():
    """Neither their count, nor their age, nor an early stop."""
    second = timedelta(seconds=1)
    lines = [
        Line("a", pending=2, dead=1, oldest=NOW - second),
        Line("b", pending=1, oldest=NOW - 2 * second, next_due=NOW + second, at_least={"dead"}),
        Line("c", paused=True, pending=7, dead=3, oldest=NOW - 9 * second, at_least={"pending"}),
    ]
    found = Backlog(NOW, (), lines)
    total = found.total
    assert (total.pending, total.dead, total.oldest, total.at_least) == (3, 4, NOW - 2 * second, {"dead"})
    assert (found.oldest, found.age(found.oldest)) == (lines[1], 2.0)

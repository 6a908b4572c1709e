"""Polls, claims, ordering keys and heartbeats, on the fake store, the simulated one and the Spanner emulator.

Expectations are written by hand, so that neither side can pass against itself.
"""

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.table.controls import TopicControls
from outbox.table.ddl import Layout
from outbox.table.states import NEVER
from publishworker.spanner import emulator
from publishworker.spanner.store import Discovery, Workers
from publishworker.types import Deferred, LockedRow, NotSent, Published, QueuedTask, RowChange, TopicKey
from tests.support.fakes import serialized
from tests.support.parts import poll_request
from tests.support.store_harness import FakeHarness, Harness, SimulatedHarness, SpannerHarness, poll_ids


@pytest.fixture(params=["fake", "simulated", "spanner"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return _harness(request, "database")


@pytest.fixture(params=["fake", "simulated", "spanner"])
def own_harness(request: pytest.FixtureRequest) -> Harness:
    """The same for a test that changes the schema."""
    return _harness(request, "own_database")


def _harness(request: pytest.FixtureRequest, database: str) -> Harness:
    match request.param:
        case "fake":
            return FakeHarness()
        case "simulated":
            return SimulatedHarness()
    return SpannerHarness(request.getfixturevalue(database))


PAST = datetime(2020, 1, 1, tzinfo=UTC)
NOW = datetime.now(UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)


ALL = range(10)


def discovered(harness: Harness) -> Discovery:
    return harness.store.discover(ALL, ())


def test_poll_returns_only_unsent_tasks_of_the_requested_topics(harness: Harness) -> None:
    """A candidate has topic, shard, priority, times, key and size. Sent, scheduled and dead tasks are none."""
    harness.insert("a", priority=7, ordering_key="key")
    harness.insert("sent", sent_at=PAST)
    harness.insert("other", topic="invoices")
    harness.insert("scheduled", available_at=FUTURE)
    harness.insert("dead", available_at=NEVER)
    [candidate] = harness.store.poll(poll_request("orders"))
    assert (candidate.id, candidate.topic, candidate.priority) == ("a", "orders", 7)
    assert (candidate.ordering_key, candidate.available_at, candidate.bytes) == ("key", None, len(serialized()))
    assert candidate.shard in range(10)
    assert poll_ids(harness.store, "orders", due=True, below_priority=1000) == ["a"]


def test_due_tasks_are_returned_on_request(harness: Harness) -> None:
    """A due task is returned by the due range only, longest due first."""
    harness.insert("due", available_at=PAST, ordering_key="same-shard")
    harness.insert("longer", available_at=PAST - timedelta(days=1), ordering_key="same-shard")
    assert poll_ids(harness.store, "orders") == []
    assert poll_ids(harness.store, "orders", due=True) == ["longer", "due"]
    assert poll_ids(harness.store, "orders", due=True, per_range=1) == ["longer"]


def test_the_next_due_time_is_that_of_the_first_task_that_is_not_ready(harness: Harness) -> None:
    """Also of one that is due already, because a poll may just have missed it."""
    assert harness.store.seconds_until_due(ALL, ["orders"]) is None
    harness.insert("ready")
    harness.insert("dead", available_at=NEVER)
    harness.insert("other", topic="invoices", available_at=FUTURE - timedelta(days=1))
    harness.insert("sent", available_at=FUTURE - timedelta(days=1), sent_at=PAST)
    assert harness.store.seconds_until_due(ALL, ["orders"]) is None
    harness.insert("later", available_at=FUTURE + timedelta(days=1))
    harness.insert("scheduled", available_at=FUTURE)
    seconds = harness.store.seconds_until_due(ALL, ["orders", "refunds"])
    assert seconds == pytest.approx((FUTURE - NOW).total_seconds(), abs=365 * 86_400)  # the fake has a clock of its own
    assert harness.store.seconds_until_due([], ["orders"]) is None
    harness.insert("due", available_at=PAST)
    assert harness.store.seconds_until_due(ALL, ["orders", "refunds"]) == 0


def test_poll_limits_each_range_and_prefers_priority(harness: Harness) -> None:
    """A range full of urgent tasks shows nothing else; the range of lower priorities begins below theirs."""
    for priority in (1, 9, 5, 9):  # the least urgent is the oldest
        harness.insert(f"p{priority}-{uuid.uuid4()}", priority=priority, ordering_key="same-shard")
    for found, options in (
        (["p9"], {"per_range": 1}),
        (["p5", "p9", "p9"], {"per_range": 3}),
        (["p5", "p9"], {"per_range": 1, "below_priority": 9}),
        (["p9"], {"per_range": 1, "below_priority": 1}),
        (["p1", "p5", "p9", "p9"], {"below_priority": 9}),
    ):
        assert sorted(id[:2] for id in poll_ids(harness.store, "orders", **options)) == found


def test_poll_covers_only_the_requested_shards(harness: Harness) -> None:
    for n in range(20):
        harness.insert(str(n))
    by_shard = [poll_ids(harness.store, "orders", shards=[shard], per_range=20) for shard in range(10)]
    assert sorted(id for ids in by_shard for id in ids) == sorted(str(n) for n in range(20))
    assert harness.store.poll(poll_request("orders", shards=[])) == ()
    of_shard = Counter(each.shard for each in harness.store.poll(poll_request("orders", per_range=20)))
    assert [of_shard[shard] for shard in range(10)] == [len(ids) for ids in by_shard]


@pytest.mark.parametrize("known", [[], ["m"], ["a", "m", "z"], ["b", "y"]])
def test_discovery_finds_topics_in_every_gap(harness: Harness, known: list[str]) -> None:
    """Before, between and after the known topics, again until all are known, but no topic whose tasks are all sent."""
    every = {"aa", "kk", "mm", "zz", *known}
    for topic in every:
        harness.insert(str(uuid.uuid4()), topic=topic)
    harness.insert("sent", topic="old", sent_at=PAST)
    found = set(known)
    while new := harness.store.discover(ALL, found).topics:
        found |= new
    assert found == every


def test_discovery_reads_the_given_shards(harness: Harness) -> None:
    harness.insert("a")
    [candidate] = harness.store.poll(poll_request("orders"))
    assert harness.store.discover([candidate.shard], ()).topics == {"orders"}
    assert harness.store.discover([each for each in ALL if each != candidate.shard], ()).topics == frozenset()
    harness.store.claim(["a"], send_all)
    assert harness.store.discover(ALL, ()).topics == frozenset()


def test_empty_topics_and_ids_are_found(harness: Harness) -> None:
    """Our functions refuse an empty topic or ID. Another writer may have inserted it."""
    harness.insert("", topic="")
    assert harness.store.discover(ALL, ()).topics == {""}
    assert harness.store.discover(ALL, {""}).topics == frozenset()
    assert poll_ids(harness.store, "") == [""]


def test_every_task_is_in_every_layout(own_harness: Harness) -> None:
    """Tasks from before and after a layout is added. A poll of two layouts returns each task once."""
    harness, first, new = own_harness, Layout(10), Layout(4, "4")
    for id in "abc":
        harness.insert(id)
    harness.reshard(new)
    harness.insert("d", ordering_key="key", available_at=PAST)
    harness.insert("e", available_at=FUTURE)
    assert harness.store.layouts == (first,)
    assert discovered(harness).workers.layouts == (first, new) == tuple(harness.store.layouts)
    for shards in (first.ids, new.ids, [*first.ids, *new.ids]):
        found = harness.store.poll(poll_request("orders", shards=shards, due=True, below_priority=1000))
        assert sorted(each.id for each in found) == ["a", "b", "c", "d"]
        assert {each.shard for each in found} <= set(shards)
        assert harness.store.discover(tuple(shards), ()).topics == {"orders"}
        assert harness.store.seconds_until_due(tuple(shards), ["orders"]) == 0
        [head] = [each for each in found if each.ordering_key]
        key = TopicKey("orders", "key")
        assert [each.id for each in harness.store.key_heads({key: head.shard}, 5, skip_dead=False)[key]] == ["d"]


def test_topic_controls(harness: Harness) -> None:
    """To the last digit; a value that is not set is None. Values that are not allowed are read, too."""
    controls = {
        "paused": TopicControls(paused=True),
        "all": TopicControls(True, 0.5, 20, 3, "all-v2", 3, 0.5, 60.0, 0.0),
        "third": TopicControls(rate_per_second=1 / 3, burst=1, backoff_max_seconds=1 / 3),
        "tiny": TopicControls(rate_per_second=1e-6, burst=1),
        "large": TopicControls(False, 1e15, 2**63 - 1, 2**63 - 1),
        "rate alone": TopicControls(rate_per_second=2.0),
        "wrong": TopicControls(False, -1.0, 0, -5, "no topic"),
        "infinite": TopicControls(rate_per_second=float("inf"), burst=1),
        "nothing": TopicControls(),
    }
    assert discovered(harness).controls == {}
    for topic, row in controls.items():
        harness.control(topic, row)
    assert discovered(harness).controls == controls
    harness.control("no number", TopicControls(rate_per_second=float("nan")))
    assert str(discovered(harness).controls["no number"].rate_per_second) == "nan"


def test_a_worker_is_live_until_it_leaves_or_its_heartbeat_is_too_old(harness: Harness) -> None:
    """By the database's clock and the seconds that the heartbeat names.

    A worker that was silent for an hour may be deleted.
    """
    harness.store.heartbeat("here", NOW, ())
    harness.store.heartbeat("here", NOW, ())
    harness.store.heartbeat("quiet", NOW, (), liveness_timeout=29)
    harness.store.heartbeat("leaving", NOW, ())
    for name, seconds, liveness_timeout in (("fresh", 5, 14), ("silent", 20, 14), ("late", 20, 50), ("gone", 7200, 14)):
        harness.seen(name, seconds, liveness_timeout)
    workers = discovered(harness).workers
    assert workers == Workers(workers.live, frozenset({"silent", "gone"}), frozenset({"gone"}))
    expected = {"here": 14, "quiet": 29, "leaving": 14, "fresh": 9, "late": 30}
    assert workers.live == {name: pytest.approx(seconds, abs=4) for name, seconds in expected.items()}
    harness.store.delete_heartbeat("leaving")
    harness.store.delete_heartbeat("never came")
    harness.store.heartbeat("here", NOW, (), remove=["gone", "not there"])
    assert discovered(harness).workers.live.keys() == {"here", "quiet", "fresh", "late"}


LATER = datetime(2100, 1, 1, 1, 2, 3, 456789, tzinfo=UTC)
#: The columns of a task that failed, and the same as `columns` returns them.
FAILED = {"available_at": PAST, "expires_at": FUTURE, "last_error": "internal: no", "attempts": 2, "due_at": PAST}
UNTOUCHED = (None, PAST, FUTURE, "internal: no", 2, PAST)


def send_all(rows: Sequence[LockedRow], _now: datetime) -> Mapping[str, RowChange]:
    return {row.id: Published("1") for row in rows}


def locked(harness: Harness, *ids: str) -> dict[str, LockedRow]:
    calls: list[list[LockedRow]] = []
    harness.store.claim(ids, lambda rows, _now: (calls.append(list(rows)), {})[1])
    return {row.id: row for row in calls[-1]}


def columns(harness: Harness, id: str) -> tuple[Any, ...]:
    names = ("sent_at", "available_at", "expires_at", "last_error", "attempts", "due_at")
    return tuple(harness.column(id, name) for name in names)


def test_claim_returns_the_locked_rows(harness: Harness) -> None:
    """A row has its body and all that failures need, and whether it is clean. Missing and deleted rows are left out."""
    harness.insert("b", ordering_key="key", available_at=PAST)
    harness.insert("a")
    harness.insert("expiring", expires_at=FUTURE, at_most_once=True)
    harness.insert("once", at_most_once=True)
    harness.insert("failed", attempts=3, last_error="internal: no", available_at=PAST)
    harness.insert("deleted")
    harness.delete("deleted")
    rows = locked(harness, "b", "missing", "deleted", "a", "failed", "expiring", "once")
    assert {id: (row.attempts, row.expires_at, row.at_most_once, row.clean) for id, row in rows.items()} == {
        "a": (0, None, False, True),
        "b": (0, None, False, False),
        "expiring": (0, FUTURE, True, False),
        "failed": (3, None, False, False),
        "once": (0, None, True, True),
    }
    assert rows["b"].data == serialized()
    assert (rows["b"].ordering_key, rows["b"].available_at, rows["b"].sent_at) == ("key", PAST, None)
    assert rows["b"].created_at == harness.column("b", "created_at")
    assert locked(harness, "deleted") == {}


def test_an_exception_after_the_lock_writes_nothing(harness: Harness) -> None:
    """A defect in the relay rolls the transaction back and is not hidden; the store continues."""
    harness.insert("a")

    def break_down(_rows: Sequence[LockedRow], _now: datetime) -> Mapping[str, RowChange]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        harness.store.claim(["a"], break_down)
    assert harness.column("a", "sent_at") is None
    harness.store.claim(["a"], send_all)
    assert harness.column("a", "sent_at") is not None


def test_sending_clears_the_traces_of_earlier_attempts(harness: Harness) -> None:
    """So setting SentAt to NULL sends a task again."""
    traces: list[dict[str, Any]] = [{name: value} for name, value in FAILED.items()]
    left = {"clean": {}, "all": FAILED} | {f"trace {n}": each for n, each in enumerate([*traces, {"last_error": ""}])}
    for id, each in left.items():
        harness.insert(id, **each)
    harness.insert("b")
    assert {id: row.clean for id, row in locked(harness, *left).items()} == {id: not each for id, each in left.items()}
    times: list[datetime] = []

    def send(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, RowChange]:
        times.append(now)
        return send_all(rows, now)

    first = harness.store.claim([*left], send)
    second = harness.store.claim(["b"], send)
    assert {columns(harness, id) for id in left} == {(first, None, None, None, 0, None)}
    assert harness.column("clean", "created_at") < first
    rows = locked(harness, "clean", "all", "b")
    assert {id: (row.sent_at, row.data) for id, row in rows.items()} == {
        "clean": (first, b""),
        "all": (first, b""),
        "b": (second, b""),
    }
    assert times[0] <= first < second
    assert times[1] <= second
    assert first.tzinfo is not None


def test_failures_and_sent_tasks_are_written_in_one_commit(harness: Harness) -> None:
    """The next time, the attempts, the text, and the expiry as before. A task without an outcome keeps its row."""
    harness.insert("sent")
    harness.insert("sent-again", **FAILED)
    harness.insert("failed")
    harness.insert("failed-again", **FAILED)
    harness.insert("untried", **FAILED)
    text = "data_loss: \U0001f600 ü \x00 " + "x" * 980
    marks: dict[str, RowChange] = {
        "sent": Published("1"),
        "sent-again": Published("2"),
        "failed": NotSent(1, LATER, None, text, PAST),
        "failed-again": NotSent(2**62, LATER, FUTURE, "data_loss: no", FUTURE),
    }
    committed = harness.store.claim([*marks, "untried"], lambda _rows, _now: marks)
    assert columns(harness, "sent") == columns(harness, "sent-again") == (committed, None, None, None, 0, None)
    assert columns(harness, "failed") == (None, LATER, None, text, 1, PAST)
    assert columns(harness, "failed-again") == (None, LATER, FUTURE, "data_loss: no", 2**62, FUTURE)
    assert columns(harness, "untried") == UNTOUCHED
    row = locked(harness, "failed-again")["failed-again"]
    assert (row.attempts, row.available_at, row.expires_at, row.due_at) == (2**62, LATER, FUTURE, FUTURE)
    assert (row.sent_at, row.data) == (None, serialized())
    harness.insert("sent alone")
    harness.store.claim(["untried", "sent alone"], lambda _rows, _now: {"sent alone": Published("1")})
    assert columns(harness, "untried") == UNTOUCHED


@pytest.mark.parametrize("count", [2**63 - 1, 2**63 - 2, 0, -(2**63)])
def test_a_count_at_its_end_does_not_overflow(harness: Harness, count: int) -> None:
    """TimesSent may have any value. Each mark and each undone mark changes it, also of a clean row."""
    harness.insert("clean", times_sent=count)
    harness.insert("other", times_sent=count, **FAILED)
    harness.store.claim(["clean", "other"], send_all)
    sent = [harness.column(id, "times_sent") for id in ("clean", "other")]
    assert sent == [count + 1 if count < 2**63 - 1 else count - 1] * 2
    harness.store.claim(["clean", "other"], lambda rows, _now: {row.id: NotSent(0, None, None, None) for row in rows})
    assert [harness.column(id, "times_sent") for id in ("clean", "other")] == [each - 1 for each in sent]


def test_a_failure_removes_the_mark(harness: Harness) -> None:
    """A task that was marked before it was published is unsent again, with its attempts and its expiry."""
    harness.insert("a", expires_at=FUTURE, attempts=2, at_most_once=True)
    committed = harness.store.claim(["a"], send_all)
    assert columns(harness, "a") == (committed, None, None, None, 0, None)
    harness.store.claim(["a"], lambda _rows, _now: {"a": NotSent(3, PAST, FUTURE, "not_found: no", PAST)})
    assert columns(harness, "a") == (None, PAST, FUTURE, "not_found: no", 3, PAST)
    assert poll_ids(harness.store, "orders", due=True) == ["a"]
    row = locked(harness, "a")["a"]
    assert (row.data, row.at_most_once) == (serialized(), True)


FIRST = datetime(2025, 1, 1, tzinfo=UTC)
KEY = TopicKey("orders", "k")
DEFERRED = {"blocked_by": "x"}


def head_ids(harness: Harness, per_key: int = 10, *, skip_dead: bool = False) -> list[str]:
    key_heads = harness.store.key_heads(harness.with_shards(KEY), per_key, skip_dead=skip_dead)
    return [each.id for each in key_heads.get(KEY, ())]


def test_key_heads_are_in_the_order_of_their_key(harness: Harness) -> None:
    """CreatedAt, then Sequence, NULL first, then Id; not the order of IDs, inserts or priorities."""
    later = FIRST + timedelta(microseconds=1)
    harness.insert("a", ordering_key="k", created_at=later, sequence=1, priority=100)
    for id, sequence in {"b": 10, "c": 9, "e": None, "d": None, "f": -5}.items():
        harness.insert(id, ordering_key="k", created_at=FIRST, sequence=sequence)
    assert head_ids(harness) == ["d", "e", "f", "c", "b", "a"]
    assert head_ids(harness, per_key=2) == ["d", "e"]


def test_only_the_requested_keys_are_read(harness: Harness) -> None:
    """A key is a topic and an ordering key. Sent tasks and those without a key are left out."""
    harness.insert("a", ordering_key="k", created_at=FIRST)
    harness.insert("sent", ordering_key="k", created_at=FIRST, sent_at=PAST)
    harness.insert("other-topic", "invoices", ordering_key="k", created_at=FIRST)
    harness.insert("other-key", ordering_key="K", created_at=FIRST)
    harness.insert("loose", created_at=FIRST)
    size = len(serialized())
    invoices = TopicKey("invoices", "k")
    key_heads = harness.store.key_heads(
        harness.with_shards(KEY, invoices, TopicKey("orders", "none")), 10, skip_dead=False
    )
    assert {key: list(ids) for key, ids in key_heads.items() if ids} == {
        KEY: [QueuedTask("a", size, sendable=True)],
        invoices: [QueuedTask("other-topic", size, sendable=True)],
    }


def test_many_keys_are_read_as_if_one_by_one(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whole, or one by one where they have more tasks than that. A read that was cut off is never used."""
    keys = [TopicKey(topic, key) for topic in ("orders", "invoices") for key in "klmn"]
    for n in range(3):
        for number, key in enumerate(keys):
            dead = {"available_at": NEVER, "attempts": 1} if n == 0 and number % 2 else {}
            id = f"{9 - n}{key.topic}{key.ordering_key}"
            harness.insert(id, key.topic, ordering_key=key.ordering_key, created_at=FIRST, sequence=n, **dead)
    for whole in (0, 20, 2_000):
        monkeypatch.setattr(emulator, "WHOLE_KEYS_ROWS", whole)
        key_heads = harness.store.key_heads(harness.with_shards(*keys), 2, skip_dead=True)
        assert {key: [each.id for each in key_heads[key]] for key in keys} == {
            key: [f"{place}{key.topic}{key.ordering_key}" for place in ("87" if number % 2 else "98")]
            for number, key in enumerate(keys)
        }


def test_key_heads_include_tasks_that_are_not_due(harness: Harness) -> None:
    """Such a task blocks the following ones, unless it expires before. A deferred task is blocked only by others."""
    tasks: dict[str, tuple[dict[str, Any], tuple[bool, bool, bool]]] = {  # sendable, deferred, expired_before_due
        "ready": ({}, (True, False, False)),
        "due": ({"available_at": PAST, "attempts": 2, "last_error": "internal: no"}, (True, False, False)),
        "deferred": ({"available_at": FUTURE, **DEFERRED}, (True, True, False)),
        "deferred-due": ({"available_at": PAST, **DEFERRED}, (True, True, False)),
        "scheduled": ({"available_at": FUTURE}, (False, False, False)),
        "retrying": ({"available_at": FUTURE, "attempts": 1, "last_error": "internal: no"}, (False, False, False)),
        "dead": ({"available_at": NEVER, "attempts": 1, "last_error": "undecodable: no"}, (False, False, False)),
        "expiring": ({"available_at": PAST, "expires_at": PAST}, (True, False, False)),
        "dead-expired": ({"available_at": NEVER, "expires_at": PAST, "attempts": 1}, (False, False, True)),
        "retrying-expired": ({"available_at": FUTURE, "expires_at": PAST, "attempts": 1}, (False, False, True)),
        "deferred-expired": ({"available_at": FUTURE, "expires_at": PAST, **DEFERRED}, (False, True, True)),
        "ready-expired": ({"expires_at": PAST}, (True, False, False)),
        "dead-in-time": ({"available_at": NEVER, "expires_at": FUTURE, "attempts": 1}, (False, False, False)),
        "in-time": ({"expires_at": FUTURE}, (True, False, False)),
    }
    for sequence, (id, (columns, _)) in enumerate(tasks.items()):
        harness.insert(id, ordering_key="k", created_at=FIRST, sequence=sequence, **columns)
    waiting = harness.store.key_heads(harness.with_shards(KEY), 20, skip_dead=False)[KEY]
    assert {each.id: (each.sendable, each.deferred, each.expired_before_due) for each in waiting} == {
        id: shown for id, (_, shown) in tasks.items()
    }
    remaining = [id for id in tasks if not id.startswith("dead")]
    assert head_ids(harness, 20, skip_dead=True) == remaining
    assert head_ids(harness, 7, skip_dead=True) == remaining[:7]


def test_a_deferred_task_is_due_later_and_names_its_head(harness: Harness) -> None:
    """Its attempts and expiry stay, the poll does not return it, and the locked row is known as deferred."""
    harness.insert("head", ordering_key="k", available_at=FUTURE)
    harness.insert("a", ordering_key="k", expires_at=FUTURE, attempts=2, due_at=PAST)
    assert poll_ids(harness.store, "orders") == ["a"]
    harness.store.claim(["a"], lambda _rows, _now: {"a": Deferred(FUTURE, "head")})
    assert poll_ids(harness.store, "orders", due=True) == []
    names = ("available_at", "expires_at", "attempts", "blocked_by", "last_error", "due_at")
    assert [harness.column("a", name) for name in names] == [FUTURE, FUTURE, 2, "head", None, PAST]
    assert {id: row.deferred for id, row in locked(harness, "a", "head").items()} == {"a": True, "head": False}

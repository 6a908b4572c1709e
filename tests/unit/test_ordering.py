"""The tasks of an ordering key: which go in a request, which are deferred behind a head, and which are released."""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from unittest import mock

import pytest

from outbox.table.states import NEVER
from publishworker.delivery.rules import release_changes, skip_reasons
from publishworker.host import Host
from publishworker.spanner.write_errors import StoreError
from publishworker.telemetry import metrics as m
from publishworker.turn import ordering
from publishworker.turn.in_flight import Limits
from publishworker.turn.ordering import MAX_KEY_HEAD_ROWS, Ordering, ResolvedKeys, parts
from publishworker.types import (
    Claim,
    Failed,
    KeyHeads,
    LockedRow,
    Next,
    NotSent,
    Published,
    QueuedTask,
    TopicKey,
    Version,
)
from tests.support.fakes import FakePublisher, FakeStore, serialized
from tests.support.parts import Bench, claim_of, overtake, policy, poll_request, relay_of


def ordering_of(store: FakeStore, size: int, busy: Collection[TopicKey] = (), **host: Any) -> Ordering:
    in_flight = mock.Mock(limits=Limits(size, 10_000_000, 2), busy_keys=lambda: busy)
    return Ordering(store, in_flight, policy(), Host(**host))


class Recording(FakeStore):
    def __init__(self, lines: Mapping[str, str]) -> None:
        """Insert the tasks of each key: `r` is ready, `x` is dead and has expired, so that it blocks no other."""
        super().__init__()
        self.asked: list[tuple[set[str], int]] = []
        self.random = Random(1)
        for key, states in lines.items():
            for n, state in enumerate(states):
                passed = {"available_at": NEVER, "expires_at": self.now - timedelta(hours=1)} if state == "x" else {}
                self.insert(f"{key}{n:02}", "orders", ordering_key=key or None, sequence=n, **passed)

    def key_heads(self, keys: Mapping[TopicKey, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        self.asked.append(({key.ordering_key for key in keys}, per_key))
        return super().key_heads(keys, per_key, skip_dead=skip_dead)

    def sendable(self, size: int) -> dict[str, tuple[str, ...]]:
        found = self.poll(poll_request("orders"))
        candidates = ordering_of(self, size, random=self.random).resolve(found).candidates
        return {each.ordering_key or "": (each.id, *each.behind) for each in candidates}


def places(key: str, *numbers: int) -> tuple[str, ...]:
    return tuple(f"{key}{n:02}" for n in numbers)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_key_is_read_as_far_as_a_batch_can_send_it(size: int) -> None:
    """One row more shows whether a deferred task follows. A key that fills a batch is not read again."""
    store = Recording({"k": "r" * (size + 3)})
    assert store.sendable(size) == {"k": places("k", *range(size))}
    assert store.asked == [({"k"}, size + 1)]
    store = Recording({f"{n:02}/": "r" for n in range(100)})
    store.sendable(1000)
    assert [rows for _, rows in store.asked] == [MAX_KEY_HEAD_ROWS // 100 + 1]


def test_a_key_with_too_many_expired_tasks_is_blocked_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows are not read without end, and it delays no other key. The warning names the first task."""
    monkeypatch.setattr(ordering, "MAX_EXPIRED_ROWS", 40)
    store = Recording({"endless": "x" * 40 + "r", "other": "r"})
    assert store.sendable(4) == {"other": ("other00",)}
    assert store.asked == [({"endless", "other"}, 5), *(({"endless"}, rows) for rows in (10, 20, 40))]
    [line] = caplog.records
    assert line.message == (
        "An ordering key of topic orders begins with at least 40 tasks that expired before they were due, more than a "
        "worker reads. Its later tasks are not sent. The first one is endless00. Find the dead ones with "
        "`outbox list --state dead --topic orders`, and delete them with `outbox cancel`."
    )
    assert vars(line)["action"] == "crowded_key"
    relay = relay_of(Recording({"endless": "x" * 40 + "r"}), FakePublisher())
    assert [relay.turn().next, relay.turn().next] == [Next.AT_ONCE, Next.SOON]  # an operator may delete the tasks


def test_tasks_are_cut_where_a_batch_is_full_to_the_byte() -> None:
    tasks = [QueuedTask(str(n), size, sendable=True) for n, size in enumerate((5, 5, 5, 5, 1, 1, 1, 11, 2))]
    pieces = [[each.bytes for each in piece] for piece in parts(tasks, Limits(2, 10, 1))]
    assert pieces == [[5, 5], [5, 5], [1, 1], [1], [11], [2]]


def test_a_key_is_one_candidate_with_its_highest_priority(bench: Bench) -> None:
    """It has the size of all its tasks. The oldest of the most urgent ones says how long it has waited."""
    at = bench.store.now
    bench.line("a", priority=0, created_at=at)
    bench.line("b", priority=100, created_at=at + timedelta(seconds=1))
    bench.line("c", priority=100, created_at=at + timedelta(seconds=2))
    seen = bench.store.poll(poll_request("orders"))
    key_heads = ordering_of(bench.store, 10).resolve(seen[::-1])
    [key] = key_heads.candidates
    assert not key_heads.left_out
    assert (key.id, key.behind, key.priority, key.created_at) == ("a", ("b", "c"), 100, at + timedelta(seconds=1))
    assert (key.task_count, key.bytes, key.releases) == (3, 3 * len(serialized()), None)
    [part] = ordering_of(bench.store, 2).resolve(seen).candidates
    assert (part.behind, part.releases) == (("b",), None)  # the task behind them is not deferred
    ordering = ordering_of(bench.store, 10, busy={TopicKey("orders", "k")})
    assert ordering.resolve(seen) == ResolvedKeys([], left_out=True)
    other = seen[0]._replace(id="other", ordering_key="other")
    assert ordering.resolve([*seen, other]).left_out


def test_keys_share_a_batch_with_each_other_and_with_tasks_without_a_key() -> None:
    """A transaction for each key would be slow. Each key stays whole, in a request of its own."""
    bench = Bench(size=20)
    bench.line("a1", "a2", key="a")
    bench.line("b1", "b2", "b3", key="b")
    bench.insert("x")
    bench.turns()
    assert bench.store.claimed.total() == 6
    assert sorted(bench.publisher.requests) == [["a1", "a2"], ["b1", "b2", "b3"], ["x"]]


UNKNOWN = Failed("data_loss", "no")
REFUSED = Failed("invalid_argument", "no")
HOUR = timedelta(hours=1)


def block(bench: Bench, tasks: int) -> list[str]:
    ids = [f"t{n:02}" for n in range(tasks)]
    bench.line("head", available_at=NEVER, attempts=1)
    bench.line(*ids)
    return ids


@pytest.mark.parametrize("state", ["scheduled", "retrying", "dead"])
def test_a_head_that_is_not_due_blocks_only_its_key(bench: Bench, state: str) -> None:
    """The tasks behind it are deferred to its time, and appear neither failed nor dead.

    The first returns after a minute, because the head may be changed meanwhile, the others after an hour.
    """
    at = NEVER if state == "dead" else bench.store.now + timedelta(seconds=90)
    bench.line("head", available_at=at, attempts=0 if state == "scheduled" else 3)
    bench.line("a", "b", "c")
    bench.line("later", available_at=bench.store.now + 9 * HOUR)
    bench.line("other", key="l")
    bench.insert("x")
    bench.turns()
    assert sorted(bench.publisher.ids()) == ["other", "x"]
    later = 3600 if state == "dead" else 90
    for id, seconds in {"a": 60, "b": later, "c": later}.items():
        row = bench.store.rows[id]
        assert bench.waits(id) == pytest.approx(seconds, abs=1)
        assert (row.attempts, row.blocked_by) == (0, "head")
    assert bench.waits("later") == pytest.approx(9 * 3600, abs=1)
    assert bench.count(m.DEFERRED) == 3
    assert bench.relay.turn().polled == 0


def test_a_blocked_key_costs_one_transaction_a_minute(bench: Bench) -> None:
    """However many tasks are behind its head. It defers one of them."""
    block(bench, 200)
    bench.turns(40)
    deferred, claimed = bench.count(m.DEFERRED), bench.store.claimed["head"]
    bench.run_for(610, step=10)
    assert (bench.count(m.DEFERRED) - deferred, bench.store.claimed["head"] - claimed) == (10, 10)


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_task_that_was_deferred_while_a_batch_had_lost_its_locks_is_released(bench: Bench, is_aborted: bool) -> None:
    """The batch has published the head, and its claim does not name the task, which was registered after the poll."""

    def defer() -> None:
        """Another worker has recorded a failed attempt of the head."""
        in_an_hour = bench.store.now + HOUR
        bench.change("head", attempts=1, available_at=in_an_hour)
        bench.line("next", available_at=in_an_hour, blocked_by="head")

    bench.line("head")
    if is_aborted:
        bench.abort_once(defer)
    else:
        bench.commits(StoreError("no answer"))
    bench.turns()
    if not is_aborted:
        defer()
    bench.run_for(2)
    assert bench.publisher.ids() == ["head", "next"]


@pytest.mark.parametrize("size", [1, 10])
def test_cancelled_tasks_that_are_made_unsent_hold_no_task_behind_them(size: int) -> None:
    """They end wherever a batch ends: among its tasks, or just behind them."""
    bench = Bench(size=size)
    deferred = {"available_at": bench.store.now + HOUR, "blocked_by": "dead"}
    bench.line("dead")
    bench.line("a", "b", cancelled_by="an operation", **deferred)
    bench.line("next", "last", **deferred)
    bench.run_for(10)
    assert bench.publisher.ids() == ["dead", "next", "last"]
    assert not bench.store.unsent_rows()


def test_deferred_tasks_are_sent_when_their_head_expires(bench: Bench) -> None:
    """They wait neither for the rest of their minute nor for the head's backoff beyond its expiry."""
    soon = bench.store.now + timedelta(seconds=20)
    bench.line("dead", "a", key="k")
    bench.line("failing", "b", key="l")
    bench.line("seen later", key="m", expires_at=soon, available_at=NEVER, attempts=1)
    bench.line("c", key="m")
    for id in ("dead", "failing"):
        bench.change(id, expires_at=soon)
    bench.publisher.failing = {"dead": REFUSED, "failing": UNKNOWN}
    bench.relay = bench.another(retries={"initial": 900})
    bench.turns()
    assert bench.publisher.ids() == []
    bench.wait(21)
    bench.turns()
    assert sorted(bench.publisher.ids()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("act", "wait", "sent"),
    [
        (lambda bench: bench.change("head", available_at=None), None, ["head", "a"]),  # retried
        (lambda bench: bench.change("head", available_at=None, at_most_once=True), None, ["head", "a"]),
        (lambda bench: bench.store.delete("head"), None, ["a"]),
        (lambda bench: bench.change("head", available_at=NEVER), None, ["a"]),  # and dead tasks are skipped
        (lambda bench: bench.change("a", available_at=bench.store.now + 9 * HOUR), 9 * 3600, []),
    ],
)
def test_nothing_is_deferred_behind_a_head_that_has_changed(
    act: Callable[[Bench], object], wait: float | None, sent: list[str]
) -> None:
    """The locked rows decide: if the head is sendable or gone, or the task is due later, nothing is written."""
    bench = Bench(skip_dead=True)
    bench.line("head", "a")
    bench.change("head", available_at=bench.store.now + HOUR)
    overtake(bench, lambda: act(bench))
    bench.relay.turn()
    assert bench.count(m.DEFERRED) == 0
    assert bench.waits("a") == (wait and pytest.approx(wait, abs=1))
    bench.turns()
    assert bench.publisher.ids() == sent


@pytest.mark.parametrize(("batches", "max_turns"), [(1, 40), (2, 20), (8, 5)])
def test_an_endless_blocked_key_delays_no_other_task(batches: int, max_turns: int) -> None:
    """Deferring uses a part of the places, even if there is only one and the key gets new tasks."""
    bench = Bench(batches=batches)
    block(bench, 300)
    bench.insert("x", topic="invoices")
    turns = 0
    while "x" not in bench.publisher.ids():
        bench.relay.turn()
        bench.line(*(f"u{turns}-{n}" for n in range(10)))
        turns += 1
        assert turns < max_turns


def test_deferring_does_not_count_as_in_flight_for_a_topics_limit() -> None:
    """Deferring waits for a lock, so another task can be the one in flight."""
    bench = Bench(batches=8)
    bench.store.control("orders", max_in_flight=1)
    block(bench, 1)
    bench.relay.turn()
    with bench.store.locked("head"):
        bench.relay.turn()
        bench.insert("x")
        for _ in range(3):
            bench.relay.turn()
        assert bench.publisher.ids() == ["x"]
    bench.relay.finish()
    assert bench.count(m.DEFERRED) == 1


NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(seconds=1)
BEFORE = NOW - timedelta(seconds=1)

#: A row, by a word: its columns, its skip reason, and whether the tasks behind it in its key may be sent.
ROWS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "ready": ({}, "", True),
    "due": ({"available_at": NOW}, "", True),
    "sent": ({"sent_at": BEFORE}, "sent", True),
    "scheduled": ({"available_at": LATER}, "not_due", False),
    "dead": ({"available_at": NEVER}, "not_due", False),
    "deferred": ({"available_at": LATER, "deferred": True}, "", True),
    "expired and due": ({"expires_at": NOW}, "", True),
    "expired before it was due": ({"available_at": LATER, "expires_at": NOW}, "not_due", True),
    "dead and expired": ({"available_at": NEVER, "expires_at": BEFORE}, "not_due", True),
    "not yet expired": ({"available_at": LATER, "expires_at": LATER}, "not_due", False),
    "of another topic": ({"topic": "invoices", "available_at": LATER}, "moved", True),
    "of another key": ({"ordering_key": "l", "available_at": LATER}, "moved", True),
    "of no key any more": ({"ordering_key": None}, "moved", True),
    "at most once": ({"at_most_once": True}, "at_most_once", False),
}


def row(id: str, **columns: Any) -> LockedRow:
    values = {"topic": "orders", "ordering_key": "k", "available_at": None, "sent_at": None, **columns}
    return LockedRow(**{"id": id, "data": b"", "created_at": BEFORE, **values})


def reasons(
    batch: Claim, *rows: LockedRow, published: Mapping[str, Version] | None = None, skip_dead: bool = False
) -> dict[str, str]:
    outcomes = skip_reasons(batch, rows, NOW, published or {}, policy(skip_dead=skip_dead))
    return {id: getattr(outcome, "reason", "?") for id, outcome in outcomes.items()}


@pytest.mark.parametrize("word", ROWS)
def test_a_row_decides_about_itself_and_the_tasks_behind_it(word: str) -> None:
    """Sent, gone and expired tasks are skipped. A task that is not due blocks only its key."""
    columns, reason, continues = ROWS[word]
    batch = claim_of("orders", "first", "next", "other", keys=("k", "k", "m"))
    expected = {"first": reason} if reason else {}
    if not continues:
        expected["next"] = "blocked"
    assert reasons(batch, row("next"), row("other", ordering_key="m"), row("first", **columns)) == expected
    # If nothing is written to the first row, the next one is released only if the first is skipped.
    batch = claim_of("orders", "first", keys=("k",), releases=("next",))
    rows = [row("first", **columns), row("next", available_at=LATER, deferred=True)]
    released_ids = {"deferred": ["first"], "ready": [], "due": [], "expired and due": ["next"]}
    released_ids = released_ids.get(word, ["next"] if reason and continues else [])
    assert list(release_changes(batch, rows, {}, NOW, policy())) == released_ids


def test_a_task_without_a_key_is_neither_blocked_nor_deferred() -> None:
    """A task that got a key after the poll is left to a poll that knows the key."""
    late, ready = row("a", available_at=LATER, ordering_key=None), row("b", ordering_key=None)
    deferred = late._replace(id="deferred", deferred=True)
    batch = claim_of("orders", "a", "b", "deferred", "keyed", "gone")
    expected = {"a": "not_due", "deferred": "not_due", "keyed": "moved", "gone": "gone"}
    assert reasons(batch, late, ready, deferred, row("keyed")) == expected


def test_the_deferred_task_that_becomes_the_head_is_released() -> None:
    deferred, dead = {"available_at": LATER, "deferred": True}, {"a": NotSent(1, NEVER, None, "no")}
    rows = [row("a"), row("b", **deferred), row("c", **deferred)]
    batch = claim_of("orders", "a", "b", keys=("k", "k"), releases=("c",))
    for marks, skip_dead, released_ids in (
        ({"a": Published("1"), "b": Published("2")}, False, ["c"]), (dead, False, []), (dead, True, ["b"]),
    ):  # fmt: skip
        assert list(release_changes(batch, rows, marks, NOW, policy(skip_dead=skip_dead))) == released_ids


@pytest.mark.parametrize("failures", [0, 5])
def test_a_key_that_another_worker_has_deferred_meanwhile_is_released_when_spanner_answers(failures: int) -> None:
    """The batch had lost its locks. Its key does not wait for the end of the deferral, however long Spanner is away."""
    bench = Bench(size=1)
    bench.line("a", "b")
    bench.commits(StoreError("no answer"), None, *[StoreError("no answer")] * failures)
    bench.relay.turn()
    bench.change("b", available_at=bench.store.now + HOUR, blocked_by="a")
    bench.run_for(40)
    assert bench.published("a", "b") == ["a", "b"]

"""Tasks that fail: recorded, retried, dead, or held back with their topic, and which failures count."""

from datetime import UTC, datetime, timedelta
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.api_core.exceptions import ServiceUnavailable

from outbox.errors import NotReached
from outbox.table.schema import service_errors
from outbox.table.states import NEVER
from publishworker.delivery.rules import should_record
from publishworker.pubsub.failures import REASONS, FailureKind, failure_kind, is_refused
from publishworker.pubsub.publisher import failure_of
from publishworker.spanner.write_errors import StoreError, WriteRefused, describe
from publishworker.telemetry import metrics as m
from publishworker.types import Failed, LockedRow, NotSent
from tests.support.fakes import FakePublisher, serialized
from tests.support.parts import Bench, claim_of, policy

TOPIC = "projects/test-project/topics/orders"
MISSING = "projects/test-project/topics/missing"
AWAY = Failed("unavailable", "connection refused")
ODD = Failed("data_loss", "what was that")
REFUSED = Failed("invalid_argument", "no")
#: When the fake store begins.
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(hours=1)


def states(bench: Bench) -> dict[str, str]:
    found = {}
    for row in bench.store.rows.values():
        if row.sent_at is not None:
            found[row.id] = "sent"
        elif row.available_at is None:
            found[row.id] = "ready"
        else:
            found[row.id] = "dead" if row.available_at >= NEVER else "retrying"
    return found


def attempts(bench: Bench) -> int:
    return sum(row.attempts for row in bench.store.rows.values())


def test_a_failure_is_written_in_the_same_commit_as_its_batches_successes(bench: Bench) -> None:
    bench.insert("good")
    bench.line("bad")  # in a request of its own
    bench.publisher.failing["bad"] = ODD
    assert [turn.recorded for turn in bench.turns()] == [1, 0]
    assert bench.store.claimed == {"good": 1, "bad": 1}
    good, bad = bench.store.rows["good"], bench.store.rows["bad"]
    assert good.sent_at is not None
    assert (bad.sent_at, bad.attempts, bad.last_error) == (None, 1, f"data_loss: {TOPIC}: what was that")
    assert bad.available_at is not None
    assert 0.49 <= (bad.available_at - good.sent_at).total_seconds() <= 1
    assert bench.count(m.FAILED) == 1
    bench.publisher.failing.clear()
    bench.wait(1)
    bench.turns()
    assert bench.unsent() == []


def test_an_error_that_no_retry_can_fix_is_dead_at_once(bench: Bench) -> None:
    bench.publisher = FakePublisher("orders", allowed=lambda name: name == TOPIC)
    bench.relay = bench.another()
    bench.insert("good", "refused")
    bench.publisher.failing["refused"] = REFUSED
    bench.insert("secret", topic="secrets")
    bench.store.insert("large", "orders", serialized(bytes(10_400_000)))
    bench.store.insert("bad", "orders", b"\xff\xff secret")
    bench.store.insert("crowded", "orders", b"\x12\x06\x0a\x04abcd" * 201)
    bench.turns()
    undecodable = "undecodable: Data is not a serialized google.pubsub.v1.PubsubMessage"
    errors = {"refused": f"invalid_argument: {TOPIC}: no"}
    errors["secret"] = "topic_not_allowed: projects/test-project/topics/secrets matches no pattern of --allowed-topics"
    errors["large"] = "too_large: the publish request has 10400078 bytes; Pub/Sub allows 10000000"
    errors |= {"bad": undecodable, "crowded": f"{undecodable}, or has more than 200 fields"}
    assert states(bench) == {"good": "sent", **dict.fromkeys(errors, "dead")}
    assert {row.id: row.last_error for row in bench.store.rows.values() if row.sent_at is None} == errors
    assert (attempts(bench), bench.count(m.DEAD)) == (5, 5)


def test_an_outage_records_no_attempt_and_affects_no_other_topic(bench: Bench) -> None:  # OUT-LOSS-4
    bench.insert(*[f"o{n}" for n in range(50)])
    bench.insert("i0", topic="invoices")
    bench.publisher.failing[TOPIC] = AWAY
    for second in range(1, 60):
        bench.turns()
        assert states(bench)[f"i{second - 1}"] == "sent"
        assert bench.store.rows["o0"].available_at is None
        bench.insert(f"i{second}", topic="invoices")
        bench.wait(1)
    assert attempts(bench) == 0
    probes = [len(ids) for ids in bench.publisher.requests if ids[0].startswith("o")]
    assert 5 <= probes.count(1) <= 12
    assert len(probes) - probes.count(1) <= 2
    del bench.publisher.failing[TOPIC]
    bench.run_for(11)
    assert bench.unsent() == []
    assert len(bench.publisher.ids()) == len(set(bench.publisher.ids()))
    assert bench.count(m.DEAD) == 0


def test_a_topic_that_is_back_within_an_hour_loses_no_task(bench: Bench) -> None:
    """However often its tasks failed, none is dead before it is a day old. Then all are sent and clean."""
    bench.insert(*[str(n) for n in range(30)], topic="missing", created_at=bench.store.now)
    bench.run_for(3600, step=5)
    assert max(row.attempts for row in bench.store.rows.values()) >= 2
    assert "dead" not in states(bench).values()
    bench.publisher.topics.add(MISSING)
    bench.run_for(2 * 3600, step=60)
    assert set(states(bench).values()) == {"sent"}
    assert attempts(bench) == 0
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    ("failure", "before", "written", "counted"),
    [
        # Another worker recorded a failed attempt: it stands, and ours is not added.
        (ODD, {}, {"attempts": 4, "available_at": LATER}, (0, 0)),
        # Another worker sent the task: it is not dead.
        (REFUSED, {}, {"sent_at": NOON}, (0, 1)),
        # An operator gave the task more time: it is not dead, and is sent.
        (None, {"expires_at": NOON}, {"expires_at": None}, (1, 0)),
        # Another worker sent the task, too: both counters say so.
        (None, {}, {"sent_at": NOON - timedelta(seconds=1)}, (1, 1)),
        # Another worker sent it, an operator wants it sent again, and it failed since: it is published again.
        (None, {}, {"attempts": 1, "available_at": LATER, "times_sent": 1}, (1, 0)),
    ],
)
def test_a_change_between_two_transaction_attempts_is_kept(
    bench: Bench,
    failure: Failed | None,
    before: dict[str, Any],
    written: dict[str, Any],
    counted: tuple[int, int],
    *,
    refused: bool,
) -> None:
    """The outcome of the aborted or refused attempt says nothing about a row that another writer has changed since.

    The failed attempt of a refused commit is reported, but not written.
    """
    bench.insert("a", **before)
    if failure:
        bench.publisher.failing["a"] = failure

    def change() -> None:
        bench.change("a", **written)
        if refused:
            raise WriteRefused("OUT_OF_RANGE")

    bench.abort_once(change)
    turns = bench.turns()
    bench.wait(0.1 if refused else 0)  # the batch marks again
    turns += bench.turns()
    later = "available_at" in written
    assert states(bench) == {"a": "retrying" if later else "sent"}
    assert {name: getattr(bench.store.rows["a"], name) for name in written} == written
    assert (bench.count(m.PUBLISHED), bench.count(m.ALREADY_PUBLISHED)) == (counted[0], 0 if refused else counted[1])
    assert sum(turn.recorded for turn in turns) == (refused and (failure is not None or "expires_at" in before))
    assert len(bench.publisher.ids()) == counted[0]
    assert len(bench.publisher.requests) == counted[0] + (failure is not None)
    bench.publisher.failing.clear()
    bench.wait(3600)
    bench.turns()
    assert states(bench) == {"a": "sent"}
    assert len(bench.publisher.ids()) == counted[0] + later


def test_a_failing_head_records_the_failure_and_defers_the_others(bench: Bench) -> None:
    """The head records one attempt. Then it goes alone, and the others follow when it is sent."""
    bench.line("a", "b", "c")
    bench.publisher.failing = {"a": ODD}
    bench.turns()
    assert bench.publisher.ids() == []
    rows = bench.store.rows
    assert [rows[id].attempts for id in "abc"] == [1, 0, 0]
    assert bench.store.claimed == {"a": 1, "b": 1, "c": 1}  # in one commit
    assert rows["a"].available_at == rows["b"].available_at == rows["c"].available_at
    assert (rows["a"].last_error, rows["c"].blocked_by) == (f"data_loss: {TOPIC}: what was that", "a")
    bench.publisher.failing = {}
    bench.wait(2)
    bench.turns()
    assert bench.publisher.requests == [["a", "b", "c"], ["a"], ["b", "c"]]
    assert rows["c"].last_error is None


def test_a_failing_head_holds_its_key_after_an_abort(bench: Bench) -> None:  # OUT-ORDER-1
    """The next attempt remembers the failure, also if another writer has changed a later task meanwhile."""
    bench.line("a", "b", "c")
    bench.publisher.failing = {"a": ODD}

    def change() -> None:
        bench.publisher.failing.clear()
        bench.change("b", expires_at=bench.store.now + timedelta(days=1))

    bench.abort_once(change)
    bench.turns()
    assert bench.publisher.ids() == []
    bench.wait(2)
    bench.turns()
    assert bench.publisher.ids() == ["a", "b", "c"]


def test_an_outage_defers_nothing(bench: Bench) -> None:
    bench.line("c", "b", "a")
    bench.publisher.failing = {TOPIC: AWAY}
    bench.turns()
    bench.publisher.requests.clear()
    for _ in range(4):
        bench.wait(10)
        bench.turns()
    assert bench.publisher.requests == [["c"]] * 4
    assert {(row.available_at, row.attempts, row.last_error) for row in bench.store.rows.values()} == {(None, 0, None)}
    assert bench.count(m.DEFERRED) == 0
    bench.publisher.failing = {}
    bench.run_for(30, step=10)
    assert bench.publisher.ids() == ["c", "b", "a"]


@pytest.mark.parametrize(("skip_dead", "dead_tasks"), [(False, 1), (True, 4)])
def test_own_failures_of_a_key_are_recorded_together_in_skip_mode(skip_dead: bool, dead_tasks: int) -> None:
    """One turn records all of a key, not one turn for each task. In block mode only the head is dead."""
    bench = Bench(skip_dead=skip_dead)
    refusal = Failed("topic_not_allowed", "orders is not allowed")
    bench.publisher.publish = lambda _topic, rows, *_: dict.fromkeys((row.id for row in rows), refusal)
    bench.line("a", "b", "c", "d")
    while not bench.count(m.DEAD):
        bench.relay.turn()
    assert bench.count(m.DEAD) == dead_tasks


#: Far from the machine's clock.
NOW = datetime(2055, 5, 5, 5, 5, 5, 123456, tzinfo=UTC)
HOUR = timedelta(hours=1)
MICROSECOND = timedelta(microseconds=1)
OLD = timedelta(days=400)
TARGET = Failed("not_found", "no")


def record(
    failure: Failed,
    attempts: int = 0,
    age: timedelta = timedelta(0),
    *,
    now: datetime = NOW,
    expires_at: datetime | None = None,
    **changes: Any,
) -> NotSent:
    row = LockedRow("a", "orders", b"", None, now - age, None, None, attempts=attempts, expires_at=expires_at)
    return policy(**changes).failed_attempt(row, failure, now)


def wait(recorded: NotSent) -> float:
    return (recorded.available_at - NOW).total_seconds()


@pytest.mark.parametrize(
    ("attempts", "full"),
    [(0, 2), (1, 4), (2, 8), (3, 16), (6, 100), (7, 100), (59, 100), (61, 100), (1100, 100), (2**62, 100), (-5, 2)],
)
def test_backoff_doubles_up_to_its_max_with_jitter(attempts: int, full: float) -> None:
    """Over many seeds: between half and full, spread over all of it. No number of attempts overflows."""
    options: dict[str, Any] = {"initial": 2, "longest": 100, "max_attempts": 2**63}
    waits = [wait(record(ODD, attempts, random=Random(seed), **options)) for seed in range(300)]
    assert full / 2 <= min(waits) < full * 0.52
    assert full * 0.98 < max(waits) <= full
    assert sum(waits) / 300 == pytest.approx(full * 0.75, rel=0.05)


@pytest.mark.parametrize("failure", [AWAY, ODD, Failed("not in the table", "no")])
@pytest.mark.parametrize("max_attempts", [1, 2, 10])
def test_a_tasks_own_error_is_dead_exactly_at_the_last_attempt(failure: Failed, max_attempts: int) -> None:
    for age in (timedelta(0), OLD):
        recorded = [record(failure, before, age, max_attempts=max_attempts) for before in range(max_attempts + 1)]
        assert [each.dead for each in recorded] == [False] * (max_attempts - 1) + [True, True]
        assert [each.attempts for each in recorded] == [*range(1, max_attempts + 2)]


@pytest.mark.parametrize("reason", ["not_found", "permission_denied", "failed_precondition"])
def test_a_missing_topic_makes_no_young_task_dead(reason: str) -> None:  # OUT-LOSS-4
    """Both must hold: the attempts used up, and the age by the database's clock. Until then the max backoff applies."""
    for before, age, dead in (
        (0, OLD, False), (8, OLD, False), (9, OLD, True), (9, HOUR, True), (9, HOUR - MICROSECOND, False),
        (8, HOUR, False), (500, HOUR - MICROSECOND, False), (500, HOUR, True), (500, -HOUR, False),
    ):  # fmt: skip
        recorded = record(Failed(reason, "no"), before, age, dead_after=3600)
        assert recorded.dead is dead
        assert dead or 0 < wait(recorded) <= 3600
    assert 1800 <= wait(record(Failed(reason, "no"), 500)) <= 3600
    scheduled = LockedRow("a", "orders", b"", None, NOW - OLD, NOW, None)  # it is old, and just due
    assert not policy(dead_after=3600, max_attempts=1).failed_attempt(scheduled, Failed(reason, "no"), NOW).dead


def test_the_expiry_is_carried_over() -> None:
    """A mark before publishing removed it from the row; a failure restores it."""
    for failure, expires_at in product((REFUSED, TARGET, AWAY, ODD), (None, NOW + HOUR, NOW - HOUR)):
        assert record(failure, expires_at=expires_at).expires_at == expires_at


@pytest.mark.parametrize("character", ["x", "ü", "\U0001f600", "\ud800"])
@pytest.mark.parametrize(("length", "expected"), [(988, 999), (989, 1000), (990, 1000), (100_000, 1000)])
def test_last_error_has_at_most_a_thousand_characters(character: str, length: int, expected: int) -> None:
    """Cut by characters of any width, and halves of one. It begins with the reason, for which operators search."""
    text = record(Failed("not_found", character * length)).error or ""
    assert len(text) == expected
    assert text.startswith("not_found: ")
    assert len(text.encode()) <= 4 * expected


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("suspect", [False, True])
def test_which_failures_are_recorded_on_the_task(probe: bool, suspect: bool) -> None:
    """The other failures open the circuit. Another task that is suspect changes nothing."""
    claim = claim_of("orders", "a", probe=probe, suspects=frozenset({"b", *(["a"] if suspect else [])}))
    # A missing or closed topic costs its probes. An outage costs a task that has met one, if its batch
    # is no probe. A failure that no message can cause is recorded on no task.
    met_again = suspect and not probe
    expected = {"invalid_argument": True, "data_loss": True, "not_found": probe}
    expected |= dict.fromkeys(("unavailable", "deadline_exceeded", "internal"), met_again)
    expected |= dict.fromkeys(("resource_exhausted", "unauthenticated", "credentials"), False)
    recorded = {reason: should_record(claim, "a", Failed(reason, "?")) for reason in expected}
    assert recorded == expected


KINDS = {
    FailureKind.CONTENT: "undecodable too_large invalid_topic topic_not_allowed expired invalid_argument",
    FailureKind.TARGET: "not_found permission_denied failed_precondition unimplemented",
    FailureKind.OUTAGE: "unavailable deadline_exceeded resource_exhausted internal aborted cancelled unknown "
    "unauthenticated credentials",
}


def test_each_status_has_its_kind() -> None:
    """The kind decides which attempts are recorded: a wrong row kills tasks, or keeps them for ever."""
    for kind, names in KINDS.items():
        assert {each.name for each in REASONS if each.kind is kind} == set(names.split())
        assert {failure_kind(name) for name in names.split()} == {kind}
    # A reason without a row is recorded on the task; its topic continues.
    others = ("", "new_in_grpc", "NOT_FOUND", "already_exists", "out_of_range", "data_loss")
    assert {failure_kind(name) for name in others} == {FailureKind.UNKNOWN}


def test_which_failures_prove_that_nothing_was_published() -> None:
    """A refusal, or a call that never left the worker; not a message that Pub/Sub may have published."""
    content_and_target = f"{KINDS[FailureKind.CONTENT]} {KINDS[FailureKind.TARGET]}".split()
    refused = {*content_and_target, "resource_exhausted", "unauthenticated", "credentials"}
    assert {each.name for each in REASONS if is_refused(each.name)} == refused
    assert not is_refused("something new")


def test_the_text_of_a_service_ends_without_a_full_stop() -> None:
    """Otherwise, a log line that goes on would have two."""
    error = ServiceUnavailable("One at a time.")  # type: ignore[no-untyped-call]  # the client has no types
    assert describe(error) == "503 One at a time"
    with pytest.raises(NotReached, match=r"One at a time$"), service_errors("orders"):
        raise error
    answer = SimpleNamespace(code=lambda: grpc.StatusCode.UNAVAILABLE, details=lambda: "Try later.")
    assert failure_of(answer, "orders", str).error == "orders: Try later"


def test_a_failed_commit_records_no_attempt(bench: Bench) -> None:
    bench.insert("bad")
    bench.publisher.failing["bad"] = REFUSED
    bench.commits(StoreError("deadline exceeded"))
    assert bench.relay.turn().failed == 1
    assert (states(bench), bench.count(m.DEAD)) == ({"bad": "ready"}, 0)
    bench.turns()
    assert (states(bench), bench.count(m.DEAD)) == ({"bad": "dead"}, 1)

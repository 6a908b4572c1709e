"""What becomes of tasks that fail: charged, put off, dead, or held back with their topic; on the fakes."""

from collections.abc import Sequence
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from outbox.states import NEVER
from publishworker.spanner.store import StoreError
from publishworker.task import Failed, Outcome, Row
from publishworker.telemetry import metrics as m
from tests.support.fakes import Abort, FakePublisher, serialized
from tests.support.relay_bench import Bench, overtake, times

TOPIC = "projects/test-project/topics/orders"
AWAY = Failed("unavailable", "connection refused")
LATE = Failed("deadline_exceeded", "no answer")
ODD = Failed("data_loss", "what was that")


def states(bench: Bench) -> dict[str, str]:
    """Return what each task is."""
    found = {}
    for row in bench.store.rows.values():
        if row.sent_at is not None:
            found[row.id] = "sent"
        elif row.available_at is None:
            found[row.id] = "ready"
        else:
            found[row.id] = "dead" if row.available_at >= NEVER else "put off"
    return found


def attempts(bench: Bench) -> int:
    """Return the attempts charged to all tasks that are not sent."""
    return sum(row.attempts for row in bench.store.rows.values())


def until_quiet(bench: Bench, seconds: float, step: float = 1.0) -> None:
    """Turn, and let time pass, for so long."""
    while seconds > 0:
        bench.turns()
        bench.wait(step)
        seconds -= step


def test_a_failure_is_written_in_the_same_commit_as_its_groups_successes(bench: Bench) -> None:
    """Attempts, LastError, and a time between half and the whole of the first backoff, by the database's clock."""
    bench.insert("good", "bad")
    bench.publisher.failing["bad"] = ODD
    assert [turn.charged for turn in bench.turns()] == [0, 1, 0]
    assert bench.store.claimed == {"good": 1, "bad": 1}
    good, bad = bench.store.rows["good"], bench.store.rows["bad"]
    assert good.sent_at is not None
    assert (bad.sent_at, bad.attempts, bad.last_error) == (None, 1, "data_loss: what was that")
    assert bad.available_at is not None
    assert 0.49 <= (bad.available_at - good.sent_at).total_seconds() <= 1


def test_an_unknown_error_is_tried_again_with_growing_waits_and_then_dead(bench: Bench) -> None:
    """Ten attempts, the waits doubling; then nobody polls it any more."""
    bench.insert("bad")
    bench.publisher.failing["bad"] = ODD
    bench.turns()
    waits = []
    while (row := bench.store.rows["bad"]).available_at != NEVER:
        assert row.available_at is not None
        waits.append((row.available_at - bench.store.now).total_seconds())
        bench.wait(waits[-1] - 0.01)
        bench.turns()
        assert row.attempts == len(waits)  # not due yet
        bench.wait(0.02)
        bench.turns()
    assert (row.attempts, len(waits)) == (10, 9)
    assert all(0.49 * 2**n <= wait <= 2**n for n, wait in enumerate(waits))
    assert bench.count(m.DEAD) == 1
    tried = len(bench.publisher.requests)
    until_quiet(bench, 20, step=5000)
    assert len(bench.publisher.requests) == tried == 10


@pytest.mark.parametrize("reason", ["invalid_argument", "too_large", "topic_not_allowed"])
def test_what_no_repetition_can_mend_is_dead_at_once(bench: Bench, reason: str) -> None:
    """With its reason, counted, and its neighbours sent."""
    bench.insert("good", "bad")
    bench.publisher.failing["bad"] = Failed(reason, "no")
    bench.turns()
    assert states(bench) == {"good": "sent", "bad": "dead"}
    assert (bench.store.rows["bad"].attempts, bench.store.rows["bad"].last_error) == (1, f"{reason}: no")
    assert bench.count(m.DEAD) == 1


def test_a_dead_task_is_sent_when_an_operator_says_so(bench: Bench) -> None:
    """By the DML of the design; once it is sent, SentAt alone is enough."""
    bench.insert("a")
    bench.publisher.failing["a"] = Failed("invalid_argument", "no")
    bench.turns()
    bench.publisher.failing.clear()
    row = bench.store.rows["a"]
    row.available_at, row.attempts, row.expires_at = None, 0, None
    bench.turns()
    row.sent_at = None
    bench.turns()
    assert bench.publisher.ids() == ["a", "a"]


def test_an_outage_costs_no_attempt_and_no_write_and_no_other_topic(bench: Bench) -> None:
    """Tasks stay as they were; the others go on; afterwards all are sent, each once."""
    bench.insert(*[f"o{n}" for n in range(50)])
    bench.insert("i0", topic="invoices")
    bench.publisher.down[TOPIC] = AWAY
    for second in range(1, 60):
        bench.turns()
        assert states(bench)[f"i{second - 1}"] == "sent"
        assert bench.store.rows["o0"].available_at is None
        bench.insert(f"i{second}", topic="invoices")
        bench.wait(1)
    assert attempts(bench) == 0
    probes = [ids for ids in bench.publisher.requests if ids[0].startswith("o")]
    assert 5 <= len([ids for ids in probes if len(ids) == 1]) <= 12
    assert len([ids for ids in probes if len(ids) > 1]) <= 2
    del bench.publisher.down[TOPIC]
    until_quiet(bench, 11)
    assert bench.unsent() == []
    assert len(bench.publisher.ids()) == len(set(bench.publisher.ids()))
    assert bench.count(m.DEAD) == 0


def test_who_met_an_outage_goes_alone_afterwards(bench: Bench) -> None:
    """So that one message that was the reason takes no others along."""
    bench.insert("a", "b", "c")
    bench.publisher.down[TOPIC] = AWAY
    bench.turns()
    bench.publisher.down.clear()
    bench.wait(1)
    bench.turns()
    assert sorted(map(len, bench.publisher.requests)) == [1, 1, 1, 3]
    bench.insert("d", "e")
    bench.turns()
    assert sorted(bench.publisher.requests[-1]) == ["d", "e"]


def test_a_message_that_always_times_out_is_charged_alone_and_becomes_dead(bench: Bench) -> None:
    """Its neighbours are sent, and later ones beside it within seconds, none of them charged."""
    bench.insert(*[str(n) for n in range(9)], "poison")
    bench.publisher.failing["poison"] = LATE
    until_quiet(bench, 30)
    assert [id for id, state in states(bench).items() if state != "sent"] == ["poison"]
    for n in range(9, 2000):
        bench.insert(str(n))
        until_quiet(bench, 12)
        assert states(bench)[str(n)] == "sent"
        if states(bench)["poison"] == "dead":
            break
    poison = bench.store.rows["poison"]
    assert (states(bench)["poison"], poison.attempts, poison.last_error) == (
        "dead",
        10,
        "deadline_exceeded: no answer",
    )
    assert attempts(bench) == 10


def test_an_outage_after_a_success_makes_nobody_dead(bench: Bench) -> None:
    """Who met an outage, and meets the next one while nothing of its topic is sent, is charged once at most."""
    bench.insert("a", "b", "c")
    bench.publisher.down[TOPIC] = AWAY
    bench.turns()
    bench.publisher.down.clear()
    bench.publisher.failing |= dict.fromkeys("ac", AWAY)  # a moment in which one of three gets through
    for _ in range(20):
        bench.wait(1)
        bench.turns()
        if "b" in bench.publisher.ids():
            break
    bench.publisher.down[TOPIC] = AWAY
    until_quiet(bench, 3600, step=2)
    assert states(bench)["b"] == "sent"
    assert "dead" not in states(bench).values()
    assert max(row.attempts for row in bench.store.rows.values()) <= 1


@pytest.mark.parametrize("reason", ["credentials", "unauthenticated", "resource_exhausted"])
def test_what_no_message_can_cause_is_charged_to_none(bench: Bench, reason: str) -> None:
    """Also while others of the topic are sent."""
    bench.insert(*[str(n) for n in range(10)], "a", "b")
    bench.publisher.failing |= dict.fromkeys("ab", Failed(reason, "?"))
    for n in range(200):
        bench.insert(f"more{n}")
        until_quiet(bench, 2)
    assert attempts(bench) == 0
    bench.publisher.failing.clear()
    until_quiet(bench, 15)
    assert bench.unsent() == []


def test_poison_messages_that_fail_together_are_found_together() -> None:
    """Twenty of them, each in a transaction of its own: the good ones wait for minutes, not for an hour."""
    bench = Bench(size=1, groups=8)
    bench.insert(*[f"poison{n}" for n in range(20)], *[f"good{n}" for n in range(50)])
    bench.publisher.failing = {f"poison{n}": LATE for n in range(20)}
    minutes = 0
    while any(id.startswith("good") for id in bench.unsent()):
        until_quiet(bench, 60)
        minutes += 1
        assert minutes < 12


def test_a_probe_of_several_groups_doubles_the_rest_once() -> None:
    """A transaction for each task, and a missing topic: somebody makes it, and the tasks go out within seconds."""
    bench = Bench(size=1, groups=8)
    bench.insert(*[str(n) for n in range(50)], topic="missing")
    until_quiet(bench, 5)
    bench.publisher.topics.add("projects/test-project/topics/missing")
    until_quiet(bench, 20)
    assert bench.unsent() == []


def test_two_tasks_of_which_one_always_times_out_do_not_block_each_other(bench: Bench) -> None:
    """Whichever is drawn first as a probe."""
    for n in range(10):
        bench.insert(f"good{n}", f"poison{n}")
        bench.publisher.failing[f"poison{n}"] = LATE
        until_quiet(bench, 20)
        assert states(bench)[f"good{n}"] == "sent"


class Flaky(FakePublisher):
    """Nine requests in ten meet a used-up quota."""

    def __init__(self, *topics: str) -> None:
        """Draw with a seed."""
        super().__init__(*topics)
        self.share = 0.9
        self._random = Random(5)

    def _request(self, name: str, rows: Sequence[Row]) -> dict[str, Outcome]:
        if rows and self._random.random() < self.share:
            return dict.fromkeys([row.id for row in rows], Failed("resource_exhausted", "quota"))
        return super()._request(name, rows)


def test_a_quota_that_is_used_up_makes_no_task_dead() -> None:
    """Some are sent all the while, so each failure follows a success of its topic; it is nobody's fault."""
    bench = Bench()
    publisher = Flaky("orders")
    bench.relay = bench.another(publisher=publisher, size=100, groups=8)
    for second in range(1500):
        bench.insert(*[f"{second}-{n}" for n in range(5)])
        for _ in range(5):
            if not bench.relay.turn().made_progress:
                break
        bench.wait(1)
    assert len(publisher.ids()) > 500
    assert "dead" not in states(bench).values()
    publisher.share = 0
    until_quiet(bench, 600)
    assert bench.unsent() == []


def test_a_missing_topic_rests_and_only_probed_tasks_are_charged(bench: Bench) -> None:
    """The first group costs nobody; each probe at most ten."""
    bench.insert(*[str(n) for n in range(100)], topic="missing")
    bench.turns()
    assert attempts(bench) == 0
    charged = []
    for _ in range(4):
        bench.wait(20)
        before = attempts(bench)
        bench.turns()
        charged.append(attempts(bench) - before)
    assert charged == [10, 10, 10, 10]
    assert set(states(bench).values()) == {"ready", "put off"}


def test_a_topic_that_comes_back_within_the_hour_loses_nothing(bench: Bench) -> None:
    """However often its tasks were charged: none is dead before it is a day old; then all are sent and clean."""
    now = bench.store.now
    bench.insert(*[str(n) for n in range(30)], topic="missing", created_at=now)
    until_quiet(bench, 3600, step=5)
    assert max(row.attempts for row in bench.store.rows.values()) >= 3
    assert "dead" not in states(bench).values()
    bench.publisher.topics.add("projects/test-project/topics/missing")
    until_quiet(bench, 2 * 3600, step=60)
    assert set(states(bench).values()) == {"sent"}
    assert attempts(bench) == 0
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)


def test_tasks_of_a_topic_that_never_comes_are_dead_after_a_day(bench: Bench) -> None:
    """After the most attempts, and not before --dead-after."""
    bench.insert("a", topic="missing", created_at=bench.store.now)
    until_quiet(bench, 23.9 * 3600, step=600)
    assert states(bench) == {"a": "put off"}
    assert bench.store.rows["a"].attempts > 10
    until_quiet(bench, 2 * 3600, step=600)
    assert states(bench) == {"a": "dead"}
    assert (bench.store.rows["a"].last_error or "").startswith("not_found: ")


def test_a_failed_commit_charges_nothing(bench: Bench) -> None:
    """The row is as it was, nothing is counted as dead, and the attempt comes again."""
    bench.insert("bad")
    bench.publisher.failing["bad"] = Failed("invalid_argument", "no")
    bench.store.before_commit = times(1, lambda: StoreError("deadline exceeded"))
    assert [bench.relay.turn().made_progress, bench.relay.turn().made_progress] == [True, False]  # a topic was found
    assert (states(bench), bench.count(m.DEAD)) == ({"bad": "ready"}, 0)
    bench.turns()
    assert (states(bench), bench.count(m.DEAD)) == ({"bad": "dead"}, 1)


def test_a_run_again_leaves_what_another_worker_has_charged_meanwhile(bench: Bench) -> None:
    """Its charge stands: the row has another attempt and another time, and ours was on the row before."""
    bench.insert("bad")
    bench.publisher.failing["bad"] = ODD
    later = bench.store.now + timedelta(hours=1)
    abort_once(bench, "bad", attempts=4, available_at=later)
    bench.turns()
    assert (bench.store.rows["bad"].attempts, bench.store.rows["bad"].available_at) == (4, later)
    assert len(bench.publisher.requests) == 1


def test_a_failure_says_nothing_of_a_row_that_was_written_since(bench: Bench) -> None:
    """An operator gave it more time while the transaction was run: it is not dead, and sent in the same turn."""
    bench.insert("a", expires_at=bench.store.now)
    abort_once(bench, "a", expires_at=None)
    bench.turns()
    assert states(bench) == {"a": "sent"}
    assert (bench.publisher.ids(), bench.count(m.DEAD)) == (["a"], 0)


def test_a_run_again_does_not_mark_what_was_written_meanwhile(bench: Bench) -> None:
    """Perhaps an operator wants it sent again, and it failed since: in doubt a duplicate, which is counted."""
    bench.insert("a")
    abort_once(bench, "a", attempts=1, available_at=bench.store.now + timedelta(hours=1))
    bench.turns()
    assert (states(bench), bench.count(m.ALREADY_PUBLISHED)) == ({"a": "put off"}, 1)
    bench.wait(3600)
    bench.turns()
    assert (states(bench), bench.publisher.ids()) == ({"a": "sent"}, ["a", "a"])


def abort_once(bench: Bench, id: str, **columns: Any) -> None:
    """Let the next commit be aborted by somebody who writes columns of a row."""

    def abort() -> None:
        bench.store.before_commit = lambda: None
        for name, value in columns.items():
            setattr(bench.store.rows[id], name, value)
        raise Abort

    bench.store.before_commit = abort


def test_an_expired_task_is_dead_and_not_sent(bench: Bench) -> None:
    """By the database's time at the claim, with the reason; one that expires later is sent."""
    now = bench.store.now
    bench.insert("expired", expires_at=now)
    bench.insert("good", expires_at=now + timedelta(seconds=1))
    bench.turns()
    assert states(bench) == {"expired": "dead", "good": "sent"}
    assert (bench.store.rows["expired"].last_error or "").startswith("expired: ExpiresAt was 2026-01-01T12:00:00")
    assert bench.publisher.ids() == ["good"]


def test_a_task_that_was_sent_before_does_not_expire(bench: Bench) -> None:
    """Its mark took the time away, so an operator who sends it again gets what he asked for."""
    bench.insert("a", expires_at=bench.store.now + timedelta(seconds=1))
    bench.turns()
    bench.wait(3600)
    bench.store.rows["a"].sent_at = None
    bench.turns()
    assert bench.publisher.ids() == ["a", "a"]


def test_a_run_again_after_the_expiry_marks_what_was_published_before_it(bench: Bench) -> None:
    """It went out in time."""
    bench.insert("a", expires_at=bench.store.now + timedelta(seconds=1))

    def abort_and_let_time_pass() -> None:
        bench.store.before_commit = lambda: None
        bench.store.now += timedelta(seconds=5)
        raise Abort

    bench.store.before_commit = abort_and_let_time_pass
    bench.turns()
    assert states(bench) == {"a": "sent"}


def test_a_task_that_was_put_off_between_poll_and_lock_is_left_alone(bench: Bench) -> None:
    """Neither sent nor charged."""
    bench.insert("a")
    later = bench.store.now + timedelta(hours=1)
    overtake(bench, lambda: setattr(bench.store.rows["a"], "available_at", later))
    bench.turns()
    row = bench.store.rows["a"]
    assert (row.attempts, row.available_at, bench.publisher.ids()) == (0, later, [])


def test_an_undecodable_body_is_dead_with_a_reason_and_without_a_payload(bench: Bench) -> None:
    """What was in it is nobody's matter."""
    bench.store.insert("bad", "orders", b"\xff\xff secret")
    bench.store.insert("crowded", "orders", b"\x12\x06\x0a\x04abcd" * 201)
    bench.store.insert("good", "orders", serialized())
    bench.turns()
    assert states(bench) == {"bad": "dead", "crowded": "dead", "good": "sent"}
    said = "undecodable: Data is not a serialized google.pubsub.v1.PubsubMessage"
    assert bench.store.rows["bad"].last_error == said
    assert bench.store.rows["crowded"].last_error == f"{said}, or has more than 200 fields"


def test_a_task_that_failed_before_shares_no_request(bench: Bench) -> None:
    """Also if another worker charged it: the row tells."""
    bench.insert("a", "b")
    bench.insert("again", attempts=1)
    bench.turns()
    assert sorted(map(sorted, bench.publisher.requests)) == [["a", "b"], ["again"]]


def test_a_failure_that_another_worker_made_good_between_two_runs_is_not_counted(bench: Bench) -> None:
    """The second run finds the task sent: nobody is dead."""
    bench.insert("a")
    bench.publisher.failing["a"] = Failed("invalid_argument", "no")

    abort_once(bench, "a", sent_at=bench.store.now)
    turns = bench.turns()
    assert bench.count(m.DEAD) == 0
    assert sum(turn.charged for turn in turns) == 0


def test_a_topic_that_rests_from_now_on_lets_the_others_go_at_once(bench: Bench) -> None:
    """The turn that found it out is followed by a poll without it, not by a wait; so is the one that found it well."""
    bench.insert("a")
    bench.relay.turn()
    bench.publisher.down[TOPIC] = AWAY
    assert bench.relay.turn().made_progress
    assert not bench.relay.turn().made_progress
    assert bench.store.looks[-1].topics == frozenset()

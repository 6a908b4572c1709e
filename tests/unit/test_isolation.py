"""What must hold nobody else up, at size: poison, missing topics, pauses, limits, schedules; on the fakes."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from outbox.states import NEVER
from publishworker.task import Failed, TopicLimit
from tests.support.relay_bench import Bench

MANY = 2_000


def large(**options: object) -> Bench:
    """Return a bench with the worker's default sizes: 100 tasks a group, 8 groups."""
    return Bench(size=100, groups=8, group_bytes=8_000_000, **options)


def missing(bench: Bench) -> None:
    """Tasks of a topic that does not exist."""
    bench.insert(*[f"bad{n}" for n in range(MANY)], topic="missing", priority=100)


def undecodable(bench: Bench) -> None:
    """Tasks of the good ones' own topic, with bodies that are no messages."""
    for n in range(MANY):
        bench.store.insert(f"bad{n}", "orders", b"\xff\xff", priority=100)


def missing_topics(bench: Bench) -> None:
    """Tasks of twenty topics that do not exist."""
    for n in range(MANY):
        bench.insert(f"bad{n}", topic=f"missing{n % 20}", priority=100)


@pytest.mark.parametrize("poison", [missing, undecodable, missing_topics])
def test_poison_keeps_good_tasks_waiting_for_one_poll_after_its_first_attempt(poison: Callable[[Bench], None]) -> None:
    """Once all the poison that is before them has been tried, the next poll's turn sends the good ones.

    A missing topic has been tried when one of its groups was; a bad body, when it was itself.
    """
    bench = large()
    poison(bench)
    bench.insert(*[f"good{n}" for n in range(100)], priority=0)

    def untried() -> set[str]:
        of = {
            row.id: row.id if poison is undecodable else row.topic for row in bench.store.rows.values() if row.priority
        }
        return set(of.values()) - {of.get(id, "") for id in bench.store.claimed}

    for _ in range(40):
        if not untried():
            break
        bench.relay.turn()
    assert not untried()
    bench.relay.turn()
    assert sum(id.startswith("good") for id in bench.publisher.ids()) == 100


@pytest.mark.parametrize("poison", [missing, undecodable])
def test_good_tasks_that_come_later_go_out_with_the_next_poll(poison: Callable[[Bench], None]) -> None:
    """For an hour of probes and retries: each good task is sent by the first turn that can see it."""
    bench = large()
    poison(bench)
    for _ in range(10):
        bench.turns()
    for n in range(120):
        bench.wait(30)
        bench.insert(f"good{n}", priority=0)
        bench.turns()
        assert bench.store.rows[f"good{n}"].sent_at is not None


def test_a_paused_topic_holds_no_other_and_is_not_asked_for() -> None:
    """2,000 urgent tasks that wait behind a pause cost the poll nothing."""
    bench = large()
    bench.insert(*[f"p{n}" for n in range(MANY)], topic="invoices", priority=100)
    bench.store.paused = {"invoices"}
    bench.insert(*[f"good{n}" for n in range(100)], priority=0)
    turns = bench.turns()
    assert len(bench.publisher.ids()) == 100
    assert len(turns) <= 3
    assert all("invoices" not in look.topics for look in bench.store.looks)
    assert max(turn.polled for turn in turns) == 100


def test_scheduled_tasks_are_sent_when_they_are_due_and_never_before() -> None:
    """By the database's time, whatever the worker's own clock says; the most urgent of the due ones first."""
    bench = large()
    due_at = bench.store.now + timedelta(minutes=10)
    bench.insert(*[f"later{n}" for n in range(MANY)], available_at=due_at)
    bench.insert("urgent", available_at=due_at, priority=100)
    bench.seconds += 10**6
    assert [turn.polled for turn in bench.turns()][-1] == 0
    bench.store.now = due_at - timedelta(microseconds=1)
    bench.turns()
    assert bench.publisher.ids() == []
    bench.store.now = due_at
    bench.relay.turn()
    assert "urgent" in bench.publisher.ids()
    bench.turns()
    assert bench.unsent() == []


def test_a_rate_is_kept_and_holds_no_other_topic(bench: Bench) -> None:
    """Ten a second with a burst of five: 5 at once, then 10 each second, however often the relay turns."""
    bench.insert(*[str(n) for n in range(100)], priority=100)
    bench.store.limits = {"orders": TopicLimit(rate=10, burst=5)}
    sent = []
    for n in range(30):
        bench.insert(f"i{n}", topic="invoices")
        for _ in range(4):
            bench.relay.turn()
        assert bench.store.rows[f"i{n}"].sent_at is not None
        sent.append(sum(not id.startswith("i") for id in bench.publisher.ids()))
        bench.wait(0.1)
    assert sent[0] == 5
    assert sent[-1] == pytest.approx(5 + 29, abs=2)
    bench.store.limits = {}
    bench.relay.turn()  # learns of it
    bench.turns()
    assert bench.unsent() == []


def test_a_topic_at_its_limit_is_not_asked_for(bench: Bench) -> None:
    """Its tasks cost the poll nothing until there is something to take again."""
    bench.insert("a", "b")
    bench.store.limits = {"orders": TopicLimit(rate=1, burst=1)}
    bench.turns()
    assert (len(bench.publisher.ids()), bench.store.looks[-1].topics) == (1, frozenset())
    bench.wait(1)
    bench.relay.turn()
    assert bench.store.looks[-1].topics == {"orders"}


def test_a_topic_that_waits_for_its_rate_wakes_the_worker_in_time(bench: Bench) -> None:
    """Not at the end of a poll interval; a rest is as good a reason."""
    bench.insert("a", "b")
    bench.store.limits = {"orders": TopicLimit(rate=4, burst=1)}
    turns = bench.turns()
    assert turns[-1].again_in == pytest.approx(0.25)
    bench.wait(0.25)
    bench.turns()
    assert bench.unsent() == []
    bench.insert("c", topic="missing")
    again_in = bench.turns()[-1].again_in
    assert again_in is not None
    assert again_in <= 1


def test_what_was_taken_and_not_sent_costs_no_rate(bench: Bench) -> None:
    """Another worker had sent it: the tokens are given back."""
    bench.store.limits = {"orders": TopicLimit(rate=0.001, burst=3)}
    bench.insert("warm")
    bench.turns()
    bench.insert("a", "b")
    claim = bench.store.claim

    def claim_too_late(ids: list[str], *arguments: object) -> object:
        bench.store.rows[ids[0]].sent_at = bench.store.now
        bench.store.claim = claim
        return claim(ids, *arguments)

    bench.store.claim = claim_too_late
    bench.turns()
    bench.insert("c")
    bench.turns()
    assert len(bench.publisher.ids()) == 3


def test_no_more_than_the_allowed_number_is_in_flight(bench: Bench) -> None:
    """Each group is as small as what is left of MaxInFlight, and all goes out in the end."""
    bench.insert(*[str(n) for n in range(20)])
    bench.store.limits = {"orders": TopicLimit(in_flight=3)}
    for _ in range(10):
        bench.relay.turn()
    assert max(map(len, bench.publisher.requests)) == 3
    assert bench.unsent() == []


def test_the_parts_of_a_fleet_add_up_to_the_limit() -> None:
    """Two workers that see each other have half of the rate each."""
    bench = Bench()
    bench.store.workers = {"other": bench.store.now}
    bench.insert(*[str(n) for n in range(50)])
    bench.store.limits = {"orders": TopicLimit(rate=10, burst=10)}
    for _ in range(10):
        bench.relay.turn()
    assert len(bench.publisher.ids()) == 5


def test_dead_tasks_cost_the_poll_nothing(bench: Bench) -> None:
    """However many."""
    bench.insert(*[str(n) for n in range(MANY)], available_at=NEVER, attempts=10, last_error="not_found: gone")
    bench.insert("good")
    assert [turn.polled for turn in bench.turns()] == [0, 1, 0]


def test_the_share_of_lower_priorities_counts_for_the_limit() -> None:
    """A group that lower priorities are owed takes of the same tokens."""
    bench = Bench(fair_share=0.5)
    bench.insert(*[f"high{n}" for n in range(200)], priority=100)
    bench.insert(*[f"low{n}" for n in range(200)], priority=0)
    for _ in range(5):  # without a limit, until something is owed
        bench.relay.turn()
    bench.store.limits = {"orders": TopicLimit(in_flight=6)}
    bench.relay.turn()
    for _ in range(20):
        bench.publisher.requests.clear()
        bench.relay.turn()
        assert sum(map(len, bench.publisher.requests)) <= 6


def test_hanging_topics_leave_places_for_others() -> None:
    """However many there are: their probes have a quarter of the places, and a good task goes at once."""
    bench = Bench(groups=8)
    topics = [f"silent{n}" for n in range(30)]
    for topic in topics:
        bench.publisher.topics.add(f"projects/test-project/topics/{topic}")
        bench.publisher.down[f"projects/test-project/topics/{topic}"] = Failed("deadline_exceeded", "no answer")
        bench.insert(f"{topic}-task", topic=topic, priority=100)
    for _ in range(20):
        bench.turns()
        bench.wait(1)
    bench.wait(11)  # all may be probed now
    before = bench.store.claimed.total()
    bench.relay.turn()
    assert bench.store.claimed.total() - before == 2
    bench.insert("good")
    bench.turns()
    assert "good" in bench.publisher.ids()


def test_a_pause_keeps_the_limits() -> None:
    """Who resumes a topic gets no second burst."""
    bench = Bench()
    bench.insert(*[str(n) for n in range(50)])
    bench.store.limits = {"orders": TopicLimit(rate=0.001, burst=5)}
    for _ in range(4):
        bench.turns()
        bench.store.paused = {"orders"}
        bench.turns()
        bench.store.paused = set()
    bench.turns()
    assert len(bench.publisher.ids()) == 5

"""Who is sent first, and who gets a share: priorities, lower ones, ready and due tasks."""

from collections import Counter
from datetime import timedelta

import pytest

from publishworker.turn.relay import Relay
from tests.support.relay_bench import Bench, SlowPublisher


def test_priorities_go_first_over_all_shards() -> None:
    """Ten urgent tasks go out in the turn that first sees them, before 490 others that are as old."""
    bench = Bench(size=50, groups=2)
    bench.insert(*[f"low{n}" for n in range(490)], priority=0)
    bench.insert(*[f"high{n}" for n in range(10)], priority=100)
    assert bench.relay.turn().discovered
    bench.relay.turn()
    assert {f"high{n}" for n in range(10)} <= set(bench.publisher.ids())
    assert len(bench.publisher.ids()) <= 100


def test_a_high_priority_task_goes_before_ten_thousand_low_ones() -> None:
    """Only the groups that are in flight when it comes go before it."""
    bench = Bench(size=50, groups=2)
    bench.insert(*[f"low{n}" for n in range(10_000)], priority=0)
    bench.relay.turn(), bench.relay.turn()
    before = len(bench.publisher.ids())
    bench.insert("high", priority=100)
    bench.relay.turn()
    assert "high" in bench.publisher.ids()[before : before + 100]


def endless(bench: Bench, relay: Relay, sent: int, most: int) -> Counter[str]:
    """Turn with an endless stream of urgent tasks and many of two lower priorities; count what is sent."""
    bench.insert(*[f"mid{n}" for n in range(sent)], priority=50)
    bench.insert(*[f"low{n}" for n in range(sent)], priority=0)
    urgent = 0
    for _ in range(most):
        missing = 1200 - sum(row.sent_at is None and row.priority == 100 for row in list(bench.store.rows.values()))
        bench.insert(*[f"high{urgent + n}" for n in range(missing)], priority=100)
        urgent += missing
        relay.turn()
        if len(bench.publisher.ids()) >= sent:
            break
    return Counter(id.rstrip("0123456789") for id in bench.publisher.ids()[:sent])


@pytest.mark.parametrize(("groups", "share"), [(1, 0.1), (2, 0.1), (4, 0.1), (8, 0.1), (32, 0.1), (8, 0.25), (8, 0.5)])
def test_an_endless_stream_of_urgent_tasks_leaves_lower_ones_their_share(groups: int, share: float) -> None:
    """For each lower priority in turn, although every range is full of urgent tasks."""
    bench = Bench(size=5, groups=groups, fair_share=share)
    kinds = endless(bench, bench.relay, 1500, 1000)
    assert kinds.total() == 1500
    lower = (kinds["mid"] + kinds["low"]) / 1500
    assert share * 0.8 <= lower <= share * 1.2
    assert min(kinds["mid"], kinds["low"]) >= (kinds["mid"] + kinds["low"]) / 4
    assert set(bench.store.claimed.values()) == {1}


def test_lower_priorities_keep_their_share_while_groups_are_slow() -> None:
    """Turns in which every place is taken, and nothing was polled, say nothing about who waits."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders")
    publisher.seconds = 0.3  # longer than a turn waits
    kinds = endless(bench, bench.another(size=5, groups=2, fair_share=0.25), 100, 200)
    assert kinds["mid"] + kinds["low"] >= 15


def test_a_task_that_goes_by_the_share_does_not_go_with_the_others_as_well() -> None:
    """The urgent tasks are suddenly few, and the rest of the places take what there is: each task is claimed once."""
    bench = Bench(size=10, groups=4, fair_share=0.5)
    bench.insert(*[f"high{n}" for n in range(200)], priority=100)
    bench.insert(*[f"low{n}" for n in range(5)], priority=0)
    bench.relay.turn(), bench.relay.turn()
    few = [id for id in bench.unsent() if id.startswith("high")][:3]
    bench.store.rows = {id: row for id, row in bench.store.rows.items() if id.startswith("low") or id in few}
    bench.relay.turn()
    assert bench.unsent() == []
    assert set(bench.store.claimed.values()) == {1}


def test_without_a_share_priority_is_strict() -> None:
    """`--fair-share 0`."""
    bench = Bench(size=10, groups=2, fair_share=0)
    bench.insert(*[f"high{n}" for n in range(500)], priority=100)
    bench.insert("low", priority=0)
    for _ in range(20):
        bench.relay.turn()
    assert "low" not in bench.publisher.ids()
    assert all(look.below is None for look in bench.store.looks)


def test_an_idle_worker_does_not_look_for_lower_priorities(bench: Bench) -> None:
    """What a poll reads whole has no tail: the share costs nothing while nothing waits."""
    bench.insert(*[str(n) for n in range(60)], priority=100)
    bench.turns()
    bench.store.looks.clear()
    for _ in range(5):
        bench.relay.turn()
    assert all(look.below is None for look in bench.store.looks)


def test_a_large_replay_does_not_starve_new_tasks() -> None:
    """A thousand due tasks, and new ones that come all the while: each get half of a turn until the last is sent."""
    bench = Bench(size=10, groups=4)
    past = bench.store.now - timedelta(hours=1)
    bench.insert(*[f"due{n}" for n in range(1000)], available_at=past, priority=100)
    bench.insert(*[f"new{n}" for n in range(1000)])
    bench.relay.turn(), bench.relay.turn()
    bench.publisher.published.clear()
    bench.relay._poller._look_further_seconds = 1e9  # no more news
    for _ in range(10):
        bench.relay.turn()
    kinds = Counter(id.rstrip("0123456789") for id in bench.publisher.ids())
    assert sum(kinds.values()) >= 390
    assert kinds["new"] == pytest.approx(kinds["due"], abs=20)

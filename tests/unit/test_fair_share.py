"""Which tasks are sent first, and which get a share: priorities, lower ones, ready and due tasks."""

from collections import Counter

import pytest

from publishworker.turn import in_flight
from publishworker.turn.relay import Relay
from tests.support.relay_bench import Bench, SlowPublisher


def test_a_high_priority_task_goes_before_ten_thousand_low_ones() -> None:  # OUT-ORDER-3
    """In all shards, however old the others are. Only batches that are in flight when it is committed go first."""
    bench = Bench(size=50, batches=2)
    bench.insert(*[f"low{n}" for n in range(10_000)], priority=0)
    bench.insert(*[f"high{n}" for n in range(10)], priority=100)
    assert bench.relay.turn().made_progress
    assert {f"high{n}" for n in range(10)} <= set(bench.publisher.ids())
    assert (before := len(bench.publisher.ids())) <= 100
    bench.insert("high", priority=100)
    bench.relay.turn()
    assert "high" in bench.publisher.ids()[before : before + 100]


def endless(bench: Bench, worker: Relay, sent: int, max_turns: int) -> Counter[str]:
    """Turn with an endless stream of urgent tasks and many of two lower priorities; count the sent tasks."""
    bench.insert(*[f"mid{n}" for n in range(sent)], priority=50)
    bench.insert(*[f"low{n}" for n in range(sent)], priority=0)
    urgent = 0
    for _ in range(max_turns):
        waiting = sum(row.sent_at is None and row.priority == 100 for row in list(bench.store.rows.values()))
        bench.insert(*[f"high{urgent + n}" for n in range(sent - waiting)], priority=100)
        urgent += sent - waiting
        worker.turn()
        if len(bench.publisher.ids()) >= sent:
            break
    return Counter(id.rstrip("0123456789") for id in bench.publisher.ids()[:sent])


@pytest.mark.parametrize(("batches", "share"), [(1, 0.1), (8, 0.5)])
def test_an_endless_stream_of_urgent_tasks_leaves_lower_ones_their_share(batches: int, share: float) -> None:
    bench = Bench(size=5, batches=batches, fair_share=share)
    sent = 500 if batches < 8 else 900
    kinds = endless(bench, bench.relay, sent, 1000)
    assert kinds.total() == sent
    lower = kinds["mid"] + kinds["low"]
    assert share * 0.8 <= lower / sent <= share * 1.2
    assert min(kinds["mid"], kinds["low"]) >= lower / 4
    assert set(bench.store.claimed.values()) == {1}
    for_lower = sum(request.below_priority is not None for request in bench.store.polls)
    assert share > 0.1 or for_lower < 0.5 * len(bench.store.polls)  # only when a batch is owed


def test_lower_priorities_keep_their_share_while_batches_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns in which every place is taken, and nothing was polled, say nothing about which tasks wait."""
    monkeypatch.setattr(in_flight, "MAX_TURN_WAIT_SECONDS", 0.02)
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders")
    publisher.seconds = 0.03  # longer than a turn waits
    kinds = endless(bench, bench.another(size=5, batches=2, fair_share=0.25), 100, 200)
    assert kinds["mid"] + kinds["low"] >= 15

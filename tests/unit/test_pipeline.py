"""Groups that fly on, and workers that divide the shards: what a turn leaves to others."""

import time
from datetime import timedelta
from typing import Any

import pytest

from publishworker.spanner import sql
from publishworker.task import Outcome, Turn
from publishworker.turn import relay as relay_module
from publishworker.turn import sampling
from publishworker.turn.fleet import divide
from tests.support.fakes import FakePublisher, serialized
from tests.support.relay_bench import Bench, SlowPublisher, run_at_once
from tests.support.waiting import eventually


def test_a_slow_group_does_not_hold_the_others_back() -> None:
    """One topic hangs: the other's tasks go out turn after turn, and no task in flight is taken twice."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders", "invoices")
    relay = bench.another(groups=4, stragglers=1, patience=0.01)
    bench.insert(*[f"o{n}" for n in range(200)])
    bench.insert("slow", topic="invoices", priority=100)
    publisher.hanging = {"invoices"}
    turns = [relay.turn() for _ in range(40)]
    assert {f"o{n}" for n in range(200)} == set(publisher.ids())
    assert turns[-1].in_flight == 1
    publisher.release.set()
    assert relay.finish().published == 1
    assert publisher.ids().count("slow") == 1
    assert bench.unsent() == []
    assert set(bench.store.claimed.values()) == {1}


def test_places_in_flight_count_for_a_topics_half() -> None:
    """Two groups of a topic hang: while another topic waits it gets no third place of four."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders", "invoices")
    relay = bench.another(size=1, groups=4, stragglers=4, patience=0.01)
    publisher.hanging = {"orders"}
    bench.insert(*[f"o{n}" for n in range(20)])
    bench.insert(*[f"i{n}" for n in range(20)], topic="invoices")
    for _ in range(8):
        relay.turn()
        assert relay._flights.by_topic()["orders"] <= 2
    assert len(publisher.ids()) >= 4
    publisher.release.set()
    relay.finish()


def test_a_poll_that_left_nothing_behind_waits_for_its_groups() -> None:
    """Where nothing waits there is no hurry: the turn reports all that it started, stragglers or not."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders")
    publisher.seconds = 0.02
    relay = bench.another(size=5, groups=4, stragglers=3, patience=0.0)
    bench.insert(*[f"o{n}" for n in range(40)])
    by_shard = {row.shard: row for row in bench.store.rows.values()}
    bench.store.rows = {row.id: row for row in by_shard.values()}  # one of each: no range of the window is full
    relay.turn()
    assert len(by_shard) == relay.turn().published == 10


def test_stragglers_are_left_behind_while_tasks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn ends when the wanted number has ended, or when patience has: the rest is reported later."""
    monkeypatch.setattr(relay_module, "LONGEST_TURN_WAIT", 25.0)
    begin = time.monotonic()
    for stragglers, patience in ((3, None), (0, 0.0)):
        bench = Bench()
        publisher = bench.publisher = SlowPublisher("orders", "invoices")
        publisher.hanging = {"invoices"}
        relay = bench.another(groups=4, stragglers=stragglers, patience=patience)
        bench.insert(*[f"o{n}" for n in range(200)])
        bench.insert(*[f"i{n}" for n in range(200)], topic="invoices")
        relay.turn()
        turn = relay.turn()
        assert 2 <= turn.in_flight <= 3
        assert turn.published + turn.in_flight * 10 == 40
        publisher.release.set()
        relay.finish()
    assert time.monotonic() - begin < 20


def test_while_every_place_is_taken_the_relay_waits_without_polls() -> None:
    """All groups hang: no poll, no busy loop, and a turn ends now and then so that the loop can beat."""
    bench = Bench()
    publisher = bench.publisher = SlowPublisher("orders")
    relay = bench.another(groups=2, stragglers=0, patience=0.01)
    bench.insert(*[f"o{n}" for n in range(40)])
    publisher.hanging = {"orders"}
    relay.turn(), relay.turn()
    polls = len(bench.store.looks)
    assert relay.turn() == Turn(in_flight=2, waits=True)
    assert len(bench.store.looks) == polls
    publisher.release.set()
    while bench.unsent():
        relay.turn()
    assert sorted(publisher.ids()) == sorted(bench.store.rows)


def test_a_worker_takes_tasks_of_its_own_shards_only(bench: Bench) -> None:
    """From the poll that tells of another worker on, also of what that poll itself found."""
    bench.insert("known")
    bench.turns()
    bench.publisher.published.clear()
    bench.store.workers |= {"worker": bench.store.now, "other": bench.store.now}
    bench.insert(*[str(n) for n in range(200)])
    mine = set(divide({"worker", "other"}, range(10))["worker"])
    bench.turns(50)
    sent = {bench.store.rows[id].shard for id in bench.publisher.ids()}
    assert sent == mine
    assert set(bench.store.looks[-1].shards) == mine


def test_a_worker_that_falls_silent_is_replaced(bench: Bench) -> None:
    """Its shards are polled again at once when its lease has ended; nothing is lost, whoever was right."""
    bench.store.workers |= {"worker": bench.store.now, "other": bench.store.now}
    bench.insert(*[str(n) for n in range(200)])
    bench.turns(50)
    assert bench.unsent()
    bench.store.now += timedelta(seconds=sql.SILENT_SECONDS)
    bench.store.workers["worker"] = bench.store.now
    assert bench.relay.turn().discovered
    bench.turns(50)
    assert bench.unsent() == []
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)


def test_a_wrong_division_costs_collisions_and_loses_nothing() -> None:
    """Two workers that both believe to be alone, with the same seed: each task is sent once."""
    bench = Bench(groups=1)
    bench.insert(*[str(n) for n in range(200)])
    others = bench.another(groups=1)
    run_at_once([lambda relay=relay: [relay.turn() for _ in range(60)] for relay in (bench.relay, others)])
    assert sorted(bench.publisher.ids()) == sorted(bench.store.rows)
    assert bench.unsent() == []


def test_large_messages_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once where there is room for three; a turn that can start none waits for one to land."""
    monkeypatch.setattr(sampling, "LEAST_BYTES", 0)
    most = [0]
    flying: list[str] = []

    class Watched(FakePublisher):
        def publish(self, topic: str, rows: Any, *arguments: Any, **keywords: Any) -> dict[str, Outcome]:
            flying.extend(row.id for row in rows)
            most[0] = max(most[0], len(flying))
            eventually(lambda: most[0] >= 3)
            answer = super().publish(topic, rows, *arguments, **keywords)
            for row in rows:
                flying.remove(row.id)
            return answer

    bench = Bench(publisher=Watched("orders", "invoices"), size=1, groups=8, group_bytes=100, stragglers=2, patience=0)
    for number in range(20):
        bench.store.insert(f"{number}", "orders", serialized(b"x" * 120))
    bench.turns(60)
    assert bench.unsent() == []
    assert most[0] == 3

"""The marks of one batch, and its report: durations, waiting times, trace IDs."""

import gc
import weakref
from datetime import timedelta
from typing import Any

import pytest

from outbox.message import RawPubsubMessage
from publishworker.delivery.claim import Cancelled, Delivered, Kind
from publishworker.delivery.delivery import Delivery, Tools
from publishworker.delivery.marking import SharedMarking
from publishworker.host import Host
from publishworker.spanner.write_errors import StoreError
from publishworker.turn.in_flight import delivery_of
from publishworker.types import CLAIM, COMMIT, PUBLISH, Answer, Failed, Published
from tests.support.fakes import Abort, FakePublisher, FakeStore, serialized
from tests.support.parts import claim_of, policy

HOUR = timedelta(hours=1)


class Bench(FakePublisher):
    def __init__(self) -> None:
        super().__init__("orders")
        self.store = FakeStore()
        self.seconds = 100.0

    def publish(self, *arguments: Any, **keywords: Any) -> dict[str, Answer]:
        self.seconds += 2
        return super().publish(*arguments, **keywords)

    def slow_commits(self, *errors: Exception) -> None:
        failing = list(errors)

        def commit() -> None:
            self.seconds += 3
            if failing:
                raise failing.pop(0)

        self.store.before_commit = commit

    def insert(self, *ids: str, **columns: Any) -> None:
        for id in ids:
            self.store.insert(id, "orders", **{"data": serialized(), **columns})

    def batch(self, *ids: str, skip_dead: bool = False, **batch: Any) -> Delivery:
        tools = Tools(
            store=self.store, publisher=self, policy=policy(skip_dead=skip_dead),
            marking=SharedMarking(Host()), host=Host(clock=lambda: self.seconds),
        )  # fmt: skip
        return delivery_of(claim_of("orders", *ids, **batch), tools)

    def deliver(self, *ids: str, **batch: Any) -> Delivered:
        return self.batch(*ids, **batch).run()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_batch_reports_its_phases_and_how_long_its_tasks_waited(bench: Bench) -> None:
    """By Spanner's clock up to the lock, then by the worker's. An aborted attempt counts towards the claim."""
    now = bench.store.now
    bench.insert("ready", created_at=now - HOUR)
    bench.insert("due", created_at=now - 9 * HOUR, available_at=now - 2 * HOUR)
    bench.insert("fresh", created_at=now - timedelta(seconds=0.25))
    bench.insert("early", created_at=now + HOUR)  # no task has waited for less than no time
    retried = {"available_at": now, "due_at": now - 3 * HOUR, "attempts": 8}
    bench.insert("retried", created_at=now - 9 * HOUR, **retried)
    bench.slow_commits(Abort())
    result = bench.deliver("ready", "due", "fresh", "early", "retried")
    assert result.aborted == 1
    assert result.phases == {CLAIM: 3, PUBLISH: 2, COMMIT: 3}
    assert result.latencies == {"ready": 3602, "due": 7202, "fresh": 2.25, "early": 0, "retried": 10802}
    bench.insert("once", created_at=bench.store.now - HOUR, at_most_once=True)
    assert bench.deliver("once", kind=Kind.MARK_FIRST).latencies == {"once": 3605}
    bench.store.away = True
    result = bench.deliver("a")
    assert result.error is not None
    assert result.phases.keys() == {CLAIM}


@pytest.mark.parametrize("errors", [[Abort()], [StoreError("no answer")], [Abort(), StoreError("no answer")]])
def test_a_task_that_is_cancelled_after_its_publish_is_reported_once(bench: Bench, errors: list[Exception]) -> None:
    """With its message ID, by the next run of the transaction or when it is marked again, also if the ID is reused."""
    bench.insert("gone", "again", "sent again", "stays")
    bench.insert("never sent", available_at=bench.store.now + HOUR)

    def commit() -> None:
        if errors:
            for id in ("gone", "again", "sent again", "never sent"):
                bench.store.rows.pop(id, None)
            bench.insert("again", created_at=bench.store.now)
            bench.insert("sent again", created_at=bench.store.now, sent_at=bench.store.now)
            raise errors.pop(0)

    bench.store.before_commit = commit
    batch = bench.batch("gone", "again", "sent again", "stays", "never sent")
    delivered = batch.run()
    later = [each for each in batch.mark_again() if isinstance(each, Cancelled)]
    found = [item for each in (delivered.cancelled(), *(each.message_ids for each in later)) for item in each.items()]
    messages = {id: answer.message_id for id, answer in delivered.answers.items() if isinstance(answer, Published)}
    assert sorted(found) == sorted((id, messages[id]) for id in ("gone", "again", "sent again"))
    assert set(delivered.uncommitted()) == (set(messages) if later else set())
    assert bench.store.rows["stays"].sent_at is not None
    assert bench.store.rows["again"].sent_at is None


@pytest.mark.parametrize("bad", ["bad", "last"])
def test_a_divided_batch_writes_each_part(bench: Bench, bad: str) -> None:
    """A part also locks the task behind it, and writes its change. The next part keeps this change."""
    bench.failing = {"head": Failed("data_loss", "no")}
    for key, ids in {"k": ("old", "older", "bad"), "l": ("head", "behind", "last")}.items():
        for id in ids:
            bench.insert(id, ordering_key=key, expires_at=bench.store.now if "old" in id else None)
    bench.store.refused.add(bad)
    batch = bench.batch("old", "older", "bad", "head", "behind", "last", keys="kkklll")
    result = batch.run()
    assert result.recorded.keys() >= {"old", "older", "head"}
    again = batch.mark_again()
    assert next(again).claim.ids == (bad,)
    assert batch.unmarked == {bad}
    assert {id for id, row in bench.store.rows.items() if row.blocked_by == "head"} == {"behind", "last"} - {bad}


def test_only_recorded_failures_report_their_traces(bench: Bench) -> None:
    expired = {"expires_at": bench.store.now - HOUR}
    for number, (id, columns) in enumerate({"expired": expired, "failing": {}, "good": {}}.items(), 1):
        message = RawPubsubMessage(attributes={"googclient_traceparent": f"00-{number:032x}-{1:016x}-01"})
        bench.insert(id, data=message.SerializeToString(), at_most_once=True, **columns)
    bench.failing = {"failing": Failed("invalid_argument", "no")}
    result = bench.deliver("expired", "failing", "good", kind=Kind.MARK_FIRST)
    traces = {id: mark.trace_id for id, mark in result.recorded.items()}
    assert traces == {"expired": f"{1:032x}", "failing": f"{2:032x}"}
    assert result.aborted == 0  # the second transaction, which undoes a mark, is no run of the first


def test_a_batch_leaves_the_memory_at_its_end(bench: Bench) -> None:
    """The garbage collector, which runs rarely, is not needed."""
    bench.insert("a")
    batch = bench.batch("a")
    batch.run()
    gc.disable()
    try:
        left = weakref.ref(batch)
        del batch
        assert left() is None
    finally:
        gc.enable()

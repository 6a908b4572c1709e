"""Tasks in doubt: which facts a worker remembers, for how long, and when it may publish again."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from publishworker.delivery.in_doubt import MAX_AGE_SECONDS, MAX_TASKS, PROBE_SECONDS, InDoubt
from publishworker.threads import REAL_THREADS, Queue, Thread
from publishworker.turn.batching import Limits
from publishworker.types import Batch, BatchResult, Key, LockedRow, Sent, Version

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ROW = LockedRow("a", "orders", b"", None, NOON, None, None)
AT_NOON = Version.of(ROW)


class Memory(InDoubt):
    """Tasks in doubt whose marks fail for the IDs in `refused`. `seconds` is the time."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.seconds = 0.0
        self.refused: Callable[[str], bool] = lambda _id: False
        self.marked: list[tuple[str, ...]] = []
        super().__init__(
            lambda batch, _decide: self.answer(batch), limits or Limits(1000, 1, 4), lambda: self.seconds, threads=self
        )

    def thread(self, *arguments: Any) -> Thread:
        return REAL_THREADS.thread(*arguments)

    def queue(self) -> Queue:
        return REAL_THREADS.queue()

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def answer(self, batch: Batch) -> BatchResult:
        self.marked.append(batch.ids)
        return BatchResult(batch, error="no" if any(map(self.refused, batch.ids)) else None)

    def fail(self, *ids: str, topic: str = "orders", key: str | None = None) -> None:
        version = AT_NOON._replace(ordering_key=key)
        tried, versions = dict.fromkeys(ids, Sent("1")), dict.fromkeys(ids, version)
        self.learn(BatchResult(Batch(topic, ids), answers=dict(tried), versions=versions, error="no answer"))

    def commit(self) -> None:
        self.learn(BatchResult(Batch("orders", ("other",))))

    def tries(self) -> list[tuple[str, ...]]:
        """Return the batches of marks that were tried now."""
        self.marked.clear()
        self.mark()
        while self.batches_in_flight:
            self._settle(self._marking.wait_for_one())
        return self.marked


def test_tasks_in_doubt_are_bounded_and_stay_until_they_are_marked() -> None:
    """The oldest beyond 10,000 are forgotten. Batches keep the limits of a turn and have one topic each."""
    doubts = Memory()
    doubts.fail(*[str(n) for n in range(MAX_TASKS + 5)])
    assert len(doubts.ids()) == MAX_TASKS
    batches = doubts.tries()
    assert min(int(ids[0]) for ids in batches) == 5
    assert [len(ids) for ids in batches] == [1000] * 4
    assert len(doubts.ids()) == MAX_TASKS - 4000
    doubts = Memory(Limits(10, 1, 9))
    doubts.fail("a")
    doubts.fail("b", topic="invoices")
    assert sorted(doubts.tries()) == [("a",), ("b",)]
    assert doubts.ids() == frozenset()


def test_a_task_is_in_doubt_for_fifteen_minutes() -> None:
    """After that it is published again."""
    doubts = Memory()
    doubts.refused = lambda _id: True
    doubts.fail("a", key="k")
    assert doubts.keys() == {Key("orders", "k")}
    doubts.seconds = MAX_AGE_SECONDS
    assert doubts.tries() == [("a",)]
    doubts.seconds += 0.001
    assert (doubts.tries(), doubts.ids(), doubts.is_paused) == ([], frozenset(), False)


@pytest.mark.parametrize(
    "columns",
    [
        {"id": "b"}, {"created_at": NOON + timedelta(seconds=1)}, {"data": b"repaired"}, {"topic": "invoices"},
        {"ordering_key": "k"}, {"times_sent": 1},
    ],
)  # fmt: skip
def test_a_task_in_doubt_matches_only_a_row_with_its_message(columns: dict[str, Any]) -> None:
    """A task that was registered again was not sent; one that was marked and then reset is to be sent again.

    Another worker may have deferred it, released it or recorded a failed attempt. It was published nevertheless.
    """
    doubts = Memory()
    doubts.fail("a")
    assert doubts.contains(ROW)
    assert doubts.contains(ROW._replace(available_at=NOON, expires_at=NOON, deferred=True, attempts=1))
    assert not doubts.contains(ROW._replace(**columns))


def test_nothing_is_published_until_a_transaction_commits_except_probes() -> None:
    """A probe is one task every 30 s. A mark that commits, or any other transaction, ends the suspension."""
    batches = [Batch("orders", ("x", "y"), keys=("k", "k"), releases=("z",), bytes=9), Batch("invoices", ("i",))]
    doubts = Memory()
    assert (doubts.may_publish, doubts.limit_to_probe(batches)) == (True, batches)
    for resume in (doubts.commit, doubts.tries):
        doubts.refused = lambda _id: True
        doubts.fail("a", "b")
        assert doubts.tries() == [("a", "b")]
        assert (doubts.is_paused, doubts.may_publish) == (True, False)
        doubts.seconds += PROBE_SECONDS
        assert doubts.may_publish
        assert doubts.limit_to_probe([]) == []
        deferral = Batch("orders", ("head", "x"), keys=("k", "k"), defers=True)
        assert doubts.limit_to_probe([deferral]) == []  # it publishes nothing
        assert doubts.limit_to_probe([deferral, *batches]) == [
            Batch("orders", ("x",), keys=("k",), releases=("y", "z"), bytes=9)
        ]
        assert not doubts.may_publish
        doubts.refused = lambda _id: False
        resume()
        assert (doubts.is_paused, doubts.limit_to_probe(batches)) == (False, batches)


def test_a_batch_without_published_tasks_suspends_nothing() -> None:
    doubts = Memory()
    doubts.learn(BatchResult(Batch("orders", ("a",)), error="no lock"))
    assert (doubts.is_paused, doubts.ids()) == (False, frozenset())


def test_while_others_commit_a_task_that_cannot_be_marked_is_tried_alone_and_less_often() -> None:
    """One refused row delays neither the other tasks of its batch nor the publishing of others."""
    doubts = Memory()
    doubts.refused = "bad".__eq__
    doubts.fail("a", "bad", "b")
    doubts.commit()
    assert doubts.tries() == [("a", "bad", "b")]
    assert sorted(doubts.tries()) == [("a",), ("b",), ("bad",)]
    assert (doubts.ids(), doubts.is_paused) == ({"bad"}, False)
    times = []
    for doubts.seconds in map(float, range(200)):
        times += [doubts.seconds] * len(doubts.tries())
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == PROBE_SECONDS


def test_at_exit_marks_are_tried_until_the_time_is_over() -> None:
    doubts = Memory()
    doubts.refused = lambda _id: doubts.seconds < 1
    doubts.fail("a")
    doubts.finish(0.5)
    assert doubts.ids() == {"a"}
    doubts.finish(5)
    assert doubts.ids() == frozenset()

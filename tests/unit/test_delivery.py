"""How long a group took, and how long its tasks waited: two clocks, put together in one place."""

from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

from publishworker.spanner.store import Store
from publishworker.task import Group, Outcome
from publishworker.telemetry import metrics as m
from publishworker.turn.delivery import Delivery
from publishworker.turn.retries import Retries
from tests.support.fakes import Abort, FakePublisher, FakeStore, serialized

HOUR = timedelta(hours=1)


class Slow(FakePublisher):
    """Takes two seconds for each call."""

    seconds = 100.0

    def publish(self, *arguments: Any, **keywords: Any) -> dict[str, Outcome]:
        """Let them pass."""
        self.seconds += 2
        return super().publish(*arguments, **keywords)

    def commits_in(self, seconds: float, *errors: Exception) -> Callable[[], None]:
        """Return what takes so long before each commit, the first of which fail."""
        failing = list(errors)

        def commit() -> None:
            self.seconds += seconds
            if failing:
                raise failing.pop()

        return commit


def delivery(store: Store, publisher: Slow) -> Delivery:
    """Return one whose clock is the publisher's."""
    retries = Retries(initial=1, longest=9, max_attempts=9, dead_after=9, random=Random(1))
    return Delivery(store, publisher, retries, 5, clock=lambda: publisher.seconds)


def test_a_group_tells_how_long_its_phases_took_and_how_long_its_tasks_waited() -> None:
    """By Spanner's clock up to the lock, then by the worker's; an aborted try counts as a part of the claim."""
    store, publisher = FakeStore(), Slow("orders")
    store.insert("ready", "orders", serialized(), created_at=store.now - HOUR)
    store.insert("due", "orders", serialized(), created_at=store.now - 9 * HOUR, available_at=store.now - 2 * HOUR)
    store.before_commit = publisher.commits_in(3, Abort())
    result = delivery(store, publisher).deliver(Group("orders", ("ready", "due")))
    assert result.runs == 2
    assert result.phases == {m.CLAIM: 3, m.PUBLISH: 2, m.COMMIT: 3}
    assert result.waited == {"ready": 3602, "due": 7202}


def test_a_task_that_is_marked_first_waits_for_that_commit_too() -> None:
    """At most once: the answer comes later, and the task has waited until then."""
    store, publisher = FakeStore(), Slow("orders")
    store.insert("once", "orders", serialized(), created_at=store.now - HOUR, at_most_once=True)
    store.before_commit = publisher.commits_in(3)
    result = delivery(store, publisher).deliver(Group("orders", ("once",), at_most_once=True))
    assert result.waited == {"once": 3605}


def test_a_claim_that_fails_has_no_commit() -> None:
    """Its time is the claim's."""
    store, publisher = FakeStore(), Slow()
    store.away = True
    result = delivery(store, publisher).deliver(Group("orders", ("a",)))
    assert result.error is not None
    assert result.phases.keys() == {m.CLAIM}

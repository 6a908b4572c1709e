"""What one group writes and tells: its marks, how long it took, how long its tasks waited, what its messages carry."""

from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

from outbox.message import RawPubsubMessage
from outbox.states import NEVER
from publishworker.spanner.store import Store, StoreError
from publishworker.task import Failed, Group, Outcome
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


def delivery(store: Store, publisher: FakePublisher, **options: Any) -> Delivery:
    """Return one whose clock is the publisher's."""
    retries = Retries(initial=1, longest=9, max_attempts=9, dead_after=9, random=Random(1))
    return Delivery(store, publisher, retries, 5, clock=lambda: getattr(publisher, "seconds", 0.0), **options)


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


def test_no_task_has_waited_for_less_than_no_time() -> None:
    """Its writer's CreatedAt may lie in the future; and what waits for a moment only has waited for that."""
    store, publisher = FakeStore(), FakePublisher("orders")
    store.insert("early", "orders", serialized(), created_at=store.now + HOUR)
    store.insert("now", "orders", serialized(), created_at=store.now - timedelta(seconds=0.25))
    assert delivery(store, publisher).deliver(Group("orders", ("early", "now"))).waited == {"early": 0.0, "now": 0.25}


def test_what_stands_behind_a_failed_task_is_parked_in_the_same_commit() -> None:
    """It has the time of the failed one, and no attempt."""
    store, publisher = FakeStore(), FakePublisher("orders")
    publisher.failing = {"a": Failed("data_loss", "no")}
    for number, id in enumerate(("a", "b", "c")):
        store.insert(id, "orders", serialized(), ordering_key="k", sequence=number)
    result = delivery(store, publisher).deliver(Group("orders", ("a", "b", "c"), keys=("k", "k", "k")))
    assert store.rows["a"].attempts == 1
    assert result.parked.keys() == {"b", "c"}
    for id in result.parked:
        row = store.rows[id]
        assert (row.attempts, row.available_at) == (0, store.rows["a"].available_at)


def test_what_a_group_has_sent_itself_shows_that_its_topic_works() -> None:
    """Who meets an outage beside it, and has met one before, is charged; else it would be nobody's fault."""
    store, publisher = FakeStore(), FakePublisher("orders")
    publisher.failing = {"a": Failed("deadline_exceeded", "no answer")}
    for id in ("a", "b"):
        store.insert(id, "orders", serialized())
    deliver = delivery(store, publisher).deliver
    assert deliver(Group("orders", ("a",), suspects=frozenset({"a"}), works=False)).charged == {}
    assert deliver(Group("orders", ("a", "b"), suspects=frozenset({"a"}), works=False)).charged.keys() == {"a"}


def test_behind_a_dead_task_that_is_passed_over_the_run_goes_on() -> None:
    """It died between the poll and the lock."""
    store, publisher = FakeStore(), FakePublisher("orders")
    store.insert("a", "orders", serialized(), ordering_key="k", sequence=1, available_at=NEVER)
    store.insert("b", "orders", serialized(), ordering_key="k", sequence=2)
    group = Group("orders", ("a", "b"), keys=("k", "k"))
    delivery(store, publisher).deliver(group)
    assert publisher.ids() == []
    delivery(store, publisher, pass_dead=True).deliver(group)
    assert publisher.ids() == ["b"]


def test_what_was_sent_in_a_run_before_is_told_though_its_row_is_gone() -> None:
    """It is in doubt, and nobody knows better: which row it was must be known."""
    store, publisher = FakeStore(), FakePublisher("orders")
    store.insert("a", "orders", serialized())
    store.insert("b", "orders", serialized())
    errors = [Abort(), StoreError("no answer")]

    def commit() -> None:
        store.rows.pop("a", None)
        raise errors.pop(0)

    store.before_commit = commit
    result = delivery(store, publisher).deliver(Group("orders", ("a", "b")))
    assert (result.error, sorted(result.published())) == ("no answer", ["a", "b"])
    assert result.published_versions().keys() == {"a", "b"}


def test_the_traces_of_what_is_charged_are_told_and_no_others() -> None:
    """Also of what was charged in an earlier commit of the same group."""
    store, publisher = FakeStore(), FakePublisher("orders")
    parents = {id: f"00-{number:032x}-{1:016x}-01" for number, id in enumerate(("expired", "failing", "good"), 1)}
    for id, parent in parents.items():
        message = RawPubsubMessage(attributes={"googclient_traceparent": parent})
        expired = {"expires_at": store.now - HOUR} if id == "expired" else {}
        store.insert(id, "orders", message.SerializeToString(), at_most_once=True, **expired)
    publisher.failing = {"failing": Failed("invalid_argument", "no")}
    result = delivery(store, publisher).deliver(Group("orders", tuple(parents), at_most_once=True))
    assert result.traces == {"expired": f"{1:032x}", "failing": f"{2:032x}"}

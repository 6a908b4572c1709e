"""Routes and retry policies of topics: where a batch publishes, and how its failures are recorded; on the fakes."""

import dataclasses
import math
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from outbox.table.controls import LIMITS, NO_CONTROLS, TopicControls
from publishworker.delivery.claim import Claim, ClaimedTask, Delivered, Kind
from publishworker.host import Host
from publishworker.topics.availability import Topics, split_valid
from publishworker.types import Failed
from tests.support.parts import policy
from tests.support.relay_bench import Bench

NEW = "projects/other/topics/orders-v2"
NOT_FOUND = Failed("not_found", "no such topic")


def claim(topic: str = "orders", kind: Kind = Kind.PUBLISH) -> Claim:
    return Claim(topic, (ClaimedTask("a", None, 0),), kind)


def topics(**controls: TopicControls) -> Topics:
    found = Topics(Host(random=Random(1)))
    found.apply(controls, 1)
    return found


def test_a_new_destination_is_tried_at_once_although_the_circuit_was_open(bench: Bench) -> None:
    """The former destination is missing. A worker reads the topic controls soon while a circuit is open."""
    bench.publisher.topics.clear()
    bench.insert("a")
    turns = bench.turns()
    assert bench.publisher.ids() == []
    assert turns[-1].seconds_to_change <= 1
    bench.publisher.topics.add(NEW)
    bench.store.control("orders", publish_to=NEW)
    bench.relay.turn()  # reads the topic controls
    bench.turns()
    assert bench.publisher.ids() == ["a"]


def test_each_change_of_a_route_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "publishworker")
    found = topics(orders=TopicControls(publish_to="orders-1"))
    found.apply({"orders": TopicControls(publish_to="orders-2")}, 1)
    found.apply({}, 1)
    assert caplog.messages == [f"Messages of topic orders go to {name}" for name in ("orders-1", "orders-2", "orders")]


ASKED, AGAIN = (TopicControls(probe_requested_at=datetime(2026, 11, 28, hour, tzinfo=UTC)) for hour in (1, 2))


@pytest.mark.parametrize(
    ("before", "changes", "is_due"),
    [
        (NO_CONTROLS, [TopicControls(paused=True), NO_CONTROLS], True),
        (NO_CONTROLS, [ASKED], True),
        (ASKED, [AGAIN], True),
        (ASKED, [dataclasses.replace(ASKED, max_attempts=3)], False),
        (ASKED, [NO_CONTROLS], False),
    ],
)
def test_the_end_of_a_pause_and_a_request_make_a_probe_due(
    before: TopicControls, changes: list[TopicControls], *, is_due: bool
) -> None:
    """So an operator who has repaired a topic does not wait for the next probe. It is a probe, not a whole batch."""
    found = topics(orders=before)
    for _ in range(9):
        found.observe(Delivered(found.permit(claim()), answers={"a": NOT_FOUND}))
    for each in (before, *changes):
        found.apply({"orders": each}, 1)
    assert found.unavailable == (frozenset() if is_due else {"orders"})
    assert [*found.circuit_states()] == ["orders"]
    assert found.admit([])[1] == {"orders": 1}


def test_a_batch_to_the_former_destination_says_nothing_about_the_new_one() -> None:
    found = topics()
    before = found.permit(claim())
    found.apply({"orders": TopicControls(publish_to=NEW)}, 1)
    assert found.observe(Delivered(before, answers={"a": NOT_FOUND})) is None
    assert found.circuit_states() == {}
    after = found.permit(claim())
    assert (before.destination, after.destination) == ("orders", NEW)
    change = found.observe(Delivered(after, answers={"a": NOT_FOUND}))
    assert change is not None
    assert [*found.circuit_states()] == ["orders"]


def test_a_topic_replaces_only_the_values_that_it_has() -> None:
    worker = policy()
    assert worker.for_topic(NO_CONTROLS) == worker
    changed = worker.for_topic(TopicControls(max_attempts=3, backoff_max_seconds=60.0))
    assert (changed.max_attempts, changed.longest) == (3, 60.0)
    assert (changed.initial, changed.dead_after, changed.random) == (1, 86_400, worker.random)
    late = worker.for_topic(TopicControls(backoff_initial_seconds=worker.longest + 1))
    assert late.longest == late.initial == worker.longest + 1


def test_a_deferral_ends_within_the_max_backoff_of_its_topic(bench: Bench) -> None:
    """Behind a head that is scheduled for much later."""
    bench.store.control("orders", backoff_max_seconds=5.0)
    bench.line("head", available_at=bench.store.now + timedelta(hours=9))
    bench.line("behind")
    bench.turns()
    assert bench.waits("behind") == pytest.approx(5, abs=0.1)


@pytest.mark.parametrize(
    ("controls", "sentence"),
    [
        ({"max_attempts": 0}, "max_attempts is 0. It must be a whole number from 1 to 1,000,000"),
        (
            {"backoff_initial_seconds": math.nan},
            "backoff_initial_seconds is nan. It must be a number from 0.05 to 3,600",
        ),
        ({"backoff_max_seconds": 1e30}, "backoff_max_seconds is 1e+30. It must be a number from 0.05 to 604,800"),
        ({"dead_after_seconds": -1.0}, "dead_after_seconds is -1.0. It must be a number from 0 to 31,536,000"),
        (
            {"backoff_initial_seconds": 60.0, "backoff_max_seconds": 5.0},
            "backoff_initial_seconds is 60.0. It must not exceed backoff_max_seconds, which is 5.0",
        ),
        ({"rate_per_second": 5.0}, "rate_per_second and burst go together. Set both or neither"),
        ({"burst": 5, "max_in_flight": 3}, "rate_per_second and burst go together. Set both or neither"),
        ({"rate_per_second": 5.0, "burst": 0}, "burst is 0. It must be a whole number from 1 to 1,000,000,000"),
        ({"max_in_flight": -7}, "max_in_flight is -7. It must be a whole number from 1 to 1,000,000,000"),
        *(
            (
                {"rate_per_second": rate, "burst": 5},
                f"rate_per_second is {rate!r}. It must be a number from 1e-09 to 1.79769313486e+308",
            )
            for rate in (0.0, -2.5, math.nan, math.inf, -math.inf, 5e-324)
        ),
    ],
)
def test_an_invalid_control_is_ignored_and_logged(
    controls: dict[str, Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other part of the row applies, and so do the rows of other topics. One line a minute for each topic."""
    limits, policy = {"max_in_flight": 2}, {"max_attempts": 3}
    is_limit = not {*LIMITS}.isdisjoint(controls)
    row = TopicControls(**controls, **(policy if is_limit else limits))
    found = topics(orders=row, invoices=TopicControls(max_in_flight=5))
    found.apply({"orders": row}, 1)
    assert found.permit(claim()).controls == TopicControls(**(policy if is_limit else limits))
    [line] = [each for each in caplog.messages if "ignored" in each]
    what = "The limits of topic orders are" if is_limit else "The retry policy of topic orders is"
    assert line == f"{what} ignored: {sentence}. See AsynchronousTaskTopics"


@pytest.mark.parametrize("to", ["", "ab", "goog-x", "projects/p/topics/", "a b c", "orders\n"])
def test_a_name_that_pubsub_refuses_is_no_destination(to: str) -> None:
    right, wrong = split_valid({"bad": TopicControls(publish_to=to), "good": TopicControls(publish_to=NEW)})
    assert right == {"bad": TopicControls(paused=True), "good": TopicControls(publish_to=NEW)}
    assert wrong["route", "bad"].startswith("Topic bad counts as paused: publish_to is ")

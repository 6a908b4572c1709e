"""Whether any unsent task is left to send, and of which topics."""

from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.table.controls import TopicControls
from outbox.table.ddl import Layout
from outbox.table.states import NEVER
from publishworker.spanner.store import any_to_send, topics_to_send
from tests.support.operations import OF_STATES, insert, row
from tests.support.parts import poll_request
from tests.support.store_harness import SpannerHarness

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)
LATE = NEVER - timedelta(microseconds=1)
ALL = range(10)


@pytest.fixture
def harness(database: Database) -> SpannerHarness:
    return SpannerHarness(database)


def test_pending_and_retrying_tasks_are_work(database: Database, harness: SpannerHarness) -> None:
    """Scheduled, blocked, dead and paused tasks are not: `drain` must not wait for them."""
    key = {"ordering_key": "same-shard"}
    for n in range(5):
        harness.insert(f"dead {n}", topic="dead", available_at=NEVER, **key)
        harness.insert(f"paused {n}", topic="paused", **key)
        same = {"available_at": LATE - timedelta(days=n // 4), "created_at": PAST - timedelta(days=n % 2)}
        harness.insert(f"scheduled {n}", priority=50 + n % 3, **same, **key)
        harness.insert(f"scheduled at once {n}", available_at=LATE, created_at=PAST, **key)
    harness.control("paused", TopicControls(paused=True))
    assert not any_to_send(harness.store)
    harness.insert("misrouted", topic="misrouted", **key)
    harness.control("misrouted", TopicControls(publish_to="no topic"))
    assert (any_to_send(harness.store), any_to_send(harness.store, misrouted=True)) == (False, True)
    harness.control("misrouted", TopicControls(paused=True, publish_to="no topic"))
    assert not any_to_send(harness.store, misrouted=True)
    harness.delete("misrouted")
    for state, columns in ((state, columns) for state, of in OF_STATES.items() for columns in of):
        insert(database, [row("a", **columns | {"OrderingKey": "same-shard"})])
        assert any_to_send(harness.store) == (state in ("pending", "retrying")), columns
        assert topics_to_send(harness.store).keys() - {"orders"} == {"paused"}
        harness.delete("a")


def test_the_topics_to_send_and_whether_their_tasks_have_keys(harness: SpannerHarness) -> None:
    """`check` asks Pub/Sub for these topics, and warns of ordering keys without an endpoint of one region."""
    harness.insert("ready", topic="ready")
    harness.insert("retrying", topic="retrying", available_at=FUTURE, attempts=1, ordering_key="key")
    harness.insert("scheduled", topic="scheduled", available_at=FUTURE, ordering_key="key")
    harness.insert("dead", topic="dead", available_at=NEVER)
    harness.insert("sent", topic="sent", sent_at=PAST, ordering_key="key")
    assert topics_to_send(harness.store) == {"ready": False, "retrying": True}


def test_only_the_requested_shards_are_read(harness: SpannerHarness) -> None:
    for n in range(5):
        harness.insert(str(n))
    used = {each.shard for each in harness.store.poll(poll_request("orders"))}
    assert {shard for shard in ALL if any_to_send(harness.store, [shard])} == used
    assert not any_to_send(harness.store, set(ALL) - used)
    assert any_to_send(harness.store, ALL)


def test_each_layout_has_all_tasks(own_database: Database) -> None:
    harness, new = SpannerHarness(own_database), Layout.added(32)
    harness.insert("a")
    harness.insert("scheduled", available_at=FUTURE)
    harness.reshard(new)
    for layouts in ((Layout(10),), (new,), (new, Layout(10))):
        harness.store.layouts = layouts
        assert any_to_send(harness.store, [shard for layout in layouts for shard in layout.ids])

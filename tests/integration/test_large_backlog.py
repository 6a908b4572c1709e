"""Backlogs that one read cannot return in time: the emulator scans the whole table for each range of an index."""

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.table.layouts import Layout
from publishworker.spanner import store as store_module
from publishworker.spanner.errors import TimedOut
from tests.support import operations, real
from tests.support.fakes import FakePublisher, serialized
from tests.support.parts import relay_of

#: The time limit of a read, which a poll of all ranges exceeds.
SECONDS = 0.3
TOPICS, TASKS = 8, 1_200


@pytest.mark.extended
@pytest.mark.emulator_only("Spanner reads the ranges in time")
@pytest.mark.parametrize("keys", [0, 100])
def test_a_backlog_is_sent_although_a_poll_of_all_ranges_times_out(
    database: Database, monkeypatch: pytest.MonkeyPatch, keys: int
) -> None:
    names = [f"topic-{number}" for number in range(TOPICS)]
    rows = [
        operations.row(
            f"{number:05}", Topic=names[number % TOPICS], Data=serialized(),
            OrderingKey=f"key-{number % keys}" if keys else None,
        )
        for number in range(TASKS)
    ]  # fmt: skip
    operations.insert(database, rows)
    monkeypatch.setattr(store_module, "READ_SECONDS", SECONDS)
    publisher = FakePublisher(*names)
    relay = relay_of(real.Store(database, Layout(10)), publisher, size=50, batches=2, discovery_seconds=1)
    relay._poller.known.note_candidates(names)
    timed_out = 0
    for _ in range(150):
        try:
            relay.turn()
        except TimedOut:
            timed_out += 1
        if len(publisher.published) >= 300:
            break
    relay.finish()
    assert timed_out > 0
    assert len(publisher.published) >= 300

"""Failing, expiring, hostile and at-most-once rows on the real emulators, the relay in this process."""

import itertools
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.table.connection import open_database
from outbox.table.ddl import Layout
from publishworker.telemetry import metrics as m
from publishworker.types import Failed
from tests.support import real
from tests.support.fakes import Counted, FakePublisher
from tests.support.parts import relay_of
from tests.support.spanner import place, query
from tests.support.store_harness import SpannerHarness

MAX, MIN = 2**63 - 1, -(2**63)
FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
#: The ends of each column that another writer can set. The values of ID are the ends of Id.
ENDS: dict[str, tuple[Any, ...]] = {
    "times_sent": (MAX, MAX - 1, MIN, -1),
    "attempts": (MAX, MIN, -1),
    "priority": (MAX, MIN),
    "sequence": (MAX, MIN),
    "available_at": (FIRST, LAST),
    "expires_at": (FIRST, LAST),
    "created_at": (FIRST,),
    "last_error": ("", "\0\U0010ffff" * 1000),
    "blocked_by": ("", "\U0010ffff" * 64),
    "ordering_key": ("\U0010ffff" * 256, "\0"),
    "topic": ("", "\U0010ffff" * 400),
}
GOOD = tuple(f"good {number}" for number in range(20))


@pytest.mark.parametrize(
    ("failing", "once"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.extended),
        pytest.param(False, True, marks=pytest.mark.extended),
        pytest.param(True, True, marks=pytest.mark.long("both")),
    ],
)
def test_no_value_of_a_row_makes_spanner_refuse_a_batch(
    database: Database, caplog: pytest.LogCaptureFixture, *, once: bool, failing: bool
) -> None:
    """The end of each column, and all pairs of ends: the commits that mark, record failures and undo marks succeed."""
    harness, counted, publisher, seconds = SpannerHarness(database), Counted(), FakePublisher("orders"), 0.0
    store = real.Store(open_database(place(database.database_id)), Layout(10))
    relay = relay_of(store, publisher, counted, size=50, clock=lambda: seconds)
    harness.insert("", at_most_once=once)
    values = [(name, value) for name, ends in ENDS.items() for value in ends]
    rows = [dict([each]) for each in values]
    rows += [dict(pair) for pair in itertools.combinations(values[::2], 2) if len(dict(pair)) == 2]
    for number, columns in enumerate(rows):
        harness.insert(f"{number}", **{"at_most_once": once, **columns})
    if failing:
        failure = Failed("data_loss" if not once else "invalid_argument", "no")
        publisher.failing = dict.fromkeys(map(str, range(len(rows))), failure)
    for id in GOOD:
        harness.insert(id, at_most_once=once)
    for _ in range(60):
        relay.turn()
        seconds += 0.5
    relay.finish()
    assert not re.search("ommit failed|cannot be changed", caplog.text)
    assert counted.counts[m.UNCOMMITTED.name] == counted.counts[m.UNCONFIRMED.name] == 0
    assert len(publisher.ids()) == len(set(publisher.ids()))
    states = query(database, "SELECT Id, SentAt, AvailableAt FROM AsynchronousTasks WHERE Topic = 'orders'")
    assert {id for id, sent_at, _ in states if sent_at} >= {*GOOD}
    assert not [id for id, sent_at, available_at in states if sent_at is None and available_at is None]

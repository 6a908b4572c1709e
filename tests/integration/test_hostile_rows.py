"""Rows that other programs wrote, with every column at its ends, on the emulators: only their own tasks suffer."""

import itertools
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.table.connection import open_database
from outbox.table.layouts import Layout
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


class Bench:
    """A relay on the emulator's table and a publisher in memory."""

    def __init__(self, database: Database, **options: Any) -> None:
        self.harness, self.counted, self.seconds = SpannerHarness(database), Counted(), 0.0
        self.publisher = FakePublisher("orders")
        self.store = real.Store(open_database(place(database.database_id)), Layout(10))
        clock = {"clock": lambda: self.seconds}
        self.relay = relay_of(self.store, self.publisher, self.counted, size=50, **clock, **options)

    def run(self, turns: int = 8) -> None:
        for _ in range(turns):
            self.relay.turn()
            self.seconds += 0.5

    def sent(self, *ids: str) -> list[str]:
        return [id for id in ids if self.harness.column(id, "sent_at") is not None]


@pytest.mark.parametrize("failing", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.parametrize("once", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_no_value_of_a_row_makes_spanner_refuse_a_batch(
    database: Database, caplog: pytest.LogCaptureFixture, *, once: bool, failing: bool
) -> None:
    """The end of each column, and all pairs of ends: the commits that mark, record failures and undo marks succeed."""
    bench = Bench(database)
    bench.harness.insert("", at_most_once=once)
    values = [(name, value) for name, ends in ENDS.items() for value in ends]
    rows = [dict([each]) for each in values]
    rows += [dict(pair) for pair in itertools.combinations(values[::2], 2) if len(dict(pair)) == 2]
    for number, columns in enumerate(rows):
        bench.harness.insert(f"{number}", **{"at_most_once": once, **columns})
    if failing:
        failure = Failed("data_loss" if not once else "invalid_argument", "no")
        bench.publisher.failing = dict.fromkeys(map(str, range(len(rows))), failure)
    for id in GOOD:
        bench.harness.insert(id, at_most_once=once)
    bench.run(20)
    bench.relay.finish()
    assert not re.search("ommit failed|cannot be changed", caplog.text)
    assert bench.counted.counts[m.UNCOMMITTED.name] == bench.counted.counts[m.UNCONFIRMED.name] == 0
    assert len(bench.sent(*GOOD)) == 20
    assert len(bench.publisher.ids()) == len(set(bench.publisher.ids()))
    states = query(database, "SELECT Id, SentAt, AvailableAt, Attempts, LastError FROM AsynchronousTasks")
    ready = {id for id, sent_at, available_at, *_ in states if sent_at is None and available_at is None}
    assert ready == set()

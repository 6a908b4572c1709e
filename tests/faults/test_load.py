"""Load: more than one worker can send, and rows of another service."""

import statistics
import time
from datetime import datetime
from typing import Any

import pytest

import outbox
from tests.support.counting import Counting
from tests.support.outages import lasting
from tests.support.trial import IN_FLIGHT, Trial, id_of, in_background

#: One batch at a time, and each takes 0.3 s.
BATCH = 10
LIMITS = ("--concurrency", "1", "--batch-size", f"{BATCH}")
DELAY = 0.15
#: Seconds, and how many tasks more than can be sent arrive in each. The emulator reads the whole table for each poll,
#: which bounds the backlog of ten minutes.
LASTS, MORE = 6.0, 30.0
LASTS_IF_LONG, MORE_IF_LONG = 600.0, 3.0
#: Maximum transactions per second, of six tasks each.
ARRIVALS = 12
POLL = ("ExecuteStreamingSql", "outbox-poll")
#: Rows of a poll, on average between two samples: with a backlog of 1,877 tasks there were 59.
MAX_POLLED = 120


@pytest.mark.extended
def test_arrivals_above_capacity(trial: Trial, long: bool) -> None:
    """More tasks arrive than one worker can send, for ten minutes in the long form. Then a second worker joins.

    Promised: No task is lost. At most the batches in flight when the second worker takes its shards are published
    again. The rows of a poll do not grow with the backlog. Urgent tasks wait less.
    """
    seconds, more = (LASTS_IF_LONG, MORE_IF_LONG) if long else (LASTS, MORE)
    urgent: dict[str, datetime] = {}
    backlogs = [0]
    polled: list[float] = []

    def sample() -> None:
        database: Any = trial.database
        with database.batch() as batch:
            id = outbox.register(batch, trial.topic, b"urgent", priority=outbox.Priority.HIGH)
        urgent[id] = batch.committed
        trial.ledger.committed.add(id)
        trial.delete_sent()
        backlogs.append(trial.backlog())
        polled.append(counting.rows[POLL] / max(1, counting.counts[POLL]))
        counting.clear()

    def arrive() -> None:
        if backlogs[-1] < 60 + more * (time.monotonic() - begin):
            trial.transaction(trial.random)

    with (
        trial.proxy("pubsub") as proxy,
        Counting(trial.spanner_host) as counting,
        trial.workers(1, *LIMITS, SPANNER_EMULATOR_HOST=counting.address),
    ):
        proxy.delay(DELAY)
        begin = time.monotonic()
        with in_background(arrive, every=1 / ARRIVALS):
            lasting(seconds, sample)
        with trial.workers(1), in_background(trial.delete_sent, every=1):
            proxy.delay(0)
            trial.settle(900)
    assert trial.audit(duplicates=BATCH + IN_FLIGHT).kept()
    published = {id_of(each): each.publish_time for each in trial.received}
    waits = [(published[id] - at).total_seconds() for id, at in urgent.items()]
    others = [(published[id] - at).total_seconds() for id, at in trial.ledger.at.items()]
    assert max(backlogs) > 100  # it was above the capacity
    assert max(polled) <= MAX_POLLED
    assert statistics.median(waits) < statistics.median(others)

"""More arrives than one worker can send, for ten minutes in the long form; then a second worker joins.

Promised: nothing lost; again comes at most what is in flight when the second one takes its shards; what a poll reads
and what a worker holds do not grow with the backlog; urgent tasks wait less than the others.
"""

import statistics
from datetime import datetime
from typing import Any

import outbox
from tests.support.counting import Counting
from tests.support.outages import lasting
from tests.support.trial import IN_FLIGHT, Trial, beside, id_of, rss_mb

#: One group at a time, of which each takes 0.3 s.
GROUP = 10
LIMITS = ("--concurrency", "1", "--group-size", f"{GROUP}")
DELAY = 0.15
#: Transactions a second, of six tasks: in a few seconds there is a backlog, in ten minutes one that the emulator, which
#: reads the whole table for each poll, can still bear.
ARRIVALS, ARRIVALS_IF_LONG = 12, 8
POLL = ("ExecuteStreamingSql", "outbox-poll")


def test_arrivals_above_capacity(trial: Trial, long: bool) -> None:
    """An urgent task comes twice a second, and waits for less than the others."""
    urgent: dict[str, datetime] = {}
    backlogs: list[int] = []
    polled: list[float] = []
    memory: list[float] = []

    def look() -> None:
        database: Any = trial.database
        with database.batch(default_retry_delay=0.02) as batch:
            id = outbox.register(batch, trial.topic, b"urgent", priority=outbox.Priority.HIGH)
        urgent[id] = batch.committed
        trial.ledger.committed.add(id)
        trial.delete_sent()
        backlogs.append(trial.backlog())
        memory.append(rss_mb(worker.pid))
        polled.append(counting.rows[POLL] / max(1, counting.counts[POLL]))
        counting.clear()

    with (
        trial.pubsub_proxy() as proxy,
        Counting(trial.spanner_host) as counting,
        trial.workers(1, *LIMITS, SPANNER_EMULATOR_HOST=counting.address) as [worker],
    ):
        proxy.delay(DELAY)
        with trial.load(ARRIVALS_IF_LONG if long else ARRIVALS):
            lasting(600 if long else 8, look)
        with trial.workers(1), beside(trial.delete_sent, every=1):
            proxy.delay(0)
            trial.settle(900)
    trial.audit(duplicates=GROUP + IN_FLIGHT)
    published = {id_of(each): each.publish_time for each in trial.received}
    waits = [(published[id] - at).total_seconds() for id, at in urgent.items()]
    others = [(published[id] - at).total_seconds() for id, at in trial.ledger.at.items()]
    half = len(memory) // 2
    trial.notes = {
        "backlog": max(backlogs),
        "urgent_seconds_median": round(statistics.median(waits), 2),
        "urgent_seconds_longest": round(max(waits), 2),
        "other_seconds_median": round(statistics.median(others), 2),
        "rows_a_poll_longest": round(max(polled)),
        "memory_mb_first_half": round(max(memory[:half])),
        "memory_mb_second_half": round(max(memory[half:])),
    }
    print(trial.notes)
    assert max(backlogs) > 100  # it was above the capacity
    assert statistics.median(waits) < statistics.median(others)

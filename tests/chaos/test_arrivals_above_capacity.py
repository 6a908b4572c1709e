"""More arrives than one worker can send, for ten minutes in the long form; then a second worker joins.

Promised: nothing lost; again comes at most what is in flight when the second one takes its shards; what a poll reads
and what a worker holds do not grow with the backlog; urgent tasks wait less than the others.
"""

import statistics
import time
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
#: Seconds, and how many tasks more than can be sent arrive in each: in ten minutes no more than the emulator can bear,
#: which reads the whole table for each poll.
LASTS, MORE = 8.0, 30.0
LASTS_IF_LONG, MORE_IF_LONG = 600.0, 3.0
#: Transactions a second at most, of six tasks.
ARRIVALS = 12
POLL = ("ExecuteStreamingSql", "outbox-poll")


def test_arrivals_above_capacity(trial: Trial, long: bool) -> None:
    """An urgent task comes twice a second, and waits for less than the others."""
    seconds, more = (LASTS_IF_LONG, MORE_IF_LONG) if long else (LASTS, MORE)
    urgent: dict[str, datetime] = {}
    backlogs = [0]
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

    def arrive() -> None:
        if backlogs[-1] < 60 + more * (time.monotonic() - begin):
            trial.transaction(trial.random)

    with (
        trial.pubsub_proxy() as proxy,
        Counting(trial.spanner_host) as counting,
        trial.workers(1, *LIMITS, SPANNER_EMULATOR_HOST=counting.address) as [worker],
    ):
        proxy.delay(DELAY)
        begin = time.monotonic()
        with beside(arrive, every=1 / ARRIVALS):
            lasting(seconds, look)
        with trial.workers(1), beside(trial.delete_sent, every=1):
            proxy.delay(0)
            trial.settle(900)
    assert trial.audit(duplicates=GROUP + IN_FLIGHT).kept()
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

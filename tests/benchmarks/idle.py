"""What a worker asks of Spanner while there is nothing to do."""

import time
from collections import Counter
from dataclasses import replace

from tests.benchmarks.bench import Bench, fresh_table
from tests.benchmarks.results import Bar, Section, figures
from tests.benchmarks.silent import worker
from tests.support.counting import Counting, Key
from tests.support.relays import wait_until_all_sent

#: Seconds after the last task until the waits between polls have grown to the poll interval.
SETTLE = 4

POLL = "outbox-poll"
COLUMN = "requests/minute"

CONDITIONS = """\
- A `publishworker run` process with default settings that knows one topic, 10 shards, no agent for metrics. Counted by
  a proxy that forwards every call to the emulator, by method and tag."""


def run(bench: Bench) -> Section:
    seconds = bench.choose(60, 5)
    counts = count(bench, seconds)
    per_minute = {key: number * 60 / seconds for key, number in counts.items()}
    samples = [("all", COLUMN, sum(per_minute.values()))]
    samples += [(" ".join(key).strip(), COLUMN, number) for key, number in sorted(per_minute.items())]
    polls = sum(number for (_, tag), number in per_minute.items() if tag == POLL)
    return Section(
        "An idle worker",
        figures(samples),
        [
            Bar("polls/minute", polls, 70, at_least=False),
            Bar("requests/minute", sum(per_minute.values()), 90, at_least=False),
        ],
        CONDITIONS,
        "All of it.",
    )


def count(bench: Bench, seconds: int) -> Counter[Key]:
    """Return the requests of a worker that has nothing to do."""
    with fresh_table(bench) as table, Counting(bench.emulators.spanner_host) as proxy:
        table.fill(1)
        with worker(replace(bench.emulators, spanner_host=proxy.address), table.database):
            wait_until_all_sent(table.database)
            time.sleep(SETTLE)
            proxy.clear()
            time.sleep(seconds)
            return proxy.counts.copy()

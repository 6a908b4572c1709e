"""Tasks per second of one worker at group sizes 1, 10 and 100, on the emulators: `make bench`.

One run, in turns, medians; a fresh table of 200 rows each time, because the emulator scans the whole table at every
query. The figures are the emulators' and this machine's: what transfers are the ratios and the requests per task
(tests/integration/test_rpc_sequence.py counts those with the client's default sessions).
"""

import argparse
import contextlib
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))

from google.cloud.spanner_v1.instance import Instance
from tqdm import tqdm

from outbox import emulators
from publishworker.connection import open_database, open_pubsub
from publishworker.metrics import Metrics
from publishworker.publisher import PubSubPublisher
from publishworker.relay import Relay
from publishworker.sampling import Limits
from publishworker.store import SpannerStore
from tests.support import spanner
from tests.support.pubsub import PubSub
from tests.support.relays import register

SIZES = (1, 10, 100)


def main() -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=200)
    options = parser.parse_args()
    with emulators.running() as made:
        os.environ |= made.environment()
        instance = spanner.instance(made.spanner_host)
        topic = PubSub.on(made.pubsub_host).new_topic()
        rates: dict[int, list[float]] = {size: [] for size in SIZES}
        cpu: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in tqdm(range(options.rounds), desc="rounds", disable=None):
            for size in SIZES:
                seconds, cpu_seconds = measure(instance, topic, size, options.tasks)
                rates[size].append(options.tasks / seconds)
                cpu[size].append(cpu_seconds / options.tasks * 1e6)
    print(f"{options.tasks} tasks of 300 bytes, one worker, one group at a time, median of {options.rounds} rounds")
    print(f"emulators on the same {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(f"{'group size':>10} {'tasks/s':>9} {'min-max':>13} {'client CPU us/task':>19}")
    for size in SIZES:
        spread = f"{min(rates[size]):.0f}-{max(rates[size]):.0f}"
        print(f"{size:>10} {statistics.median(rates[size]):>9.0f} {spread:>13} {statistics.median(cpu[size]):>19.0f}")
    return 0


def measure(instance: Instance, topic: str, size: int, tasks: int) -> tuple[float, float]:
    """Relay `tasks` tasks of a fresh table; return the seconds of time and of this process's CPU."""
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(spanner.outbox_database(instance))
        register(database, topic, tasks)
        opened = open_database(spanner.PROJECT, spanner.INSTANCE, database.database_id)
        store = SpannerStore(opened, 10, one_at_a_time=True)
        relay = Relay(
            store,
            PubSubPublisher(open_pubsub(), spanner.PROJECT),
            Metrics(),
            limits=Limits(size, 8_000_000, max(1, 100 // size)),
            publish_seconds=5,
            look_further_seconds=1,
            random=Random(1),
        )
        relay.turn()  # connects and learns the topic
        begin, cpu_begin, published = time.perf_counter(), time.process_time(), 0
        while published < tasks:
            published += relay.turn().published
        return time.perf_counter() - begin, time.process_time() - cpu_begin


if __name__ == "__main__":
    sys.exit(main())

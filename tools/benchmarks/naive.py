"""The baseline: user code without a relay. A transaction for each task, the clients with their default settings."""

import base64
from typing import Any

from google.cloud import pubsub_v1
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, param_types

import outbox
from outbox.devtools.emulators import Emulators
from outbox.message import RawPubsubMessage
from tests.support.spanner import INSTANCE, client
from tools.benchmarks.bench import ROWS, Bench, Speed, connecting_to, fresh_table, stopwatch

LOCK = """
@{LOCK_SCANNED_RANGES=exclusive}
SELECT Topic, Data FROM AsynchronousTasks WHERE Id = @id AND SentAt IS NULL"""

#: Where a service names no pause after ABORTED the client waits 2 s and more; the emulator names none.
RETRY_DELAY = 0.01


def relay(bench: Bench, hosts: Emulators) -> Speed:
    tasks = bench.choose(60, 12)
    with fresh_table(bench) as table, connecting_to(hosts), pubsub_v1.PublisherClient() as publisher:
        database: Any = client(hosts.spanner_host).instance(INSTANCE).database(table.id)

        def send(transaction: Any, id: str) -> None:
            found = transaction.execute_sql(LOCK, params={"id": id}, param_types={"id": param_types.STRING})
            for topic, data in list(found):
                message = RawPubsubMessage.FromString(base64.b64decode(data))
                attributes = {**message.attributes, outbox.TASK_ID_ATTRIBUTE: id}
                publisher.publish(topic, message.data, **attributes).result()
                transaction.update("AsynchronousTasks", ["Id", "SentAt"], [[id, COMMIT_TIMESTAMP]])

        first, *ids = table.fill(1) + table.fill(ROWS)[:tasks]
        database.run_in_transaction(send, first, default_retry_delay=RETRY_DELAY)
        with stopwatch() as watch:
            for id in ids:
                database.run_in_transaction(send, id, default_retry_delay=RETRY_DELAY)
        return Speed(tasks, watch)

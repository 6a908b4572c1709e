"""Two relays of forty lines, with Google's clients and no outbox: `python -m tools.benchmarks.own DESIGN DATABASE`.

`batch` is the design that everybody writes first: one transaction locks, publishes and marks a batch. `careful` has a
transaction for each task, keeps the error in the row, and waits longer after each failed attempt.
"""

import base64
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from google.cloud import pubsub_v1
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, param_types

from outbox.message import RawPubsubMessage
from tests.support.spanner import INSTANCE, client

#: Seconds between two polls without work, for an answer of Pub/Sub, and after a first failed attempt.
POLL, PUBLISH, BACKOFF = 1.0, 5.0, 1.0
#: The emulator names no pause after ABORTED, and the client would then wait for seconds.
RETRY_DELAY = 0.01
MANY = "SELECT Id, Topic, Data FROM AsynchronousTasks WHERE SentAt IS NULL ORDER BY CreatedAt LIMIT 100"
DUE = """
SELECT Id FROM AsynchronousTasks WHERE SentAt IS NULL AND (AvailableAt IS NULL OR AvailableAt < CURRENT_TIMESTAMP())
ORDER BY CreatedAt LIMIT 100"""
ONE = "SELECT Topic, Data, Attempts FROM AsynchronousTasks WHERE Id = @id AND SentAt IS NULL"
FAILED = """
UPDATE AsynchronousTasks SET Attempts = Attempts + 1, LastError = @error,
  AvailableAt = TIMESTAMP_ADD(CURRENT_TIMESTAMP(), INTERVAL @wait SECOND) WHERE Id = @id"""
TYPES = {"id": param_types.STRING, "error": param_types.STRING, "wait": param_types.INT64}


def publish(publisher: Any, id: str, topic: str, data: bytes) -> Any:
    message = RawPubsubMessage.FromString(base64.b64decode(data))
    return publisher.publish(topic, message.data, asynchronous_task_id=id)


def batch(database: Any, publisher: Any) -> bool:
    """Send up to 100 tasks in one transaction; return whether there were any."""

    def send(transaction: Any) -> int:
        rows = list(transaction.execute_sql(MANY))
        futures = [publish(publisher, *row) for row in rows]
        for future in futures:
            future.result(PUBLISH)
        if rows:
            transaction.update("AsynchronousTasks", ["Id", "SentAt"], [[id, COMMIT_TIMESTAMP] for id, _, _ in rows])
        return len(rows)

    return bool(database.run_in_transaction(send, default_retry_delay=RETRY_DELAY))


def careful(database: Any, publisher: Any) -> bool:
    """Send up to 100 tasks in a transaction each, and keep the error of a task that fails."""

    def send(transaction: Any, id: str) -> None:
        for topic, data, attempts in list(transaction.execute_sql(ONE, {"id": id}, TYPES)):
            try:
                publish(publisher, id, topic, data).result(PUBLISH)
            except Exception as error:
                values = {"id": id, "error": str(error)[:1000], "wait": int(BACKOFF * 2**attempts)}
                transaction.execute_update(FAILED, values, TYPES)
            else:
                transaction.update("AsynchronousTasks", ["Id", "SentAt"], [[id, COMMIT_TIMESTAMP]])

    with database.snapshot() as snapshot:
        ids = [id for [id] in snapshot.execute_sql(DUE)]
    for id in ids:
        database.run_in_transaction(send, id, default_retry_delay=RETRY_DELAY)
    return bool(ids)


DESIGNS: dict[str, Callable[[Any, Any], bool]] = {"batch": batch, "careful": careful}


def main(design: str, host: str, database_id: str) -> None:
    database = client(host).instance(INSTANCE).database(database_id)
    publisher = pubsub_v1.PublisherClient()
    print("relaying", flush=True)
    while True:
        try:
            found = DESIGNS[design](database, publisher)
        except Exception:
            logging.getLogger(__name__).exception("a batch failed")
            found = False
        if not found:
            time.sleep(POLL)


if __name__ == "__main__":
    main(*sys.argv[1:])

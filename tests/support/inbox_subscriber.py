"""A subscriber that uses the inbox: `python -m tests.support.inbox_subscriber DATABASE MAX_BATCH SUBSCRIPTION ...`.

Each task inserts one row into Effects, under a random ID, so a second effect is a second row. It prints the outcome of
each message. SIGTERM ends it.
"""

import os
import signal
import sys
import threading
import uuid
from types import SimpleNamespace
from typing import Any

from google.cloud.pubsub_v1 import SubscriberClient
from google.cloud.pubsub_v1.types import FlowControl

import outbox
from outbox import inbox
from tests.support.spanner import INSTANCE, client

EFFECTS = "CREATE TABLE Effects (EffectId STRING(36) NOT NULL, TaskId STRING(64) NOT NULL) PRIMARY KEY (EffectId)"
CONSUMER = "billing"
#: Seconds until a message of a killed or paused process is delivered again, the shortest that Pub/Sub allows.
LEASE_SECONDS = 10


def main(database_id: str, max_batch: str, *subscriptions: str) -> None:
    database: Any = client(os.environ["SPANNER_EMULATOR_HOST"]).instance(INSTANCE).database(database_id)
    outbox.set_metrics(SimpleNamespace(increment=lambda _name, _value, tags: print(tags[1], flush=True)))

    @inbox.BatchHandler(database, consumer=CONSUMER, max_batch=int(max_batch), default_retry_delay=0.02)
    def receive(transaction: Any, messages: Any) -> None:
        ids = [each.attributes[outbox.TASK_ID_ATTRIBUTE] for each in messages]
        transaction.insert("Effects", ("EffectId", "TaskId"), [(str(uuid.uuid4()), task_id) for task_id in ids])

    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())
    control = FlowControl(max_messages=20, max_duration_per_lease_extension=LEASE_SECONDS)
    with SubscriberClient() as subscriber:
        streams = [subscriber.subscribe(each, receive, flow_control=control) for each in subscriptions]
        print("receiving", flush=True)
        end.wait()
        for each in streams:
            each.cancel()
            each.result(LEASE_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])

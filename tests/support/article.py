"""The article's relay, to compare with: a transaction for each task, and no record of published tasks.

As a worker's module, with a worker's environment: `python -m tests.support.article run`. It knows no flags. One thread:
more would abort each other on the emulator, which is no fault of the protocol.
https://engineering.mercari.com/blog/entry/20211221-transactional-outbox/ describes it.
"""

import os
import random
import sys
import time
from typing import Any

from google.api_core.exceptions import GoogleAPICallError, RetryError

from outbox.devtools.emulators import Emulators
from tests.benchmarks.naive import Naive
from tests.support.spanner import INSTANCE, client

#: Tasks of a poll.
WINDOW = 100
POLL_SECONDS = 0.2
PENDING = f"SELECT Id FROM AsynchronousTasks WHERE SentAt IS NULL ORDER BY Priority DESC, CreatedAt LIMIT {WINDOW}"


def main() -> None:
    hosts = Emulators(os.environ["SPANNER_EMULATOR_HOST"], os.environ["PUBSUB_EMULATOR_HOST"])
    name = os.environ["OUTBOX_DATABASE"]
    database: Any = client(hosts.spanner_host).instance(INSTANCE).database(name)
    relay = Naive(hosts, name)
    print("relaying", file=sys.stderr, flush=True)
    while True:
        try:
            with database.snapshot() as snapshot:
                ids = [id for (id,) in snapshot.execute_sql(PENDING, timeout=5)]
        except (GoogleAPICallError, RetryError) as error:
            print(repr(error), file=sys.stderr, flush=True)
            ids = []
        random.shuffle(ids)
        for id in ids:
            _relay(relay, id)
        if not ids:
            time.sleep(POLL_SECONDS)


def _relay(relay: Naive, id: str) -> None:
    try:
        relay.relay(id)
    except Exception as error:
        # Whatever it was, the task is not marked, and the next poll finds it.
        print(repr(error), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

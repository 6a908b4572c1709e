"""The baselines: what a user writes who has no relay. A transaction a task, the clients with their default settings."""

import base64
import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import pubsub_v1, spanner
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, param_types

import outbox
from outbox.devtools.emulators import Emulators
from outbox.message import RawPubsubMessage
from tests.benchmarks.bench import ROWS, Bench, Speed, Table, connecting_to, fresh_table, stopwatch
from tests.support.spanner import INSTANCE, PROJECT

LOCK = """
@{LOCK_SCANNED_RANGES=exclusive}
SELECT Topic, Data FROM AsynchronousTasks WHERE Id = @id AND SentAt IS NULL"""

#: Where a service names no pause after ABORTED the client waits 2 s and more; the emulator names none.
RETRY_DELAY = 0.01


class Naive:
    """One thread's clients."""

    def __init__(self, hosts: Emulators, database_id: str) -> None:
        with connecting_to(hosts):
            client = spanner.Client(
                PROJECT, credentials=AnonymousCredentials(), disable_builtin_metrics=True
            )  # they want Cloud Monitoring
            self._database: Any = client.instance(INSTANCE).database(database_id)
            self._publisher = pubsub_v1.PublisherClient()
        self.published = 0

    def relay(self, id: str) -> None:
        """Lock one task, publish it, wait for the answer, mark it, commit."""

        def work(transaction: Any) -> None:
            found = transaction.execute_sql(LOCK, params={"id": id}, param_types={"id": param_types.STRING})
            for topic, data in list(found):
                message = RawPubsubMessage.FromString(base64.b64decode(data))
                attributes = {**message.attributes, outbox.TASK_ID_ATTRIBUTE: id}
                self._publisher.publish(topic, message.data, **attributes).result()
                self.published += 1
                transaction.update("AsynchronousTasks", ["Id", "SentAt"], [[id, COMMIT_TIMESTAMP]])

        self._database.run_in_transaction(work, default_retry_delay=RETRY_DELAY)

    def close(self) -> None:
        """End the publisher's threads."""
        self._publisher.stop()
        self._publisher.transport.close()


def sequential(bench: Bench, hosts: Emulators) -> Speed:
    """Baseline A: one thread; a part of a table of the usual size."""
    return _relay(bench, hosts, threads=1, tables=1)


def threads_on_one_table(bench: Bench, hosts: Emulators) -> Speed:
    """Baseline B: 4 threads with their own clients, who abort one another."""
    return _relay(bench, hosts, threads=4, tables=1)


def threads_on_own_tables(bench: Bench, hosts: Emulators) -> Speed:
    """Baseline B without aborts: a database for each of 4 threads."""
    return _relay(bench, hosts, threads=4, tables=4)


def _relay(bench: Bench, hosts: Emulators, *, threads: int, tables: int) -> Speed:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(fresh_table(bench)) for _ in range(tables)]
        clients = [stack.enter_context(_connected(hosts, made[n % tables])) for n in range(threads)]
        filled = [table.fill(ROWS) for table in made]
        part = bench.choose(60, 12) // threads
        shares = [filled[n % tables][n // tables * part :][:part] for n in range(threads)]
        for client in clients:
            client.published = 0
        with stopwatch() as watch:
            _at_once(clients, shares)
        return Speed(part * threads, watch, sum(client.published for client in clients))


@contextlib.contextmanager
def _connected(hosts: Emulators, table: Table) -> Iterator[Naive]:
    client = Naive(hosts, table.id)
    [first] = table.fill(1)
    client.relay(first)
    yield client
    client.close()


def _at_once(clients: Sequence[Naive], shares: Sequence[Sequence[str]]) -> None:
    def relay(client: Naive, ids: Sequence[str]) -> None:
        for id in ids:
            client.relay(id)

    if len(clients) == 1:
        relay(clients[0], shares[0])
        return
    with ThreadPoolExecutor(len(clients)) as pool:
        for done in [pool.submit(relay, *each) for each in zip(clients, shares, strict=True)]:
            done.result()

"""Effects per second of one consumer, with and without the inbox."""

import uuid
from collections.abc import Callable
from typing import Any

from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox import inbox
from outbox.storage import schema
from tests.benchmarks.bench import ROWS, Bench, stopwatch
from tests.benchmarks.results import Plot, Section, figures
from tests.support.spanner import fresh_database

ACCOUNTS = "CREATE TABLE Accounts (AccountId INT64 NOT NULL, Cents INT64 NOT NULL) PRIMARY KEY (AccountId)"

CONDITIONS = f"""\
- {ROWS} messages, one after the other in one thread, on fresh tables. The effect of a message is a row that is read and
  updated by its key. Acknowledgements are not part of it.
- *Without the inbox* is `run_in_transaction` with the effect alone: a read, which begins the transaction, and a commit.
  The inbox adds a read by key, and a row to the commit.
- *Redelivered* are the same messages again: one read, and no effect."""

#: Processes a message.
Process = Callable[[Any], object]


def effect(transaction: Any, message: Any) -> None:
    account = int(message.data)
    [[cents]] = transaction.read("Accounts", ("Cents",), KeySet(keys=[[account]]))
    transaction.update("Accounts", ("AccountId", "Cents"), [(account, cents + 1)])


def _ways(database: Database) -> dict[str, Process]:
    def once(transaction: Any, message: Any) -> None:
        if inbox.process_once(transaction, message, consumer="bare"):
            effect(transaction, message)

    handler = inbox.Handler(database, consumer="handler")(effect)
    return {
        "without the inbox": lambda message: database.run_in_transaction(effect, message),
        "process_once": lambda message: database.run_in_transaction(once, message),
        "Handler": handler.process,
        "Handler, redelivered": handler.process,
    }


def run(bench: Bench) -> Section:
    samples = []
    messages = [
        PubsubMessage(data=f"{n}".encode(), attributes={outbox.TASK_ID_ATTRIBUTE: str(uuid.uuid4())})
        for n in range(ROWS)
    ]
    for _ in bench.each_round("inbox"):
        with fresh_database(bench.instance, [*schema.statements(), ACCOUNTS]) as database:
            with database.batch() as batch:
                batch.insert("Accounts", ("AccountId", "Cents"), [(n, 0) for n in range(ROWS)])
            for row, process in _ways(database).items():
                with stopwatch() as watch:
                    for message in messages:
                        process(message)
                samples += [
                    (row, "messages/s", ROWS / watch.seconds),
                    (row, "client CPU us/message", watch.cpu_seconds / ROWS * 1e6),
                ]
    section = Section("The inbox", figures(samples), CONDITIONS, "The ratios.", Plot(["messages/s"]))
    without, handler = (section.value(row, "messages/s") for row in ("without the inbox", "Handler"))
    section.at_least("Handler / without the inbox, messages/s", handler / without, 0.5)
    return section

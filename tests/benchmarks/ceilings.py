"""The ceilings: each half of a relay's work without the other. No relay can be faster than the slower of them."""

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from google.pubsub_v1.types import PublishRequest, PublishResponse

import outbox
from outbox.devtools.emulators import Emulators
from outbox.message import RawPublishRequest, RawPubsubMessage
from outbox.shared.pubsub import open_pubsub
from outbox.storage.connection import LimitedDatabase, open_database
from outbox.storage.layout import Layout
from publishworker.spanner import statements
from publishworker.spanner.store import SpannerStore
from publishworker.types import LockedRow, Sent
from tests.benchmarks.bench import MESSAGE, ROWS, Bench, Speed, connecting_to, fresh_table, stopwatch
from tests.support.spanner import place

#: Messages in a request, rows in a transaction: the worker's default.
BATCH_SIZE = 200
#: Requests in flight.
IN_FLIGHT = 4

READ_COLUMNS = ("Id", "Topic", "Data", "OrderingKey", "CreatedAt", "AvailableAt", "SentAt")


def publish_only(bench: Bench, hosts: Emulators) -> Speed:
    with connecting_to(hosts):
        transport = open_pubsub(place())
    publish = transport.grpc_channel.unary_unary(
        "/google.pubsub.v1.Publisher/Publish",
        request_serializer=PublishRequest.pb().SerializeToString,
        response_deserializer=PublishResponse.pb().FromString,
    )
    topic = bench.pubsub.new_topic()
    request = RawPublishRequest(topic=topic)
    for number in range(BATCH_SIZE):
        attributes = {outbox.TASK_ID_ATTRIBUTE: f"00000000-0000-4000-8000-{number:012}"}
        request.messages.append(RawPubsubMessage(data=MESSAGE, attributes=attributes))
    publish(request, timeout=5)
    requests = bench.choose(50, 10)
    in_flight_batches: deque[Any] = deque()
    with stopwatch() as watch:
        for _ in range(requests):
            if len(in_flight_batches) == IN_FLIGHT:
                in_flight_batches.popleft().result()
            in_flight_batches.append(publish.future(request, timeout=5))
        for entry in in_flight_batches:
            entry.result()
    transport.close()
    return Speed(requests * BATCH_SIZE, watch)


def mark_only(bench: Bench, hosts: Emulators) -> Speed:
    def sent(rows: Sequence[LockedRow], _now: datetime) -> Mapping[str, Sent]:
        return {row.id: Sent("") for row in rows}

    def claim(database: LimitedDatabase, ids: Sequence[str]) -> None:
        SpannerStore(database, Layout(10)).claim(ids, sent)

    return _claim_all(bench, hosts, claim)


def read_and_mark_only(bench: Bench, hosts: Emulators) -> Speed:
    """Read by key without the exclusive lock, and mark: the figure M without the emulator's scans for SQL."""

    def claim(database: Any, ids: Sequence[str]) -> None:
        def work(transaction: Any) -> None:
            keys = KeySet(keys=[[id] for id in ids])
            found = [row[0] for row in transaction.read("AsynchronousTasks", READ_COLUMNS, keys)]
            marks = [(id, COMMIT_TIMESTAMP, 1) for id in found]
            transaction.update("AsynchronousTasks", statements.MARK_CLEAN_COLUMNS, marks)

        database.run_in_transaction(work)

    return _claim_all(bench, hosts, claim)


def _claim_all(bench: Bench, hosts: Emulators, claim: Any) -> Speed:
    with fresh_table(bench) as table:
        with connecting_to(hosts):
            database = open_database(place(table.id))
        claim(database, table.fill(1))
        ids = table.fill(ROWS)
        with stopwatch() as watch:
            for begin in range(0, ROWS, BATCH_SIZE):
                claim(database, ids[begin : begin + BATCH_SIZE])
        return Speed(ROWS, watch)

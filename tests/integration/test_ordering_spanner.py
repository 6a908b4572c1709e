"""A head that cannot be sent, and two thousand tasks behind it: on the real emulators, the relay in this process."""

import base64
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.param_types import STRING, Array

import outbox
from outbox.states import NEVER
from publishworker.connection import open_database, open_pubsub
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner.store import SpannerStore
from publishworker.turn.relay import Relay
from tests.support.fakes import serialized
from tests.support.outages import count
from tests.support.parts import relay_of
from tests.support.pubsub import PubSub
from tests.support.relays import execute, first_deliveries, insert_undecodable, key_orders, unsent
from tests.support.spanner import INSTANCE, PROJECT

pytestmark = pytest.mark.timeout(240)

KEY = "blocked"
#: Tasks behind a blocked head: more than the 800 that a poll may bring; with `--long` twice as many.
TAIL, LONG_TAIL = 1_000, 2_000
#: Rows of one transaction: the emulator's commits cost more than their rows.
TOGETHER = 200
#: The longest time for which a task is parked: the default of --backoff-max.
PARKED_SECONDS = 3600


def make_relay(database: Database, **options: Any) -> Relay:
    """Return a relay of this process with the worker's own sizes."""
    store = SpannerStore(open_database(PROJECT, INSTANCE, database.database_id), shards=10, emulator=True)
    return relay_of(store, PubSubPublisher(open_pubsub(), PROJECT), size=100, groups=8, **options)


def of_one_shard(database: Database, key: str, names: Sequence[str]) -> list[str]:
    """Return those of `names`, ids or ordering keys, whose tasks are in the shard of an ordering key."""
    shard = "MOD(FARM_FINGERPRINT({}), 10)"
    statement = f"""
SELECT each FROM UNNEST(@names) AS each WHERE ABS({shard.format("each")}) = ABS({shard.format("@of_key")})"""
    types = {"names": Array(STRING), "of_key": STRING}
    with database.snapshot() as snapshot:
        return [row[0] for row in snapshot.execute_sql(statement, {"names": names, "of_key": key}, types)]


def extremes(database: Database, condition: str) -> tuple[datetime, datetime]:
    """Return the first and the last AvailableAt of the tasks in a state, a condition in SQL."""
    statement = f"SELECT MIN(AvailableAt), MAX(AvailableAt) FROM AsynchronousTasks WHERE {condition}"
    with database.snapshot() as snapshot:
        [[first, last]] = snapshot.execute_sql(statement)
    return first, last


def test_a_long_blocked_tail_is_parked_and_hides_no_other_task(
    database: Database, topic: str, pubsub: PubSub, long: bool
) -> None:
    """Parked tasks hide no other of their shard, cost the poll nothing, and go out, in order, when the head has."""
    tail = LONG_TAIL if long else TAIL
    subscription = pubsub.new_subscription(topic, ordered=True)
    insert_undecodable(database, "head", topic, KEY)
    for first in range(0, tail, TOGETHER):
        with database.batch() as batch:
            for n in range(first, first + TOGETHER):
                outbox.register(batch, topic, b"%d" % n, ordering_key=KEY)
    other_key, *_ = of_one_shard(database, KEY, [f"other-{n}" for n in range(200)])
    loose = of_one_shard(database, KEY, [f"loose-{n}" for n in range(200)])[:5]
    with database.batch() as batch:
        others = [outbox.register(batch, topic, b"", ordering_key=other_key, priority=-100) for _ in range(5)]
        others += [outbox.register(batch, topic, b"", task_id=id, priority=-100) for id in loose]
    assert len(others) == 10
    assert count(database, "Shard = (SELECT Shard FROM AsynchronousTasks WHERE Id = 'head')") == 1 + tail + 10
    relay = make_relay(database)

    begin, before, others_after, polled, turns = time.monotonic(), datetime.now(UTC), 0.0, 0, 0
    while count(database, "SentAt IS NULL AND AvailableAt IS NULL"):
        turn = relay.turn()
        polled, turns = polled + turn.polled, turns + 1
        assert turns < 300
        others_after = others_after or (time.monotonic() - begin if turn.published else 0.0)
    relay.finish()
    parking = time.monotonic() - begin
    print(
        f"{tail} tasks parked in {parking:.1f} s, {turns} turns and {polled} rows of polls; "
        f"the others sent after {others_after:.1f} s"
    )
    assert {message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.pull_until(10)} == set(others)
    parked = "Attempts = 0 AND LastError = 'parked: waits for the task head of its ordering key'"
    assert count(database, f"SentAt IS NULL AND {parked}") == tail
    first, last = extremes(database, f"SentAt IS NULL AND {parked}")
    assert before + timedelta(seconds=PARKED_SECONDS) <= first <= last
    assert last <= datetime.now(UTC) + timedelta(seconds=PARKED_SECONDS) < NEVER
    assert [relay.turn().polled for _ in range(3)] == [0, 0, 0]

    good = base64.b64encode(serialized()).decode()
    retry = "AvailableAt = NULL, Attempts = 0, ExpiresAt = NULL WHERE Id = 'head'"
    assert execute(database, f"UPDATE AsynchronousTasks SET Data = FROM_BASE64('{good}'), {retry}") == 1
    begin, turns = time.monotonic(), 0
    while unsent(database):
        turns += 1
        turn = relay.turn()
        assert turn.made_progress or turn.waits  # else the worker would rest
    following = time.monotonic() - begin
    received = subscription.drain()
    print(f"head and tail sent in {following:.1f} s and {turns} turns once the head was retried")
    assert len(received) == 1 + tail
    assert first_deliveries(received)[KEY] == key_orders(database, topic)[KEY]
    assert count(database, "SentAt IS NULL OR AvailableAt IS NOT NULL OR LastError IS NOT NULL OR Attempts > 0") == 0

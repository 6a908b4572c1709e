"""`outbox resend` and `outbox operations continue` as processes: what arrives where, in order, and what is refused."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1.database import Database

import outbox as library
from outbox.admin import operations
from outbox.admin.table import TaskTable
from outbox.devtools.emulators import Emulators
from outbox.message import build
from tests.support.commands import Commands, row
from tests.support.fakes import serialized
from tests.support.operations import Row, insert, opened, rows_of
from tests.support.pubsub import PubSub
from tests.support.relays import first_deliveries, key_orders, worker
from tests.support.waiting import eventually

START = datetime.now(UTC) - timedelta(hours=1)


def keyed(topic: str, count: int, keys: int) -> Iterator[Row]:
    """Yield sent tasks of ordering keys. Neither ID nor SentAt says their order, and four share a CreatedAt."""
    for n in range(count):
        id, key = f"{(n * 7919) % count:05}", f"key-{n % keys}"
        data, _ = build(b"%d" % n, topic=topic, attributes={"n": str(n)}, ordering_key=key, task_id=id)
        created = START + timedelta(milliseconds=n // (4 * keys))
        sent = START + timedelta(seconds=-n % 60)
        yield row(id, topic=topic, Data=data, OrderingKey=key, CreatedAt=created, Sequence=n, SentAt=sent)


@pytest.mark.extended
def test_a_resend_that_is_killed_three_times_reaches_one_topic_in_order(
    emulators: Emulators, own_database: Database, pubsub: PubSub
):
    """Each task arrives at least once, in the order of its key, and nowhere else. No task is changed."""
    outbox, count = Commands(emulators, own_database), 1_200
    topic, to = pubsub.new_topic(), pubsub.new_topic()
    others = [pubsub.new_subscription(topic), pubsub.new_subscription(topic)]
    subscription = pubsub.new_subscription(to, ordered=True)
    insert(own_database, keyed(topic, count, 50))
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(worker(emulators, own_database))
        before, table, done = rows_of(own_database), TaskTable(opened(own_database)), 0
        command = ["resend", "--topic", topic, "--to", to, "--rate", "300", "--yes", "--reason", "ticket 4711"]
        for _ in range(3):
            with outbox.started(*command) as process:
                eventually(lambda done=done: _published(table) > done, seconds=60)
                process.stop(signal.SIGKILL)
                process.wait()
            [found] = _resends(table)
            done, command = found.tasks or 0, ["operations", "continue", found.id]
            assert (found.finished_at, found.selected, found.reason) == (None, count, "ticket 4711")
            assert 0 < done < count
        last = outbox.run(*command, "--json")
        assert last.code == 0, last
        assert json.loads(last.stdout)["tasks"] == count - done
        [found] = _resends(table)
        assert (found.tasks, found.finished_at is None) == (count, False)
        assert rows_of(own_database) == before
    messages = subscription.drain(1.0)
    assert {each.attributes[library.TASK_ID_ATTRIBUTE] for each in messages} == before.keys()
    assert {each.attributes["n"]: each.data for each in messages} == {str(n): b"%d" % n for n in range(count)}
    assert all(set(each.attributes) == {"n", library.TASK_ID_ATTRIBUTE} for each in messages)
    assert first_deliveries(messages) == key_orders(own_database, topic)
    assert [other.drain() for other in others] == [[], []]


def _published(table: TaskTable) -> int:
    return sum(each.tasks or 0 for each in _resends(table))


def _resends(table: TaskTable) -> list[operations.Operation]:
    return operations.latest(table, 10, operation="resend")


@pytest.mark.extended
def test_a_terminal_shows_a_progress_bar(outbox: Commands, database: Database, pubsub: PubSub):
    to = pubsub.new_topic()
    insert(database, [row(f"{n}", "sent", Data=serialized(b"x")) for n in range(4)])
    with outbox.terminal("resend", "--topic", "orders", "--to", to, "--rate", "2") as terminal:
        terminal.wait_for_text("of 4 tasks, ")
        assert terminal.wait() == 0
        assert re.search(r"\r\[#{1,30} *\] [1-4] of 4 tasks, [\d.]+s left", terminal.seen)
        assert terminal.seen.endswith("\r\x1b[Kpublished: 4 tasks\r\n")

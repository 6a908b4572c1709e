"""`outbox resend` and `outbox operations continue` as processes: what arrives where, in order, and what is refused."""

import itertools
import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1.database import Database

import outbox as library
from outbox.admin import changes, operations
from outbox.admin.operations import Author
from outbox.admin.table import TaskTable
from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached
from outbox.message import build
from outbox.table.states import NEVER
from tests.support.commands import Commands, row
from tests.support.fakes import serialized
from tests.support.operations import Row, insert, opened, rows_of
from tests.support.pubsub import PubSub, Subscription
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


def attributes(subscription: Subscription) -> list[str]:
    return sorted(message.attributes[library.TASK_ID_ATTRIBUTE] for message in subscription.drain())


@pytest.mark.extended
def test_a_resend_that_is_killed_three_times_reaches_one_topic_in_order(
    emulators: Emulators, own_database: Database, pubsub: PubSub
):
    """Each task arrives at least once, in the order of its key, and nowhere else. No task is changed."""
    outbox, count = Commands(emulators, own_database), 5_000
    topic, to = pubsub.new_topic(), pubsub.new_topic()
    others = [pubsub.new_subscription(topic), pubsub.new_subscription(topic)]
    subscription = pubsub.new_subscription(to, ordered=True)
    insert(own_database, keyed(topic, count, 200))
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(worker(emulators, own_database))
        before, table, done = rows_of(own_database), TaskTable(opened(own_database)), 0
        command = ["resend", "--topic", topic, "--to", to, "--rate", "1500", "--yes", "--reason", "ticket 4711"]
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


def test_a_resend_says_what_it_would_do_and_what_it_did(outbox: Commands, database: Database, pubsub: PubSub):
    """As text and as JSON, and what cannot be published, with exit code 1."""
    to = pubsub.new_subscription(pubsub.new_topic())
    sent = {"age": timedelta(minutes=5), "Data": serialized(b"x")}
    insert(database, [row("a", "sent", **sent), row("b", "sent", **sent), row("broken", "sent", Data=b"\xff")])
    insert(database, [row("other", "sent", topic="mails", **sent), row("pending")])
    before, some = rows_of(database), ["--topic", "orders", "--since", "2h", "--to", to.topic]
    dry = outbox.here("resend", *some, "--dry-run")
    assert (dry.code, dry.stdout) == (0, f"3 tasks would be published to {to.topic}\nTASKS  TOPIC\n    3  orders\n")
    [counted] = outbox.objects("resend", *some, "--dry-run", "--json")
    assert (counted["tasks"], counted["topics"], counted["to"]) == (3, {"orders": 3}, to.topic)
    assert f"pass --until={counted['until'][:10]}" in dry.stderr
    missing = outbox.here("resend", "a", "pending", "gone", "other", "--to", to.topic, "--dry-run")
    assert (missing.code, missing.stdout.splitlines()[0]) == (1, f"2 tasks would be published to {to.topic}")
    assert "1 task would not be published: pending" in missing.stderr
    assert "1 task would not be published: not in the table" in missing.stderr
    nothing = outbox.here("resend", "--topic", "order", "--to", to.topic)
    assert (nothing.code, nothing.stdout) == (0, f"0 tasks would be published to {to.topic}\n")
    assert "unknown topic 'order'" in nothing.stderr
    assert attributes(to) == []
    done = outbox.here("resend", *some, "--until", counted["until"])
    assert (done.code, done.stdout) == (1, "published: 2 tasks\n")
    assert "outbox: 1 task not published, undecodable: Data is not a serialized google.pubsub.v1" in done.stderr
    [by_id] = outbox.objects("resend", "a", "other", "--to", to.topic, "--json")
    assert by_id == {"operation": mock.ANY, "tasks": 2, "unchanged": {}, "missing": []}
    assert attributes(to) == ["a", "a", "b", "other"]
    assert rows_of(database) == before


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("a --to orders", 2, "--to orders is the topic of the tasks"),
        ("a --to nowhere", 1, "nowhere does not exist. Create it: "),
        ("--topic orders", 2, "--to"),
        ("--to other", 2, "a resend needs the IDs or the topic of its tasks"),
        ("a --to other --rate 0", 2, "a whole number from 1 to 1,000,000"),
    ],
)
def test_a_wrong_resend_is_refused_with_a_sentence(
    outbox: Commands, database: Database, words: str, code: int, sentence: str
):
    insert(database, [row("a", "sent")])
    done = outbox.here("resend", *words.split())
    assert (done.code, done.stdout) == (code, "")
    assert sentence in done.stderr
    assert operations.latest(TaskTable(opened(database)), 1) == []


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        ("retry --state dead", {"AvailableAt": NEVER}),
        pytest.param("purge --sent-before 1d", {}, marks=pytest.mark.extended),
    ],
)
def test_any_stopped_operation_is_continued_by_its_id(
    outbox: Commands, database: Database, monkeypatch: pytest.MonkeyPatch, words: str, columns: dict[str, Any]
):
    """With a dry run before, and only if it is not finished."""
    monkeypatch.setattr(changes, "CHUNK", 2)
    state = "dead" if columns else "sent"
    insert(database, [row(f"{n}", state, age=timedelta(days=2), **columns) for n in range(6)])
    table, transact, calls = TaskTable(opened(database)), TaskTable.transact, itertools.count()

    def interrupted(self: TaskTable, tag: str, work: Any) -> Any:
        if next(calls) == 2:
            raise NotReached("Spanner did not answer")
        return transact(self, tag, work)

    with monkeypatch.context() as once:
        once.setattr(TaskTable, "transact", interrupted)
        stopped = outbox.here(*words.split(), "--topic", "orders", "--yes")
    assert (stopped.code, "Spanner did not answer. " in stopped.stderr) == (3, True)
    [found] = [each for each in operations.latest(table, 10) if each.operation in words]
    assert (found.finished_at, 0 < (found.tasks or 0) < 6) == (None, True)
    operations.stop(table, found.id, Author("jane", None))
    assert f"is stopped. To continue it, run: outbox operations continue {found.id}" in outbox.here("operations").stderr
    dry = outbox.here("operations", "continue", found.id, "--dry-run")
    assert (dry.code, f", {found.tasks} of 6 tasks so far" in dry.stdout) == (0, True)
    [done] = outbox.objects("operations", "continue", found.id, "--json", "--reason", "go on")
    assert (done["tasks"], operations.found(table, found.id).tasks) == (6 - (found.tasks or 0), 6)
    for id in (found.id, operations.latest(table, 1, operation="continue")[0].id, "gone"):
        again = outbox.here("operations", "continue", id)
        assert (again.code, again.stdout) == (1, "")
        assert f"operation {id} " in again.stderr


@pytest.mark.extended
def test_a_terminal_shows_a_progress_bar(outbox: Commands, database: Database, pubsub: PubSub):
    to = pubsub.new_topic()
    insert(database, [row(f"{n}", "sent", Data=serialized(b"x")) for n in range(4)])
    with outbox.terminal("resend", "--topic", "orders", "--to", to, "--rate", "2") as terminal:
        terminal.wait_for_text("of 4 tasks, ")
        assert terminal.wait() == 0
        assert re.search(r"\r\[#{1,30} *\] [1-4] of 4 tasks, [\d.]+s left", terminal.seen)
        assert terminal.seen.endswith("\r\x1b[Kpublished: 4 tasks\r\n")

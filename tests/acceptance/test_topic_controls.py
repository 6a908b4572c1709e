"""Pauses and limits by the commands: running workers follow them, and the page about them shows their effect."""

import re
import shlex
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.commands import Commands, row
from tests.support.operations import insert
from tests.support.processes import ROOT
from tests.support.pubsub import Subscription
from tests.support.relays import divided, execute, register, unsent, wait_until_all_sent, worker
from tests.support.spanner import query
from tests.support.waiting import eventually

PAGE = Path("docs/operations/topics.md")


def blocks(language: str) -> str:
    block, *_ = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_commands_of_the_page_print_its_output(outbox: Commands, database: Database):
    """One after the other on the same database; the flags that name it are the test's."""
    insert(database, [row(topic, topic=topic) for topic in ("orders", "invoices")])
    unknown, wrong = outbox.run("pause", "ordres"), outbox.run("topics", "set", "orders", "--rate", "0")
    assert (unknown.code, wrong.code) == (2, 2)
    assert "Pass --yes to confirm: unknown topic 'ordres'" in unknown.stderr
    assert "Known topics: invoices, orders. Pause 'ordres' anyway? Nothing was changed" in unknown.stderr
    assert {(each.stdout, each.stderr.count("\n")) for each in (unknown, wrong)} == {("", 1)}
    shown = re.findall(r"^\$ outbox (.*?) --project .*\n((?:[^$].*\n)*)", blocks("console"), re.MULTILINE)
    assert [words.split()[0] for words, _ in shown] == ["pause", "resume", "topics", "topics", "topics"]
    for words, expected in shown:
        done = outbox.run(*shlex.split(words))
        assert (done.code, done.stdout) == (0, expected)
        assert "workers apply this within 10 seconds" in done.stderr
    columns = "Topic, Paused, RatePerSecond, Burst, MaxInFlight"
    rows = query(database, f"SELECT {columns} FROM AsynchronousTaskTopics ORDER BY Topic")
    assert rows == [["invoices", False, None, None, None], ["orders", False, None, None, None]]


def test_the_sql_of_the_page_does_the_same(database: Database):
    """Each statement of the page leaves the row that the command would leave."""
    *statements, last = [re.sub(r"--.*", "", each).strip() for each in blocks("sql").split(";")]
    left: list[Any] = []
    for statement in statements:
        execute(database, statement)
        left += query(database, last)
    assert left == [
        ["orders", False, None, None, None],
        ["orders", True, None, None, None],
        ["orders", False, None, None, None],
        ["orders", False, 10.0, 20, None],
        ["orders", False, 10.0, 20, 5],
        ["orders", False, None, None, None],
    ]


@pytest.mark.extended
def test_workers_follow_pauses_and_limits_within_ten_seconds(
    outbox: Commands, emulators: Emulators, database: Database, topic: str, subscription: Subscription
) -> None:
    """Without a restart: no task of a paused topic, no more than the shared rate of a limited one, all at the end."""

    def run(*words: str) -> str:
        done = outbox.run(*words)
        assert done.code == 0, done.stderr
        return done.stdout

    with ExitStack() as stack:
        workers = [stack.enter_context(worker(emulators, database)) for _ in range(2)]
        eventually(lambda: divided(workers), seconds=30)
        register(database, topic, 20)
        wait_until_all_sent(database)
        subscription.pull_until(20)

        assert run("pause", topic, "--yes") == f"{topic}: paused\n"
        for each in workers:
            each.wait_for_text('"action": "paused"', seconds=10)
        ids = register(database, topic, 60, priority=100)
        # Tried by both, which have polled since.
        register(database, "missing-topic", 20, priority=0)
        for each in workers:
            each.wait_for_text("Circuit open for topic missing-topic")
        assert subscription.drain() == []

        run("topics", "set", topic, "--rate", "10", "--burst", "10")
        begin = datetime.now(UTC)
        assert "resumed" in run("resume", topic)
        for each in workers:
            each.wait_for_text("all live workers together: 10 tasks a second, 10 at once", seconds=10)
        received = subscription.pull_until(30, seconds=30)
        seconds = (max(message.publish_time for message in received) - begin).total_seconds()
        assert len(received) <= 10 + 10 * seconds
        print(f"{len(received)} tasks in {seconds:.1f} s at 10 a second with a burst of 10")

        run("topics", "unset", topic, "rate", "burst")
        eventually(lambda: not set(unsent(database)) & set(ids), seconds=10)
        for each in workers:
            each.end()
    assert len(received) + len(subscription.drain()) >= len(ids)

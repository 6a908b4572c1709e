"""`outbox retry` as a process: sent and dead tasks arrive again, and the printed commands do the same."""

import re
from collections import Counter
from datetime import UTC, datetime
from unittest import mock

from google.cloud.spanner_v1.database import Database

import outbox as api
from outbox.cli import bulk
from outbox.devtools.emulators import Emulators
from tests.support.commands import HOUR, SECONDS, Commands, row, table
from tests.support.operations import insert
from tests.support.pubsub import Subscription
from tests.support.relays import execute, register, worker

MAKE_DEAD = """
UPDATE AsynchronousTasks SET AvailableAt = TIMESTAMP '9999-12-31T00:00:00Z', Attempts = 16 WHERE """
RETRIED = "SentAt IS NULL AND Attempts = 0 AND AvailableAt <= CURRENT_TIMESTAMP()"


def test_tasks_arrive_again_with_their_id_and_data(
    outbox: Commands, emulators: Emulators, database: Database, topic: str, subscription: Subscription
):
    """A worker sends a sent task a second time and a dead one at last, and leaves their neighbours."""
    again, once = register(database, topic, 2, b"sent data")
    with worker(emulators, database, command="drain") as process:
        assert process.wait(SECONDS) == 0
    dead, stays = register(database, topic, 2, b"dead data")
    execute(database, f"{MAKE_DEAD} SentAt IS NULL")
    done = outbox.run("retry", again, dead)
    assert (done.code, done.stdout, done.stderr) == (0, "due now: 2 tasks\n", "")
    with worker(emulators, database, command="drain") as process:
        assert process.wait(SECONDS) == 0
    received = subscription.pull_until(4) + subscription.drain()
    found = Counter((message.attributes[api.TASK_ID_ATTRIBUTE], message.data) for message in received)
    assert found == {(again, b"sent data"): 2, (once, b"sent data"): 1, (dead, b"dead data"): 1}
    assert list(table(database, "SentAt IS NULL")) == [stays]


def test_a_retry_that_changes_nothing_says_why(outbox: Commands, database: Database):
    """An unknown topic with the nearest one, flags that exclude tasks, no task in the state, or a pending task."""
    insert(database, [row("a-dead-task", "dead"), row("a-pending-task")])
    before = table(database)
    none, dead = "due now: 0 tasks\n", "outbox: 1 task in the state dead, but none matches"
    for words, reason in {
        "--state sent": "outbox: 0 tasks in the state sent\n",
        "--state dead --since 1s": f"{dead} --since\n",
        "--state dead --topic oders": f". Did you mean 'orders'? Known topics: orders\n{dead} --topic\n",
        "a-pend": "outbox: 1 task not changed, because pending tasks need no retry: a-pending-task\n",
    }.items():
        done = outbox.here("retry", *words.split())
        assert (done.code, done.stdout) == (0, none)
        assert done.stderr.endswith(reason), done.stderr
        assert table(database) == before


def test_a_retry_of_a_blocked_task_names_the_head_to_retry(outbox: Commands, database: Database):
    """Unless the head is among the given tasks, because it is then sent anyway."""
    insert(database, [row("head", "dead", OrderingKey="key"), row("next", "blocked")])
    done = outbox.here("retry", "next")
    waits = "because blocked tasks wait for the head of their ordering key"
    assert (done.code, done.stdout) == (0, "due now: 0 tasks\n")
    assert done.stderr == (
        f"outbox: 1 task not changed, {waits}: next\noutbox: retry the head of the ordering key, or cancel it: head\n"
    )
    done = outbox.here("retry", "head", "next")
    assert (done.code, done.stdout) == (0, "due now: 1 task\n")
    assert done.stderr == f"outbox: 1 task not changed, {waits}: next\n"


def test_a_retry_over_all_topics_shows_them_and_asks_first(outbox: Commands, database: Database):
    """The count of each topic and reason. Expired tasks are left out, and the dry run says so."""
    columns = {"ExpiresAt": datetime.now(UTC) - HOUR}
    insert(
        database,
        [
            *[row(f"a{n}", "dead", LastError="not_found: no topic") for n in range(3)],
            row("b", "dead", topic="invoices", LastError="internal: 500"),
            row("expired", "dead", LastError="expired: late", **columns),
        ],
    )
    before = table(database)
    done = outbox.here("retry", "--state", "dead")
    assert done.code == 2
    assert re.search(r"3 +dead +orders +not_found: no topic\n +1 +dead +invoices +internal: 500\n", done.stderr)
    assert "Not a terminal. Pass --yes to confirm: 4 tasks will become due now. Nothing was changed" in done.stderr
    assert table(database) == before
    with mock.patch.object(bulk, "CONFIRM_ABOVE", 2):
        many = outbox.here("retry", "--state", "dead", "--topic", "orders")
    assert (many.code, "Pass --yes to confirm: 3 tasks will become due now" in many.stderr) == (2, True)
    for words, expired in (("--state dead", True), ("a0", False), ("--state retrying", False)):
        dry = outbox.here("retry", *words.split(), "--dry-run")
        assert ("outbox: 1 expired task not counted. Pass --include-expired" in dry.stderr) == expired
    for words, code, reason in (
        ("a0", 0, ""),
        ("expired", 0, "because ExpiresAt has passed"),
        ("a0 gone", 1, "not in the table"),
        ("a0 --topic invoices", 1, "excluded by --state, --topic"),
    ):
        dry = outbox.here("retry", *words.split(), "--dry-run")
        assert (dry.code, "1 task would not be changed, " + reason in dry.stderr) == (code, bool(reason)), dry.stderr
    for flags, what in (([], "changed"), (["--dry-run"], "counted")):
        done = outbox.here("retry", "--state", "dead", "--topic", "orders", "--error", "late", *flags)
        assert done.stderr == f"outbox: 1 expired task not {what}. Pass --include-expired to send expired tasks, too\n"
    done = outbox.here("retry", "expired")
    assert (done.code, done.stdout) == (0, "due now: 0 tasks\n")
    assert "because ExpiresAt has passed; pass --include-expired to send expired tasks: expired" in done.stderr
    done = outbox.here("retry", "expired", "--include-expired", "--topic", "other")
    assert (done.code, done.stdout) == (1, "due now: 0 tasks\n")
    assert (
        "1 task not changed, excluded by --state, --topic, --since, --until or --error (the state is expired)"
        in done.stderr
    )
    assert outbox.here("retry", "--state", "dead", "--yes").stdout == "due now: 4 tasks\n"
    done = outbox.here("retry", "--state", "dead", "--include-expired", "--yes")
    assert done.stdout == "due now: 1 task\n"

"""`outbox status` and `outbox topics` as processes: the counts and their time, and the exit code for a pager."""

from datetime import UTC, datetime, timedelta

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from google.cloud.spanner_v1.database import Database

from outbox.admin import tasks
from outbox.cli import error_tables
from tests.support.commands import HOUR, Commands, row
from tests.support.operations import insert

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)


def pause(database: Database, *topics: str) -> None:
    with database.batch() as batch:
        rows = [(topic, True, 5) for topic in topics]
        batch.insert("AsynchronousTaskTopics", ("Topic", "Paused", "MaxInFlight"), rows)


def test_each_topic_and_priority_has_its_counts(outbox: Commands, database: Database):
    """The tasks of each state, those sent in the last minute, the oldest age and the live workers are right."""
    insert(
        database,
        [
            *[row(f"ready-{n}", age=(n + 1) * HOUR) for n in range(3)],
            row("due", age=9 * HOUR, AvailableAt=datetime.now(UTC) - MINUTE, Priority=100),
            *[row(f"retrying-{n}", "retrying") for n in range(4)],
            *[row(f"scheduled-{n}", "scheduled") for n in range(5)],
            row("blocked", "blocked"),
            *[row(f"dead-{n}", "dead") for n in range(7)],
            *[row(f"sent-{n}", "sent", topic="invoices", age=5 * SECOND) for n in range(8)],
            *[row(f"long-sent-{n}", "sent", age=2 * MINUTE) for n in range(9)],
        ],
    )
    with database.batch() as batch:
        row_of_worker = ("alive", datetime.now(UTC) - HOUR, COMMIT_TIMESTAMP)
        batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt"), [row_of_worker])
    [whole] = outbox.objects("status", "--exact", "--json")
    table = outbox.run("status", "--exact")
    names = ("topic", "priority", "pending", "retrying", "scheduled", "blocked", "dead", "registered_last_minute")
    names += ("sent_last_minute",)
    counts = [
        ("invoices", 50, 0, 0, 0, 0, 0, 8, 8),
        ("orders", 100, 1, 0, 0, 0, 0, 0, 0),
        ("orders", 50, 3, 4, 5, 1, 7, 0, 0),
    ]  # fmt: skip
    assert [tuple(line[name] for name in names) for line in whole["topics"]] == counts
    assert [whole[name] for name in (*names[2:], "workers")] == [4, 4, 5, 1, 7, 8, 8, 1]
    assert [line["next_due"] is None for line in whole["topics"]] == [True, True, False]
    ages = [line["oldest_age"] for line in whole["topics"]]
    assert ages == [None, pytest.approx(60, abs=30), pytest.approx(3 * 3600, abs=30)]
    first, head, *lines = table.stdout.splitlines()
    assert (table.code, table.stderr) == (0, "")
    assert first.startswith("as of 2")
    assert first.endswith("Z, 1 live worker")
    states = ["PENDING", "RETRYING", "SCHEDULED", "BLOCKED", "DEAD"]
    assert head.split() == ["TOPIC", "PRIORITY", *states, "IN/MIN", "SENT/MIN", "OLDEST", "NEXT", "DUE"]
    assert [line.split()[:9] for line in lines[:3]] == [[str(each) for each in line] for line in counts]
    assert [line.split(maxsplit=3) for line in lines[5:8]] == [
        ["TASKS", "STATE", "TOPIC", "ERROR"],
        ["7", "dead", "orders", "not_found: no such topic"],
        ["4", "retrying", "orders", "unavailable: it is away"],
    ]
    assert lines[8:10] == ["", "PROBLEM"]
    assert [each["kind"] for each in whole["problems"]] == ["blocked", "dead", "late"]
    assert [line.split()[:10] for line in lines[3:5]] == [["all", "4", "4", "5", "1", "7", "8", "8", "3h", "in"], []]
    error = {"topic": "orders", "state": "retrying", "error": "unavailable: it is away"}
    assert whole["errors"][1] == error | {"tasks": 4, "at_least": False}


def test_a_change_shows_at_once_in_every_command(outbox: Commands, database: Database):
    """Commands that read the past would contradict each other right after a retry or a pause."""
    insert(database, [row("dead", "dead"), row("other", topic="invoices")])
    for words in (("retry", "dead"), ("pause", "invoices")):
        assert outbox.here(*words).code == 0
    [status], [topics] = outbox.objects("status", "--json"), outbox.objects("topics", "--json")
    assert {(task["id"], task["state"]) for task in outbox.objects("list", "--json")} == {
        ("other", "pending"), ("dead", "pending"),
    }  # fmt: skip
    for whole in (status, topics):
        seen = [(line["topic"], line["paused"], line["pending"], line["dead"]) for line in whole["topics"]]
        assert seen == [("invoices", True, 1, 0), ("orders", False, 1, 0)]


def test_errors_that_are_not_all_read_are_lower_bounds(
    outbox: Commands, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """At most ERRORS_READ tasks of a state are read, and at most ROWS errors are shown."""
    insert(
        database,
        [row(f"dead-{n}", "dead", LastError=f"error {'ab'[n % 2]}") for n in range(5)] + [row("r", "retrying")],
    )
    monkeypatch.setattr(tasks, "ERRORS_READ", 4)
    monkeypatch.setattr(error_tables, "ROWS", 2)
    lines = outbox.here("status", "--exact").stdout.partition("\n\n")[2].splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [[">=", "2", "dead"]] * 2
    assert lines[3] == "... and 1 more"


def test_an_exceeded_age_or_count_is_exit_code_1(outbox: Commands, database: Database):
    """A sentence says which limit and by how much, otherwise it is 0. In paused topics, only dead tasks count."""
    insert(database, [row("a"), row("b", age=2 * HOUR), row("p", topic="paused", age=9 * HOUR)])
    insert(database, [row("d", "dead"), row("e", "dead", topic="paused")])
    pause(database, "paused")
    oldest = "the oldest task has waited 2h (topic orders, priority 50), more than --max-age 1h 30m"
    for words, sentence in {
        ("--max-age", "90m"): oldest,
        ("--max-age", "3h"): "",
        ("--max-pending", "1"): "2 tasks are pending, more than --max-pending 1",
        ("--max-pending", "2"): "",
        ("--max-dead", "1"): "2 tasks are dead, more than --max-dead 1",
        ("--max-dead", "2"): "",
    }.items():
        done = outbox.run("status", "--exact", *words)
        assert (done.code, sentence in done.stderr) == (1 if sentence else 0, True), (words, done)
        assert bool(done.stderr) == bool(sentence)
        assert "paused (paused)" in done.stdout


def test_topics_shows_controls_beside_the_backlog(outbox: Commands, database: Database):
    """A topic with a row only, one with tasks only and one with both have a line each; no topic is a sentence."""
    assert "no unsent tasks, and no task sent in the last minute\n" in outbox.here("status").stdout
    assert "no topics\n" in outbox.here("topics").stdout
    insert(database, [row("a", topic="tasks-only"), row("b", topic="both"), row("c", "dead", topic="both")])
    pause(database, "both", "row-only")
    first, head, *lines = outbox.run("topics", "--exact").stdout.splitlines()
    [whole] = outbox.objects("topics", "--exact", "--json")
    assert first.startswith("as of ")
    assert head.split()[:3] == ["TOPIC", "CONTROL", "PENDING"]
    assert [" ".join(line.split()) for line in lines] == [
        "both paused; at most 5 in flight 1 0 0 0 1 0 0 1h -",
        "row-only paused; at most 5 in flight 0 0 0 0 0 0 0 - -",
        "tasks-only no limits 1 0 0 0 0 0 0 1h -",
    ]
    names = ("topic", "paused", "max_in_flight", "rate_per_second", "pending", "dead")
    assert [[line[name] for name in names] for line in whole["topics"]] == [
        ["both", True, 5, None, 1, 1],
        ["row-only", True, 5, None, 0, 0],
        ["tasks-only", False, None, None, 1, 0],
    ]

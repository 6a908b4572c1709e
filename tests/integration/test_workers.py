"""`outbox workers` on rows of workers, and the circuits in `status` and `topics`: what they print, and exit codes."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, JsonObject
from google.cloud.spanner_v1.database import Database
from starlette.testclient import TestClient

from outbox import console
from outbox.admin import backlog, changes, operations
from outbox.admin.reshard import Resharding
from outbox.admin.table import TaskTable
from outbox.devtools.emulators import Emulators
from outbox.errors import OutboxError
from outbox.table.ddl import Layout
from publishworker.spanner.store import SpannerStore
from tests.support.commands import Commands, row
from tests.support.console import ORIGIN
from tests.support.operations import insert, opened

INFO: dict[str, Any] = {
    "host": "node-1", "version": "0.1.0", "shards": [[0, 9]], "in_flight": 2, "utilization": 0.25, "settings": {},
}  # fmt: skip
CIRCUIT = {"topic": "orders", "reason": "not_found", "error": "404 no", "open_seconds": 25, "seconds_to_probe": 300}


@pytest.fixture
def outbox(emulators: Emulators, database: Database) -> Commands:
    return Commands(emulators, database)


def live(database: Database, **infos: dict[str, Any] | None) -> None:
    columns = ("WorkerId", "StartedAt", "SeenAt", "Info")
    rows = [(id, datetime.now(UTC), COMMIT_TIMESTAMP, JsonObject(info)) for id, info in infos.items()]
    if rows:
        with database.batch() as batch:
            batch.insert_or_update("AsynchronousTaskWorkers", columns, rows)


def test_a_heartbeat_carries_the_info(database: Database, outbox: Commands) -> None:
    """As JSON, in the same commit; a worker that is gone is not listed."""
    store = SpannerStore(database, Layout(10))
    store.heartbeat("me", datetime.now(UTC), (), info=INFO | {"circuits": [CIRCUIT]})
    gone = datetime.now(UTC) - timedelta(minutes=1)
    with database.batch() as batch:
        batch.insert("AsynchronousTaskWorkers", ("WorkerId", "StartedAt", "SeenAt"), [("gone", gone, gone)])
    [found] = outbox.objects("workers", "--json")
    [worker] = found["workers"]
    assert (worker["id"], worker["host"], worker["version"]) == ("me", "node-1", "0.1.0")
    assert (worker["shards"], worker["in_flight"], worker["utilization"]) == (list(range(10)), 2, 0.25)
    assert 0 <= worker["age"] < 10
    assert [circuit["reason"] for circuit in worker["circuits"]] == ["not_found"]
    assert (found["differing"], found["shards_without_worker"]) == ({}, [])
    for command in ("status", "topics"):
        [found] = outbox.objects(command, "--json")
        assert [circuit["topic"] for circuit in found["circuits"]] == ["orders"]


def test_tasks_of_a_topic_that_cannot_be_published_are_not_said_to_be_next(
    database: Database, outbox: Commands
) -> None:
    """The commands and the page name the pause, or the circuit and its next probe."""
    insert(database, [row("a-1"), row("b-1", Topic="paused"), row("c-1", Topic="fine"), row("d-1", "dead")])
    with database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ("Topic", "Paused"), [("paused", True)])
    live(database, a=INFO | {"circuits": [CIRCUIT]}, b=INFO | {"settings": {"batch_size": 50}})
    circuit = "the circuit of the topic is open in 1 of 2 workers (not_found), and the next probe is in "
    notes = outbox.here("list").stderr.splitlines()
    assert [note.startswith(f"outbox: due tasks of orders wait: {circuit}") for note in notes] == [True, False]
    assert notes[1] == "outbox: due tasks of paused wait: the topic is paused"
    assert [circuit in outbox.here("show", id).stderr for id in ("a-1", "c-1", "d-1")] == [True, False, False]
    browser = TestClient(console.app(opened(database)), base_url=ORIGIN)
    for path in ("/task?id=a-1", "/tasks?state=pending", "/topic?name=orders"):
        assert circuit in browser.get(path).text, path
    marked = re.findall(r'<span class="differs">(.*?)<', browser.get("/workers").text)
    assert marked == ["batch_size=default", "batch_size=50"]
    assert "as soon as it can" in browser.get("/task?id=c-1").text
    assert "But the topic is paused" in browser.get("/task?id=b-1").text


def test_errors_that_differ_only_in_ids_and_numbers_are_one_group(database: Database, outbox: Commands) -> None:
    """In the status, and in the preview of a change."""
    ids = ["7f3ad5a0-0000-4000-8000-abcdefabcdef", "dcbaabcd-abcd-abcd-abcd-abcdefabcdef", "91", "o_1"]
    errors = [f"unknown: 500 request {id} failed after {n}.{n} s\nat 0x{n}" for n, id in enumerate(ids)]
    insert(database, [row(f"d{n}", "dead", LastError=error) for n, error in enumerate([*errors, "unknown: other"])])
    [status] = outbox.objects("status", "--json")
    found = [(each["error"] in errors, each["tasks"]) for each in status["errors"] if each["state"] == "dead"]
    assert found == [(True, 4), (False, 1)]
    for narrowed in ({"state": "dead"}, {"ids": ("d0", "d1", "d2", "d3", "d4")}):
        groups = changes.preview(TaskTable(database), changes.TaskSelection(**narrowed)).groups
        assert [number for *_, number in groups] == [4, 1]


def test_topics_that_are_not_counted_are_mentioned(
    emulators: Emulators, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands and the console. No such topic seems to have no tasks."""
    insert(database, [row(topic, topic=topic) for topic in ("a", "b")])
    outbox = Commands(emulators, database)
    assert outbox.here("pause", "b").code == 0
    monkeypatch.setattr(backlog, "MAX_TOPICS", 1)
    sentence = "Only the first 1 are counted"
    assert all(sentence in outbox.here(command).stderr for command in ("status", "topics"))
    [listed] = outbox.objects("topics", "--json")
    assert [each["at_least"] for each in listed["topics"]] == [[], sorted(backlog.COUNTS)]
    browser = TestClient(console.app(opened(database)), base_url=ORIGIN)
    assert sentence in browser.get("/").text
    assert "may not be counted" in browser.get("/topic?name=b").text


@pytest.mark.extended
def test_the_record_of_a_reshard_ends_with_it(own_database: Database) -> None:
    """Or with the beginning of its abort, which has a record of its own. The command that was changing then ends."""
    table = TaskTable(opened(own_database))
    resharding = Resharding(table)
    changing = resharding.run(resharding.target(4))
    next(each for each in changing if "poll Shard4" in each)
    assert [each.state(table.now()) for each in operations.latest(table, 9)] == ["unfinished"]
    list(resharding.run(resharding.former(), aborts=True))
    with pytest.raises(OutboxError, match="another command has begun to change the number of shards to 10"):
        list(changing)
    assert list(resharding.snapshot().layouts) == [Layout(10)]
    assert [each.state(table.now()) for each in operations.latest(table, 9)] == ["finished", "stopped"]

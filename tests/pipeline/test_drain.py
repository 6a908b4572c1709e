"""The job `drain` as a command: alone, next to live workers, and with killed executors."""

import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox.devtools.emulators import Emulators
from outbox.errors import OutboxError
from outbox.program.settings import DatabaseSettings
from outbox.table.states import NEVER
from outbox_pipeline.jobs import drain as job
from publishworker import process
from publishworker.process.app import open_store
from publishworker.process.worker_settings import RelaySettings
from publishworker.spanner.write_errors import TimedOut
from tests.support.operations import FUTURE, insert, limit, pause, row
from tests.support.pipeline import Case, options, write_received
from tests.support.processes import Process, children
from tests.support.pubsub import PubSub
from tests.support.relays import first_deliveries, key_orders, register, unsent, worker
from tests.support.spanner import query
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(180)

#: Groups of few tasks, so that more of them are in flight when something happens.
SMALL = {"batch_size": "10", "concurrency": "2", "poll_interval": "0.2"}


def settings_of(target: DatabaseSettings, **given: str) -> RelaySettings:
    return RelaySettings.read(options(target, log_level="error", **SMALL | given), {})


@contextlib.contextmanager
def living(settings: RelaySettings, id: str) -> Iterator[None]:
    """Be a live worker that does nothing else."""
    store = open_store(settings)
    store.heartbeat(id, datetime.now(UTC), (), liveness_timeout=600)
    yield
    store.delete_heartbeat(id)


def drain(case: Case, capsys: pytest.CaptureFixture[str], **more: str) -> tuple[int, dict[str, Any]]:
    return case.job("drain", "--json", **SMALL, **more), json.loads(capsys.readouterr().out)


def heartbeats(database: Database) -> dict[str, datetime]:
    found = query(database, "SELECT WorkerId, StartedAt FROM AsynchronousTaskWorkers")
    return {worker: started_at for worker, started_at in found if worker.startswith("spark-")}


def ids_of(messages: list[PubsubMessage]) -> Counter[str]:
    return Counter(message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in messages)


def register_keys(database: Database, topic: str, keys: int, commits: int) -> list[str]:
    ids = []
    for _ in range(commits):
        with database.batch() as batch:
            ids += [outbox.register(batch, topic, b"x", ordering_key=f"key-{n % keys}") for n in range(3 * keys)]
    return ids


def test_every_sendable_task_is_sent_and_the_others_are_counted(
    case: Case, pubsub: PubSub, capsys: pytest.CaptureFixture[str]
):  # OUT-SPARK-1
    database = case.database
    topics = [pubsub.new_topic() for _ in range(2)]
    subscriptions = [pubsub.new_subscription(topic, ordered=True) for topic in topics]
    expected = [register(database, topic, 60) for topic in topics]
    expected[0] += [id for priority in (0, 100) for id in register(database, topics[0], 20, priority=priority)]
    expected[1] += register_keys(database, topics[1], keys=5, commits=4)
    register(database, topics[0], 2, available_at=FUTURE)
    insert(database, [row("dead", Topic=topics[0], AvailableAt=NEVER), row("paused", Topic="paused")])
    pause(database, "paused")

    code, done = drain(case, capsys)
    assert code == 0
    states = {name: done[name] for name in ("pending", "retrying", "scheduled", "blocked", "dead", "paused")}
    assert states == {"pending": 0, "retrying": 0, "scheduled": 2, "blocked": 0, "dead": 1, "paused": 1}
    received = [each.drain() for each in subscriptions]
    assert [ids_of(each).keys() for each in received] == [set(each) for each in expected]
    assert done["published"] == sum(map(len, received))
    assert (done["job"], done["workers"], done["rounds"], done["failed"]) == ("drain", 2, 1, 0)
    assert first_deliveries(received[1]) == key_orders(database, topics[1])
    assert heartbeats(database) == {}

    code, again = drain(case, capsys)
    assert (code, again["published"], again["rounds"], again["scheduled"]) == (0, 0, 0, 2)


def test_the_deadline_stops_a_drain_with_work_left(case: Case, capsys: pytest.CaptureFixture[str]):
    register(case.database, "missing-topic", 3)
    code, done = drain(case, capsys, deadline="2")
    assert code == 4
    assert done["pending"] + done["retrying"] == 3
    assert done["seconds"] >= 2
    assert len(unsent(case.database)) == 3
    assert heartbeats(case.database) == {}


def test_a_live_worker_keeps_its_shards(case: Case, topic: str, monkeypatch: pytest.MonkeyPatch):
    """The drain sends no task of a live worker's shards. After that worker has left, another round sends them."""
    settings = settings_of(case.target)
    register(case.database, topic, 100)
    notes: list[str] = []
    with contextlib.ExitStack() as beside:
        beside.enter_context(living(settings, "a worker"))

        def note(text: str, *values: object, **_extra: object) -> None:
            notes.append(text % values)
            if len(notes) == 2:
                beside.close()

        monkeypatch.setattr(job._log, "info", note)
        done = job.run(case.spark, settings)
    assert done["rounds"] == len(notes) >= 2
    assert notes[0] == "Round 1: 2 workers"
    assert (done["pending"], done["published"] >= 100) == (0, True)


def test_a_failed_round_deletes_its_heartbeats(case: Case, topic: str, monkeypatch: pytest.MonkeyPatch):
    """All heartbeats exist before the first worker starts, and none stays, so live workers get the shards at once."""
    register(case.database, topic, 1)
    there = []

    def fail(*_arguments: object) -> None:
        there.extend(heartbeats(case.database))
        raise OutboxError("no workers today")

    monkeypatch.setattr(job, "map_rows", fail)
    with pytest.raises(OutboxError, match="no workers today"):
        job.run(case.spark, settings_of(case.target))
    assert len(there) == 2
    assert heartbeats(case.database) == {}


def test_the_last_error_of_a_worker_reaches_the_summary(case: Case, topic: str, monkeypatch: pytest.MonkeyPatch):
    """The log of a worker is on its executor only."""
    register(case.database, topic, 1)
    app = SimpleNamespace(
        store=None, failure=TimedOut("504 no answer"), until_stopped=lambda *_, **__: process.WORK_LEFT
    )
    monkeypatch.setattr(job, "App", lambda *_, **__: app)
    monkeypatch.setattr("outbox.program.logs.configure", lambda *_: None)
    results = list(job.run_workers(settings_of(case.target), ["one"], None, iter([[{"id": 0}]])))
    monkeypatch.setattr(job, "map_rows", lambda _rows, schema, *_: case.spark.createDataFrame(results[0], schema))
    done = job.run(case.spark, settings_of(case.target), deadline=5)  # the first round begins within it
    assert (done["work_left"], done["pending"], done["last_error"]) == (True, 1, "504 no answer")


def pythons_of_spark() -> list[int]:
    family = [os.getpid()]
    for each in family:
        family += children(each)
    daemons = [each for each in family if "pyspark.worker" in Path(f"/proc/{each}/cmdline").read_text()]
    return [each for each in daemons if not children(each)]


@contextlib.contextmanager
def two_workers(emulators: Emulators, database: Database) -> Iterator[list[Process]]:
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with worker(emulators, database, *small) as one, worker(emulators, database, *small) as other:
        both = [one, other]
        for each in both:
            each.wait_for_text("relaying")
        yield both
        for each in both:
            each.stop()
        assert [each.wait() for each in both] == [0, 0]


def test_no_task_is_lost_if_executors_are_killed_next_to_live_workers(case: Case, emulators: Emulators, pubsub: PubSub):
    """SIGKILL to every Python of Spark while its workers relay along with two others: all is received, keys in order.

    One worker divides the shards with those on Spark, the other polls all. What this test counts, the audit finds.
    """
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic, ordered=True)
    ids = register(case.database, topic, 160) + register_keys(case.database, topic, keys=8, commits=10)
    limit(case.database, topic, 8.0)  # until all are there there is something left to do
    with ThreadPoolExecutor(1) as pool, two_workers(emulators, case.database) as workers:
        running = pool.submit(job.run, case.spark, settings_of(case.target))
        made: dict[str, datetime] = {}

        def all_run() -> bool:
            rows = heartbeats(case.database)
            for id, began in rows.items():
                made.setdefault(id, began)
            return len(rows) == 2 and all(began > made[id] for id, began in rows.items())

        eventually(all_run, seconds=60, message="all workers run")
        for each in workers:
            each.wait_for_text("4 live workers")
        limit(case.database, topic, 150.0)
        before = len(unsent(case.database))
        eventually(lambda: len(unsent(case.database)) < before - 30, seconds=30, message="they work")
        killed = pythons_of_spark()
        assert len(killed) >= 2
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        done = running.result(120)
        eventually(lambda: not unsent(case.database), seconds=30, message="the workers have ended what they had begun")
    received = subscription.drain(0.5)
    came = ids_of(received)
    assert came.keys() == set(ids)
    assert first_deliveries(received) == key_orders(case.database, topic)
    duplicates = came.total() - len(ids)
    print(f"{len(ids)} tasks, {len(killed)} processes killed: {duplicates} duplicates, {done}")
    # Each killed worker had two in-flight batches of ten. If two overlap, the emulator aborts one that has published.
    assert duplicates <= 100
    assert (done["work_left"], heartbeats(case.database)) == (False, {})

    write_received(case.folder / "received.jsonl", received)
    audited = case.audit(until="1s", grace="1")
    messages = len({each.message_id for each in received})
    assert (audited["tasks"], audited["delivered"], audited["messages"]) == (len(ids), len(ids), messages)
    assert (audited["republished"], audited["redelivered"]) == (messages - len(ids), len(received) - messages)
    wrong = ("lost", "late", "arriving", "pending", "unknown", "foreign", "unreadable", "mismatched", "out_of_order")
    assert {name: audited[name] for name in wrong} == dict.fromkeys(wrong, 0)


def test_heartbeats_that_cannot_be_deleted_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    store, spark = mock.Mock(layouts=()), mock.Mock()
    store.delete_heartbeat.side_effect, spark.range.side_effect = TimedOut("no answer"), OutboxError("no executors")
    with pytest.raises(OutboxError, match="no executors"):
        job._round(spark, mock.Mock(), store, 8, None)
    [line] = caplog.messages
    assert line.startswith("8 heartbeats (spark-")
    assert line.endswith("not deleted; other workers take over after the liveness timeout: no answer")

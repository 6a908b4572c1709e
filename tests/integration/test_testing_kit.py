"""The pytest plugin for applications: what a test gets, in one process and with pytest-xdist, and without emulators."""

import re
from pathlib import Path

import pytest

from outbox.devtools.emulators import PUBSUB, SPANNER, Emulators
from tests.support import processes
from tests.support.processes import Finished

DDL = """
CREATE TABLE Parents (Id STRING(36)) PRIMARY KEY (Id);
CREATE TABLE Children (Id STRING(36), Number INT64, Other STRING(36),
  CONSTRAINT Known FOREIGN KEY (Other) REFERENCES Parents (Id)) PRIMARY KEY (Id, Number), INTERLEAVE IN PARENT Parents;
CREATE TABLE Chickens (Id STRING(36) NOT NULL, Egg STRING(36) NOT NULL) PRIMARY KEY (Id);
CREATE TABLE Eggs (Id STRING(36) NOT NULL, Chicken STRING(36) NOT NULL, Twin STRING(36),
  FOREIGN KEY (Chicken) REFERENCES Chickens (Id), FOREIGN KEY (Twin) REFERENCES Eggs (Id)) PRIMARY KEY (Id);
ALTER TABLE Chickens ADD FOREIGN KEY (Egg) REFERENCES Eggs (Id);
CREATE SCHEMA sales;
CREATE TABLE sales.Orders (Id STRING(36)) PRIMARY KEY (Id);
CREATE TABLE sales.Lines (Id STRING(36), Line INT64) PRIMARY KEY (Id, Line), INTERLEAVE IN PARENT sales.Orders;
"""
TESTS = """
import base64
import contextlib
import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from unittest import mock

import outbox
import pytest
import time_machine
from google.api_core.exceptions import NotFound, ServiceUnavailable
from google.cloud.pubsub_v1 import PublisherClient
from google.pubsub_v1 import PublisherClient as Generated
from google.pubsub_v1.types import PublishRequest, PubsubMessage
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet
from outbox.testing import assert_registered, faults

NEXT_YEAR = datetime.now(UTC) + timedelta(days=365)
LAST_YEAR = datetime.now(UTC) - timedelta(days=365)


@pytest.mark.parametrize("run", range(3))
def test_each_test_begins_without_rows(run, outbox_database):
    with outbox_database.snapshot(multi_use=True) as snapshot:
        for table in ("AsynchronousTasks", "Parents", "Children", "Chickens", "Eggs", "sales.Orders", "sales.Lines"):
            assert list(snapshot.read(table, [], KeySet(all_=True))) == []
    with outbox_database.batch() as batch:
        batch.insert("Chickens", ["Id", "Egg"], [["a", "b"]])
        batch.insert("Eggs", ["Id", "Chicken", "Twin"], [["b", "a", "c"], ["c", "a", "b"]])
        batch.insert("sales.Orders", ["Id"], [["a"]])
        batch.insert("sales.Lines", ["Id", "Line"], [["a", 1]])
        batch.insert("Parents", ["Id"], [["a"]])
        batch.insert("Children", ["Id", "Number", "Other"], [["a", 1, "a"]])
        outbox.register(batch, "orders", b"")
    assert outbox_database.name.split("/")[1] == os.environ["OUTBOX_PROJECT"]


def test_what_is_due_is_published_once_and_in_order(outbox_database, outbox_relay, published):
    with outbox_database.batch() as batch:
        ids = [outbox.register(batch, "orders", b"%d" % number, ordering_key="key") for number in range(105)]
        outbox.register(batch, "projects/other/topics/bills", b"bill", available_at=NEXT_YEAR)
        outbox.register(batch, "orders", b"head", ordering_key="blocked", available_at=NEXT_YEAR)
        outbox.register(batch, "orders", b"behind", ordering_key="blocked")
    assert outbox_relay.drain().published == 105
    assert [message.attributes["asynchronous_task_id"] for message in published("orders")] == ids
    assert published("projects/other/topics/bills") == published("unknown") == []
    assert outbox_relay.drain().published == 0


def test_a_lost_answer_is_a_failed_attempt_and_then_a_duplicate(outbox_database, outbox_relay, published):
    with outbox_database.batch() as batch:
        outbox.register(batch, "orders", b"")
    with outbox_relay.losing_publish_answers():
        assert (outbox_relay.drain().published, outbox_relay.drain().failed) == (0, 1)
    assert (outbox_relay.drain().published, len(published("orders"))) == (1, 3)


def test_a_message_arrives_on_the_topic_of_its_route(outbox_database, outbox_relay, published):
    with outbox_database.batch() as batch:
        batch.insert("AsynchronousTaskTopics", ["Topic", "PublishTo"], [["orders", "moved"], ["wrong", "no topic"]])
        outbox.register(batch, "orders", b"order")
        outbox.register(batch, "wrong", b"")
    assert outbox_relay.drain().published == 1
    assert [message.data for message in published("moved")] == [b"order"]
    assert published("orders") == []


def in_days(number):
    return datetime.now(UTC) + timedelta(days=number)


def test_a_call_publishes_what_is_due_at_its_time_whatever_calls_came_before(outbox_database, outbox_relay, published):
    # No time of a row changes. One task expires before the first call, and one is behind the head of its key.
    with outbox_database.batch() as batch:
        for day in range(1, 7):
            outbox.register(batch, "orders", b"%d" % day, available_at=in_days(day), expires_at=in_days(day + 10))
        outbox.register(batch, "orders", b"only today", priority=0, available_at=in_days(0.5), expires_at=in_days(0.7))
        outbox.register(batch, "orders", b"head", ordering_key="key", available_at=in_days(5.5))
        outbox.register(batch, "orders", b"behind", ordering_key="key")
    before = {task.id: task.available_at for task in assert_registered(outbox_database, times=9)}
    sent = []
    for day in (1, 1, 3, 2, 1, 3, 4):
        assert outbox_relay.drain(now=in_days(day)).published == len(published("orders")) - len(sent)
        sent = [message.data for message in published("orders")]
        assert sorted(sent) == [b"%d" % n for n in range(1, max(day, len(sent)) + 1)]
    left = [task for task in assert_registered(outbox_database, times=9) if task.message.data in (b"5", b"6", b"head")]
    assert [task.available_at for task in left] == [before[task.id] for task in left]
    with outbox_relay.losing_publish_answers():
        outbox_relay.drain(now=in_days(5))
    assert outbox_relay.drain(now=in_days(6)).published == 4
    sent = [message.data for message in published("orders")]
    assert sent.index(b"head") < sent.index(b"behind")
    assert outbox_relay.drain(now=datetime.max.replace(tzinfo=UTC)).published == 0


def test_messages_of_others_are_left_out(outbox_database, outbox_relay, published):
    topic = "projects/other/topics/shared"
    for data in (b"first", b"second"):
        with outbox_database.batch() as batch:
            outbox.register(batch, topic, data)
        assert outbox_relay.drain().published == 1
        other_process(topic, b"other", asynchronous_task_id="other")
    assert [message.data for message in published(topic)] == [b"first", b"second"]


def other_process(topic, data, **attributes):
    # As PublisherClient, but this process does not see it.
    request = PublishRequest(topic=topic, messages=[PubsubMessage(data=data, attributes=attributes)])
    PublisherClient().transport.publish(request)


def place(database, publish, topic):
    with database.batch() as batch:
        outbox.register(batch, "orders", b"order")
    with contextlib.suppress(NotFound):  # the topic may not exist
        publish(f"projects/{os.environ['OUTBOX_PROJECT']}/topics/{topic}", b"order", kind="dual")


@pytest.mark.parametrize(
    "publish",
    [
        lambda topic, data, **attributes: PublisherClient().publish(topic, data, **attributes).result(),
        lambda topic, data, **attributes: Generated().publish(topic=topic, messages=[{"data": data}]),
        lambda topic, data, **attributes: Generated().publish({"topic": topic, "messages": [PubsubMessage(data=data)]}),
    ],
)
@pytest.mark.parametrize("topic", ["orders", "never-created"])
def test_a_message_that_no_task_explains_fails(outbox_database, outbox_relay, published, publish, topic):
    with pytest.raises(AssertionError, match="/topics/orders has 1 task to publish: call outbox_relay.drain"):
        place(outbox_database, publish, topic)
        published("orders", foreign=None)
    outbox_relay.drain()
    with pytest.raises(AssertionError, match=f"{topic}: 1 message that no task explains, expected 0: b'order'. Pub"):
        published(topic)
    with pytest.raises(AssertionError, match="expected 2. Pass foreign=1 to published if that is right$"):
        published(topic, foreign=2)
    assert len(published(topic, foreign=1)) == len(published(topic, foreign=None)) == (topic == "orders")


def test_a_dual_write_of_another_process_fails_at_the_end_of_the_test(outbox_database, outbox_relay, published):
    place(outbox_database, lambda *_, **attributes: None, "orders")
    outbox_relay.drain()
    place(outbox_database, other_process, "orders")
    outbox_relay.drain()
    time.sleep(0.2)
    with pytest.raises(AssertionError, match="orders: 1 message that no"):
        outbox_relay.check_foreign()
    assert len(published("orders", foreign=1)) == 2


def test_a_misspelled_topic_is_no_empty_one(outbox_database, outbox_relay, published):
    assert published("orders") == []
    place(outbox_database, lambda *_, **attributes: None, "orders")
    outbox_relay.drain()
    assert published("invoices") == []
    with pytest.raises(AssertionError, match="no task of this test has the topic 'order'. Did you mean 'orders'"):
        published("order")


def test_a_scheduled_task_is_the_first_of_its_topic(outbox_database, outbox_relay, published):
    with outbox_database.batch() as batch:
        outbox.register(batch, "first-of-all", b"later", available_at=in_days(1))
    assert outbox_relay.drain(now=in_days(2)).published == len(published("first-of-all")) == 1


def test_a_task_that_is_only_scheduled_is_logged(outbox_database, outbox_relay, published, caplog):
    with outbox_database.batch() as batch:
        outbox.register(batch, "orders", b"later", available_at=in_days(1))
    assert outbox_relay.drain().published == len(published("orders")) == 0
    assert "/orders has 1 task to publish: call outbox_relay.drain(now=...) if they are scheduled" in caplog.text


def test_tasks_that_fail_stop_no_drain(outbox_database, outbox_relay, published):
    outbox_relay._settings = replace(outbox_relay._settings, concurrency=1, batch_size=1)
    with outbox_database.batch() as batch:
        for _ in range(2):
            outbox.register(batch, "orders", b"", priority=outbox.Priority.HIGH, expires_at=LAST_YEAR)
        columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
        row = ("invalid", "orders", base64.b64encode(b"no message"), outbox.Priority.HIGH.value, COMMIT_TIMESTAMP)
        batch.insert("AsynchronousTasks", columns, [row])
        outbox.register(batch, "orders", b"valid")
    drained = outbox_relay.drain()
    assert (drained.published, drained.failed, [message.data for message in published("orders")]) == (1, 3, [b"valid"])


def test_a_wrong_argument_is_refused(outbox_relay, published):
    for now in (datetime(2030, 1, 1), timedelta(days=1)):
        with pytest.raises(ValueError, match=r"^now (.* has no time zone|is datetime.timedelta)"):
            outbox_relay.drain(now=now)
    with pytest.raises(ValueError, match=r"^topic is list. It must be a str"):
        published(["orders"])
    with pytest.warns(RuntimeWarning, match=r"^losing_publish_answers was called without `with`"):
        outbox_relay.losing_publish_answers()


def test_a_large_message_arrives(outbox_database, outbox_relay, published):
    with outbox_database.batch() as batch:
        outbox.register(batch, "orders", bytes(4_200_000))
    assert (outbox_relay.drain().published, len(published("orders"))) == (1, 1)


@pytest.mark.parametrize("run", range(2))
def test_a_session_that_failed_affects_no_later_test(run, outbox_database):
    assert outbox_database.run_in_transaction(lambda transaction: transaction.execute_sql("SELECT 1").one()) == [1]
    failure = ServiceUnavailable("the test")
    with mock.patch.object(outbox_database._sessions_manager, "get_session", side_effect=failure):
        with pytest.raises(ServiceUnavailable):
            outbox_database.run_in_transaction(lambda transaction: None)


def test_a_clock_that_stands_still(outbox_database, outbox_relay, published, monkeypatch):
    monkeypatch.setattr("publishworker.testing.relay.RELAY_SECONDS", 1.0)
    with time_machine.travel(datetime(2030, 1, 1, tzinfo=UTC), tick=False):
        with outbox_database.batch() as batch:
            outbox.register(batch, "orders", b"")
        assert outbox_relay.drain().published == 1
        assert len(published(Enum("Topic", {"ORDERS": "orders"}, type=str).ORDERS)) == 1
        outbox_relay._publisher.counts.update(list(outbox_relay._publisher.counts))
        with pytest.raises(AssertionError, match="1 of 2 messages have arrived on .*/orders within 1 s"):
            published("orders")


def test_an_aborted_transaction_runs_again(outbox_database):
    runs = []

    def work(transaction):
        runs.append(transaction)
        outbox.register(transaction, "orders", b"")

    with faults.abort_next_commit(times=2), faults.delay_commits(0.01):
        outbox_database.run_in_transaction(work)
    assert (len(runs), len(assert_registered(outbox_database))) == (3, 1)
    with pytest.raises(AssertionError, match="0 of 1 transactions were committed"), faults.abort_next_commit():
        pass
"""


#: The tests of `make test`.
QUICK = "without_rows or in_order or route or aborted or explains or misspelled or first_of or only"


def run(folder: Path, *arguments: str, **variables: str) -> Finished:
    words = ("-c", str(folder / "pytest.ini"), "-p", "no:randomly", "-p", "no:cacheprovider", *arguments)
    return processes.run("pytest", str(folder), *words, environment=variables, seconds=120)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"test_shop.py": TESTS, "shop.sql": DDL, "pytest.ini": "[pytest]\noutbox_ddl = shop.sql\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_test_gets_emulators_a_database_and_a_relay(emulators: Emulators, project: Path) -> None:
    ended = run(project, "-k", QUICK, **emulators.environment())
    assert (ended.code, "15 passed" in ended.stdout) == (0, True), ended.stdout


@pytest.mark.extended
@pytest.mark.usefixtures("emulators")  # skips where there are none
def test_parallel_runs_start_and_share_emulators(project: Path) -> None:
    ended = run(project, "-n", "2", **{SPANNER.variable: "", PUBSUB.variable: ""})
    assert (ended.code, "25 passed" in ended.stdout) == (0, True), ended.stdout


@pytest.mark.parametrize(
    ("ci", "outcome"), [pytest.param("", "25 skipped", marks=pytest.mark.extended), ("true", "25 errors")]
)
@pytest.mark.parametrize("arguments", [(), pytest.param(("-n", "1"), marks=pytest.mark.extended)])
def test_without_an_emulator_tests_are_skipped_and_fail_in_ci(
    arguments: tuple[str, ...], ci: str, outcome: str, project: Path
) -> None:
    nowhere = {"SPANNER_EMULATOR_HOST": "", "CLOUDSDK_ROOT_DIR": "/nowhere", "CI": ci}
    ended = run(project, "-rsE", *arguments, **nowhere)
    assert outcome in ended.stdout, ended.stdout
    assert "the Spanner emulator not found" in ended.stdout


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ddl", "sentence"),
    [
        ("CREATE TABLE Wrong;", r"the setting outbox_ddl \(.*shop.sql\): could not create database outbox"),
        (None, r"the setting outbox_ddl names .*shop.sql, which cannot be read: No such file or directory"),
    ],
)
def test_wrong_ddl_is_an_error_that_names_the_file(
    emulators: Emulators, project: Path, ddl: str | None, sentence: str
) -> None:
    """A sentence without the lines of the plugin."""
    (project / "shop.sql").unlink() if ddl is None else (project / "shop.sql").write_text(ddl)
    ended = run(project, "-k", "once", **emulators.environment())
    assert re.search(sentence, ended.stdout)
    assert "Traceback" not in ended.stdout
    assert "database.py" not in ended.stdout


READY = """
import pytest
from google.cloud import spanner
from outbox.table import ddl

@pytest.fixture(scope="session")
def outbox_session_database(spanner_emulator):
    database = spanner.Client("ready", disable_builtin_metrics=True).instance("main").database("shop")
    database._instance.configuration_name = "projects/ready/instanceConfigs/emulator-config"
    database._instance.create().result()
    database._ddl_statements = (*ddl.statements(shards=3),)
    database.create().result()
    yield database
    database.drop()
    database._instance.delete()

@pytest.fixture(autouse=True)
def is_used(outbox_session_database, outbox_database):
    assert outbox_database is outbox_session_database and outbox_database.database_id == "shop"
"""


@pytest.mark.extended
def test_the_database_may_be_ready(emulators: Emulators, project: Path) -> None:
    """With three shards. The plugin adds no table to it."""
    (project / "conftest.py").write_text(READY)
    ended = run(project, "-k", "in_order or route", **emulators.environment())
    assert "2 passed" in ended.stdout, ended.stdout


@pytest.mark.extended
def test_parallel_runs_that_use_no_fixture_open_no_socket(tmp_path: Path) -> None:
    """In no process, although the plugin is installed."""
    opened = tmp_path / "opened"
    hook = f"lambda event, _: event == 'socket.bind' and open({str(opened)!r}, 'a').write(event)"
    (tmp_path / "conftest.py").write_text(f"import sys\nsys.addaudithook({hook})\n")
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    assert "1 passed" in run(tmp_path, "-n", "1").stdout
    assert not opened.exists()

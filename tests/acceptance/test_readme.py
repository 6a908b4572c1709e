"""The README and the guides run as written: Python, SQL and commands, on the emulators."""

import asyncio
import base64
import contextlib
import importlib
import itertools
import json
import os
import re
import shlex
import sys
import uuid
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fastapi.testclient import TestClient
from google.cloud import spanner
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox
import outbox_admin.cli
import publishworker.process.cli
from outbox import inbox
from outbox.devtools.emulators import Emulators
from outbox.table import ddl
from outbox.table.connection import open_database
from outbox.table.ddl import Layout
from outbox.testing import RecordingTransaction, assert_registered
from publishworker.spanner.store import SpannerStore
from publishworker.types import Failed
from tests.support.fakes import FakePublisher
from tests.support.operations import update
from tests.support.parts import relay_of
from tests.support.processes import ROOT, Finished, Process, run, started
from tests.support.pubsub import PubSub
from tests.support.spanner import ADMIN_SECONDS, client, instance, place, query
from tests.support.waiting import eventually

#: The database that the pages name is also that of the pipeline's pages, on the same emulator.
pytestmark = pytest.mark.xdist_group("spark")

PROJECT = "my-project"
PARSERS = {"outbox": outbox_admin.cli._parser, "publishworker": publishworker.process.cli._parser}
#: Tables of the application and of the subscribers, which the pages presuppose.
TABLES = (
    "CREATE TABLE Orders (OrderId STRING(36), Cents INT64) PRIMARY KEY (OrderId)",
    "CREATE TABLE Invoices (TaskId STRING(64), OrderJson STRING(MAX)) PRIMARY KEY (TaskId)",
    "CREATE TABLE Accounts (AccountId STRING(36), Cents INT64) PRIMARY KEY (AccountId)",
    "CREATE TABLE Stock (Article STRING(36), Pieces INT64) PRIMARY KEY (Article)",
)


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """Return the command behind a prompt of a page, as words, up to the first operator of the shell."""
    lines = [line for block in blocks(page, "console") for line in block.replace("\\\n", "").splitlines()]
    return [list(_first_command(line[2:])) for line in lines if line.startswith("$ ")]


def _first_command(line: str) -> Iterator[str]:
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    return itertools.takewhile(lambda word: word[0] not in words.punctuation_chars, words)


@pytest.fixture
def shop(emulators: Emulators, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The database of the pages: `shop` of the instance `main` of `my-project`."""
    monkeypatch.setenv("SPANNER_EMULATOR_HOST", emulators.spanner_host)
    monkeypatch.setenv("SPANNER_DISABLE_BUILTIN_METRICS", "true")  # an example's client would want Cloud Monitoring
    main = instance(emulators.spanner_host, "main", PROJECT)
    database = main.database("shop", ddl_statements=[*ddl.statements(), *TABLES])
    database.create().result(timeout=ADMIN_SECONDS)
    yield database
    database.drop()
    main.delete()


@pytest.fixture
def topics(pubsub: PubSub) -> Iterator[None]:
    name = f"projects/{PROJECT}/topics/orders"
    subscriptions = [f"projects/{PROJECT}/subscriptions/{id}" for id in ("billing", "stock")]
    pubsub.publisher.create_topic(name=name)
    for subscription in subscriptions:
        pubsub.subscriber.create_subscription(name=subscription, topic=name)
    yield
    for subscription in subscriptions:
        pubsub.subscriber.delete_subscription(subscription=subscription)
    pubsub.publisher.delete_topic(topic=name)


def one(database: Database, sql: str) -> Any:
    [[value]] = query(database, sql)
    return value


def execute(block: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block of Python and return the names that it leaves; warnings of the clients are theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        exec(compile(block, "page", "exec"), names)
    return names


class Reader:
    """Runs processes that know only the variables that `outbox emulators` prints.

    With INSTALLED, the Python of an environment with the wheel (`make dist`), they do not see the repository.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._installed = folder, os.environ.get("INSTALLED")
        programs = Path(self._installed or sys.executable).parent  # of the activated environment
        self.environment = {
            "OUTBOX_HEARTBEAT_FILE": str(folder / "heartbeat"), "PATH": f"{programs}:{os.environ['PATH']}"
        }  # fmt: skip
        if not self._installed:
            self.environment["PYTHONPATH"] = str(ROOT)

    def process(self, *words: str) -> contextlib.AbstractContextManager[Process]:
        python = self._installed or sys.executable
        return started(*words, environment=self.environment, directory=self._folder, python=python)

    def finished(self, words: list[str]) -> Finished:
        if not self._installed:
            return run(*words, environment=self.environment)
        with self.process(*words) as ending:
            return Finished(ending.wait(), ending.stdout, ending.stderr)


@pytest.mark.usefixtures("installed")
def test_the_quick_start_runs_as_written(tmp_path: Path) -> None:
    """Emulators, a registration, a worker, a subscriber; sent again by the page's command, and handled once."""
    for block in (*blocks("README.md", "sql"), *blocks("README.md", "python")):
        (tmp_path / re.findall(r"\A(?:#|--) (\S+)\n", block)[0]).write_text(block)
    ours = [words for words in commands("README.md") if words[0] in PARSERS]
    names = [" ".join(words[:2]) for words in ours]
    assert names == ["outbox emulators", "outbox list", "outbox retry", "outbox schema", "publishworker check"]
    reader = Reader(tmp_path)
    with reader.process(*ours[0]) as running:
        running.wait_for_text("relaying my-project/main/shop", seconds=90)
        exports = (tmp_path / "shop.env").read_text()
        reader.environment |= dict(re.findall(r"^export (\w+)=(.+)$", exports, re.MULTILINE))
        shop = client(reader.environment["SPANNER_EMULATOR_HOST"], PROJECT).instance("main").database("shop")
        with reader.process("register_order") as registering:
            assert registering.wait() == 0
        assert query(shop, "SELECT OrderId, Cents FROM Orders") == [["order-1", 1999]]
        task_id = one(shop, "SELECT Id FROM AsynchronousTasks")
        running.wait_for_text("order-1: invoice written")
        eventually(lambda: one(shop, "SELECT SentAt FROM AsynchronousTasks"), seconds=10)
        again = [[task_id if word == "THE-ID" else word for word in each] for each in ours[1:]]
        listed, retried, applied, checked = map(reader.finished, again)
        assert task_id in listed.stdout
        assert retried.code == 0
        assert applied.stdout.splitlines()[0] == "exists   table AsynchronousTasks"
        assert (checked.code, checked.stdout.count("ok  ")) == (0, 4)
        eventually(lambda: one(shop, "SELECT TimesSent FROM AsynchronousTasks") == 2, seconds=10)
        pubsub = PubSub.on(reader.environment["PUBSUB_EMULATOR_HOST"])
        pubsub.publish(f"projects/{PROJECT}/topics/orders", b"{}")  # no task ID
        running.wait_for_text("did not come from the outbox")
        assert running.child.poll() is None
        assert query(shop, "SELECT OrderId FROM Invoices") == [["order-1"]]
        running.end()
    assert not (tmp_path / "shop.env").exists()


def test_the_guide_to_registering(shop: Database) -> None:
    """All blocks of the page in their order, and then the recording transaction of the page about tests."""
    names: dict[str, Any] = {}
    try:
        for block in (*blocks("docs/guide/register.md", "python"), *blocks("docs/guide/testing.md", "python")):
            if not block.startswith("# "):  # a file of the example of the page about tests
                execute(block, names)
    finally:
        outbox.set_metrics(None)
    columns = "Topic, Priority, AvailableAt > CURRENT_TIMESTAMP(), ExpiresAt > CURRENT_TIMESTAMP(), AtMostOnce"
    rest = "FROM AsynchronousTasks WHERE CancelledBy IS NULL ORDER BY CreatedAt, Topic"
    assert query(shop, f"SELECT {columns} {rest}") == [
        ["orders", 100, None, None, False],
        ["reminders", 50, True, None, False],
        ["reminders", 50, None, None, False],
        ["reminders", 50, None, None, False],
        ["orders", 50, None, None, False],
        ["codes", 50, None, True, False],
        ["bells", 50, None, None, True],
        ["invoices", 50, None, None, False],
        ["orders", 50, None, None, False],
    ]
    assert query(shop, "SELECT OrderId, Cents FROM Orders") == [["order-1", 0]]


def test_the_guide_to_projections(emulators: Emulators, shop: Database, tmp_path: Path) -> None:
    """From an empty file, and again after a signal: each task counts once, also one that is sent again."""
    for block in blocks("docs/guide/projection.md", "python"):
        (tmp_path / re.findall(r"\A# (\S+)\n", block)[0]).write_text(block)
    command, _ = commands("docs/guide/projection.md")
    assert command[-2:] == ["python", "totals.py"]
    variables = emulators.environment() | {"SPANNER_DISABLE_BUILTIN_METRICS": "true", "PYTHONPATH": str(ROOT)}

    def send(task_id: str, cents: int) -> None:
        data = json.dumps({"customer": "ann", "cents": cents}).encode()
        with shop.batch() as batch:
            outbox.register(batch, "orders", data, task_id=task_id)
        update(shop, task_id, SentAt=spanner.COMMIT_TIMESTAMP)

    send("task-1", 10)
    for task_id, cents, total in (("task-2", 5, 15), ("task-3", 100, 115)):
        with started("totals", environment=variables, directory=tmp_path) as running:
            send(task_id, cents)
            running.wait_for_text(f"ann: {total} cents")
            update(shop, "task-1", SentAt=None)
            update(shop, "task-1", SentAt=spanner.COMMIT_TIMESTAMP)
            eventually(lambda running=running, total=total: running.stdout.count(f"ann: {total} cents") == 2)
            running.end() if total == 15 else running.child.kill()
            assert running.stdout.count("cents") == {15: 3, 115: 2}[total]
    with started("order", environment=variables, directory=tmp_path) as ordering:
        assert ordering.wait() == 0
    assert one(shop, "SELECT COUNT(*) FROM AsynchronousTasks") == 4


@pytest.mark.usefixtures("topics")
def test_the_guide_to_subscribing(emulators: Emulators, shop: Database, pubsub: PubSub, tmp_path: Path) -> None:
    """Each block is the file that its first line names. A task that comes twice takes one piece."""
    page = "docs/guide/subscribe.md"
    for block in (*blocks(page, "python"), *blocks(page, "sql")):
        with (tmp_path / re.findall(r"\A(?:#|--) ([\w.]+)", block)[0]).open("a") as file:
            file.write(block)
    assert (tmp_path / "stock.sql").read_text().count("CREATE TABLE Stock") == 1  # among those of this module
    variables = emulators.environment() | {"SPANNER_DISABLE_BUILTIN_METRICS": "true", "PYTHONPATH": str(ROOT)}
    with shop.batch() as batch:
        batch.insert("Stock", ["Article", "Pieces"], [["book", 6]])
    topic, data = f"projects/{PROJECT}/topics/orders", b'{"article": "book"}'
    task = {"data": data, "attributes": {outbox.TASK_ID_ATTRIBUTE: "task-1"}}

    def pieces() -> int:
        return int(one(shop, "SELECT Pieces FROM Stock"))

    with started("stock", environment=variables, directory=tmp_path) as receiving:
        pubsub.publisher.publish(topic=topic, messages=[task, {"data": data}])
        receiving.wait_for_text("did not come from the outbox")
        eventually(lambda: pieces() == 5)
        assert receiving.child.poll() is None
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "path", [str(tmp_path), *sys.path]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        push, by_sqlalchemy = importlib.import_module("push"), importlib.import_module("stock_by_sqlalchemy")
        body = {"message": {"data": base64.b64encode(data).decode(), "attributes": task["attributes"]}}
        with TestClient(push.app, raise_server_exceptions=False) as client:
            assert client.post("/stock", json=body).status_code == 204
            body["message"]["attributes"] = {outbox.TASK_ID_ATTRIBUTE: "task-2"}
            assert [client.post("/stock", json=body).status_code for _ in range(2)] == [204, 204]
            body["message"]["attributes"] = {}
            assert client.post("/stock", json=body).status_code == 500
        for id in ("task-2", "task-3", "task-3"):
            by_sqlalchemy.take_from_stock(PubsubMessage(data=data, attributes={outbox.TASK_ID_ATTRIBUTE: id}))
        by_sqlalchemy.engine.dispose()
        in_batches = importlib.import_module("stock_in_batches").take_from_stock
        for expected in (True, False):
            of = PubsubMessage(data=data, attributes={outbox.TASK_ID_ATTRIBUTE: "task-4"})
            assert in_batches.process(of) is expected
        of = mock.Mock(data=data, attributes={outbox.TASK_ID_ATTRIBUTE: "task-4"})
        by_sqlalchemy.receive(of)
        of.ack.assert_called_once_with()
        body["message"]["attributes"] = {outbox.TASK_ID_ATTRIBUTE: "task-5"}
        for _ in range(2):
            asyncio.run(importlib.import_module("stock_async").receive(body))
        for name in ("push", "stock", "stock_by_sqlalchemy", "stock_in_batches", "stock_async"):
            del sys.modules[name]
    assert pieces() == 1


def test_the_guide_to_replacing(shop: Database) -> None:
    """Unsent messages are moved with their IDs, once; and both relays together have one effect for each message."""
    page = "docs/guide/replace.md"
    table, empty = blocks(page, "sql")
    shop.update_ddl(ddl.cut(table)).result(timeout=ADMIN_SECONDS)
    _, *names = (execute(block, {"__name__": "page"}) for block in blocks(page, "python"))
    ids = [str(uuid.uuid4()) for _ in range(501)]
    columns = ("Id", "Topic", "Payload", "CreatedAt", "PublishedAt")
    rows = [(id, "orders", base64.b64encode(b"old"), spanner.COMMIT_TIMESTAMP, None) for id in ids]
    with shop.batch() as batch:
        batch.insert("OldOutbox", columns, rows)
    assert [shop.run_in_transaction(names[0]["copy"]) for _ in range(3)] == [500, 1, 0]
    assert one(shop, empty) == 0
    tasks = assert_registered(shop, topic="orders", times=501)
    assert {(task.id, task.message.data) for task in tasks} == {(id, b"old") for id in ids}

    shop.run_in_transaction(names[1]["announce"], "invoices", b"both")
    [task] = assert_registered(shop, topic="invoices")
    assert query(shop, "SELECT Id, Topic FROM OldOutbox") == [[task.id, "invoices"]]
    of_old_relay = PubsubMessage(data=b"both", attributes={outbox.TASK_ID_ATTRIBUTE: task.id})
    receive = inbox.Handler(shop, consumer="billing")(lambda *_: None)
    assert [receive.process(message) for message in (of_old_relay, task.message)] == [True, False]


def test_the_recipes(shop: Database) -> None:
    page = "docs/guide/recipes.md"
    shop.update_ddl(blocks(page, "sql")).result(timeout=ADMIN_SECONDS)
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        assert len(block.splitlines()) < 40
        execute(block, names)
    with TestClient(names["app"]) as client:
        asked = [("k1", 5), ("k1", 5), ("k1", 6), ("k2", 5)]
        answers = [client.post("/orders", json={"cents": c}, headers={"Idempotency-Key": key}) for key, c in asked]
    assert [each.status_code for each in answers] == [201, 201, 422, 201]
    assert answers[0].json() == answers[1].json() != answers[3].json()
    assert_registered(shop, topic="orders", times=2)

    begin = datetime(2030, 1, 1, tzinfo=UTC)
    times = [begin + timedelta(seconds=n) for n in (0, 1, 59, 60, 119, 120)]
    new = [shop.run_in_transaction(names["announce_change"], "order-1", now=time) for time in times]
    assert new == [True, False, False, True, False, True]
    waiting = assert_registered(shop, topic="changes", times=3)
    assert waiting[0].available_at == begin + timedelta(seconds=70)

    recorded = RecordingTransaction()
    names["announce_order"](recorded, names["OrderPlaced"](order="o-1", cents=5))
    names["handle"](recorded, recorded.tasks[0].message)
    assert recorded.inserts[1][2] == [("o-1", '{"order":"o-1","cents":5}')]
    id = names["register_event"](recorded, "orders", "shop.order.placed", {"order": "o-1"})
    assert dict(recorded.tasks[-1].message.attributes).items() > {"ce-id": id, "ce-type": "shop.order.placed"}.items()

    with shop.batch() as batch:
        batch.insert("PersonKeys", ["PersonId", "Key"], [["ann", base64.b64encode(bytes(32))]])
    shop.run_in_transaction(names["register_sealed"], "mails", "ann", b"secret")
    [task] = assert_registered(shop, topic="mails")
    assert b"secret" not in task.message.data
    with shop.snapshot() as snapshot:
        assert names["opened"](snapshot, task.message) == b"secret"


def test_the_guide_to_ordering(shop: Database) -> None:
    """Two tasks of a key; the first is dead: let the other pass, have it at once."""
    [pay] = blocks("docs/guide/ordering.md", "python")
    let_pass, at_once = blocks("docs/guide/ordering.md", "sql")
    publisher = FakePublisher("payments", project=PROJECT)
    relay = relay_of(
        SpannerStore(open_database(place("shop", project=PROJECT, instance="main")), Layout(10)), publisher
    )

    def turns() -> None:
        while relay.turn().made_progress:
            pass

    def change(statement: str, **values: str) -> None:
        for name, value in values.items():
            statement = statement.replace(f"the-{name}", value)
        shop.run_in_transaction(lambda transaction: transaction.execute_update(statement))

    execute(pay, {"outbox": outbox, "database": shop})
    [dead], [tail] = query(shop, "SELECT Id FROM AsynchronousTasks ORDER BY Sequence")
    publisher.failing = {dead: Failed("invalid_argument", "no")}
    turns()
    change(let_pass, id=dead)
    turns()
    assert publisher.ids() == []
    change(at_once, key="account-42", topic="payments")
    turns()
    assert publisher.ids() == [tail]


def test_every_command_of_the_pages_is_known() -> None:
    """Commands that are not run above have flags that exist."""
    pages = ["README.md", *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")))]
    shown = [words for page in pages for words in commands(page) if words[0] in PARSERS]
    assert len(shown) >= 8
    parsers = {name: create() for name, create in PARSERS.items()}
    for words in shown:
        parsers[words[0]].parse_args(words[1:])

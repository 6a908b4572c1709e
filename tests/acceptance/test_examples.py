"""The Django and FastAPI examples: one task for each order, none for a failed request, one invoice for a task."""

import base64
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance

import outbox
from outbox.devtools.emulators import Emulators
from outbox.table import ddl
from tests.support.processes import ROOT
from tests.support.pubsub import PubSub
from tests.support.relays import worker
from tests.support.spanner import INSTANCE, PROJECT, fresh_database, query, variables
from tests.support.waiting import eventually

EXAMPLES = ROOT / "docs/examples"
ORDER = """
import json
from django.test import Client
for order in ({"item": "book", "cents": 1999}, {"item": "unavailable", "cents": 5}):
    answer = Client().post("/orders", order, content_type="application/json")
    print(json.dumps([answer.status_code, answer.json()]))
"""
#: As if Pub/Sub delivered the message three times, and one that is not of the outbox.
RECEIVE = """
import base64, json, sys
from types import SimpleNamespace
from django_orders.subscriber import receive
attributes, data = json.load(sys.stdin)
data = base64.b64decode(data)
for its, data in ((attributes, data), (attributes, data), (attributes, data), ({}, data), (attributes, b"no JSON")):
    receive(SimpleNamespace(
        attributes=its, data=data, message_id="1", ack=lambda: print("ack"), nack=lambda: print("nack")
    ))
"""


class Site:
    """The example on a database, each command in a process of its own, because the driver changes classes of others."""

    def __init__(self, emulators: Emulators, database: Database, topic: str) -> None:
        self._environment = {
            **os.environ, **emulators.environment(), "DJANGO_SETTINGS_MODULE": "django_orders.settings",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, EXAMPLES))), "SPANNER_DISABLE_BUILTIN_METRICS": "true",
            "OUTBOX_PROJECT": PROJECT, "OUTBOX_INSTANCE": INSTANCE, "OUTBOX_DATABASE": database.database_id,
            "GOOGLE_CLOUD_PROJECT": "of-something-else", "TOPIC": topic,
        }  # fmt: skip

    def run(self, *words: str, stdin: str = "") -> list[str]:
        done = subprocess.run(
            [sys.executable, *words], env=self._environment, input=stdin, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@pytest.mark.extended
@pytest.mark.timeout(240)
def test_an_order_of_django_becomes_one_task_one_message_and_one_invoice(
    emulators: Emulators, own_database: Database, pubsub: PubSub
) -> None:
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    site = Site(emulators, own_database, topic)
    site.run("-m", "django", "migrate")
    script = "import django; django.setup()\n"
    placed, refused = (json.loads(line) for line in site.run("-c", script + ORDER))
    assert (placed[0], refused) == (201, [409, {"detail": "this item is not available"}])
    order, task = placed[1]["order_id"], placed[1]["task_id"]
    assert query(own_database, "SELECT order_id, item, cents FROM django_orders_order") == [[order, "book", 1999]]
    assert query(own_database, "SELECT Id, Topic FROM AsynchronousTasks") == [[task, topic]]
    with worker(emulators, own_database, "--poll-interval", "0.1"):
        [message] = subscription.pull_until(1, seconds=30)
    stdin = json.dumps([dict(message.attributes), base64.b64encode(message.data).decode()])
    assert site.run("-c", script + RECEIVE, stdin=stdin) == ["ack"] * 3 + ["nack"] * 2
    assert query(own_database, "SELECT * FROM django_orders_invoice") == [[task, order, 1999]]


@pytest.fixture
def shop(spanner_instance: Instance) -> Iterator[Database]:
    tables = ddl.cut((EXAMPLES / "fastapi_orders/schema.sql").read_text(encoding="utf-8"))
    with fresh_database(spanner_instance, [*ddl.statements(), *tables]) as database:
        yield database


@pytest.fixture
def subscriber(shop: Database, emulators: Emulators, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the example, on this database."""
    environment = variables(shop.database_id)
    for name, value in (emulators.environment() | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(EXAMPLES)
    found = importlib.import_module("fastapi_orders.subscriber")
    yield found
    found.engine.dispose()
    for name in [name for name in sys.modules if name.startswith("fastapi_orders")]:
        del sys.modules[name]


def test_an_order_becomes_one_task_one_message_and_one_invoice(
    emulators: Emulators, shop: Database, subscriber: ModuleType, pubsub: PubSub, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = pubsub.new_topic()
    app = sys.modules["fastapi_orders.app"]
    monkeypatch.setattr(app, "TOPIC", topic)
    subscription = pubsub.new_subscription(topic)
    with TestClient(app.app) as client:
        placed = client.post("/orders", json={"item": "book", "cents": 1999})
        assert placed.status_code == 201, placed.text
        assert client.post("/orders", json={"item": "unavailable", "cents": 5}).status_code == 409
        assert client.post("/orders", json={"item": "", "cents": 5}).status_code == 422
    order, task = placed.json()["order_id"], placed.json()["task_id"]
    assert query(shop, "SELECT OrderId, Item, Cents FROM Orders") == [[order, "book", 1999]]
    assert query(shop, "SELECT Id, Topic FROM AsynchronousTasks") == [[task, topic]]
    with worker(emulators, shop, "--poll-interval", "0.1"):
        [message] = subscription.pull_until(1, seconds=30)
        eventually(lambda: query(shop, "SELECT Id FROM AsynchronousTasks WHERE SentAt IS NOT NULL"), seconds=20)
    seen: list[str] = []
    ours = (dict(message.attributes), message.data)
    # As if Pub/Sub delivered the message three times, then a foreign one, and one that cannot be processed.
    for attributes, data in (ours, ours, ours, ({}, b""), (ours[0], b"no JSON")):
        delivery = SimpleNamespace(attributes=attributes, data=data, message_id="1")
        delivery.ack, delivery.nack = lambda: seen.append("ack"), lambda: seen.append("nack")
        subscriber.receive(delivery)
    assert seen == ["ack"] * 3 + ["nack"] * 2
    assert query(shop, "SELECT TaskId, OrderId, Cents FROM Invoices") == [[task, order, 1999]]


def test_a_push_endpoint_writes_one_invoice_for_each_task(shop: Database, subscriber: ModuleType) -> None:
    """Pub/Sub pushes a message until the answer is 2xx, and may push it again after that."""
    assert subscriber
    push = importlib.import_module("fastapi_orders.push")
    data = base64.b64encode(b'{"order_id": "o-1", "cents": 5}').decode()
    message = {"messageId": "1", "data": data, "attributes": {outbox.TASK_ID_ATTRIBUTE: "task-1"}}
    bodies = [{"message": message}, {"message": message}, {}, {"message": {"messageId": "1"}}]
    with TestClient(push.app, raise_server_exceptions=False) as client:
        assert [client.post("/invoices", json=body).status_code for body in bodies] == [204, 204, 400, 500]
    assert query(shop, "SELECT TaskId, OrderId, Cents FROM Invoices") == [["task-1", "o-1", 5]]

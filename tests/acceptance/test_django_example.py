"""The Django example: one task for each order, none for a failed request, and one invoice for each task."""

import base64
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT
from tests.support.pubsub import PubSub
from tests.support.relays import worker
from tests.support.spanner import INSTANCE, PROJECT, query

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
def test_an_order_becomes_one_task_one_message_and_one_invoice(
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
    assert site.run("-c", script + RECEIVE, stdin=_as_json(message)) == ["ack"] * 3 + ["nack"] * 2
    assert query(own_database, "SELECT * FROM django_orders_invoice") == [[task, order, 1999]]


def _as_json(message: Any) -> str:
    return json.dumps([dict(message.attributes), base64.b64encode(message.data).decode()])

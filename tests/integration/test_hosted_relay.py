"""An application that runs the relay in its own process, as docs/operations/worker.md shows it."""

import re
import time
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.devtools.emulators import Emulators
from tests.support.processes import ROOT
from tests.support.pubsub import PubSub
from tests.support.spanner import INSTANCE, PROJECT
from tests.support.waiting import eventually

PAGE = ROOT / "docs/operations/worker.md"


def test_a_hosted_relay_sends_a_task_when_it_is_woken(
    emulators: Emulators, database: Database, pubsub: PubSub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its poll interval is over. The page's example is run, with a long pause when the task comes."""
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    place = {"PROJECT": PROJECT, "INSTANCE": INSTANCE, "DATABASE": database.database_id, "POLL_INTERVAL": "30"}
    hosts = {"SPANNER_EMULATOR_HOST": emulators.spanner_host, "PUBSUB_EMULATOR_HOST": emulators.pubsub_host}
    for name, value in {**{f"OUTBOX_{name}": value for name, value in place.items()}, **hosts}.items():
        monkeypatch.setenv(name, value)
    [example] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    start, rest = example.split("database.run_in_transaction")
    register, end = rest.split("stop.set()")

    def place_order(transaction: Any) -> None:
        outbox.register(transaction, topic, b"order")

    names: dict[str, Any] = {"database": database, "place_order": place_order}
    exec(start, names)
    try:
        for _ in range(10):  # each wake-up in vain doubles the pause between polls
            names["app"].relay.wake()
            eventually(lambda: not names["app"].relay.woken.is_set(), seconds=10, message="a turn")
            time.sleep(0.1)
        exec(f"database.run_in_transaction{register}", names)
        subscription.pull_until(1, seconds=10)
    finally:
        exec(f"stop.set(){end}", names)
    assert not names["thread"].is_alive()

"""An application that runs the relay in its own process, as docs/operations/worker.md shows it."""

import re
import subprocess
import sys
import time
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

import outbox
from outbox.devtools.emulators import Emulators
from publishworker.hosted import HostedRelay
from tests.support.processes import ROOT
from tests.support.pubsub import PubSub
from tests.support.spanner import INSTANCE, PROJECT
from tests.support.waiting import eventually

PAGE = ROOT / "docs/operations/worker.md"


@pytest.fixture(autouse=True)
def _environment(emulators: Emulators, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"PROJECT": PROJECT, "INSTANCE": INSTANCE, "DATABASE": database.database_id, "POLL_INTERVAL": "30"}
    variables = {f"OUTBOX_{name}": value for name, value in place.items()}
    for name, value in (variables | emulators.environment()).items():
        monkeypatch.setenv(name, value)


def test_a_hosted_relay_sends_a_task_when_it_is_woken(database: Database, pubsub: PubSub) -> None:
    """Long before its poll interval is over. The page's example is run, with a long pause when the task comes."""
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    [example] = re.findall(r"^```python\n(from publishworker.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    start, commit = "with HostedRelay() as relay:", "    database.run_in_transaction"
    assert example.count(start) == example.count(commit) == 1

    def wait_for_a_long_pause(relay: HostedRelay) -> None:
        woken = relay._app.relay._woken  # type: ignore[union-attr]  # it runs
        for _ in range(10):  # each wake-up in vain doubles the pause between polls
            relay.wake()
            eventually(lambda: not woken.is_set(), seconds=10, message="a turn")
            time.sleep(0.1)

    def place_order(transaction: Any) -> None:
        outbox.register(transaction, topic, b"order")

    names = {"database": database, "place_order": place_order, "before": wait_for_a_long_pause}
    names["after"] = lambda: subscription.pull_until(1, seconds=10)
    exec(example.replace(commit, f"    before(relay)\n{commit}") + "    after()\n", names)
    relay: Any = names["relay"]
    assert not relay._thread.is_alive()
    relay.start()
    with pytest.raises(RuntimeError, match="runs already"):
        relay.start()
    relay.stop()
    relay.stop()  # a second call, and one in a process without a relay, do nothing
    assert not relay._thread.is_alive()


@pytest.mark.parametrize(
    ("program", "code", "stopped"),
    [
        ("with HostedRelay(): raise LookupError('of the application')", 1, True),
        *(
            pytest.param(*each, False, marks=pytest.mark.extended)
            for each in (
                ("HostedRelay().start(); raise LookupError('of the application')", 1),
                ("relay = HostedRelay().start()\nif os.fork() == 0: relay.stop()", 0),
            )
        ),
    ],
)
def test_a_process_ends_although_its_main_program_has_not_stopped_the_relay(
    program: str, code: int, stopped: bool, database: Database
) -> None:
    """At the end of its block, a relay stops as a worker does. Otherwise its thread ends with the process."""
    start = "import logging, os, sys\nfrom publishworker.hosted import HostedRelay\nlogging.basicConfig(level=20)\n"
    done = subprocess.run(
        [sys.executable, "-c", start + program], cwd=ROOT, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert ("INFO:publishworker:stopped" in done.stderr) == stopped
    with database.snapshot() as snapshot:
        left = list(snapshot.execute_sql("SELECT COUNT(*) FROM AsynchronousTaskWorkers"))
    assert left == [[0]] or not stopped

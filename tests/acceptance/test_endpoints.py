"""The worker and the commands reach both services through flags, without the emulators' variables.

So the emulator's own code paths are not used: transactions do not wait for each other in the worker, and Spanner aborts
those that overlap.
"""

import json

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.processes import run
from tests.support.pubsub import Subscription
from tests.support.relays import register
from tests.support.spanner import INSTANCE, PROJECT

NOWHERE = "127.0.0.1:9"
TASKS = 100


@pytest.fixture
def environment(emulators: Emulators) -> dict[str, str]:
    return {
        "SPANNER_EMULATOR_HOST": NOWHERE, "PUBSUB_EMULATOR_HOST": NOWHERE,
        "OUTBOX_SPANNER_ENDPOINT": f"http://{emulators.spanner_host}",
        "OUTBOX_PUBSUB_ENDPOINT": f"http://{emulators.pubsub_host}",
        # Emulators before 1.5.38 end a session's transaction when another begins.
        "GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW": "false",
        "OUTBOX_PROJECT": PROJECT, "OUTBOX_INSTANCE": INSTANCE,
    }  # fmt: skip


def test_the_endpoints_win_over_the_emulators_variables(
    environment: dict[str, str], empty_database: Database, topic: str, subscription: Subscription
) -> None:
    """From creating the tables to the received messages."""
    environment |= {"OUTBOX_DATABASE": empty_database.database_id}

    def called(*words: str) -> str:
        done = run(*words, environment=environment)
        assert done.code == 0, done
        return done.stdout

    assert "created  table AsynchronousTasks" in called("outbox", "schema", "apply")
    ids = register(empty_database, topic, TASKS)
    assert f"ok          topic {topic}" in called("publishworker", "check")
    assert "drained" in called("publishworker", "drain", "--concurrency", "2")
    status = json.loads(called("outbox", "status", "--json"))
    assert (status["pending"], status["sent_last_minute"]) == (0, TASKS)
    received = {message.attributes["asynchronous_task_id"] for message in subscription.pull_until(TASKS)}
    assert received == set(ids)
    unknown = run("outbox", "pause", "nosuch", environment=environment)
    assert (unknown.code, f"Known topics: {topic}" in unknown.stderr) == (2, True)

"""Real workers and a topic that does not exist: operators see the reason at once, and who does what."""

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.devtools.emulators import Emulators
from tests.support.commands import Commands
from tests.support.relays import register, worker
from tests.support.waiting import eventually


@pytest.mark.extended
def test_the_reason_why_a_missing_topic_is_not_sent_is_visible(
    emulators: Emulators, database: Database, outbox: Commands
) -> None:
    """Its tasks are pending most of the time, because the first attempts follow each other soon."""
    register(database, "missing", 30)
    with worker(emulators, database) as running:
        eventually(lambda: outbox.objects("topics", "--json")[0]["circuits"], seconds=30, message="an open circuit")
        [status] = outbox.objects("status", "--json")
        [circuit] = status["circuits"]
        assert (circuit["topic"], circuit["reason"], circuit["workers"]) == ("missing", "not_found", 1)
        assert "projects/test-project/topics/missing" in circuit["error"]
        shown = outbox.here("status").stdout
        assert shown.count("not_found: ") >= 2  # of the circuit, and of the tasks that were probes
        [found] = outbox.objects("workers", "--json")
        assert [each["reason"] for each in found["workers"][0]["circuits"]] == ["not_found"]
        running.end()

"""What a purge deletes, group by group; the job that runs it is in test_archive_job.py."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from google.cloud.spanner_v1.database import Database

from outbox.operations.table import Transaction
from outbox.settings import DatabaseSettings
from outbox_pipeline.purging import GROUP_ROWS, Purge, purge
from outbox_pipeline.spanner import Table
from tests.support.archives import DAY, MICROSECOND, Sent, sent
from tests.support.operations import FUTURE, Watch, insert, row, rows_of, update


def batch(tasks: list[Sent], zone: str = "UTC") -> pa.RecordBatch:
    """Return tasks as Spark hands them on in a session of that time zone."""
    times = pa.array([at for _, at in tasks], pa.timestamp("us", tz=zone))
    return pa.RecordBatch.from_arrays([pa.array([id for id, _ in tasks], pa.string()), times], names=["Id", "SentAt"])


def test_only_what_is_as_it_was_archived_is_deleted(database: Database) -> None:
    """Sent again a microsecond later, to be sent again, dead: these stay. Requests are of LOW priority and tagged."""
    names = ("same", "again", "reset", "dead", "other")
    insert(database, [sent(id, DAY) for id in names])
    update(database, "again", SentAt=DAY + MICROSECOND)
    update(database, "reset", SentAt=None)
    update(database, "dead", SentAt=None, AvailableAt=datetime.fromisoformat("9999-12-31T00:00:00Z"))
    watch = Watch(database)
    table = Table(watch.database)
    watch.requests.clear()
    counts = purge(table, [(id, DAY) for id in ("same", "again", "reset", "dead", "gone")])
    assert counts == {"deleted": 1, "changed": 3, "missing": 1}
    assert sorted(rows_of(database)) == ["again", "dead", "other", "reset"]
    assert {name for name, _ in watch.requests} == {"streaming_read", "commit"}
    for name, request in watch.requests:
        options = request.request_options
        assert options.priority == 1, (name, request)
        assert options.transaction_tag == "outbox-pipeline-purge", (name, request)
        assert name == "commit" or options.request_tag == "outbox-pipeline-purge"
    assert purge(table, [("same", DAY), ("again", DAY)]) == {"deleted": 0, "changed": 1, "missing": 1}
    assert sorted(rows_of(database)) == ["again", "dead", "other", "reset"]


def test_a_task_that_was_reset_since_the_look_stays(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentAt is read in the transaction that deletes."""
    insert(database, [sent("a", DAY), sent("b", DAY)])
    table = Table(Watch(database).database)
    tries = 0
    transact = table.transact

    def meddled(tag: str, work: Callable[[Transaction], Any]) -> Any:
        def after_another(transaction: Transaction) -> Any:
            nonlocal tries
            tries += 1
            if tries == 1:
                update(database, "a", SentAt=None)
            return work(transaction)

        return transact(tag, after_another)

    monkeypatch.setattr(table, "transact", meddled)
    assert purge(table, [("a", DAY), ("b", DAY)]) == {"deleted": 1, "changed": 1, "missing": 0}
    assert list(rows_of(database)) == ["a"]


def test_tasks_are_deleted_in_groups(database: Database, target: DatabaseSettings) -> None:
    """One answer a group, none for nothing; the last one may be of a single task."""
    tasks = [(f"{number:04d}", DAY + MICROSECOND * number) for number in range(2 * GROUP_ROWS + 1)]
    insert(database, [sent(id, at) for id, at in tasks])
    insert(database, [row("unsent"), row("scheduled", AvailableAt=FUTURE)])
    answers = [each.to_pylist() for each in Purge(target)(iter([batch(tasks), batch([]), batch(tasks[-2:])]))]
    full, one = ({"deleted": number, "changed": 0, "missing": 0} for number in (GROUP_ROWS, 1))
    assert answers == [[full, full, one], [], [{"deleted": 0, "changed": 0, "missing": 2}]]
    assert sorted(rows_of(database)) == ["scheduled", "unsent"]


def test_the_time_zone_of_the_session_changes_nothing(database: Database, target: DatabaseSettings) -> None:
    """Not even in the hour that a zone has twice, in which Python takes no time to be equal to one of another zone."""
    first = datetime.fromisoformat("2026-10-25T00:30:00Z")
    tasks = [("first", first), ("second", first + timedelta(hours=1)), ("before", first - timedelta(days=1))]
    insert(database, [sent(id, at) for id, at in tasks])
    [answer] = Purge(target)(iter([batch(tasks, "Europe/Berlin")]))
    assert answer.to_pylist() == [{"deleted": 3, "changed": 0, "missing": 0}]
    assert rows_of(database) == {}

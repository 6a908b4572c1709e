"""How old the oldest pending task is, found by seeks."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.operations import backlog
from outbox.operations.table import TaskTable
from outbox.states import NEVER
from tests.support.operations import CREATED, FUTURE, PAST, Watch, insert, pause, row

DAY = timedelta(days=1)


class Later(TaskTable):
    """Says that it is another time, and reads what is there now."""

    def query(self, *arguments: Any, at: datetime | None = None, **keywords: Any) -> list[list[Any]]:
        """See TaskTable."""
        return super().query(*arguments, **keywords)


def oldest(watch: Watch, at: datetime) -> datetime:
    """Return since when the oldest task is pending, as if it were `at`, or `at` if there is none."""
    return at - timedelta(seconds=backlog._oldest_age_at(Later(watch.database), at))


def test_it_is_of_ready_and_due_tasks_that_are_not_paused(database: Database, watch: Watch):
    """Of any topic, shard and priority; sent, scheduled, dead and paused tasks have no age."""
    now = datetime.now(UTC)
    assert backlog.oldest_age(watch.table) == 0
    insert(
        database,
        [
            row("sent", SentAt=PAST),
            row("scheduled", AvailableAt=FUTURE),
            row("retrying", AvailableAt=FUTURE, Attempts=1),
            row("dead", AvailableAt=NEVER),
            row("paused", Topic="paused"),
            row("paused and due", Topic="paused", AvailableAt=PAST),
        ],
    )
    pause(database, "paused")
    assert oldest(watch, now) == now
    insert(database, [row("high", Priority=500, CreatedAt=now - DAY), row("low", Priority=-5, CreatedAt=CREATED)])
    assert oldest(watch, now) == CREATED


@pytest.mark.parametrize(
    ("available_at", "since"), [(CREATED + DAY, CREATED + DAY), (CREATED - DAY, CREATED)], ids=["later", "before"]
)
def test_a_due_task_counts_from_when_it_became_due(
    database: Database, watch: Watch, available_at: datetime, since: datetime
):
    """But not from before it was registered."""
    insert(database, [row("due", CreatedAt=CREATED, AvailableAt=available_at)])
    assert oldest(watch, PAST) == since


def test_a_task_that_was_due_before_it_was_registered_does_not_hide_an_older_one(database: Database, watch: Watch):
    """It is the first of the index, and the youngest."""
    insert(
        database,
        [
            *(row(f"backdated {n}", CreatedAt=PAST - DAY, AvailableAt=CREATED, OrderingKey="k") for n in range(5)),
            row("older", CreatedAt=CREATED, AvailableAt=CREATED + DAY, OrderingKey="k"),
        ],
    )
    assert oldest(watch, PAST) == CREATED + DAY


@pytest.mark.parametrize("looks", [0, 1, 3, 20], ids=lambda looks: f"{looks} seeks")
def test_it_is_exact_whatever_waits(database: Database, watch: Watch, monkeypatch: pytest.MonkeyPatch, looks: int):
    """Random tasks against the plainest reckoning; also of the lowest and the highest number, and past the seeks."""
    monkeypatch.setattr(backlog, "MAX_LOOKS", looks)
    random = Random(looks)
    priorities = [2**63 - 1, 100, 50, 1, 0, -1, -(2**63)]
    rows = [
        row(
            str(number),
            Topic=random.choice(["a", "b", "paused"]),
            Priority=random.choice(priorities),
            CreatedAt=CREATED + random.random() * DAY,
            AvailableAt=random.choice([None, None, CREATED + random.random() * 2 * DAY, NEVER]),
            SentAt=random.choice([None, None, PAST]),
        )
        for number in range(60)
    ]
    insert(database, rows)
    pause(database, "paused")
    for _ in range(3):
        at = CREATED + DAY + random.random() * DAY
        assert oldest(watch, at) == min(since(rows, at), default=at)
        with database.batch() as batch:  # the oldest goes
            first = min((each for each in rows if pending(each, at)), key=ready_since)
            batch.update("AsynchronousTasks", ("Id", "SentAt"), [(first["Id"], PAST)])
            first["SentAt"] = PAST


def pending(task: dict[str, Any], at: datetime) -> bool:
    """Tell whether a task counts."""
    return task["SentAt"] is None and task["Topic"] != "paused" and (task["AvailableAt"] or CREATED) <= at


def ready_since(task: dict[str, Any]) -> datetime:
    """Return since when."""
    since: datetime = max(task["CreatedAt"], task["AvailableAt"] or task["CreatedAt"])
    return since


def since(rows: Sequence[dict[str, Any]], at: datetime) -> list[datetime]:
    """Return since when each task that counts has been pending."""
    return [ready_since(each) for each in rows if pending(each, at)]


def test_all_is_read_at_one_moment(database: Database, watch: Watch):
    """So that no replica need ask another, and what is sent meanwhile is not missed."""
    insert(database, [row("old", CreatedAt=CREATED)])
    watch.requests.clear()
    backlog.oldest_age(watch.table)
    options = [request.transaction.single_use.read_only for name, request in watch.requests if "sql" in name]
    times = [each.read_timestamp for each in options if each.read_timestamp]
    assert len(times) >= len(options) - 1  # but for the question what time it is
    assert len(set(map(str, times))) <= 2  # ten seconds ago, or now, where the table is younger than that

"""The steps of a change of the number of shards: whatever happens between them, some polled layout has every task."""

from datetime import UTC, datetime
from unittest import mock

import pytest
from google.api_core.exceptions import FailedPrecondition

from outbox.admin.operations import Operation
from outbox.admin.reshard import POLLED, RETIRED, Change, Resharding, Snapshot, Step, _polled_by, next_step
from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.table import schema
from outbox.table.layouts import Layout, by_layout

FIRST, NEW = Layout(10), Layout(32, "32")
COMPLETE = {"AsynchronousTasksInOrder": "READ_WRITE", "AsynchronousTasksToSend": "READ_WRITE"}


@pytest.mark.parametrize(
    ("recorded", "polls", "expected"),
    [
        (POLLED, "Shard", ("wait", NEW, "Waiting until w also polls Shard32")),  # as of a worker without `Polls`
        (POLLED, "Shard,Shard32", ("set", FIRST, "Let workers stop polling Shard")),
        (RETIRED, "Shard,Shard32", ("wait", FIRST, "Waiting until w no longer polls Shard")),
        (RETIRED, "Shard32", ("drop", FIRST, "Drop the indexes of Shard and the column")),
    ],
)
def test_a_layout_is_retired_and_dropped_when_no_live_worker_depends_on_it(
    recorded: str, polls: str, expected: tuple[object, ...]
) -> None:
    workers = {"w": frozenset(polls.split(","))}
    step = next_step(Snapshot({FIRST: COMPLETE, NEW: COMPLETE}, {FIRST: recorded, NEW: POLLED}, workers), NEW)
    assert step is not None
    assert (step.kind, step.layout, step.text) == expected


def test_statements_and_shard_ids_name_the_layout() -> None:
    sql = "SELECT Shard, in_shard FROM AsynchronousTasks@{FORCE_INDEX=AsynchronousTasksToSend}, AsynchronousTaskShards"
    assert FIRST.sql(sql) == sql
    assert NEW.sql(sql) == sql.replace("Shard,", "Shard32,").replace("ToSend", "ToSend32")
    first, new = by_layout([9, 32_031, 0, 32_000])
    assert (first.numbers, first.first_id, first.sql(sql)) == ([9, 0], 0, sql)
    assert (new.numbers, new.first_id, new.sql(sql)) == ([31, 0], 32_000, NEW.sql(sql))
    assert [shard in new for shard in (0, 32_000, 33_000)] == [False, True, False]
    for layout in (Layout(1000), Layout.added(1), Layout.added(1000)):
        [shards] = by_layout(layout.ids)
        assert (shards.numbers, shards.first_id) == ([*range(layout.shards)], layout.ids[0])
        assert shards.sql("Shard") == layout.column


def change(former: int, target: int, *, aborts: bool = False) -> Change:
    """Return a change that is under way."""
    since = datetime(2026, 11, 21, tzinfo=UTC)
    operation = Operation("", "reshard", since, *[None] * 2, "{}", *[None] * 5)
    return Change(former, target, operation, aborts)


def resharding(snapshot: Snapshot, latest: Change | None, monkeypatch: pytest.MonkeyPatch) -> Resharding:
    """Return a Resharding of a database that looks like this."""
    table = mock.Mock(TaskTable)
    table.name = "shop"
    table.database = mock.Mock()
    monkeypatch.setattr(Resharding, "snapshot", lambda _self: snapshot)
    monkeypatch.setattr(Resharding, "_latest", lambda _self: latest)
    monkeypatch.setattr(schema, "layouts", lambda _database: snapshot.found)
    return Resharding(table)


def test_a_change_under_way_is_reported_with_its_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the order of the names of the columns, which is Shard16 before Shard32."""
    found = {Layout(32, "32"): COMPLETE, Layout(16, "16"): COMPLETE}
    sentence = "a change from 32 to 16 shards is under way. Continue it with --shards 16, or end it with --abort"
    with pytest.raises(OutboxError, match=sentence):
        resharding(Snapshot(found, {}, {}), change(32, 16), monkeypatch).target(64)


@pytest.mark.parametrize(("former", "target", "aborts"), [(32, 16, False), (16, 32, True)])
def test_an_abort_that_was_interrupted_is_continued(
    former: int, target: int, aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not aborted in turn."""
    found = {Layout(32, "32"): COMPLETE, Layout(16, "16"): COMPLETE}
    latest = change(former, target, aborts=aborts)
    assert resharding(Snapshot(found, {}, {}), latest, monkeypatch).former().shards == 32


@pytest.mark.parametrize(
    "indexes", [{"AsynchronousTasksToSend": "READ_WRITE"}, COMPLETE | {"AsynchronousTasksToSend": "WRITE_ONLY"}]
)
def test_the_only_layout_must_be_complete(indexes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to do, and nothing is written."""
    its = resharding(Snapshot({FIRST: indexes}, {}, {}), None, monkeypatch)
    with pytest.raises(OutboxError, match=r"an index of Shard is missing .* Run `outbox schema apply`"):
        list(its.run(its.target(10)))


def test_the_only_layout_is_completed_if_a_change_added_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `outbox schema apply`."""
    snapshot = Snapshot({NEW: {"AsynchronousTasksInOrder32": "READ_WRITE"}}, {NEW: POLLED}, {})
    its = resharding(snapshot, None, monkeypatch)
    assert next(iter(its.run(NEW))) == "Add column Shard32 and its indexes; all tasks are written to them"


def test_a_layout_that_another_run_dropped_is_not_dropped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    its = resharding(Snapshot({NEW: COMPLETE}, {}, {}), None, monkeypatch)
    its._do(Step("drop", FIRST, "Drop"), NEW)
    its._table.database.update_ddl.assert_not_called()
    its._do(Step("drop", NEW, "Drop"), FIRST)
    its._table.database.update_ddl.assert_called_once()


def test_an_update_that_is_refused_after_another_one_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of an earlier run, which was queued before it. It is one if nothing has changed."""
    found: dict[Layout, dict[str, str]] = {FIRST: COMPLETE}
    its = resharding(Snapshot(found, {}, {}), None, monkeypatch)
    monkeypatch.setattr(schema, "layouts", lambda _database: dict(found))

    def refuse(_statements: list[str]) -> None:
        found[NEW] = COMPLETE
        raise FailedPrecondition("Duplicate name in schema: Shard32.")  # type: ignore[no-untyped-call]  # no types

    its._table.database.update_ddl.side_effect = refuse
    its._do(Step("build", NEW, "Add"), NEW)
    with pytest.raises(OutboxError, match="Duplicate name"):
        its._do(Step("drop", FIRST, "Drop"), NEW)


def test_a_worker_counts_for_twice_its_liveness_timeout() -> None:
    """A slow worker must not be overlooked. One that has not written Polls polls the first layout."""
    rows = [
        ["late", 27_999, 14, "Shard,Shard32"],
        ["gone", 28_000, 14, "Shard"],
        ["fresh", 0, 14, None],
        ["off", 0, 0, ""],
    ]
    assert _polled_by(rows) == {"late": {"Shard", "Shard32"}, "fresh": {"Shard"}}

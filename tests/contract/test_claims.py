"""Claims: rows read under the lock and marks written at the commit, on the fake store and on the Spanner emulator."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from outbox.table.states import NEVER
from publishworker.types import LockedRow, NotSent, Published, RowChange
from tests.support.fakes import serialized
from tests.support.store_harness import Harness, poll_ids

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)
LATER = datetime(2100, 1, 1, 1, 2, 3, 456789, tzinfo=UTC)
#: The columns of a task that failed, and the same as `columns` returns them.
FAILED = {"available_at": PAST, "expires_at": FUTURE, "last_error": "internal: no", "attempts": 2, "due_at": PAST}
UNTOUCHED = (None, PAST, FUTURE, "internal: no", 2, PAST)


def send_all(rows: Sequence[LockedRow], _now: datetime) -> Mapping[str, RowChange]:
    return {row.id: Published("1") for row in rows}


def locked(harness: Harness, *ids: str) -> dict[str, LockedRow]:
    calls: list[list[LockedRow]] = []
    harness.store.claim(ids, lambda rows, _now: (calls.append(list(rows)), {})[1])
    return {row.id: row for row in calls[-1]}


def columns(harness: Harness, id: str) -> tuple[Any, ...]:
    names = ("sent_at", "available_at", "expires_at", "last_error", "attempts", "due_at")
    return tuple(harness.column(id, name) for name in names)


def test_claim_returns_the_locked_rows(harness: Harness) -> None:
    """A row has its body and all that failures need, and whether it is clean. Missing and deleted rows are left out."""
    harness.insert("b", ordering_key="key", available_at=PAST)
    harness.insert("a")
    harness.insert("expiring", expires_at=FUTURE, at_most_once=True)
    harness.insert("once", at_most_once=True)
    harness.insert("failed", attempts=3, last_error="internal: no", available_at=PAST)
    harness.insert("deleted")
    harness.delete("deleted")
    rows = locked(harness, "b", "missing", "deleted", "a", "failed", "expiring", "once")
    assert {id: (row.attempts, row.expires_at, row.at_most_once, row.clean) for id, row in rows.items()} == {
        "a": (0, None, False, True),
        "b": (0, None, False, False),
        "expiring": (0, FUTURE, True, False),
        "failed": (3, None, False, False),
        "once": (0, None, True, True),
    }
    assert rows["b"].data == serialized()
    assert (rows["b"].ordering_key, rows["b"].available_at, rows["b"].sent_at) == ("key", PAST, None)
    assert rows["b"].created_at == harness.column("b", "created_at")
    assert locked(harness, "deleted") == {}


def test_an_exception_after_the_lock_writes_nothing(harness: Harness) -> None:
    """A defect in the relay rolls the transaction back and is not hidden; the store continues."""
    harness.insert("a")

    def break_down(_rows: Sequence[LockedRow], _now: datetime) -> Mapping[str, RowChange]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        harness.store.claim(["a"], break_down)
    assert harness.column("a", "sent_at") is None
    harness.store.claim(["a"], send_all)
    assert harness.column("a", "sent_at") is not None


def test_sending_clears_the_traces_of_earlier_attempts(harness: Harness) -> None:
    """So setting SentAt to NULL sends a task again."""
    traces: list[dict[str, Any]] = [{name: value} for name, value in FAILED.items()]
    left = {"clean": {}, "all": FAILED} | {f"trace {n}": each for n, each in enumerate([*traces, {"last_error": ""}])}
    for id, each in left.items():
        harness.insert(id, **each)
    harness.insert("b")
    assert {id: row.clean for id, row in locked(harness, *left).items()} == {id: not each for id, each in left.items()}
    times: list[datetime] = []

    def send(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, RowChange]:
        times.append(now)
        return send_all(rows, now)

    first = harness.store.claim([*left], send)
    second = harness.store.claim(["b"], send)
    assert {columns(harness, id) for id in left} == {(first, None, None, None, 0, None)}
    assert harness.column("clean", "created_at") < first
    rows = locked(harness, "clean", "all", "b")
    assert {id: (row.sent_at, row.data) for id, row in rows.items()} == {
        "clean": (first, b""),
        "all": (first, b""),
        "b": (second, b""),
    }
    assert times[0] <= first < second
    assert times[1] <= second
    assert first.tzinfo is not None


def test_failures_and_sent_tasks_are_written_in_one_commit(harness: Harness) -> None:
    """The next time, the attempts, the text, and the expiry as before. A task without an outcome keeps its row."""
    harness.insert("sent")
    harness.insert("sent-again", **FAILED)
    harness.insert("failed")
    harness.insert("failed-again", **FAILED)
    harness.insert("untried", **FAILED)
    text = "data_loss: \U0001f600 ü \x00 " + "x" * 980
    marks: dict[str, RowChange] = {
        "sent": Published("1"),
        "sent-again": Published("2"),
        "failed": NotSent(1, LATER, None, text, PAST),
        "failed-again": NotSent(2**62, LATER, FUTURE, "data_loss: no", FUTURE),
    }
    committed = harness.store.claim([*marks, "untried"], lambda _rows, _now: marks)
    assert columns(harness, "sent") == columns(harness, "sent-again") == (committed, None, None, None, 0, None)
    assert columns(harness, "failed") == (None, LATER, None, text, 1, PAST)
    assert columns(harness, "failed-again") == (None, LATER, FUTURE, "data_loss: no", 2**62, FUTURE)
    assert columns(harness, "untried") == UNTOUCHED
    row = locked(harness, "failed-again")["failed-again"]
    assert (row.attempts, row.available_at, row.expires_at, row.due_at) == (2**62, LATER, FUTURE, FUTURE)
    assert (row.sent_at, row.data) == (None, serialized())
    harness.insert("sent alone")
    harness.store.claim(["untried", "sent alone"], lambda _rows, _now: {"sent alone": Published("1")})
    assert columns(harness, "untried") == UNTOUCHED


def test_a_failed_task_is_a_candidate_once_its_retry_is_due(harness: Harness) -> None:
    """It is a candidate of the due range only. A dead task never is one, and keeps its error."""
    times = {"now": PAST, "later": FUTURE, "dead": NEVER}
    for id in (*times, "alive"):
        harness.insert(id, expires_at=FUTURE)
    marks = {id: NotSent(10, at, FUTURE, "expired: long ago") for id, at in times.items()}
    harness.store.claim([*marks], lambda _rows, _now: marks)
    assert poll_ids(harness.store, "orders") == ["alive"]
    assert sorted(poll_ids(harness.store, "orders", due=True, below_priority=1000)) == ["alive", "now"]
    assert columns(harness, "dead") == (None, NEVER, FUTURE, "expired: long ago", 10, None)


@pytest.mark.parametrize("count", [2**63 - 1, 2**63 - 2, 0, -(2**63)])
def test_a_count_at_its_end_does_not_overflow(harness: Harness, count: int) -> None:
    """TimesSent may have any value. Each mark and each undone mark changes it, also of a clean row."""
    harness.insert("clean", times_sent=count)
    harness.insert("other", times_sent=count, **FAILED)
    harness.store.claim(["clean", "other"], send_all)
    sent = [harness.column(id, "times_sent") for id in ("clean", "other")]
    assert sent == [count + 1 if count < 2**63 - 1 else count - 1] * 2
    harness.store.claim(["clean", "other"], lambda rows, _now: {row.id: NotSent(0, None, None, None) for row in rows})
    assert [harness.column(id, "times_sent") for id in ("clean", "other")] == [each - 1 for each in sent]


def test_a_failure_removes_the_mark(harness: Harness) -> None:
    """A task that was marked before it was published is unsent again, with its attempts and its expiry."""
    harness.insert("a", expires_at=FUTURE, attempts=2, at_most_once=True)
    committed = harness.store.claim(["a"], send_all)
    assert columns(harness, "a") == (committed, None, None, None, 0, None)
    harness.store.claim(["a"], lambda _rows, _now: {"a": NotSent(3, PAST, FUTURE, "not_found: no", PAST)})
    assert columns(harness, "a") == (None, PAST, FUTURE, "not_found: no", 3, PAST)
    assert poll_ids(harness.store, "orders", due=True) == ["a"]
    row = locked(harness, "a")["a"]
    assert (row.data, row.at_most_once) == (serialized(), True)

"""What a claim reads under the lock and writes with its commit: on the fake store and on the Spanner emulator."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from outbox.states import NEVER
from publishworker.spanner.store import Unsent
from publishworker.task import Charged, Mark, Row, Sent
from tests.support.fakes import serialized
from tests.support.store_harness import KINDS, Harness, harness_of, poll_ids

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)
LATER = datetime(2100, 1, 1, 1, 2, 3, 456789, tzinfo=UTC)


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each scenario runs on both."""
    return harness_of(request)


def send_all(rows: Sequence[Row], _now: datetime) -> Mapping[str, Mark]:
    """Say of each row that it was sent."""
    return {row.id: Sent("1") for row in rows}


def locked(harness: Harness, *ids: str) -> dict[str, Row]:
    """Return the rows as a claim sees them."""
    seen: dict[str, Row] = {}
    harness.store.claim(ids, lambda rows, _now: (seen.update({row.id: row for row in rows}), {})[1])
    return seen


def columns(harness: Harness, id: str) -> tuple[Any, ...]:
    """Return what a mark may write."""
    names = ("sent_at", "available_at", "expires_at", "last_error", "attempts")
    return tuple(harness.column(id, name) for name in names)


def test_claim_gives_the_rows_under_the_lock(harness: Harness) -> None:
    """Rows come with their bodies, sorted or not asked for in order; missing ones are left out."""
    harness.insert("b", ordering_key="key", available_at=PAST)
    harness.insert("a")
    seen: list[Row] = []

    def decide(rows: Sequence[Row], _now: datetime) -> Mapping[str, Mark]:
        seen.extend(rows)
        return {}

    harness.store.claim(["b", "missing", "a"], decide)
    by_id = {row.id: row for row in seen}
    assert set(by_id) == {"a", "b"}
    assert by_id["b"].data == serialized()
    assert (by_id["b"].ordering_key, by_id["b"].available_at, by_id["b"].sent_at) == ("key", PAST, None)


def test_claim_marks_what_was_sent_and_leaves_the_row_clean(harness: Harness) -> None:
    """SentAt is set; the traces of earlier attempts are gone, so that nulling SentAt alone sends it again."""
    harness.insert("a", available_at=PAST, attempts=3, last_error="once")
    harness.store.claim(["a"], send_all)
    assert harness.column("a", "sent_at") > harness.column("a", "created_at")
    assert harness.column("a", "available_at") is None
    assert (harness.column("a", "attempts"), harness.column("a", "last_error")) == (0, None)


def test_claim_leaves_alone_what_has_no_mark(harness: Harness) -> None:
    """A task that was not tried, or taken by others, keeps its row as it was."""
    harness.insert("untried", attempts=1, available_at=PAST, expires_at=FUTURE, last_error="internal: no")
    harness.insert("sent")
    harness.store.claim(["untried", "sent"], lambda _rows, _now: {"sent": Sent("1")})
    assert columns(harness, "untried") == (None, PAST, FUTURE, "internal: no", 1)


def test_claim_shows_a_row_that_another_worker_has_sent(harness: Harness) -> None:
    """The second claim sees SentAt, and reads no body that nobody needs."""
    harness.insert("a")
    harness.store.claim(["a"], send_all)
    seen: list[Row] = []
    harness.store.claim(["a"], lambda rows, _now: (seen.extend(rows), {})[1])
    assert seen[0].sent_at is not None
    assert seen[0].data == b""


def test_an_exception_under_the_lock_writes_nothing(harness: Harness) -> None:
    """A defect in the relay rolls the transaction back and is not hidden; the store goes on."""
    harness.insert("a")

    def break_down(_rows: Sequence[Row], _now: datetime) -> Mapping[str, Mark]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        harness.store.claim(["a"], break_down)
    assert harness.column("a", "sent_at") is None
    harness.store.claim(["a"], send_all)
    assert harness.column("a", "sent_at") is not None


def test_rows_under_the_lock_carry_what_failures_need(harness: Harness) -> None:
    """Attempts, the expiry, at most once; and what is left of earlier attempts makes a row that is not clean."""
    harness.insert("new")
    harness.insert("expiring", expires_at=FUTURE, at_most_once=True)
    harness.insert("failed", attempts=3, last_error="internal: no", available_at=PAST)
    rows = locked(harness, "new", "expiring", "failed")
    assert {id: (row.attempts, row.expires_at, row.at_most_once, row.clean) for id, row in rows.items()} == {
        "new": (0, None, False, True),
        "expiring": (0, FUTURE, True, False),
        "failed": (3, None, False, False),
    }


@pytest.mark.parametrize(
    "left", [{"attempts": 1}, {"expires_at": FUTURE}, {"last_error": ""}, {"available_at": PAST}, {}]
)
def test_a_sent_task_is_clean_whatever_was_left(harness: Harness, left: dict[str, Any]) -> None:
    """Each of the columns alone is enough to be written."""
    harness.insert("a", **left)
    assert locked(harness, "a")["a"].clean is (not left)
    committed = harness.store.claim(["a"], send_all)
    assert columns(harness, "a") == (committed, None, None, None, 0)


def test_a_failure_is_written_beside_what_was_sent_in_one_commit(harness: Harness) -> None:
    """The next time, the attempts, the text, the expiry as it was; the neighbours get what is theirs."""
    harness.insert("sent")
    harness.insert("sent-again", attempts=2, available_at=PAST, expires_at=FUTURE, last_error="internal: no")
    harness.insert("failed")
    harness.insert("failed-again", attempts=2, available_at=PAST, expires_at=FUTURE, last_error="internal: no")
    harness.insert("untried", attempts=1, available_at=PAST, expires_at=FUTURE, last_error="aborted: no")
    text = "data_loss: \U0001f600 ü \x00 " + "x" * 980
    marks: dict[str, Mark] = {
        "sent": Sent("1"),
        "sent-again": Sent("2"),
        "failed": Charged(1, LATER, None, text),
        "failed-again": Charged(3, LATER, FUTURE, "data_loss: no"),
    }
    committed = harness.store.claim([*marks, "untried"], lambda _rows, _now: marks)
    assert columns(harness, "sent") == (committed, None, None, None, 0)
    assert columns(harness, "sent-again") == (committed, None, None, None, 0)
    assert columns(harness, "failed") == (None, LATER, None, text, 1)
    assert columns(harness, "failed-again") == (None, LATER, FUTURE, "data_loss: no", 3)
    assert columns(harness, "untried") == (None, PAST, FUTURE, "aborted: no", 1)
    assert harness.store.unsent() == [Unsent("orders", "pending", 1), Unsent("orders", "retrying", 2)]


def test_a_failure_can_be_read_back_under_the_lock(harness: Harness) -> None:
    """The next attempt counts on from there."""
    harness.insert("a")
    harness.store.claim(["a"], lambda _rows, _now: {"a": Charged(2**62, LATER, FUTURE, "internal: no")})
    row = locked(harness, "a")["a"]
    assert (row.attempts, row.available_at, row.expires_at, row.clean) == (2**62, LATER, FUTURE, False)
    assert (row.sent_at, row.data) == (None, serialized())


def test_a_failed_task_is_due_when_its_time_has_come(harness: Harness) -> None:
    """It is among the due ones then, and not among the ready ones."""
    harness.insert("now")
    harness.insert("later")
    marks = {id: Charged(1, at, None, "internal: no") for id, at in (("now", PAST), ("later", FUTURE))}
    harness.store.claim([*marks], lambda _rows, _now: marks)
    assert poll_ids(harness.store, "orders") == []
    assert poll_ids(harness.store, "orders", due=True) == ["now"]


def test_a_dead_task_is_no_candidate_and_is_counted(harness: Harness) -> None:
    """It stays in the table, with what it died of, until somebody sets it free."""
    harness.insert("dead", expires_at=FUTURE)
    harness.insert("alive")
    harness.store.claim(["dead"], lambda _rows, _now: {"dead": Charged(10, NEVER, FUTURE, "expired: long ago")})
    assert columns(harness, "dead") == (None, NEVER, FUTURE, "expired: long ago", 10)
    assert poll_ids(harness.store, "orders", due=True, below=1000) == ["alive"]
    assert harness.store.unsent() == [Unsent("orders", "dead", 1), Unsent("orders", "pending", 1)]


def test_claim_returns_the_time_of_its_commit(harness: Harness) -> None:
    """The SentAt of all that it marked, by the column and under the next lock; the lock's own time is not later."""
    for id in ("a", "b"):
        harness.insert(id)
    harness.insert("not clean", attempts=1)
    times: list[datetime] = []

    def send(rows: Sequence[Row], now: datetime) -> Mapping[str, Mark]:
        times.append(now)
        return {row.id: Sent("1") for row in rows}

    first = harness.store.claim(["a", "not clean"], send)
    second = harness.store.claim(["b"], send)
    assert {harness.column(id, "sent_at") for id in ("a", "not clean")} == {first}
    assert {row.id: row.sent_at for row in locked(harness, "a", "b").values()} == {"a": first, "b": second}
    assert times[0] <= first < second
    assert times[1] <= second
    assert first.tzinfo is not None


def test_a_failure_takes_back_a_mark(harness: Harness) -> None:
    """A task that was marked before it was published is unsent again, with its attempts and its expiry."""
    harness.insert("a", expires_at=FUTURE, attempts=2, at_most_once=True)
    committed = harness.store.claim(["a"], send_all)
    assert columns(harness, "a") == (committed, None, None, None, 0)
    harness.store.claim(["a"], lambda _rows, _now: {"a": Charged(3, PAST, FUTURE, "not_found: no")})
    assert columns(harness, "a") == (None, PAST, FUTURE, "not_found: no", 3)
    assert poll_ids(harness.store, "orders", due=True) == ["a"]
    row = locked(harness, "a")["a"]
    assert (row.data, row.at_most_once) == (serialized(), True)

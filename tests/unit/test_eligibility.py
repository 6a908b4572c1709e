"""Which of the locked rows may be sent, in tables."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.table.states import NEVER
from publishworker.delivery.claim import Claim
from publishworker.delivery.rules import release_changes, skip_reasons
from publishworker.types import Deferred, LockedRow, NotSent, Published, RowChange, Version
from tests.support.parts import claim_of, policy

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(seconds=1)
BEFORE = NOW - timedelta(seconds=1)

#: A row, by a word: its columns, its skip reason, and whether the tasks behind it in its key may be sent.
ROWS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "ready": ({}, "", True),
    "due": ({"available_at": NOW}, "", True),
    "sent": ({"sent_at": BEFORE}, "sent", True),
    "scheduled": ({"available_at": LATER}, "not_due", False),
    "dead": ({"available_at": NEVER}, "not_due", False),
    "deferred": ({"available_at": LATER, "deferred": True}, "", True),
    "expired and due": ({"expires_at": NOW}, "", True),
    "expired before it was due": ({"available_at": LATER, "expires_at": NOW}, "not_due", True),
    "dead and expired": ({"available_at": NEVER, "expires_at": BEFORE}, "not_due", True),
    "not yet expired": ({"available_at": LATER, "expires_at": LATER}, "not_due", False),
    "of another topic": ({"topic": "invoices", "available_at": LATER}, "moved", True),
    "of another key": ({"ordering_key": "l", "available_at": LATER}, "moved", True),
    "of no key any more": ({"ordering_key": None}, "moved", True),
    "at most once": ({"at_most_once": True}, "at_most_once", False),
}


def row(id: str, **columns: Any) -> LockedRow:
    values = {"topic": "orders", "ordering_key": "k", "available_at": None, "sent_at": None, **columns}
    return LockedRow(**{"id": id, "data": b"", "created_at": BEFORE, **values})


def reasons(
    batch: Claim, *rows: LockedRow, published: Mapping[str, Version] | None = None, skip_dead: bool = False
) -> dict[str, str]:
    outcomes = skip_reasons(batch, rows, NOW, published or {}, policy(skip_dead=skip_dead))
    return {id: getattr(outcome, "reason", "?") for id, outcome in outcomes.items()}


@pytest.mark.parametrize("word", ROWS)
def test_a_row_decides_about_itself_and_the_tasks_behind_it(word: str) -> None:
    """Sent, gone and expired tasks are skipped. A task that is not due blocks only its key."""
    columns, reason, continues = ROWS[word]
    batch = claim_of("orders", "first", "next", "other", keys=("k", "k", "m"))
    expected = {"first": reason} if reason else {}
    if not continues:
        expected["next"] = "blocked"
    assert reasons(batch, row("next"), row("other", ordering_key="m"), row("first", **columns)) == expected
    # If nothing is written to the first row, the next one is released only if the first is skipped.
    batch = claim_of("orders", "first", keys=("k",), releases=("next",))
    rows = [row("first", **columns), row("next", available_at=LATER, deferred=True)]
    released_ids = {"deferred": ["first"], "ready": [], "due": [], "expired and due": ["next"]}
    released_ids = released_ids.get(word, ["next"] if reason and continues else [])
    assert list(release_changes(batch, rows, {}, NOW, policy())) == released_ids


def test_a_task_without_a_key_is_neither_blocked_nor_deferred() -> None:
    """A task that got a key after the poll is left to a poll that knows the key."""
    late, ready = row("a", available_at=LATER, ordering_key=None), row("b", ordering_key=None)
    deferred = late._replace(id="deferred", deferred=True)
    batch = claim_of("orders", "a", "b", "deferred", "keyed", "gone")
    expected = {"a": "not_due", "deferred": "not_due", "keyed": "moved", "gone": "gone"}
    assert reasons(batch, late, ready, deferred, row("keyed")) == expected


@pytest.mark.parametrize(
    ("marks", "skip_dead", "released_ids"),
    [
        ({"a": Published("1"), "b": Published("2")}, False, ["c"]),
        ({"a": Published("1")}, False, ["b"]),
        ({}, False, []),  # the head is ready: the poll sees the key by it
        ({"a": NotSent(1, LATER, None, "no"), "b": Deferred(LATER, "a")}, False, []),
        ({"a": NotSent(1, NEVER, None, "no")}, False, []),
        ({"a": NotSent(1, NEVER, None, "no")}, True, ["b"]),
        ({"a": Published("1"), "b": NotSent(1, NEVER, None, "no")}, True, ["c"]),
        ({"a": Published("1"), "b": NotSent(1, LATER, None, "no")}, False, []),
    ],
)
def test_the_deferred_task_that_becomes_the_head_is_released(
    marks: dict[str, RowChange], skip_dead: bool, released_ids: list[str]
) -> None:
    deferred = {"available_at": LATER, "deferred": True}
    rows = [row("a"), row("b", **deferred), row("c", **deferred), row("d", ordering_key="l", **deferred)]
    batch = claim_of("orders", "a", "b", keys=("k", "k"), releases=("c", "d"))
    assert list(release_changes(batch, rows, marks, NOW, policy(skip_dead=skip_dead))) == released_ids
    # A head that has expired since the poll blocks no task.
    rows = [each._replace(expires_at=NOW) if each.id in released_ids else each for each in rows]
    behind = [each.id for each in rows if each.deferred and each.ordering_key == "k" and each.id not in marks]
    released = list(release_changes(batch, rows, marks, NOW, policy(skip_dead=skip_dead)))
    assert released == (behind if released_ids else [])

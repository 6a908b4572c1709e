"""What stands at the front of ordering keys, and what is put behind a head: on the fake store and on the emulator."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.states import NEVER
from publishworker.spanner import store
from publishworker.task import Key, Mark, Parked, Row, Waiting
from tests.support.fakes import serialized
from tests.support.store_harness import KINDS, Harness, harness_of, poll_ids

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)
FIRST = datetime(2025, 1, 1, tzinfo=UTC)
KEY = Key("orders", "k")


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each scenario runs on both."""
    return harness_of(request)


def insert_in_order(harness: Harness, tasks: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tasks of a key in this order, by their ids and columns."""
    for sequence, (id, columns) in enumerate(tasks.items()):
        harness.insert(id, ordering_key="k", created_at=FIRST, sequence=sequence, **columns)


def front(harness: Harness, key: Key = KEY, per_key: int = 10, *, pass_dead: bool = False) -> list[str]:
    """Return the ids at the front of a key."""
    fronts = harness.store.fronts([key], per_key, pass_dead=pass_dead)
    return [each.id for each in fronts.get(key, ())]


def test_a_front_is_in_the_order_of_the_key(harness: Harness) -> None:
    """CreatedAt, then Sequence, NULL first, then Id; not the order of ids, of inserting, or of priorities."""
    later = FIRST + timedelta(microseconds=1)
    harness.insert("a", ordering_key="k", created_at=later, sequence=1, priority=100)
    harness.insert("b", ordering_key="k", created_at=FIRST, sequence=10)
    harness.insert("c", ordering_key="k", created_at=FIRST, sequence=9)
    harness.insert("e", ordering_key="k", created_at=FIRST)
    harness.insert("d", ordering_key="k", created_at=FIRST)
    harness.insert("f", ordering_key="k", created_at=FIRST, sequence=-5)
    assert front(harness) == ["d", "e", "f", "c", "b", "a"]
    assert front(harness, per_key=2) == ["d", "e"]


def test_fronts_are_those_of_the_keys_that_were_asked_for(harness: Harness) -> None:
    """A key is a topic and an ordering key; sent tasks and those without a key are in no front."""
    harness.insert("a", ordering_key="k", created_at=FIRST)
    harness.insert("sent", ordering_key="k", created_at=FIRST, sent_at=PAST)
    harness.insert("other-topic", "invoices", ordering_key="k", created_at=FIRST)
    harness.insert("other-key", ordering_key="K", created_at=FIRST)
    harness.insert("loose", created_at=FIRST)
    size = len(serialized())
    invoices = Key("invoices", "k")
    fronts = harness.store.fronts([KEY, invoices, Key("orders", "none")], 10, pass_dead=False)
    assert {key: list(front) for key, front in fronts.items() if front} == {
        KEY: [Waiting("a", size, may_go=True)],
        invoices: [Waiting("other-topic", size, may_go=True)],
    }


@pytest.mark.parametrize("whole", [0, 20, 2_000])
def test_the_fronts_of_many_keys_are_those_of_each(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    """Read whole, or one by one where they have more tasks than that; a look that was cut off is never believed."""
    monkeypatch.setattr(store, "WHOLE_KEYS_ROWS", whole)
    keys = [Key(topic, key) for topic in ("orders", "invoices") for key in "klmn"]
    for n in range(3):
        for number, key in enumerate(keys):
            dead = {"available_at": NEVER, "attempts": 1} if n == 0 and number % 2 else {}
            id = f"{9 - n}{key.topic}{key.ordering_key}"
            harness.insert(id, key.topic, ordering_key=key.ordering_key, created_at=FIRST, sequence=n, **dead)
    harness.store._emulator = True
    fronts = harness.store.fronts(keys, 2, pass_dead=True)
    assert {key: [each.id[0] for each in fronts[key]] for key in keys} == {
        key: ["8", "7"] if number % 2 else ["9", "8"] for number, key in enumerate(keys)
    }
    assert {each.id[1:] for each in fronts[Key("orders", "m")]} == {"ordersm"}


def test_a_front_shows_what_is_not_due(harness: Harness) -> None:
    """It holds what follows; a parked task is held by nothing of its own."""
    insert_in_order(
        harness,
        {
            "ready": {},
            "due": {"available_at": PAST, "attempts": 2, "last_error": "internal: no"},
            "parked": {"available_at": FUTURE, "last_error": "parked: waits for the task x of its ordering key"},
            "parked-due": {"available_at": PAST, "last_error": "parked: waits for the task x of its ordering key"},
            "scheduled": {"available_at": FUTURE},
            "retrying": {"available_at": FUTURE, "attempts": 1, "last_error": "internal: no"},
            "dead": {"available_at": NEVER, "attempts": 1, "last_error": "undecodable: no"},
            "expiring": {"available_at": PAST, "expires_at": PAST},
        },
    )
    waiting = harness.store.fronts([KEY], 10, pass_dead=False)[KEY]
    assert {each.id: (each.may_go, each.parked) for each in waiting} == {
        "ready": (True, False),
        "due": (True, False),
        "parked": (True, True),
        "parked-due": (True, True),
        "scheduled": (False, False),
        "retrying": (False, False),
        "dead": (False, False),
        "expiring": (True, False),
    }


def test_what_holds_back_nothing_is_told_in_the_front(harness: Harness) -> None:
    """Tasks that expired before they were due; dead ones are left out, if they are passed over."""
    insert_in_order(
        harness,
        {
            "dead-expired": {"available_at": NEVER, "expires_at": PAST, "attempts": 1},
            "retrying-expired": {"available_at": FUTURE, "expires_at": PAST, "attempts": 1},
            "parked-expired": {"available_at": FUTURE, "expires_at": PAST, "last_error": "parked: waits"},
            "due-expired": {"expires_at": PAST},
            "dead": {"available_at": NEVER, "attempts": 1},
            "dead-in-time": {"available_at": NEVER, "expires_at": FUTURE, "attempts": 1},
            "head": {"expires_at": FUTURE},
        },
    )
    waiting = harness.store.fronts([KEY], 10, pass_dead=False)[KEY]
    assert {each.id: (each.may_go, each.passed_over) for each in waiting} == {
        "dead-expired": (False, True),
        "retrying-expired": (False, True),
        "parked-expired": (False, True),
        "due-expired": (True, False),
        "dead": (False, False),
        "dead-in-time": (False, False),
        "head": (True, False),
    }
    assert front(harness, per_key=2, pass_dead=True) == ["retrying-expired", "parked-expired"]
    assert front(harness, pass_dead=True) == ["retrying-expired", "parked-expired", "due-expired", "head"]


def test_a_parked_task_waits_for_its_time_and_says_why(harness: Harness) -> None:
    """Its attempts and its expiry stay, the poll does not see it, and under the lock it is known as parked."""
    harness.insert("head", ordering_key="k", available_at=FUTURE)
    harness.insert("a", ordering_key="k", expires_at=FUTURE, attempts=2)
    assert poll_ids(harness.store, "orders", known=()) == ["a"]
    harness.store.claim(["a"], lambda _rows, _now: {"a": Parked(FUTURE, "head")})
    assert poll_ids(harness.store, "orders", due=True) == []
    assert harness.column("a", "available_at") == FUTURE
    assert harness.column("a", "expires_at") == FUTURE
    assert harness.column("a", "attempts") == 2
    assert harness.column("a", "last_error") == "parked: waits for the task head of its ordering key"
    rows: list[Row] = []

    def look(found: Sequence[Row], _now: datetime) -> Mapping[str, Mark]:
        rows.extend(found)
        return {}

    harness.store.claim(["a", "head"], look)
    assert {row.id: row.parked for row in rows} == {"a": True, "head": False}


def test_unsent_tasks_with_an_ordering_key_are_counted(harness: Harness) -> None:
    """`check` warns of them."""
    harness.insert("a", ordering_key="k")
    harness.insert("b")
    assert [(each.topic, each.state, each.count, each.ordered) for each in harness.store.unsent()] == [
        ("orders", "pending", 2, 1)
    ]


def test_a_parked_task_is_scheduled_whatever_its_attempts(harness: Harness) -> None:
    """It waits for its head, which may be dead: `drain` must not wait for it."""
    parked = {"available_at": FUTURE, "attempts": 2, "last_error": "parked: waits for the task x of its ordering key"}
    harness.insert("a", ordering_key="k", **parked)
    harness.insert("b", ordering_key="k", **{**parked, "last_error": "internal: no"})
    harness.insert("c", ordering_key="k", **{**parked, "last_error": None})
    harness.insert("d", **parked)
    harness.insert("e", ordering_key="k", **{**parked, "available_at": PAST})
    harness.insert("f", ordering_key="k", **{**parked, "available_at": NEVER})
    assert {(each.state, each.count, each.ordered) for each in harness.store.unsent()} == {
        ("scheduled", 1, 1),
        ("retrying", 3, 2),
        ("pending", 1, 1),
        ("dead", 1, 1),
    }

"""The first tasks of ordering keys, and tasks deferred behind a head: on the fake store and on the Spanner emulator."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.table.states import NEVER
from publishworker.spanner import emulator
from publishworker.types import Deferred, LockedRow, QueuedTask, TopicKey
from tests.support.fakes import serialized
from tests.support.store_harness import Harness, poll_ids

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime(2090, 1, 1, tzinfo=UTC)
FIRST = datetime(2025, 1, 1, tzinfo=UTC)
KEY = TopicKey("orders", "k")
DEFERRED = {"blocked_by": "x"}


def insert_in_order(harness: Harness, tasks: Mapping[str, Mapping[str, Any]]) -> None:
    for sequence, (id, columns) in enumerate(tasks.items()):
        harness.insert(id, ordering_key="k", created_at=FIRST, sequence=sequence, **columns)


def head_ids(harness: Harness, per_key: int = 10, *, skip_dead: bool = False) -> list[str]:
    key_heads = harness.store.key_heads(harness.with_shards(KEY), per_key, skip_dead=skip_dead)
    return [each.id for each in key_heads.get(KEY, ())]


def test_key_heads_are_in_the_order_of_their_key(harness: Harness) -> None:
    """CreatedAt, then Sequence, NULL first, then Id; not the order of IDs, inserts or priorities."""
    later = FIRST + timedelta(microseconds=1)
    harness.insert("a", ordering_key="k", created_at=later, sequence=1, priority=100)
    for id, sequence in {"b": 10, "c": 9, "e": None, "d": None, "f": -5}.items():
        harness.insert(id, ordering_key="k", created_at=FIRST, sequence=sequence)
    assert head_ids(harness) == ["d", "e", "f", "c", "b", "a"]
    assert head_ids(harness, per_key=2) == ["d", "e"]


def test_only_the_requested_keys_are_read(harness: Harness) -> None:
    """A key is a topic and an ordering key. Sent tasks and those without a key are left out."""
    harness.insert("a", ordering_key="k", created_at=FIRST)
    harness.insert("sent", ordering_key="k", created_at=FIRST, sent_at=PAST)
    harness.insert("other-topic", "invoices", ordering_key="k", created_at=FIRST)
    harness.insert("other-key", ordering_key="K", created_at=FIRST)
    harness.insert("loose", created_at=FIRST)
    size = len(serialized())
    invoices = TopicKey("invoices", "k")
    key_heads = harness.store.key_heads(
        harness.with_shards(KEY, invoices, TopicKey("orders", "none")), 10, skip_dead=False
    )
    assert {key: list(ids) for key, ids in key_heads.items() if ids} == {
        KEY: [QueuedTask("a", size, sendable=True)],
        invoices: [QueuedTask("other-topic", size, sendable=True)],
    }


def test_many_keys_are_read_as_if_one_by_one(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whole, or one by one where they have more tasks than that. A read that was cut off is never used."""
    keys = [TopicKey(topic, key) for topic in ("orders", "invoices") for key in "klmn"]
    for n in range(3):
        for number, key in enumerate(keys):
            dead = {"available_at": NEVER, "attempts": 1} if n == 0 and number % 2 else {}
            id = f"{9 - n}{key.topic}{key.ordering_key}"
            harness.insert(id, key.topic, ordering_key=key.ordering_key, created_at=FIRST, sequence=n, **dead)
    for whole in (0, 20, 2_000):
        monkeypatch.setattr(emulator, "WHOLE_KEYS_ROWS", whole)
        key_heads = harness.store.key_heads(harness.with_shards(*keys), 2, skip_dead=True)
        assert {key: [each.id for each in key_heads[key]] for key in keys} == {
            key: [f"{place}{key.topic}{key.ordering_key}" for place in ("87" if number % 2 else "98")]
            for number, key in enumerate(keys)
        }


def test_key_heads_include_tasks_that_are_not_due(harness: Harness) -> None:
    """Such a task blocks the following ones, unless it expires before. A deferred task is blocked only by others."""
    tasks: dict[str, tuple[dict[str, Any], tuple[bool, bool, bool]]] = {  # sendable, deferred, expired_before_due
        "ready": ({}, (True, False, False)),
        "due": ({"available_at": PAST, "attempts": 2, "last_error": "internal: no"}, (True, False, False)),
        "deferred": ({"available_at": FUTURE, **DEFERRED}, (True, True, False)),
        "deferred-due": ({"available_at": PAST, **DEFERRED}, (True, True, False)),
        "scheduled": ({"available_at": FUTURE}, (False, False, False)),
        "retrying": ({"available_at": FUTURE, "attempts": 1, "last_error": "internal: no"}, (False, False, False)),
        "dead": ({"available_at": NEVER, "attempts": 1, "last_error": "undecodable: no"}, (False, False, False)),
        "expiring": ({"available_at": PAST, "expires_at": PAST}, (True, False, False)),
        "dead-expired": ({"available_at": NEVER, "expires_at": PAST, "attempts": 1}, (False, False, True)),
        "retrying-expired": ({"available_at": FUTURE, "expires_at": PAST, "attempts": 1}, (False, False, True)),
        "deferred-expired": ({"available_at": FUTURE, "expires_at": PAST, **DEFERRED}, (False, True, True)),
        "ready-expired": ({"expires_at": PAST}, (True, False, False)),
        "dead-in-time": ({"available_at": NEVER, "expires_at": FUTURE, "attempts": 1}, (False, False, False)),
        "in-time": ({"expires_at": FUTURE}, (True, False, False)),
    }
    insert_in_order(harness, {id: columns for id, (columns, _) in tasks.items()})
    waiting = harness.store.key_heads(harness.with_shards(KEY), 20, skip_dead=False)[KEY]
    assert {each.id: (each.sendable, each.deferred, each.expired_before_due) for each in waiting} == {
        id: shown for id, (_, shown) in tasks.items()
    }
    remaining = [id for id in tasks if not id.startswith("dead")]
    assert head_ids(harness, 20, skip_dead=True) == remaining
    assert head_ids(harness, 7, skip_dead=True) == remaining[:7]


def test_a_deferred_task_is_due_later_and_names_its_head(harness: Harness) -> None:
    """Its attempts and expiry stay, the poll does not return it, and the locked row is known as deferred."""
    harness.insert("head", ordering_key="k", available_at=FUTURE)
    harness.insert("a", ordering_key="k", expires_at=FUTURE, attempts=2, due_at=PAST)
    assert poll_ids(harness.store, "orders") == ["a"]
    harness.store.claim(["a"], lambda _rows, _now: {"a": Deferred(FUTURE, "head")})
    assert poll_ids(harness.store, "orders", due=True) == []
    names = ("available_at", "expires_at", "attempts", "blocked_by", "last_error", "due_at")
    assert [harness.column("a", name) for name in names] == [FUTURE, FUTURE, 2, "head", None, PAST]
    rows: list[LockedRow] = []
    harness.store.claim(["a", "head"], lambda found, _now: (rows.extend(found), {})[1])
    assert {row.id: row.deferred for row in rows} == {"a": True, "head": False}

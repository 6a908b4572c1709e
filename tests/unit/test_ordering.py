"""The order of a key, between fakes: how far the first tasks of keys are read, and which of them go in one request."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from random import Random
from unittest import mock

import pytest

from outbox.table.states import NEVER
from publishworker.host import Host
from publishworker.turn import ordering
from publishworker.turn.in_flight import Limits
from publishworker.turn.ordering import MAX_KEY_HEAD_ROWS, Ordering, ResolvedKeys, parts
from publishworker.types import KeyHeads, Next, QueuedTask, TopicKey
from tests.support.fakes import FakePublisher, FakeStore, serialized
from tests.support.parts import policy, poll_request, relay_of
from tests.support.relay_bench import Bench


class Recording(FakeStore):
    def __init__(self, lines: Mapping[str, str]) -> None:
        """Insert the tasks of each key: `r` is ready, `x` is dead and has expired, so that it blocks no other."""
        super().__init__()
        self.asked: list[tuple[set[str], int]] = []
        self.random = Random(1)
        for key, states in lines.items():
            for n, state in enumerate(states):
                passed = {"available_at": NEVER, "expires_at": self.now - timedelta(hours=1)} if state == "x" else {}
                self.insert(f"{key}{n:02}", "orders", ordering_key=key or None, sequence=n, **passed)

    def key_heads(self, keys: Mapping[TopicKey, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        self.asked.append(({key.ordering_key for key in keys}, per_key))
        return super().key_heads(keys, per_key, skip_dead=skip_dead)

    def sendable(self, size: int) -> dict[str, tuple[str, ...]]:
        found = self.poll(poll_request("orders"))
        parts = Ordering(self, Limits(size, 10_000_000, 2), policy(), Host(random=self.random))
        candidates = parts.resolve(found, frozenset()).candidates
        return {each.ordering_key or "": (each.id, *each.behind) for each in candidates}


def places(key: str, *numbers: int) -> tuple[str, ...]:
    return tuple(f"{key}{n:02}" for n in numbers)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_key_is_read_as_far_as_a_batch_can_send_it(size: int) -> None:
    """One row more shows whether a deferred task follows. A key that fills a batch is not read again."""
    store = Recording({"k": "r" * (size + 3)})
    assert store.sendable(size) == {"k": places("k", *range(size))}
    assert store.asked == [({"k"}, size + 1)]
    store = Recording({f"{n:02}/": "r" for n in range(100)})
    store.sendable(1000)
    assert [rows for _, rows in store.asked] == [MAX_KEY_HEAD_ROWS // 100 + 1]


@pytest.fixture
def bounded() -> Iterator[None]:
    with mock.patch.object(ordering, "MAX_EXPIRED_ROWS", 40):
        yield


@pytest.mark.usefixtures("bounded")
def test_a_key_with_too_many_expired_tasks_is_blocked_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Its rows are not read without end, and it delays no other key. The warning names the first task."""
    store = Recording({"endless": "x" * 40 + "r", "other": "r"})
    assert store.sendable(4) == {"other": ("other00",)}
    assert store.asked == [({"endless", "other"}, 5), *(({"endless"}, rows) for rows in (10, 20, 40))]
    [line] = caplog.records
    assert line.message == (
        "An ordering key of topic orders begins with at least 40 tasks that expired before they were due, more than a "
        "worker reads. Its later tasks are not sent. The first one is endless00. Find the dead ones with "
        "`outbox list --state dead --topic orders`, and delete them with `outbox cancel`."
    )
    assert vars(line)["action"] == "crowded_key"
    relay = relay_of(Recording({"endless": "x" * 40 + "r"}), FakePublisher())
    assert [relay.turn().next, relay.turn().next] == [Next.AT_ONCE, Next.SOON]  # an operator may delete the tasks


def test_tasks_are_cut_where_a_batch_is_full_to_the_byte() -> None:
    tasks = [QueuedTask(str(n), size, sendable=True) for n, size in enumerate((5, 5, 5, 5, 1, 1, 1, 11, 2))]
    pieces = [[each.bytes for each in piece] for piece in parts(tasks, Limits(2, 10, 1))]
    assert pieces == [[5, 5], [5, 5], [1, 1], [1], [11], [2]]


def test_a_key_is_one_candidate_with_its_highest_priority(bench: Bench) -> None:
    """It has the size of all its tasks. The oldest of the most urgent ones says how long it has waited."""
    at = bench.store.now
    bench.line("a", priority=0, created_at=at)
    bench.line("b", priority=100, created_at=at + timedelta(seconds=1))
    bench.line("c", priority=100, created_at=at + timedelta(seconds=2))
    ordering = Ordering(bench.store, Limits(10, 10_000, 2), policy(), Host())
    seen = bench.store.poll(poll_request("orders"))
    key_heads = ordering.resolve(seen[::-1], frozenset())
    [key] = key_heads.candidates
    assert not key_heads.left_out
    assert (key.id, key.behind, key.priority, key.created_at) == ("a", ("b", "c"), 100, at + timedelta(seconds=1))
    assert (key.task_count, key.bytes, key.releases) == (3, 3 * len(serialized()), None)
    [part] = Ordering(bench.store, Limits(2, 10_000, 2), policy(), Host()).resolve(seen, frozenset()).candidates
    assert (part.behind, part.releases) == (("b",), None)  # the task behind them is not deferred
    in_flight = frozenset({TopicKey("orders", "k")})
    assert ordering.resolve(seen, in_flight) == ResolvedKeys([], left_out=True)
    other = seen[0]._replace(id="other", ordering_key="other")
    assert ordering.resolve([*seen, other], in_flight).left_out


def test_keys_share_a_batch_with_each_other_and_with_tasks_without_a_key() -> None:
    """A transaction for each key would be slow. Each key stays whole, in a request of its own."""
    bench = Bench(size=20)
    bench.line("a1", "a2", key="a")
    bench.line("b1", "b2", "b3", key="b")
    bench.insert("x")
    bench.turns()
    assert bench.store.claimed.total() == 6
    assert sorted(bench.publisher.requests) == [["a1", "a2"], ["b1", "b2", "b3"], ["x"]]

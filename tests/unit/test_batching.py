"""From candidates to batches: limits, priority, fairness, and the shuffle that keeps workers apart."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publishworker.turn.in_flight import Limits
from publishworker.turn.selection import choose_batches
from publishworker.types import Candidate, Claim

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
#: More than any test needs.
BYTES = 10**9


def candidate(
    id: str, *, topic: str = "orders", shard: int = 0, priority: int = 50, size: int = 100, age: int = 0
) -> Candidate:
    return Candidate(id, topic, shard, priority, NOON - timedelta(seconds=age), None, None, size)


def due(id: str, **columns: Any) -> Candidate:
    return candidate(id, **columns)._replace(available_at=NOON)


def prefix(key: str, tasks: int, **columns: Any) -> Candidate:
    ids = tuple(f"{key}{n}" for n in range(tasks))
    head = candidate(ids[0], **columns)
    return head._replace(ordering_key=key, behind=ids[1:], releases=f"{key}{tasks}")


def ids(batches: list[Claim]) -> list[str]:
    return [id for batch in batches for id in batch.ids]


def kinds(batches: list[Claim]) -> Counter[str]:
    return Counter(id.split("-")[0] for id in ids(batches))


randoms = st.integers(0, 2**32).map(Random)
candidates = st.lists(
    st.builds(
        candidate,
        id=st.just(""),
        topic=st.sampled_from(["a", "b", "c"]),
        shard=st.integers(0, 9),
        priority=st.integers(0, 2),
        size=st.integers(1, 3000),
    ),
    max_size=60,
).map(lambda found: [each._replace(id=str(n)) for n, each in enumerate(found)])


@given(candidates, st.integers(1, 12), st.integers(1000, 9000), st.integers(1, 6), st.integers())
def test_batches_keep_every_limit(found: list[Candidate], size: int, max_bytes: int, places: int, seed: int) -> None:
    by_id = {each.id: each for each in found}
    batches = choose_batches(found, Limits(size, max_bytes, places), Random(seed))
    assert len(batches) <= places
    assert len(ids(batches)) == len(set(ids(batches)))
    for batch in batches:
        assert 1 <= len(batch.ids) <= size
        assert {by_id[id].topic for id in batch.ids} == {batch.topic}
        assert len(batch.ids) == 1 or sum(by_id[id].bytes for id in batch.ids) <= max_bytes
    if batches:
        assert max(by_id[id].priority for id in batches[0].ids) == max(each.priority for each in found)
    assert choose_batches(found, Limits(size, max_bytes, places), Random(seed)) == batches


def test_within_a_slice_the_oldest_task_of_a_priority_is_first() -> None:
    found = [candidate("young", age=1), candidate("old", age=9), candidate("urgent", priority=99)]
    assert ids(choose_batches(found, Limits(3, 1000, 1), Random(1))) == ["urgent", "old", "young"]
    longer = due("longer", age=0)._replace(available_at=NOON - timedelta(hours=1))
    assert ids(choose_batches([due("old", age=9), longer], Limits(2, 1000, 1), Random(1))) == ["longer", "old"]


@given(
    st.lists(
        st.builds(
            lambda topic, shard, priority, is_due: (due if is_due else candidate)(
                "", topic=topic, shard=shard, priority=priority
            ),
            st.sampled_from(["a", "b", "c"]), st.integers(0, 3), st.integers(0, 3), st.booleans(),
        ),
        max_size=40,
    ),
    st.builds(
        Limits, st.integers(1, 4), st.just(BYTES), st.integers(1, 6), fair_share=st.sampled_from([0.0, 0.1])
    ),
    st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 4)), randoms,
)  # fmt: skip
def test_no_task_starts_while_a_more_urgent_one_waits(
    found: list[Candidate], limits: Limits, allowed: dict[str, int], random: Random
) -> None:  # OUT-ORDER-3
    """Over topics, shards, ready and due tasks. The rest of a batch may be less urgent, and one place may be left."""
    found = [each._replace(id=str(n)) for n, each in enumerate(found)]
    by_id = {each.id: each for each in found}
    batches = choose_batches(found, limits, random, {}, allowed)
    leaves_place = limits.fair_share > 0
    left = Counter(allowed) - Counter(by_id[id].topic for id in ids(batches))
    waiting = [
        each for each in found if each.id not in ids(batches) and (each.topic not in allowed or left[each.topic])
    ]
    most_urgent = max((each.priority for each in waiting), default=-1)
    late = [each for each in batches if by_id[each.ids[0]].priority < most_urgent]
    held = {each.topic for each in batches}
    assert len(late) <= (leaves_place and limits.places > 1)
    assert all(held - {each.topic} for each in late)
    if leaves_place and 1 < limits.places == len(batches):
        assert len(held) > 1 or {each.topic for each in waiting} <= held


def test_batches_are_filled_up() -> None:
    found = [candidate(f"{shard}-{n}", shard=shard) for shard in range(7) for n in range(60)]
    batches = choose_batches(found, Limits(100, BYTES, 5), Random(1))
    assert [len(batch.ids) for batch in batches] == [100, 100, 100, 100, 20]
    assert all(len(kinds([batch])) <= 3 for batch in batches)


def test_slices_stay_whole_where_they_fit() -> None:
    """Workers that share shards collide in few slices, each of one shard, whatever the ages of its tasks."""
    mixed = [candidate(f"{shard}-{n}", shard=shard, age=n) for n in range(20) for shard in range(10)]
    assert all(len(kinds([batch])) == 1 for batch in choose_batches(mixed, Limits(20, BYTES, 10), Random(1)))


def test_a_sample_is_uniform_over_slices() -> None:
    """Each of ten equal slices is among the three selected about as often as any other (A23)."""
    found = [candidate(str(shard), shard=shard) for shard in range(10)]
    random = Random(7)
    taken = Counter(id for _ in range(2500) for id in ids(choose_batches(found, Limits(1, 1000, 3), random)))
    assert set(taken) == {str(shard) for shard in range(10)}
    assert sum((count - 750) ** 2 / 750 for count in taken.values()) < 27.9  # chi-square, 9 degrees, 0.1 %


@pytest.mark.parametrize(("workers", "expected"), [(2, 0.05), (10, 0.35)])
def test_workers_rarely_pick_the_same_slice(workers: int, expected: float) -> None:
    """Double picks follow 1 - L(1-(1-S/L)^W)/(W*S) for L = 100 slices and S = 10 selected (A24)."""
    found = [candidate(str(shard), shard=shard) for shard in range(100)]
    random, rounds = Random(3), 600 // workers  # as many picks for each number of workers
    doubles = 0
    for _ in range(rounds):
        picks = Counter(id for _ in range(workers) for id in ids(choose_batches(found, Limits(1, 1000, 10), random)))
        doubles += sum(count - 1 for count in picks.values())
    assert doubles / (rounds * workers * 10) == pytest.approx(expected, abs=0.015)


@given(candidates, st.dictionaries(st.sampled_from(["a", "b", "x"]), st.integers(0, 8)), st.integers(1, 12), randoms)
def test_a_topic_gets_exactly_its_allowance_if_there_is_room(
    found: list[Candidate], allowed: dict[str, int], size: int, random: Random
) -> None:
    """In all its batches together, ready and due. Topics without a limit and the mapping stay unchanged."""
    found = [each._replace(available_at=random.choice([None, NOON])) for each in found]
    by_id = {each.id: each for each in found}
    before = dict(allowed)
    taken = Counter(
        by_id[id].topic for id in ids(choose_batches(found, Limits(size, BYTES, 1000), random, None, allowed))
    )
    waiting = Counter(each.topic for each in found)
    assert taken == Counter({topic: min(count, allowed.get(topic, count)) for topic, count in waiting.items()})
    assert allowed == before


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(0, 9), st.none() | st.integers(0, 30), randoms)
def test_a_sendable_prefix_stays_in_order_and_is_cut_only_at_its_end(
    lengths: list[int], loose: int, allowed: int | None, random: Random
) -> None:
    found = [prefix(f"key{n:02}-", length) for n, length in enumerate(lengths)]
    found += [candidate(f"loose{n}") for n in range(loose)]
    batches = choose_batches(
        found, Limits(6, 10**6, 100), random, allowed={} if allowed is None else {"orders": allowed}
    )
    total = sum(lengths) + loose
    assert len(ids(batches)) == (total if allowed is None else min(total, allowed))
    for batch in batches:
        assert len(batch.ids) <= 6
        keys = [task.ordering_key for task in batch.tasks]
        for key in set(keys) - {None}:
            its = [id for id, of in zip(batch.ids, keys, strict=True) if of == key]
            assert its == [f"{key}{n}" for n in range(len(its))]
            assert (f"{key}{len(its)}", key) in [task[:2] for task in batch.releases]
        assert all(id.startswith("loose") for id, key in zip(batch.ids, keys, strict=True) if key is None)
    keyed = [key for batch in batches for key in batch.keys]
    assert len(keyed) == len(set(keyed))

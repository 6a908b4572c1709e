"""How far the fronts of keys are looked at, and how a run is cut."""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from random import Random

import pytest

from outbox.states import NEVER
from publishworker.task import Key, Waiting
from publishworker.turn import ordering
from publishworker.turn.ordering import MAX_FRONT_ROWS, Ordering, cut
from publishworker.turn.polling import Found
from publishworker.turn.sampling import Limits
from tests.support.fakes import FakeStore
from tests.support.parts import look


class Looked(FakeStore):
    """A store that keeps what was asked for."""

    def __init__(self) -> None:
        """Begin empty."""
        super().__init__()
        self.asked: list[tuple[set[str], int]] = []
        self.random = Random(1)

    def line(self, key: str, states: str) -> None:
        """Insert the tasks of a key: `r` is ready, `x` is dead and has expired, so that it holds back nobody."""
        for n, state in enumerate(states):
            passed = {"available_at": NEVER, "expires_at": self.now - timedelta(hours=1)} if state == "x" else {}
            self.insert(f"{key}{n:02}", "orders", ordering_key=key, sequence=n, **passed)

    def fronts(self, keys: Collection[Key], per_key: int, *, pass_dead: bool) -> Mapping[Key, Sequence[Waiting]]:
        """See Store."""
        self.asked.append(({key.ordering_key for key in keys}, per_key))
        return super().fronts(keys, per_key, pass_dead=pass_dead)

    def runs(self, size: int) -> dict[str, tuple[str, ...]]:
        """Return the run of each key, in groups of `size` tasks."""
        found = Found(self.poll(look("orders")).candidates)
        limits = Limits(size, 10_000_000, 2)
        candidates = (
            Ordering(self, limits, self.random, pass_dead=False).fronts(found, frozenset(), frozenset()).candidates
        )
        return {each.ordering_key or "": (each.id, *each.behind) for each in candidates}


@pytest.mark.parametrize("size", [1, 2, 7])
def test_one_row_more_than_a_run_may_have_is_read(size: int) -> None:
    """It shows whether a parked one follows; a key that has enough is not looked at again."""
    store = Looked()
    store.line("k", "r" * (size + 3))
    assert store.runs(size) == {"k": tuple(f"k{n:02}" for n in range(size))}
    assert store.asked == [({"k"}, size + 1)]


def test_where_very_many_keys_wait_their_runs_are_shorter() -> None:
    """About as many rows are read in all."""
    store = Looked()
    for n in range(100):
        store.line(f"{n:02}/", "r")
    store.runs(1000)
    assert [rows for _, rows in store.asked] == [MAX_FRONT_ROWS // 100 + 1]


def test_behind_what_is_passed_over_it_looks_further_and_at_such_keys_only() -> None:
    """By as many rows as were passed over, until a run is full or the key has no more."""
    store = Looked()
    store.line("all", "x" * 12 + "rr")
    store.line("few", "rr")
    store.line("full", "r" * 5)
    assert store.runs(4) == {
        "all": ("all12", "all13"),
        "few": ("few00", "few01"),
        "full": ("full00", "full01", "full02", "full03"),
    }
    assert store.asked == [({"all", "few", "full"}, 5), ({"all"}, 10), ({"all"}, 20)]


def test_it_looks_further_by_what_was_passed_over() -> None:
    """Not by what it has found."""
    store = Looked()
    store.line("k", "r" + "x" * 5 + "rrrr")
    assert store.runs(4) == {"k": ("k00", "k06", "k07", "k08")}
    assert store.asked == [({"k"}, 5), ({"k"}, 9), ({"k"}, 14)]


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that a test can reach."""
    monkeypatch.setattr(ordering, "MAX_PASSED_OVER", 40)


@pytest.mark.usefixtures("bounded")
def test_a_key_of_which_very_much_is_passed_over_waits(caplog: pytest.LogCaptureFixture) -> None:
    """Its rows are not read without end, it keeps no other from being sent, and somebody is told."""
    store = Looked()
    store.line("endless", "x" * 40 + "r")
    store.line("other", "r")
    assert store.runs(4) == {"other": ("other00",)}
    assert store.asked == [({"endless", "other"}, 5), *(({"endless"}, rows) for rows in (10, 20, 40))]
    [line] = caplog.records
    assert line.message == (
        "at least 40 expired tasks stand in front of an ordering key of topic orders, beginning with endless00: "
        "the key waits until they are deleted, by outbox discard"
    )
    assert vars(line)["action"] == "crowded_key"


@pytest.mark.usefixtures("bounded")
def test_what_was_found_before_the_bound_goes(caplog: pytest.LogCaptureFixture) -> None:
    """Then the key does not wait, and nobody is told."""
    store = Looked()
    store.line("k", "x" * 10 + "r" + "x" * 40 + "r")
    assert store.runs(4) == {"k": ("k10",)}
    assert not caplog.records


@pytest.mark.usefixtures("bounded")
def test_of_many_such_keys_few_are_looked_at_in_a_turn(caplog: pytest.LogCaptureFixture) -> None:
    """Whichever, so that each has its turn; nobody is told, as none of them waits for good."""
    store = Looked()
    keys = [f"{n}/" for n in range(9)]
    for key in keys:
        store.line(key, "x" * 19 + "r")
    runs = [store.runs(4) for _ in range(60)]
    assert {key for each in runs for key in each} == set(keys)
    assert max(len(each) for each in runs) == 2
    assert max(len(asked) * rows for asked, rows in store.asked if rows > 5) == 40
    assert not caplog.records


def test_a_run_is_cut_where_it_is_full_to_the_byte() -> None:
    """Whichever of the two limits comes first; each piece begins anew."""
    tasks = [Waiting(str(n), size, may_go=True) for n, size in enumerate((5, 5, 5, 5, 1, 1, 1, 11, 2))]
    assert [[each.bytes for each in piece] for piece in cut(tasks, Limits(2, 10, 1))] == [
        *([5, 5], [5, 5], [1, 1]),
        *([1], [11], [2]),
    ]

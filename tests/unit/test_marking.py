"""Tasks whose commit failed: which are marked again, in which parts, how often, and for how long."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from outbox.base.schedules import MARKING_ASIDE
from publishworker.delivery.claim import Claim, MarkState
from publishworker.delivery.marking import (
    MAX_MARKING_SECONDS,
    MAX_REFUSED,
    MarkRetry,
    SharedMarking,
)
from publishworker.host import Event, Host, Threads
from publishworker.spanner.write_errors import Refused, StoreError
from tests.support.parts import claim_of


class Exit(Event):
    """Waiting only advances the clock."""

    def __init__(self, marking: "Waits") -> None:
        super().__init__()
        self.marking = marking

    def wait(self, timeout: float | None = None) -> bool:
        self.marking.sleep(timeout or 0)
        return self.is_set()


class Waits(Threads):
    seconds = 0.0

    def event(self) -> Event:
        return Exit(self)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Batch:
    """A batch whose marks fail for the IDs for which `fails` returns an error. It notes what it has tried."""

    def __init__(self, *ids: str, marking: SharedMarking | None = None) -> None:
        self.waits = Waits()
        host = Host(random=Random(1), clock=lambda: self.waits.seconds, threads=self.waits)
        self.marking = marking or SharedMarking(host, shutdown_seconds=5)
        self.fails: Callable[[str], StoreError | None] = lambda _id: None
        self.tried: list[tuple[float, tuple[str, ...]]] = []
        self.retry(claim_of("orders", *ids))

    def retry(self, claim: Claim) -> None:
        self.mark_retry = MarkRetry(claim, self.marking)
        self.mark_retry.begin(self, [claim])

    def write_again(self, claim: Claim) -> None:
        self.tried.append((self.waits.seconds, claim.ids))
        if error := next(filter(None, map(self.fails, claim.locks)), None):
            raise error
        self.marking.committed()

    def state_of(self, _id: str) -> MarkState:
        return "published"

    def settle(self, until: float = float("inf")) -> list[tuple[tuple[str, ...], bool]]:
        """Return what is reported: the IDs, and whether they are given up."""
        found = []
        for each in self.mark_retry.run():
            found.append((each.claim.ids, each.given_up))
            if self.waits.seconds >= until:
                break
        return found


def fail(*ids: str, error: type[StoreError] = StoreError) -> Callable[[str], StoreError | None]:
    return lambda each: error("no") if each in ids or not ids else None


IDS = [f"{number:03}" for number in range(200)]


def test_a_row_that_cannot_be_marked_is_found_and_the_others_are_marked() -> None:
    """It is reported once, gives its place back, and is tried less and less often, for 15 minutes."""
    batch = Batch(*IDS)
    batch.fails = fail("077", error=Refused)
    assert batch.settle() == [(("077",), False), (("077",), True)]
    assert batch.mark_retry.unmarked == frozenset()
    alone = [at for at, ids in batch.tried if ids == ("077",)]
    found = alone[0]
    assert found < 30
    assert max(Counter(id for at, ids in batch.tried if at <= found for id in ids).values()) <= 3
    pauses = [after - before for before, after in pairwise(alone)]
    assert all(after > 0.9 * before for before, after in pairwise(pauses))
    assert pauses[-1] == pytest.approx(MARKING_ASIDE.most, abs=0.6)
    assert alone[-1] == pytest.approx(MAX_MARKING_SECONDS, abs=MARKING_ASIDE.most)


def test_while_nothing_commits_one_part_is_tried_every_five_seconds() -> None:
    """Others wait for their turn. The batch keeps its place, and few parts are left to mark afterwards."""
    batch = Batch(*IDS)
    batch.fails = lambda _id: StoreError("no") if batch.waits.seconds < 300 else None
    assert batch.settle() == []
    early = [at for at, _ in batch.tried if 50 < at < 300]
    assert min(after - before for before, after in pairwise(early)) > 4
    assert not batch.mark_retry.aside
    assert len([at for at, _ in batch.tried if at >= 300]) <= 10
    assert max(at for at, _ in batch.tried) < 306


def test_a_failure_beside_commits_of_others_is_no_outage() -> None:
    """The only task of its batch gives its place back at once."""
    batch = Batch("a")

    def fails(_id: str) -> StoreError:
        batch.marking.committed()
        return StoreError("locked by another transaction")

    batch.fails = fails
    next(batch.mark_retry.run())
    assert batch.mark_retry.aside


def test_while_every_mark_is_refused_few_batches_give_their_places_back() -> None:
    """The reason is then in no row."""
    first = Batch(*IDS)
    first.fails = fail(error=Refused)
    first.mark_retry.try_once()
    assert len({ids for _, ids in first.tried if len(ids) == 1}) <= MAX_REFUSED + 1
    assert not first.mark_retry.aside
    alone = [Batch(id, marking=first.marking) for id in IDS]
    for batch in alone:
        batch.fails = fail(error=Refused)
        batch.mark_retry.try_once()
    assert not any(batch.mark_retry.aside for batch in alone)
    first.marking.committed()
    for batch in alone:
        batch.mark_retry.try_once()
    assert all(batch.mark_retry.aside for batch in alone[:MAX_REFUSED])


def test_a_refused_release_keeps_no_batch_in_flight() -> None:
    """The deferral of the task ends by itself."""
    batch = Batch("a")
    batch.retry(claim_of("orders", "a", keys=("k",), releases=("next",)))
    batch.fails = fail("next", error=Refused)
    assert batch.settle() == []
    assert [ids for _, ids in batch.tried] == [("a",), ("a",)]


@pytest.mark.parametrize("works_at", [0.0, 2.0, 1000.0])
def test_at_exit_marks_are_tried_at_least_once_until_the_time_is_over(works_at: float) -> None:
    batch = Batch("a")
    batch.marking.shut_down()
    batch.fails = lambda _id: StoreError("no") if batch.waits.seconds < works_at else None
    assert batch.settle() == [(("a",), True)] * (works_at > 5)
    assert 1 <= len(batch.tried) < 40
    assert batch.waits.seconds < 6
    late = Batch("b", marking=batch.marking)
    batch.waits.seconds = 100
    assert late.settle() == []
    assert len(late.tried) == 1


def test_what_is_given_up_is_reported_by_its_state() -> None:
    """The worker logs those that will be published again."""
    batch = Batch(*"abcd")
    batch.fails = fail()
    states: dict[str, MarkState] = {"a": "published", "b": "unpublished", "c": "published", "d": "published"}
    batch.state_of = states.__getitem__  # type: ignore[method-assign]  # one for each task
    batch.marking.shut_down()
    assert {id: each.state for each in batch.mark_retry.run() if each.given_up for id in each.claim.ids} == states


def test_the_parts_of_a_claim_have_all_tasks() -> None:
    """Each releases the task behind its own. A single task is tried without the one behind it, too."""
    claim = claim_of("orders", *"abd", keys=("k", "k", None), releases=[])
    first, second, third = claim.rows()
    assert (first.locks, second.locks, third.locks) == (("a", "b"), ("b",), ("d",))
    [alone] = first.rows()
    assert (alone.locks, alone.rows()) == (("a",), ())

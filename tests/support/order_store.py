"""The store of the order's model: every verb is a point to stand at, with row locks that may be lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from publishworker.spanner.store import Decide, NotWritten, StoreError
from publishworker.types import Candidate, FailedAttempt, Key, KeyHeads, Mark, PollRequest, Sent
from tests.support.fakes import FakeStore, StoredTask
from tests.support.order_pubsub import Request
from tests.support.order_repeats import REMEMBERED, Cause
from tests.support.stepwise import Fate, Point, Stepper, here

if TYPE_CHECKING:
    from tests.support.order_model import World


@dataclass(eq=False)
class Claim:
    ids: Sequence[str]
    process: object
    heads_at: datetime  # the snapshot that it goes back to
    holds: bool = False  # the locks, whatever the worker believes
    in_flight: list[Request] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    locked_at: datetime | None = None  # by the run that is or was the last
    in_vain: dict[str, datetime] = field(default_factory=dict)  # when a task was locked that was tried and failed


class ModelStore(FakeStore):
    """A store whose every method is a point to stop at, with row locks that may be lost."""

    def __init__(self, world: "World") -> None:
        super().__init__(shards=2)
        self.world = world
        self.holders: dict[str, tuple[Stepper, Claim]] = {}
        self.ranges: dict[Key, Claim] = {}  # ranges read in a transaction
        self.claims: dict[Stepper, Claim] = {}
        self.past: dict[Stepper, Claim] = {}  # ended; at-most-once tasks are published afterwards

    def tick(self) -> datetime:
        self.now += timedelta(microseconds=1)
        return self.now

    def poll(self, request: PollRequest) -> Sequence[Candidate]:
        poll = super().poll(request)
        worker: Any = here().crew
        worker.heads_at = None
        self._read(Point.POLLED)
        return poll

    def key_heads(self, keys: Mapping[Key, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        """See Store. Read by a transaction, it would lock the range, and callers insert there."""
        if (claim := self.claims.get(here())) is not None and claim.holds:
            self.ranges |= dict.fromkeys(keys, claim)
        worker: Any = here().crew
        worker.heads_at = worker.heads_at or self.now  # a turn may read several times: the first counts
        key_heads = super().key_heads(keys, per_key, skip_dead=skip_dead)
        self._read(Point.KEY_HEADS)
        return key_heads

    def _read(self, point: Point) -> None:
        if here().pause(point) is Fate.FAIL:
            raise StoreError("no answer")

    def claim(self, ids: Sequence[str], decide: Decide) -> datetime:
        worker: Any = here().crew
        process = worker.relay
        claim = self.claims[here()] = Claim(sorted(ids), process, worker.snapshots[here()])
        try:
            while (committed := self._run(claim, decide)) is None:
                # The worker remembers; another one may be faster.
                self.world.repeats.allow(claim.answered, Cause(but=process))
        except StoreError:
            self.world.repeats.allow(claim.answered, Cause(but=process, forgotten=worker.clock() + REMEMBERED))
            raise
        finally:
            self._release(claim)
            self.world.repeats.over(claim.ids, process)
            self.past[here()] = self.claims.pop(here())
            self.world.late += claim.in_flight
            claim.in_flight = []
        return committed

    def claim_of(self, stepper: Stepper) -> Claim:
        return self.claims.get(stepper) or self.past[stepper]

    def _run(self, claim: Claim, decide: Decide) -> datetime | None:
        stepper = here()
        stepper.wanted = claim.ids
        if stepper.pause(Point.LOCK) is Fate.FAIL:
            raise NotWritten("no lock in time")
        claim.holds = True
        self.holders |= dict.fromkeys(claim.ids, (stepper, claim))
        rows = [self._locked(self.rows[id]) for id in claim.ids if id in self.rows]
        locked_at = claim.locked_at = self.now
        marks = decide(rows, locked_at)
        fate = stepper.pause(Point.COMMIT)
        if fate is Fate.FAIL:
            raise StoreError("not committed")
        if fate is Fate.ABORT or not claim.holds:
            self._release(claim)
            return None
        marks = {row.id: marks[row.id] for row in rows if row.id in marks}
        self._check(marks, claim, locked_at)
        committed = self._mark(marks)
        claim.answered.clear()
        self._release(claim)
        if fate is Fate.LANDED:
            raise StoreError("perhaps committed")
        stepper.pause(Point.COMMITTED)
        return committed

    def _check(self, marks: Mapping[str, Mark], claim: Claim, locked_at: datetime) -> None:
        ledger = self.world.ledger
        ledger.check_marks(marks)
        for id, mark in marks.items():
            if not isinstance(mark, Sent) and ledger.tasks[id].published:
                self.world.repeats.allow([id])  # who has published it does not know the row any more
            if isinstance(mark, FailedAttempt):
                wrong = self.world.records.wrong(self.rows[id], mark, claim, locked_at)
                ledger.broken.extend(f"{id} {each}" for each in wrong)

    def lose(self, claim: Claim) -> None:
        if claim.holds:
            self.world.repeats.allow(claim.ids, Cause(but=claim.process))
            self.world.repeats.allow(claim.ids, Cause(only=claim.process))
        self._release(claim)

    def _release(self, claim: Claim) -> None:
        claim.holds = False
        self.holders = {id: pair for id, pair in self.holders.items() if pair[1] is not claim}
        self.ranges = {key: each for key, each in self.ranges.items() if each is not claim}

    def write(self, id: str) -> StoredTask | None:
        if id in self.holders:
            self.lose(self.holders[id][1])
        if id in self.rows:
            self.world.ledger.touched[id] = self.tick()
        return self.rows.get(id)

    def _mark(self, marks: Mapping[str, Mark]) -> datetime:
        committed = super()._mark(marks)
        self.world.repeats.marked(id for id, mark in marks.items() if isinstance(mark, Sent))
        self.world.ledger.touched |= dict.fromkeys(marks, committed)
        return committed

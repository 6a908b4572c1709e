"""Compare what workers do with the specification: each decision of a transaction must be a path of steps there.

The rows that a worker has locked, and what it remembers of the batch, are a state of the specification. So are the rows
after its marks. Between the two, the specification must allow to lock, to publish with these answers, and to commit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from unittest import mock

from outbox.specification import state as spec
from outbox.specification.protocol import Protocol
from outbox.specification.state import NO_ANSWER, ORPHAN, PUBLISHED, Batch, Row, Seen, State, Worker
from outbox.table.states import NEVER
from publishworker.delivery.claim import Claim, ClaimedTask, Kind
from publishworker.delivery.delivery import Delivery
from publishworker.delivery.kinds import Deferral
from publishworker.types import Deferred, Failed, LockedRow, Mark, Sent, Version

PUBLISH = frozenset({"publish", NO_ANSWER, spec.RETRYING, spec.DEAD})
#: The steps of a transaction, by the step of the batch before it.
PATHS = {"polled": ({"lock"}, PUBLISH, {"commit"}), "doubt": ({"mark again"},)}


@dataclass
class Comparison:
    """The transactions of all tasks and keys, and what the specification does not allow, as texts."""

    transactions: int = 0
    differences: list[str] = field(default_factory=list)


def state_of(row: LockedRow | None, now: datetime) -> str:
    """Return the state of a row in the specification."""
    if row is None:
        return spec.GONE
    if row.sent_at is not None:
        return spec.SENT
    if row.deferred:  # even if the deferral has ended, because it may be sent in both states
        return spec.DEFERRED
    if row.is_due(now):
        return spec.READY
    dead = row.available_at is not None and row.available_at >= NEVER
    return spec.DEAD if dead else spec.RETRYING if row.attempts else spec.SCHEDULED


def state_after(before: str, mark: Mark | None) -> str:
    if mark is None:
        return before
    if isinstance(mark, Sent):
        return spec.SENT
    if isinstance(mark, Deferred):
        return spec.DEFERRED
    return spec.DEAD if mark.dead else spec.READY if mark.available_at is None else spec.RETRYING


class Lane:
    """The tasks of one ordering key in a claim, or one task without a key, as a state of the specification."""

    def __init__(
        self, delivery: Delivery, claim: Claim, tasks: Sequence[ClaimedTask], rows: dict[str, LockedRow], step: str
    ) -> None:
        """Copy what the worker knows before it decides."""
        self.step, self._defers = step, claim.kind is Kind.DEFER
        key = tasks[0].ordering_key
        behind = (task.id for task in claim.releases if key is not None and task.ordering_key == key)
        self.tasks = tuple(task.id for task in tasks)
        self.all = (*self.tasks, *(id for id in behind if id not in self.tasks))
        self._skip_dead, self._key = delivery._tools.skip_dead, key
        self._rows = [rows.get(id) for id in self.all]
        self._answers = {id: delivery._answers[id] for id in self.tasks if id in delivery._answers}
        self._tried = dict(delivery._tried)

    def begin(self, now: datetime, marks: dict[str, Mark]) -> tuple[Protocol, State]:
        """Return the state before the transaction. The marks tell whether an earlier failure counts as an attempt."""
        states = [state_of(row, now) for row in self._rows]
        times = [row.times_sent if row else 0 for row in self._rows]
        seen = []
        for i, id in enumerate(self.tasks):
            row, answer, tried = self._rows[i], self._answers.get(id), self._tried.get(id)
            if isinstance(answer, Sent) and tried:
                seen.append(Seen(i, spec.READY, times[i] if row and tried.has_message_of(row) else -1, PUBLISHED))
            elif isinstance(answer, Failed) and row and tried == Version.of(row):
                end = state_after(states[i], marks.get(id))
                seen.append(Seen(i, states[i], times[i], end if end in (spec.RETRYING, spec.DEAD) else NO_ANSWER))
                break  # the later tasks of the request have no answer of their own
        n, ids = len(self.tasks), tuple(range(len(self.all)))
        batch = Batch(ids[:n], self._defers, ids[n:], self.step, answered=tuple(seen))
        rows = tuple(Row(each, count, messages=1, fresh=True) for each, count in zip(states, times, strict=True))
        machine = Protocol([self._key] * len(ids), skip_dead=self._skip_dead, events=dict.fromkeys(spec.EVENTS, 99))
        return machine, State(rows, (Worker((batch,)),), (9,) * len(spec.EVENTS))


def differences(lane: Lane, answers: dict[str, Any], marks: dict[str, Mark], now: datetime) -> Iterator[str]:
    """Yield both states if no path of the specification has these answers and marks."""
    machine, before = lane.begin(now, marks)
    wanted = tuple(state_after(row.state, marks.get(id)) for id, row in zip(lane.all, before.rows, strict=True))
    published = {i for i, id in enumerate(lane.tasks) if isinstance(answers.get(id), Sent)}
    ends = [before]
    for names in PATHS[lane.step]:
        ends = [after for s in ends for name, after in machine.steps(s) if name[0] in names and not after.broken]
        if names == PUBLISH:
            ends = [s for s in ends if _published(s) == published]
    found = {tuple(spec.DEFERRED if row.state == ORPHAN else row.state for row in s.rows) for s in ends}
    if wanted not in found:
        yield f"{lane.all}: {before}\nthe worker: {answers}, {wanted}\nthe specification: {found}"


def _published(s: State) -> set[int]:
    return {seen.id for batch in s.workers[0].batches for seen in batch.answered if seen.answer == PUBLISHED}


@contextmanager
def compared() -> Iterator[Comparison]:
    """Compare each transaction of workers in this process."""
    comparison = Comparison()

    def checked(real: Callable[..., Any], step: str) -> Callable[..., Any]:
        def decide(self: Delivery, *arguments: Any) -> dict[str, Mark]:
            claim, rows, now = arguments if step == "doubt" else (self.claim, *arguments)
            by_id = {row.id: row for row in rows}
            lanes: dict[str, list[ClaimedTask]] = {}
            behind = [
                task for task in claim.releases if step == "doubt" and isinstance(self._answers.get(task.id), Sent)
            ]
            for task in (*claim.tasks, *behind):  # the task behind a part of a batch may be in doubt, too
                lanes.setdefault(task.ordering_key or f"\0{task.id}", []).append(task)
            before = [Lane(self, claim, tasks, by_id, step) for tasks in lanes.values()]
            marks: dict[str, Mark] = real(self, *arguments)
            for lane in before:
                comparison.transactions += 1
                comparison.differences += differences(lane, self._answers, marks, now)
            return marks

        return decide

    with ExitStack() as stack:
        for owner, name, step in (
            (Delivery, "_decide", "polled"), (Deferral, "_decide", "polled"), (Delivery, "_marks_again", "doubt")
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, checked(getattr(owner, name), step)))
        yield comparison

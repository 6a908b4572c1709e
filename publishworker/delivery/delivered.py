"""The results of a batch. Frozen: they pass from the batch's thread to the relay's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from publishworker.delivery.claim import Claim, Kind
from publishworker.types import Deferred, Failed, NotSent, Outcome, Sent, Skipped, Turn

#: What has happened to a task whose marks are not written. `marked`: at most once, marked but not published.
State: TypeAlias = Literal["published", "unpublished", "marked"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of the tasks of a batch, after its first transaction.

    `error` is why the commit failed. It is also None if only single rows were refused: each has an Unmarked.
    """

    claim: Claim
    #: Pub/Sub's answer for each task over all transaction attempts. A task that is expired or cannot be published has a
    #: failure instead, without a request.
    answers: Mapping[str, Outcome] = field(default_factory=dict)
    #: The outcomes of the last attempt. If another worker sent a task while this one published it, `answers` has Sent
    #: and `outcomes` has Skipped.
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    #: Failed attempts and deferrals that are written.
    recorded: Mapping[str, NotSent] = field(default_factory=dict)
    deferred: Mapping[str, Deferred] = field(default_factory=dict)
    #: Tasks whose marks are not written. The batch goes on to write them.
    unmarked: frozenset[str] = frozenset()
    #: At-most-once tasks that may be marked as sent without having been published.
    unconfirmed: tuple[str, ...] = ()
    #: Trace IDs of the messages whose failure was recorded.
    traces: Mapping[str, str] = field(default_factory=dict)
    #: Seconds between a task's due time and Pub/Sub's answer.
    latencies: Mapping[str, float] = field(default_factory=dict)
    #: Seconds of each phase, over all attempts.
    phases: Mapping[str, float] = field(default_factory=dict)
    #: Transaction attempts that were aborted.
    aborted: int = 0
    error: str | None = None

    def published(self) -> list[str]:
        """Return the IDs of the published tasks, whether or not they are marked."""
        return [id for id, outcome in self.answers.items() if isinstance(outcome, Sent)]

    def uncommitted(self) -> list[str]:
        """Return the IDs of published tasks that are in doubt, or whose rows were deleted after an aborted attempt."""
        gone = Skipped("gone")
        return [id for id in self.published() if id in self.unmarked or self.outcomes.get(id) == gone]

    def has_written(self) -> bool:
        """Tell whether the batch has written a mark, so that another turn may find other tasks."""
        return len(self.published()) > len(self.uncommitted()) or bool(self.recorded or self.deferred)

    def already_sent(self) -> list[str]:
        """Return the IDs that another worker had sent."""
        return self._skipped("sent")

    def failed(self) -> dict[str, Failed]:
        """Return the failures by ID."""
        return {id: outcome for id, outcome in self.answers.items() if isinstance(outcome, Failed)}

    def at_most_once(self) -> Claim | None:
        """Return a claim of the tasks that must be marked first, without those behind a failure, or None."""
        skipped = self._skipped("at_most_once")
        tried = {*self.published(), *self.outcomes}.difference(self.failed())
        stopped = {task.ordering_key for task in self.claim.tasks if task.id not in tried and skipped} - {None}
        once = {task.id for task in self.claim.tasks if task.id in skipped and task.ordering_key not in stopped}
        return self.claim.part(once, Kind.MARK_FIRST) if once else None

    def _skipped(self, reason: str) -> list[str]:
        skipped = ((id, outcome) for id, outcome in self.outcomes.items() if isinstance(outcome, Skipped))
        return [id for id, outcome in skipped if outcome.reason == reason]


def counted_in_turn(batches: Sequence[Delivered]) -> Turn:
    """Return a turn with the counts of tasks of these batches."""
    return Turn(
        published=sum(len(each.published()) for each in batches),
        already_sent=sum(len(each.already_sent()) for each in batches),
        failed=sum(len(each.failed()) for each in batches),
        recorded=sum(len(each.recorded) for each in batches),
        deferred=sum(len(each.deferred) for each in batches),
        uncommitted=sum(len(each.uncommitted()) for each in batches),
    )


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A row that cannot be written, although others are. With `given_up` the batch does not try again."""

    claim: Claim
    error: str
    state: State
    given_up: bool = False

"""A batch before and after its delivery: the tasks that it claims, and what became of them. Frozen.

Claims pass from the relay's thread to the batch's, and results come back.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from outbox.table.controls import NO_CONTROLS, TopicControls
from publishworker.types import (
    Answer,
    Deferred,
    Failed,
    KeyHeads,
    NotSent,
    Published,
    Skipped,
    TopicKey,
    Turn,
)


class Kind(Enum):
    """What happens to the tasks of a claim."""

    PUBLISH = auto()  # they are published and then marked, in one transaction
    MARK_FIRST = auto()  # at most once: they are marked, and published after the commit
    DEFER = auto()  # nothing is published: the first unsent task of a key (its head) is not due, so the others wait


class ClaimedTask(NamedTuple):
    """A task to claim, as a poll or a read of key heads has returned it."""

    id: str
    ordering_key: str | None
    shard: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch: tasks of one topic.

    If the kind is DEFER, the first task is the key head, and the others are in any order. Otherwise the tasks of each
    ordering key are in order.
    """

    topic: str
    tasks: tuple[ClaimedTask, ...]
    kind: Kind = Kind.PUBLISH
    #: For each ordering key, the task behind the claimed ones. It is locked, too, and released if it is deferred and
    #: becomes the head.
    releases: tuple[ClaimedTask, ...] = ()
    #: Size of all messages of the batch. A part keeps the size of the whole.
    bytes: int = 0
    #: Whether the batch probes a topic whose circuit is open.
    probe: bool = False
    #: Tasks whose publish failed in an outage of the topic. They share no request. If one fails again while the circuit
    #: is closed, a failed attempt is recorded.
    suspects: frozenset[str] = frozenset()
    #: Those of the topic when the batch starts.
    controls: TopicControls = NO_CONTROLS

    @property
    def destination(self) -> str:
        """Return the Pub/Sub topic that the messages go to."""
        return self.controls.publish_to or self.topic

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the IDs of the tasks."""
        return tuple(task.id for task in self.tasks)

    @property
    def locks(self) -> tuple[str, ...]:
        """Return the IDs of all rows to lock."""
        return tuple(task.id for task in (*self.tasks, *self.releases))

    @property
    def keys(self) -> dict[TopicKey, int]:
        """Return the ordering keys of the tasks, each with its shard."""
        return {TopicKey(self.topic, key): shard for _, key, shard in self.tasks if key is not None}

    @property
    def may_delay(self) -> bool:
        """Tell whether nothing waits for the commit: no next task of an ordering key, and no at-most-once message."""
        return self.kind is Kind.PUBLISH and all(task.ordering_key is None for task in self.tasks)

    def part(self, ids: Collection[str], kind: Kind | None = None) -> "Claim":
        """Return a claim of only these tasks.

        `releases` are then the tasks after them in each ordering key.
        """
        ids = frozenset(ids)
        tasks = tuple(task for task in self.tasks if task.id in ids)
        keys = {task.ordering_key for task in tasks} - {None}
        behind = (
            after
            for task, after in pairwise(self.tasks)
            if task.ordering_key in keys and after.ordering_key == task.ordering_key
            if task.id in ids and after.id not in ids
        )
        releases = (*behind, *(task for task in self.releases if task.ordering_key in keys))
        return replace(self, tasks=tasks, kind=kind or self.kind, releases=releases)

    def of_deferred(self, heads: KeyHeads) -> "Claim":
        """Return a claim of the deferred tasks among the `heads` of its keys."""
        tasks = (
            ClaimedTask(head.id, key.ordering_key, self.keys[key])
            for key, queue in heads.items()
            for head in queue[:1]
            if head.deferred
        )
        return replace(self, tasks=tuple(tasks), releases=())

    def rows(self) -> "tuple[Claim, ...]":
        """Return a claim for each task.

        For a single task with `releases`, return its claim without them. For one without, return nothing. The tasks in
        `releases` need no transaction of their own, because the batch reads the key heads after its tasks are marked.
        """
        if len(self.tasks) > 1:
            return tuple(self.part([id]) for id in self.ids)
        return (replace(self, releases=()),) if self.releases else ()


#: What has happened to a task whose change cannot be written. `marked`: an at-most-once task whose mark is committed,
#: but which Pub/Sub has refused, or not answered.
MarkState: TypeAlias = Literal["published", "unpublished", "marked"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """The first report of a batch: what became of its tasks.

    `error` says why the commit failed. It is None after a commit, and if Spanner refused only some rows, because each
    of them is reported as an Unmarked.
    """

    claim: Claim
    #: Pub/Sub's answer for each task that was tried, over all runs of the transaction. A task that is expired or cannot
    #: be published has a failure instead, without a request.
    answers: Mapping[str, Answer] = field(default_factory=dict)
    #: The tasks that the last run skipped. A published task can be here, too, if another worker has sent it after
    #: an abort.
    skipped: Mapping[str, Skipped] = field(default_factory=dict)
    #: Failed attempts, which are written, or will be with the marks. Deferrals that are written.
    recorded: Mapping[str, NotSent] = field(default_factory=dict)
    deferred: Mapping[str, Deferred] = field(default_factory=dict)
    #: Published tasks whose rows were deleted before their mark, by a cancel. An ID that was registered again counts.
    deleted: frozenset[str] = frozenset()
    #: Tasks whose marks are not written. The batch goes on to write them.
    unmarked: frozenset[str] = frozenset()
    #: At-most-once tasks that may be marked as sent without having been published.
    unconfirmed: tuple[str, ...] = ()
    #: Seconds between a task's due time and Pub/Sub's answer.
    latencies: Mapping[str, float] = field(default_factory=dict)
    #: Seconds of each phase, over all runs.
    phases: Mapping[str, float] = field(default_factory=dict)
    #: Runs of transactions that were aborted after they had decided.
    aborted: int = 0
    error: str | None = None

    def published(self) -> list[str]:
        """Return the IDs of the published tasks, whether or not they are marked."""
        return [id for id, answer in self.answers.items() if isinstance(answer, Published)]

    def uncommitted(self) -> list[str]:
        """Return the IDs of published tasks whose marks are not written yet."""
        return [id for id in self.published() if id in self.unmarked]

    def cancelled(self) -> dict[str, str]:
        """Return the message ID of each published task that was deleted before its mark."""
        deleted = self.deleted - self.unmarked  # the batch locks an unmarked task again, and reports it then
        published = {id: answer for id, answer in self.answers.items() if isinstance(answer, Published)}
        return {id: answer.message_id for id, answer in published.items() if id in deleted}

    def has_written(self) -> bool:
        """Tell whether the batch has changed a row. Then the next poll may find other tasks."""
        unwritten = self.unmarked | self.deleted
        return any(id not in unwritten for id in (*self.published(), *self.recorded, *self.deferred))

    def already_sent(self) -> list[str]:
        """Return the IDs that another worker had sent."""
        return self._skipped("sent")

    def failed(self) -> dict[str, Failed]:
        """Return the failures by ID."""
        return {id: answer for id, answer in self.answers.items() if isinstance(answer, Failed)}

    def at_most_once(self) -> Claim | None:
        """Return a claim of the skipped at-most-once tasks that are behind no failure, or None if there are none."""
        if not (skipped := self._skipped("at_most_once")):
            return None
        passed = {*self.published(), *self.skipped}.difference(self.failed())
        stopped = {task.ordering_key for task in self.claim.tasks if task.id not in passed} - {None}
        once = {task.id for task in self.claim.tasks if task.id in skipped and task.ordering_key not in stopped}
        return self.claim.part(once, Kind.MARK_FIRST) if once else None

    def _skipped(self, reason: str) -> list[str]:
        return [id for id, skipped in self.skipped.items() if skipped.reason == reason]


def turn_counts(batches: Sequence[Delivered]) -> Turn:
    """Return a turn with the counts of tasks of these batches."""
    return Turn(
        published=sum(len(each.published()) for each in batches),
        already_sent=sum(len(each.already_sent()) for each in batches),
        failed=sum(len(each.failed()) for each in batches),
        recorded=sum(len(each.recorded) for each in batches),
        deferred=sum(len(each.deferred) for each in batches),
        uncommitted=sum(len(each.uncommitted()) for each in batches),
        cancelled=sum(len(each.cancelled()) for each in batches),
    )


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Published tasks that were found deleted after the first report of their batch, with their message IDs."""

    claim: Claim
    message_ids: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Unmarked:
    """Tasks whose rows the batch cannot write. Unless it has `given_up`, it tries again."""

    claim: Claim
    error: str
    state: MarkState
    given_up: bool = False

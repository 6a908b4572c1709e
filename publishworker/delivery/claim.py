"""What one transaction claims: tasks of one topic, and what the worker knows about the topic."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from publishworker.types import NO_POLICY, Key, TopicPolicy


class Kind(Enum):
    """What happens to the tasks of a claim."""

    PUBLISH = auto()  # they are published and then marked, in one transaction
    MARK_FIRST = auto()  # at most once: they are marked, and published after the commit
    DEFER = auto()  # nothing is published: the first one is a key head that is not due, and the others wait for it


class ClaimedTask(NamedTuple):
    """A task as the poll has read it."""

    id: str
    ordering_key: str | None = None


@dataclass(frozen=True, slots=True)
class TopicHints:
    """What the worker knows about the topic when it starts the batch. It decides which failed attempts are recorded."""

    #: The batch probes a topic whose circuit is open.
    probe: bool = False
    #: The worker has published a task to the topic since its last outage.
    accepts: bool = True
    #: Tasks whose publish failed in the topic's last outage. If one fails again while the topic accepts other tasks, a
    #: failed attempt is recorded.
    suspects: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch: tasks of one topic. The tasks of each ordering key are in order, except in a batch that defers them."""

    topic: str
    tasks: tuple[ClaimedTask, ...]
    kind: Kind = Kind.PUBLISH
    #: Deferred tasks that follow the sendable prefixes, to be released when these are sent.
    releases: tuple[ClaimedTask, ...] = ()
    #: Size of all messages.
    bytes: int = 0
    hints: TopicHints = TopicHints()
    #: The Pub/Sub topic that the messages go to, if it is not `topic`. It is fixed when the batch starts.
    publish_to: str | None = None
    policy: TopicPolicy = NO_POLICY

    @property
    def destination(self) -> str:
        """Return the Pub/Sub topic that the messages go to."""
        return self.publish_to or self.topic

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the IDs of the tasks."""
        return tuple(task.id for task in self.tasks)

    @property
    def locks(self) -> tuple[str, ...]:
        """Return the IDs of all rows to lock."""
        return tuple(task.id for task in (*self.tasks, *self.releases))

    @property
    def keys(self) -> frozenset[Key]:
        """Return the ordering keys of the tasks."""
        names = {task.ordering_key for task in self.tasks}
        return frozenset(Key(self.topic, name) for name in names if name is not None)

    def part(self, ids: Collection[str], kind: Kind | None = None) -> "Claim":
        """Return a claim of these tasks alone. Its commit also releases the deferred task behind them."""
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

    def halves(self) -> "tuple[Claim, ...]":
        """Return two claims that together lock these rows, or none if there is only one row."""
        if len(self.tasks) > 1:
            ids = self.ids
            return self.part(ids[: len(ids) // 2]), self.part(ids[len(ids) // 2 :])
        if len(self.locks) < 2:
            return ()
        if self.tasks:
            return replace(self, releases=()), replace(self, tasks=())
        half = len(self.releases) // 2
        return replace(self, releases=self.releases[:half]), replace(self, releases=self.releases[half:])

"""When a failed task is tried again, and when it is dead. Pure, with an injected source of randomness.

All times derive from the database's time, so a wrong clock of the worker has no effect.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

from outbox.storage.task_states import NEVER
from publishworker.pubsub.errors import FailureKind, is_refused, kind_of
from publishworker.types import Batch, Deferred, Failed, LockedRow, NotSent

#: The max of INT64. Another writer may have set the column to any value.
MAX_ATTEMPTS = 2**63 - 1
#: Max characters of LastError, with the reason.
MAX_ERROR_CHARACTERS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and after how many seconds a failed task is tried again.

    The delay doubles from `initial` to `longest`, each with jitter between half and full. After `max_attempts` the task
    is dead, except that a task of a topic that is missing or refuses messages lives until it is `dead_after` seconds
    old. A task whose message can never be published is dead at once.
    """

    initial: float
    longest: float
    max_attempts: int
    dead_after: float
    random: Random

    def record(self, row: LockedRow, failure: Failed, now: datetime) -> NotSent:
        """Return what a failure at `now`, the database's time, writes to its row."""
        attempts = min(row.attempts + 1, MAX_ATTEMPTS)
        dead = self._is_last(row, attempts, kind_of(failure.reason), now)
        available_at = NEVER if dead else now + timedelta(seconds=self._wait(attempts))
        return NotSent(attempts, available_at, row.expires_at, last_error(failure))

    def defer(self, head: LockedRow, available_at: datetime, now: datetime) -> Deferred:
        """Return what is written to a task behind `head`, which is not due before `available_at`.

        At most `longest` from now, so that a dead head does not make the tasks behind it look dead. At most the head's
        ExpiresAt, because an expired head blocks nothing.
        """
        until = min(available_at, now + timedelta(seconds=self.longest))
        return Deferred(until if head.expires_at is None else min(until, max(head.expires_at, now)), head.id)

    def _is_last(self, row: LockedRow, attempts: int, kind: FailureKind, now: datetime) -> bool:
        if kind is FailureKind.CONTENT:
            return True
        if kind is FailureKind.TARGET and now - row.created_at < timedelta(seconds=self.dead_after):
            return False
        return attempts >= self.max_attempts

    def _wait(self, attempts: int) -> float:
        doublings = max(0, min(attempts - 1, 60))  # no overflow, and far beyond any limit
        return min(self.initial * 2.0**doublings, self.longest) * self.random.uniform(0.5, 1)


def is_recorded(batch: Batch, id: str, failure: Failed, *, topic_accepts: bool) -> bool:
    """Tell whether a failure counts as a failed attempt of its task, or only opens the circuit of its topic.

    If the topic is missing or refuses messages, only tasks that probe it record the failure. An outage is recorded only
    on a suspect, which is a task of an earlier outage, and only if the topic accepts other tasks. An outage that no
    message can cause, for example an exhausted quota, is never recorded.
    """
    match kind_of(failure.reason):
        case FailureKind.TARGET:
            return batch.probe
        case FailureKind.OUTAGE:
            return id in batch.suspects and topic_accepts and not batch.probe and not is_refused(failure.reason)
    return True


def last_error(failure: Failed) -> str:
    """Return the text for LastError: valid UTF-8, without any of the message."""
    text = f"{failure.reason}: {failure.error}"[:MAX_ERROR_CHARACTERS]
    return text.encode("utf-8", "replace").decode()

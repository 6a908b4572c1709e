"""What a failure costs its task: when it is tried again, and when no more. Pure, with an injected source of randomness.

Times are computed from the database's time, so a worker with a wrong clock delays nothing and hurries nothing.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

from outbox.storage.task_states import NEVER
from publishworker.pubsub.errors import FailureKind, is_refused, kind_of
from publishworker.types import Batch, Deferred, Failed, FailedAttempt, LockedRow

#: What INT64 holds; another writer may have put anything into the column.
MAX_ATTEMPTS = 2**63 - 1
#: Characters of LastError, reason included.
MAX_ERROR_CHARACTERS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and after how long a failed task is tried again; times in seconds.

    The wait begins with about `initial` and doubles up to `longest`, each between half and full. After `max_attempts`
    the task is dead, but while its topic is missing or closed not before it is `dead_after` old.
    """

    initial: float
    longest: float
    max_attempts: int
    dead_after: float
    random: Random

    def record(self, row: LockedRow, failure: Failed, now: datetime) -> FailedAttempt:
        """Return what a failure at `now`, the database's time, writes to its row."""
        attempts = min(row.attempts + 1, MAX_ATTEMPTS)
        dead = self._is_last(row, attempts, kind_of(failure.reason), now)
        available_at = NEVER if dead else now + timedelta(seconds=self._wait(attempts))
        return FailedAttempt(attempts, available_at, row.expires_at, last_error(failure))

    def defer(self, head: LockedRow, available_at: datetime, now: datetime) -> Deferred:
        """Return what is written to a task behind `head`, which is not due before `available_at`.

        No later than the longest wait, so that a dead head does not make the tasks behind it look dead; and no later
        than the head expires, as it holds them no longer then.
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
        doublings = max(0, min(attempts - 1, 60))  # far beyond any limit, and no overflow
        return min(self.initial * 2.0**doublings, self.longest) * self.random.uniform(0.5, 1)


def is_recorded(batch: Batch, id: str, failure: Failed, *, works: bool) -> bool:
    """Tell whether a failure is its task's own, or its topic's, which then rests and costs the task nothing.

    A missing or closed topic is recorded to the tasks that probe it. An outage is recorded to a suspect, who has met one
    before, if the topic `works` beside it; but not one that no message can cause, as a used-up quota.
    """
    match kind_of(failure.reason):
        case FailureKind.TARGET:
            return batch.probe
        case FailureKind.OUTAGE:
            return id in batch.suspects and works and not batch.probe and not is_refused(failure.reason)
    return True


def last_error(failure: Failed) -> str:
    """Return the text for LastError: valid UTF-8, never a payload, as `Failed` holds none."""
    text = f"{failure.reason}: {failure.error}"[:MAX_ERROR_CHARACTERS]
    return text.encode("utf-8", "replace").decode()

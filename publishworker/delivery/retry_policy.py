"""When a failed task is retried, and when it is dead. Pure, with an injected source of randomness.

All times derive from the database's time, so a wrong clock of the worker has no effect.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from itertools import chain, repeat
from random import Random

from outbox.table.states import NEVER
from publishworker.delivery.claim import TopicHints
from publishworker.pubsub.errors import FailureKind, is_refused, kind_of
from publishworker.types import MAX_INT64, Deferred, Failed, LockedRow, NotSent, TopicPolicy

#: Max seconds until a worker notices that the head of a blocked key is gone or has been changed.
CHECK_SECONDS = 60.0
#: Max characters of LastError, with the reason.
MAX_ERROR_CHARACTERS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a failed task is retried, and after how many seconds.

    The delay begins at `initial` and doubles up to `longest`. With jitter, a task waits a random time between half of
    the delay and the whole delay. After `max_attempts` failed attempts the task is dead. If its topic is missing or
    refuses messages, it is not dead before it is `dead_after` seconds old. If its message can never be published, it is
    dead at once.
    """

    initial: float
    longest: float
    max_attempts: int
    dead_after: float
    random: Random

    def for_topic(self, policy: TopicPolicy) -> "RetryPolicy":
        """Return this policy with the values that the topic has."""
        return replace(self, **{name: value for name, value in asdict(policy).items() if value is not None})

    def record(self, row: LockedRow, failure: Failed, now: datetime) -> NotSent:
        """Return the values to write to the row of a task that failed at `now`, the database's time."""
        attempts = min(max(row.attempts, 0) + 1, MAX_INT64)  # another writer may have set the column to any number
        kind, age = kind_of(failure.reason), now - row.created_at
        may_die = kind is not FailureKind.TARGET or age >= timedelta(seconds=self.dead_after)
        if kind is FailureKind.CONTENT or (may_die and attempts >= self.max_attempts):
            return NotSent(attempts, NEVER, row.expires_at, last_error(failure))
        doublings = min(attempts - 1, 60)  # 2**60 cannot overflow a float, and exceeds any `longest`
        wait = min(self.initial * 2.0**doublings, self.longest) * self.random.uniform(0.5, 1)
        return NotSent(attempts, now + timedelta(seconds=wait), row.expires_at, last_error(failure))

    def deferrals(self, head: LockedRow, available_at: datetime, now: datetime) -> Iterator[Deferred]:
        """Yield the values to write to each task behind `head`, which is not due before `available_at`.

        The deferrals of the first two tasks end within CHECK_SECONDS. Then a poll finds the key even if the head is
        deleted or changed by SQL. The commit that sends a task releases the next, so one such task would be enough.
        The second is needed if the first is deleted as well.

        The others end within `longest` seconds. Otherwise the tasks behind a dead head would look dead too. All end
        when the head expires, because an expired head blocks no task.
        """
        if head.expires_at is not None:
            available_at = min(available_at, max(head.expires_at, now))
        for longest in chain([min(CHECK_SECONDS, self.longest)] * 2, repeat(self.longest)):
            yield Deferred(min(available_at, now + timedelta(seconds=longest)), head.id)


def should_record(hints: TopicHints, id: str, failure: Failed, *, topic_accepts: bool) -> bool:
    """Tell whether to record the failure as a failed attempt of its task. Otherwise it only opens the topic's circuit.

    If the topic is missing or refuses messages, only the failures of probes are recorded. In an outage, a
    failure is recorded only if the topic accepts other tasks, the task is a suspect (it failed in the last outage too),
    and its batch is no probe. Outages that no message can cause, such as an exhausted quota, are never recorded.
    """
    match kind_of(failure.reason):
        case FailureKind.TARGET:
            return hints.probe
        case FailureKind.OUTAGE:  # OUT-LOSS-4
            return id in hints.suspects and topic_accepts and not hints.probe and not is_refused(failure.reason)
    return True


def last_error(failure: Failed) -> str:
    """Return the text for LastError: valid UTF-8, and no part of the message."""
    text = f"{failure.reason}: {failure.error}"[:MAX_ERROR_CHARACTERS]
    return text.encode("utf-8", "replace").decode()

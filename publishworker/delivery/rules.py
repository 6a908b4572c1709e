"""Which of the locked rows may be sent, when a failed task is retried, and when it is dead.

No function here calls a service, and only the jitter is random. A comment such as OUT-ORDER-1 names the promise of
docs/guarantees.md that its line keeps.

The rules for rows keep the order of each ordering key (docs/guide/ordering.md). The sendable prefix of a key consists
of its unsent tasks up to the first one that must wait. A task must wait if its AvailableAt is in the future and it is
not deferred, or if it is an at-most-once task, which another batch sends. An expired task never ends the prefix, and a
dead one does not if the policy skips dead tasks. After a failure, except expiry, this batch publishes no later task of
the key, even in a later attempt of its transaction.

All times derive from the database's time, so a wrong clock of the worker has no effect.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import chain, repeat
from random import Random

from outbox.base.schedules import Schedule
from outbox.base.values import shown
from outbox.table.controls import TopicControls
from outbox.table.states import KEY_CHECK_SECONDS, NEVER, first_due, is_dead
from publishworker.pubsub.failures import FailureKind, failure_kind, is_refused
from publishworker.pubsub.publisher import trace_id
from publishworker.types import (
    MAX_INT64,
    Answer,
    Claim,
    Deferred,
    EndedAgain,
    Failed,
    Kind,
    LockedRow,
    NotSent,
    Published,
    RowChange,
    Skipped,
    Version,
)

#: Max characters of LastError, including the reason that it begins with.
MAX_ERROR_CHARACTERS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a failed task is retried, and after how many seconds.

    The delay begins at `initial` and doubles up to `longest`. With jitter, a task waits a random time between half of
    the delay and the whole delay. After `max_attempts` failed attempts the task is dead. If its topic is missing or
    refuses messages, it is not dead before it is `dead_after` seconds old. If its message can never be published, it is
    dead at once. A failure that is about the topic is usually not recorded (`should_record`): the topic's circuit then
    decides when its tasks are tried again.
    """

    initial: float
    longest: float
    max_attempts: int
    dead_after: float
    random: Random
    #: Whether later tasks of an ordering key are sent although an earlier one is dead.
    skip_dead: bool = False

    def for_topic(self, controls: TopicControls) -> "RetryPolicy":
        """Return this policy with the values of the topic. A first delay that exceeds `longest` replaces it, too."""
        initial = controls.backoff_initial_seconds
        own = {
            "initial": initial,
            "longest": controls.backoff_max_seconds or max(initial or 0, self.longest),
            "max_attempts": controls.max_attempts,
            "dead_after": controls.dead_after_seconds,
        }
        return replace(self, **{name: value for name, value in own.items() if value is not None})  # type: ignore[arg-type]  # by name

    def failed_attempt(self, row: LockedRow, failure: Failed, now: datetime) -> NotSent:
        """Return the values to write to the row of a task that failed at `now`, the database's time."""
        attempts = min(max(row.attempts, 0) + 1, MAX_INT64)  # another writer may have set the column to any number
        kind, due_at = failure_kind(failure.reason), first_due(row)
        may_die = kind is not FailureKind.TARGET or now - due_at >= timedelta(seconds=self.dead_after)
        if kind is FailureKind.CONTENT or (may_die and attempts >= self.max_attempts):
            return NotSent(attempts, NEVER, row.expires_at, last_error(failure), due_at, trace_id(row.data))  # dead
        wait = Schedule(self.initial, self.longest).nth(attempts - 1) * self.random.uniform(0.5, 1)
        due = now + timedelta(seconds=wait)
        return NotSent(attempts, due, row.expires_at, last_error(failure), due_at, trace_id(row.data))

    def deferrals(self, head: LockedRow, available_at: datetime, now: datetime) -> Iterator[Deferred]:
        """Yield the values to write to each task behind `head`. The head is not due before `available_at`.

        The deferral of the first task is short, so that a poll soon finds the key even if the head was changed by
        SQL. A cancel of the first task releases the next one, or makes its deferral as short, so one of them is always
        short.

        The other deferrals end within `longest` seconds. Otherwise the tasks behind a dead head would look dead, too.
        All end when the head expires, because an expired head blocks no task.
        """
        if head.expires_at is not None:
            available_at = min(available_at, max(head.expires_at, now))
        for seconds in chain([min(KEY_CHECK_SECONDS, self.longest)], repeat(self.longest)):
            yield Deferred(min(available_at, now + timedelta(seconds=seconds)), head.id)


def eligible(
    claim: Claim, rows: Sequence[LockedRow], now: datetime, published: Mapping[str, Version], policy: RetryPolicy
) -> tuple[list[LockedRow], dict[str, Skipped]]:
    """Return the rows that this transaction may change, in key order, and why it skips the other tasks of the claim.

    They are the rows to publish or mark, and behind them the deferred rows of `claim.releases`.
    """
    skipped = skip_reasons(claim, rows, now, published, policy)
    releases = {task.id for task in claim.releases}
    excluded = {row.id for row in rows if row.id in releases and not (row.deferred and row.topic == claim.topic)}
    excluded |= skipped.keys()
    return [row for row in in_key_order(claim, rows) if row.id not in excluded], skipped


def skip_reasons(
    claim: Claim, rows: Sequence[LockedRow], now: datetime, published: Mapping[str, Version], policy: RetryPolicy
) -> dict[str, Skipped]:
    """Return the skip reason of each task of the claim that this transaction must not publish.

    `published` are the tasks that an earlier attempt of the transaction has published. They still need their mark, so
    they are skipped only if their rows are gone, sent, or no longer hold the message that was published. A cancelled
    one gets its mark, because the row tells what subscribers have. A task that is skipped as "not_due" or as
    "at_most_once" blocks the later tasks of its key, unless it has expired, or is dead and the policy skips dead tasks.
    """
    by_id = {row.id: row for row in rows}
    reasons: dict[str, Skipped] = {}
    blocked: set[str] = set()
    for id, key, _shard in claim.tasks:
        row, version = by_id.get(id), published.get(id)
        if row is None:
            reasons[id] = Skipped("gone")
        elif settled := _settled(row, version):
            reasons[id] = settled
        elif version is not None:
            continue
        elif (row.topic, row.ordering_key) != (claim.topic, key):
            reasons[id] = Skipped("moved")
        elif key in blocked:  # OUT-ORDER-1
            reasons[id] = Skipped("blocked")
        elif reason := _skip_reason(row, claim.kind, now):
            reasons[id] = reason
            if key is not None and _blocks_key(row, now, policy):
                blocked.add(key)
    return reasons


def _settled(row: LockedRow, published: Version | None) -> Skipped | None:
    """Return why the row of a task needs neither a publish nor a mark, or None. `published` is what was published."""
    if row.is_sent:
        return Skipped("sent")
    if published is not None:
        return None if published.has_message_of(row) else Skipped("changed")
    return None if row.cancelled_by is None else Skipped("cancelled")  # OUT-CANCEL-1


def _skip_reason(row: LockedRow, kind: Kind, now: datetime) -> Skipped | None:
    if not (row.is_due(now) or (row.ordering_key is not None and row.deferred)):  # OUT-ORDER-2
        return Skipped("not_due")
    # A later batch, with at-most-once tasks only, sends these tasks. `outbox` refuses to register one with an ordering
    # key, but other writers may insert one. It then blocks its key.
    return Skipped("at_most_once") if row.at_most_once and kind is not Kind.MARK_FIRST else None


def in_key_order(claim: Claim, rows: Sequence[LockedRow]) -> list[LockedRow]:
    """Return the rows, in the order of `claim.locks` if the tasks have ordering keys."""
    if all(task.ordering_key is None for task in claim.tasks):
        return list(rows)
    positions = {id: position for position, id in enumerate(claim.locks)}
    return sorted(rows, key=lambda row: positions[row.id])


def release_changes(
    claim: Claim, rows: Sequence[LockedRow], changes: Mapping[str, RowChange], now: datetime, policy: RetryPolicy
) -> dict[str, RowChange]:
    """Return a change for each deferred task that this commit makes the head of its key: it makes the task ready.

    No poll reads a deferred task until its deferral ends, so the key would wait. One ready task is enough for a poll to
    find the key. An expired head blocks no task, so the task behind it is released, too.
    """
    released: dict[str, RowChange] = {}
    keys = {key.ordering_key for key in claim.keys}
    for row in in_key_order(claim, rows):
        key, change = row.ordering_key, changes.get(row.id)
        has_ended = row.sent_at is not None or row.cancelled_by is not None
        if key not in keys or row.topic != claim.topic or has_ended or isinstance(change, Published):
            continue
        if row.deferred and change is None:
            released[row.id] = NotSent(row.attempts, None, row.expires_at, None, row.due_at)
        dead = isinstance(change, NotSent) and change.dead
        if _blocks_key(row, now, policy) and not (dead and policy.skip_dead):
            keys.remove(key)
    return released


def ended_again(claim: Claim, rows: Sequence[LockedRow], now: datetime) -> dict[str, RowChange]:
    """Return a change for each cancelled task that another program has made unsent: it gets a SentAt again.

    One in `releases` does not, because the next task of its key is not locked and may be deferred. The end of its own
    deferral lets a poll read the key.
    """
    found = [row for row in rows if row.cancelled_by is not None and row.sent_at is None]
    releases = {task.id for task in claim.releases}
    due = {row.id: Deferred(now, claim.locks[0]) for row in found if row.id in releases and row.deferred}
    return {**{row.id: EndedAgain() for row in found if row.id not in releases}, **due}


def stops_key(answer: Answer | None) -> bool:
    """Tell whether this answer stops the later tasks of its key: true for every failure except expiry."""
    return isinstance(answer, Failed) and answer.reason != "expired"


def expiry_failure(row: LockedRow) -> Failed:
    """Return the failure of a task whose ExpiresAt has passed."""
    return Failed("expired", f"ExpiresAt was {shown(row.expires_at or NEVER)}")


def _blocks_key(row: LockedRow, now: datetime, policy: RetryPolicy) -> bool:
    """Tell whether the later tasks of the key must wait for this unsent task.

    They need not wait if it has expired, or if it is dead and the policy skips dead tasks.
    """
    return not (row.is_expired(now) or (policy.skip_dead and is_dead(row.available_at)))


def row_changes(
    claim: Claim,
    rows: Sequence[LockedRow],
    answers: Mapping[str, Answer],
    now: datetime,
    policy: RetryPolicy,
) -> dict[str, RowChange]:
    """Return what to write to eligible rows: marks, failed attempts, and deferrals of tasks behind failed ones."""
    changes: dict[str, RowChange] = {}
    #: The ordering keys that a failed task stops, each with the deferrals for the tasks behind it, if any.
    stopped: dict[str, Iterator[Deferred]] = {}
    for row in rows:
        answer = answers.get(row.id)
        if isinstance(answer, Published):  # OUT-LOSS-3
            changes[row.id] = answer
        elif row.ordering_key in stopped:
            if deferral := next(stopped[row.ordering_key], None):
                changes[row.id] = deferral
        elif answer is not None:
            recorded = None
            if should_record(claim, row.id, answer):
                recorded = changes[row.id] = policy.failed_attempt(row, answer, now)
            blocks_nothing = recorded is not None and recorded.dead and policy.skip_dead
            if blocks_nothing and failure_kind(answer.reason) is FailureKind.CONTENT:
                continue  # defer no later task: those with an answer are marked, and another batch publishes the others
            if row.ordering_key is not None and stops_key(answer):
                retry_at = None if recorded is None or blocks_nothing else recorded.available_at
                stopped[row.ordering_key] = iter(()) if retry_at is None else policy.deferrals(row, retry_at, now)
    return changes


def should_record(claim: Claim, id: str, failure: Failed) -> bool:
    """Tell whether to record the failure as a failed attempt of its task.

    Otherwise it counts only for the topic's circuit. If the topic is missing or refuses messages, only the failures of
    probes are recorded. A failure in an outage may be the fault of the message. It is recorded only if the task is a
    suspect (it failed in an earlier outage, too) and the batch is no probe. A failure that no message can cause, such
    as an exhausted quota, is never recorded.
    """
    match failure_kind(failure.reason):
        case FailureKind.TARGET:
            return claim.probe
        case FailureKind.OUTAGE:  # OUT-LOSS-4
            return id in claim.suspects and not claim.probe and not is_refused(failure.reason)
    return True


def last_error(failure: Failed) -> str:
    """Return the text for LastError: valid UTF-8, and no message data."""
    text = f"{failure.reason}: {failure.error}"[:MAX_ERROR_CHARACTERS]
    return text.encode("utf-8", "replace").decode()

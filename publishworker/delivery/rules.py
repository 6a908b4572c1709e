"""Which of the locked rows may be sent. Pure functions.

These functions keep the order of each ordering key (docs/guide/ordering.md). Sent and missing rows do not end the
sendable prefix. It ends before the first task that blocks its key and is neither due nor deferred. After a failure,
except expiry, no later task of the key is published, not even in a later transaction attempt.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from outbox.program.times import shown
from outbox.table.states import NEVER, is_dead
from publishworker.delivery.claim import Claim, Kind
from publishworker.types import Failed, LockedRow, Mark, NotSent, Outcome, Sent, Skipped, Version


def skip_reasons(
    claim: Claim, rows: Sequence[LockedRow], now: datetime, published: Mapping[str, Version], *, skip_dead: bool
) -> dict[str, Outcome]:
    """Return the skip reason of each task of the claim that this transaction must not publish.

    `published` are the tasks that an earlier transaction attempt has published. They still need their mark, so they are
    skipped only if their rows are gone, sent, or no longer hold the message that was published. A task that is skipped
    as "not_due" or as "at_most_once" blocks the later tasks of its key, unless it has expired, or is dead and
    `skip_dead` is set.
    """
    by_id = {row.id: row for row in rows}
    reasons: dict[str, Outcome] = {}
    blocked: set[str] = set()
    for id, key in claim.tasks:
        row, version = by_id.get(id), published.get(id)
        if row is None:
            reasons[id] = Skipped("gone")
        elif row.sent_at is not None:
            reasons[id] = Skipped("sent")
        elif version is not None and not version.has_message_of(row):
            reasons[id] = Skipped("changed")
        elif version is not None:
            continue
        elif (row.topic, row.ordering_key) != (claim.topic, key):
            reasons[id] = Skipped("moved")
        elif key in blocked:  # OUT-ORDER-1
            reasons[id] = Skipped("blocked")
        elif reason := _skip_reason(row, claim.kind, now):
            reasons[id] = reason
            if key is not None and _blocks_key(row, now, skip_dead=skip_dead):
                blocked.add(key)
    return reasons


def _skip_reason(row: LockedRow, kind: Kind, now: datetime) -> Skipped | None:
    if not (row.is_due(now) or (row.ordering_key is not None and row.deferred)):  # OUT-ORDER-2
        return Skipped("not_due")
    # An at-most-once task is sent later, in a batch of its own. `outbox` refuses such a task with an ordering key, but
    # other writers may insert one, so it may block a key.
    return Skipped("at_most_once") if row.at_most_once and kind is not Kind.MARK_FIRST else None


def in_order(claim: Claim, rows: Sequence[LockedRow]) -> list[LockedRow]:
    """Return the rows, in the order of the claim's tasks if they have ordering keys. Released rows come last."""
    if all(task.ordering_key is None for task in claim.tasks):
        return list(rows)
    positions = {id: position for position, id in enumerate(claim.locks)}
    return sorted(rows, key=lambda row: positions[row.id])


def to_publish(rows: Sequence[LockedRow], answers: Mapping[str, Outcome]) -> list[LockedRow]:
    """Return the rows to publish now. They have no answer yet, and no earlier task of their key has failed."""
    stopped: set[str] = set()
    unanswered = []
    for row in rows:
        answer = answers.get(row.id)
        if answer is None and row.ordering_key not in stopped:  # OUT-TWICE-2, OUT-ORDER-1
            unanswered.append(row)
        elif row.ordering_key is not None and stops_key(answer):
            stopped.add(row.ordering_key)
    return unanswered


def to_release(
    claim: Claim, rows: Sequence[LockedRow], marks: Mapping[str, Mark], now: datetime, *, skip_dead: bool
) -> list[LockedRow]:
    """Return the deferred rows that become heads of their keys with this commit. The commit must make them ready.

    Until its deferral ends, no poll reads a deferred task. One ready task is enough for a poll to find the key. A head
    that has expired blocks no task, so the one behind it is released, too.
    """
    released: list[LockedRow] = []
    keys = {task.ordering_key for task in claim.tasks} - {None}
    for row in in_order(claim, rows) if keys else ():
        key, mark = row.ordering_key, marks.get(row.id)
        if key not in keys or row.topic != claim.topic or row.sent_at is not None or isinstance(mark, Sent):
            continue
        if row.deferred and mark is None:
            released.append(row)
        dead = isinstance(mark, NotSent) and mark.dead
        if _blocks_key(row, now, skip_dead=skip_dead) and not (dead and skip_dead):
            keys.remove(key)
    return released


def deferred_behind(claim: Claim, rows: Sequence[LockedRow]) -> list[LockedRow]:
    """Return the deferred rows behind the sendable prefixes of the claim."""
    releases = {task.id for task in claim.releases}
    return [row for row in rows if row.id in releases and row.deferred and row.topic == claim.topic]


def stops_key(outcome: Outcome | None) -> bool:
    """Tell whether this outcome stops the later tasks of its key: true for every failure except expiry."""
    return isinstance(outcome, Failed) and outcome.reason != "expired"


def expired(row: LockedRow) -> Failed:
    """Return the failure of a task whose ExpiresAt has passed."""
    return Failed("expired", f"ExpiresAt was {shown(row.expires_at or NEVER)}")


def _blocks_key(row: LockedRow, now: datetime, *, skip_dead: bool) -> bool:
    """Tell whether an unsent task blocks its key. It does not if it has expired, or is dead and `skip_dead` is set."""
    return not (row.is_expired(now) or (skip_dead and is_dead(row.available_at)))

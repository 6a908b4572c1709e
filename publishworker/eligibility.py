"""What may be sent of the rows under the lock: pure.

The order of a key is kept here (docs/guide/ordering.md): what was sent or is gone is passed over, what is due is taken,
and what is not due ends the run. After a failure nothing more of the key goes out, also when the transaction is run
again.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import zip_longest

from outbox.shared.times import shown
from outbox.storage.task_states import NEVER
from publishworker.types import Batch, Failed, FailedAttempt, LockedRow, Mark, Outcome, Sent, Skipped, Version


def taken(
    batch: Batch,
    rows: Sequence[LockedRow],
    now: datetime,
    published: Mapping[str, Version],
    *,
    skip_dead: bool,
) -> dict[str, Outcome]:
    """Return those of the batch's tasks that are not to be sent here, each with the reason.

    Those that an earlier run of the transaction has `published` need their mark, unless their rows are gone or sent, or
    somebody has written them since: in doubt they are published again. A task that is not due holds back what follows
    in its key, but not if it is expired, or dead and these are passed over.
    """
    by_id = {row.id: row for row in rows}
    outcomes: dict[str, Outcome] = {}
    stopped: set[str] = set()
    for id, key in zip_longest(batch.ids, batch.keys):
        row, version = by_id.get(id), published.get(id)
        if row is None:
            outcomes[id] = Skipped("gone")
        elif row.sent_at is not None or (version is not None and version != Version.of(row)):
            outcomes[id] = Skipped("sent")
        elif version is not None:
            continue
        elif (row.topic, row.ordering_key) != (batch.topic, key):
            outcomes[id] = Skipped("moved")
        elif key in stopped:
            outcomes[id] = Skipped("held")
        elif reason := _reason_to_leave(row, batch, now):
            outcomes[id] = reason
            if key is not None and not _is_passed_over(row, now, skip_dead=skip_dead):
                stopped.add(key)
    return outcomes


def _reason_to_leave(row: LockedRow, batch: Batch, now: datetime) -> Skipped | None:
    if not (row.is_due(now) or (row.ordering_key is not None and row.deferred)):
        return Skipped("not_due")
    # In a batch of its own, and before what follows in its key.
    return Skipped("at_most_once") if row.at_most_once and not batch.at_most_once else None


def in_order(batch: Batch, rows: Sequence[LockedRow]) -> list[LockedRow]:
    """Return a batch's rows as it names them, the tasks of a key in their order; those that it releases at the end."""
    if not batch.keys:
        return list(rows)
    places = {id: place for place, id in enumerate((*batch.ids, *batch.releases))}
    return sorted(rows, key=lambda row: places[row.id])


def untried(rows: Sequence[LockedRow], tried: Mapping[str, Outcome]) -> list[LockedRow]:
    """Return the rows that may be published now: not tried yet, and before them nothing of their key has failed."""
    failed: set[str] = set()
    found = []
    for row in rows:
        outcome = tried.get(row.id)
        if outcome is None and row.ordering_key not in failed:
            found.append(row)
        elif row.ordering_key is not None and stops(outcome):
            failed.add(row.ordering_key)
    return found


def released(
    batch: Batch, rows: Sequence[LockedRow], marks: Mapping[str, Mark], now: datetime, *, skip_dead: bool
) -> list[LockedRow]:
    """Return the deferred rows that are to be ready again, because they stand at the front of their key after the commit.

    No poll would see a key by its deferred tasks. One is enough: the poll sees the key by it.
    """
    key_heads: dict[str, LockedRow] = {}
    keys = set(batch.keys)
    for row in in_order(batch, rows):
        key, mark = row.ordering_key, marks.get(row.id)
        if key is None or key not in keys or row.topic != batch.topic:
            continue
        if row.sent_at is not None or isinstance(mark, Sent):
            continue
        dead = isinstance(mark, FailedAttempt) and mark.dead
        if not (_is_passed_over(row, now, skip_dead=skip_dead) or (dead and (skip_dead or row.is_expired(now)))):
            key_heads.setdefault(key, row)
    return [row for row in key_heads.values() if row.deferred and row.id not in marks]


def stops(outcome: Outcome | None) -> bool:
    """Tell whether nothing may follow in a key after this: a failure, but not that its time has passed."""
    return isinstance(outcome, Failed) and outcome.reason != "expired"


def expired(row: LockedRow) -> Failed:
    """Return the failure of a task whose ExpiresAt has passed."""
    return Failed("expired", f"ExpiresAt was {shown(row.expires_at or NEVER)}")


def _is_passed_over(row: LockedRow, now: datetime, *, skip_dead: bool) -> bool:
    """Tell whether what is not sent holds back nothing: it has expired, or is dead and these are passed over."""
    is_dead = row.available_at is not None and row.available_at >= NEVER
    return row.is_expired(now) or (skip_dead and is_dead)

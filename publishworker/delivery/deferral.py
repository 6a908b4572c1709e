"""Let the tasks behind a key head that is not due wait, so that polls do not return them again and again."""

from collections.abc import Sequence
from datetime import datetime

from publishworker.delivery.delivery import Delivery
from publishworker.delivery.rules import in_order, skip_reasons
from publishworker.types import Deferred, LockedRow, Mark, Skipped


class Deferral(Delivery):
    """A batch that publishes nothing: if its first task, the key head, is unsent and not due, it defers the others."""

    def _decide(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        self._forget(self.claim)
        reasons = skip_reasons(self.claim, rows, now, {}, skip_dead=self._tools.skip_dead)
        blocked = [row for row in in_order(self.claim, rows) if reasons.get(row.id) == Skipped("blocked")]
        head = next((row for row in rows if row.id == self.claim.ids[0]), None)
        if head is not None and head.available_at is not None:
            deferrals = self._retries.deferrals(head, head.available_at, now)
            waiting = [row for row in blocked if row.is_due(now) or row.deferred]
            pairs = zip(waiting, deferrals, strict=False)
            self._deferred |= {row.id: deferral for row, deferral in pairs if _is_too_late(row, deferral, now)}
        marks: dict[str, Mark] = dict(self._deferred)
        return marks | self._releases(self.claim, rows, marks, now)


def _is_too_late(row: LockedRow, deferral: Deferred, now: datetime) -> bool:
    """Tell whether a blocked row needs this deferral: a poll still returns it, or will return it only later."""
    return row.available_at is None or not now < row.available_at <= deferral.available_at

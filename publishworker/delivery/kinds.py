"""Which kind of delivery a claim gets, and the deferral, which publishes nothing."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from publishworker.delivery.claim import Claim, Kind
from publishworker.delivery.delivery import Delivery, Tools
from publishworker.delivery.mark_first import MarkFirst
from publishworker.delivery.marking import Marking
from publishworker.delivery.rules import in_order, skip_reasons
from publishworker.types import LockedRow, Mark, Skipped


class Deferral(Delivery):
    """A batch that defers tasks behind their key head, which is its first task, if the head is unsent and not due."""

    def _decide(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        self._forget(self.claim)
        reasons = skip_reasons(self.claim, rows, now, {}, skip_dead=self._tools.skip_dead)
        blocked = [row for row in in_order(self.claim, rows) if reasons.get(row.id) == Skipped("blocked")]
        head = next((row for row in rows if row.id == self.claim.ids[0]), None)
        if head is not None and head.available_at is not None:
            deferrals = self._retries.deferrals(head, head.available_at, now)
            waiting = [row for row in blocked if row.is_due(now) or row.deferred]
            pairs = zip(waiting, deferrals, strict=False)
            # A task that becomes due before its deferral would end keeps its own time.
            self._deferred |= {
                row.id: deferral
                for row, deferral in pairs
                if row.available_at is None or not now < row.available_at <= deferral.available_at
            }
        marks: dict[str, Mark] = dict(self._deferred)
        return marks | self._releases(self.claim, rows, marks, now)


_KINDS = {Kind.PUBLISH: Delivery, Kind.MARK_FIRST: MarkFirst, Kind.DEFER: Deferral}


def delivery_of(claim: Claim, tools: Tools, marking: Marking) -> Delivery:
    """Return the delivery of a claim."""
    if tools.trace is not None:
        store, publisher = tools.trace.of_batch(claim, tools.store, tools.publisher, skips_dead=tools.skip_dead)
        tools = replace(tools, store=store, publisher=publisher)
    return _KINDS[claim.kind](claim, tools, marking)

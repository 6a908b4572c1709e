"""Which kind of delivery a claim gets."""

from publishworker.delivery.claim import Claim, Kind
from publishworker.delivery.deferral import Deferral
from publishworker.delivery.delivery import Delivery, Tools
from publishworker.delivery.mark_first import MarkFirst
from publishworker.delivery.marking import Marking

_KINDS = {Kind.PUBLISH: Delivery, Kind.MARK_FIRST: MarkFirst, Kind.DEFER: Deferral}


def delivery_of(claim: Claim, tools: Tools, marking: Marking) -> Delivery:
    """Return the delivery of a claim."""
    return _KINDS[claim.kind](claim, tools, marking)

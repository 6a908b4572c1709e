"""Which failed attempts may be recorded: checked when they are about to be committed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import grpc

from publishworker.pubsub.errors import FailureKind, kind_of
from publishworker.types import FailedAttempt
from tests.support.fakes import StoredTask
from tests.support.order_pubsub import Request

if TYPE_CHECKING:
    from tests.support.order_store import Claim

#: As the workers are set.
INITIAL_BACKOFF, LONGEST_BACKOFF, MAX_ATTEMPTS, DEAD_AFTER = 0.5, 3600.0, 3, timedelta(days=1)
MAX_ERROR = 1000  # characters of LastError


@dataclass
class Charges:
    """The answers of Pub/Sub to each process, so that no attempt is recorded for a failure of other tasks."""

    #: How often a process got an outage as the answer for a task.
    outages: Counter[tuple[object, str]] = field(default_factory=Counter)
    #: How often it got one for a topic, or that the topic is missing: its circuit opens then.
    troubles: Counter[tuple[object, str]] = field(default_factory=Counter)

    def answered(self, request: Request, code: grpc.StatusCode) -> None:
        kind = kind_of(code.name.lower())
        if kind is FailureKind.OUTAGE:
            self.outages.update((request.process, id) for id in request.ids)
        if kind in {FailureKind.OUTAGE, FailureKind.TARGET}:
            self.troubles[request.process, request.topic.rpartition("/")[2]] += 1

    def wrong(self, row: StoredTask, mark: FailedAttempt, claim: "Claim", locked_at: datetime) -> Iterator[str]:
        if row.sent_at is not None:
            return  # it was marked before it was sent, and is given back
        if mark.error is not None:
            yield from self._not_to_be_paid(row, mark.error.partition(":")[0], claim)
            yield from _wrong_price(row, mark, mark.error, locked_at)
        elif mark.attempts != row.attempts:
            yield "pays for a task that it stands behind"

    def _not_to_be_paid(self, row: StoredTask, reason: str, claim: "Claim") -> Iterator[str]:
        if reason != "expired" and row.id not in claim.answered:
            yield f"pays for {reason}, and was not tried"
        if kind_of(reason) is FailureKind.OUTAGE and self.outages[claim.process, row.id] < 2:
            yield "pays for the first outage that it met"
        if kind_of(reason) is FailureKind.TARGET and self.troubles[claim.process, row.topic] < 2:
            yield "is recorded for its topic, whose circuit was not open before"


def _wrong_price(row: StoredTask, mark: FailedAttempt, error: str, locked_at: datetime) -> Iterator[str]:
    reason = error.partition(":")[0]
    if mark.attempts != row.attempts + 1:
        yield f"pays {mark.attempts - row.attempts} attempts"
    if len(error) > MAX_ERROR:
        yield f"gets a LastError of {len(error)} characters"
    young = kind_of(reason) is FailureKind.TARGET and locked_at - row.created_at < DEAD_AFTER
    if mark.dead != (kind_of(reason) is FailureKind.CONTENT or (mark.attempts >= MAX_ATTEMPTS and not young)):
        yield f"is {'' if mark.dead else 'not '}dead after {mark.attempts} times {reason}"
    elif not mark.dead and mark.available_at is not None:
        full = timedelta(seconds=min(INITIAL_BACKOFF * 2 ** (mark.attempts - 1), LONGEST_BACKOFF))
        if not full / 2 <= mark.available_at - locked_at < full:
            yield f"waits for {mark.available_at - locked_at} after attempt {mark.attempts}"

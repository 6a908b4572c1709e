"""Deliver one batch: claim its rows, publish its messages and mark its tasks. If the commit fails, mark them again.

`Delivery` publishes and marks in one transaction. The other kinds of delivery are in `kinds`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from publishworker.delivery import heads, rules
from publishworker.delivery.claim import Claim, Delivered, State, Unmarked
from publishworker.delivery.marking import Marking, MarkRetry
from publishworker.delivery.rules import RetryPolicy
from publishworker.delivery.timing import Timing
from publishworker.host import Host
from publishworker.pubsub.publisher import Publisher
from publishworker.spanner.errors import Refused, StoreError
from publishworker.spanner.store import Decide, Store
from publishworker.types import (
    MARKED,
    Answer,
    Deferred,
    Failed,
    LockedRow,
    Mark,
    NotSent,
    Sent,
    Skipped,
    Version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every delivery works with."""

    store: Store
    publisher: Publisher
    policy: RetryPolicy
    #: The time limit for publishing one batch.
    publish_seconds: float
    #: What all batches share when they mark again.
    marking: Marking
    host: Host = field(default_factory=Host)

    def for_reads(self) -> Store:
        """Return the store for the reads of turns. TracedTools return one that records them."""
        return self.store

    def for_batch(self, _claim: Claim) -> "Tools":
        """Return the tools of a batch. TracedTools return some that record its steps."""
        return self

    def publish(self, claim: Claim, rows: Sequence[LockedRow]) -> dict[str, Answer]:
        """Publish rows of a claim within the time limit. Tasks that failed before share no request."""
        alone = rules.sent_alone(claim, rows)
        return self.publisher.publish(claim.destination, rows, self.publish_seconds, alone)


class Delivery:
    """Delivers one batch, on a thread of its own. The relay's thread reads `claim`, `mark_retry` and `timing`.

    After an abort, the next run of the transaction locks the rows again. It publishes only tasks that have no answer
    yet, and failed tasks whose rows have changed since. It marks the tasks that any run has published, unless their
    rows are gone, sent, or hold another message now.
    """

    def __init__(self, claim: Claim, tools: Tools) -> None:
        self.claim = claim
        #: Writes the marks again if the commit fails.
        self.mark_retry = MarkRetry(claim, tools.marking)
        self._tools = tools
        self._policy = tools.policy.for_topic(claim.policy)
        #: By ID, over all runs of the transaction: the answer of Pub/Sub, or the reason why no request was sent.
        self._answers: dict[str, Answer] = {}
        #: By ID, the version of the row at its last lock before the answer. The answer is about this version.
        self._versions: dict[str, Version] = {}
        #: By ID, what the last run has decided about tasks that it does not mark as sent.
        self._decided: dict[str, Skipped | NotSent | Deferred] = {}
        self.timing = Timing(tools.host.clock)
        self._error: str | None = None

    def run(self) -> Delivered:
        """Claim, publish and mark, in one transaction."""
        try:
            self._transact(self.claim, self._decide)
            self.mark_retry.done()  # nothing is left to mark
            if self.timing.aborted:  # meanwhile other workers may have deferred the heads
                self._release_heads()
        except StoreError as error:
            self._begin_marking(error)
        return self._delivered()

    def mark_again(self) -> Iterator[Unmarked]:
        """Mark again, in transactions that publish nothing.

        Yield an Unmarked for each row that cannot be written although others can, and for tasks that are given up.
        """
        if self.mark_retry.has_begun:
            yield from self.mark_retry.run()
            if self.timing.transactions > 1:
                self._release_heads()

    def write_again(self, claim: Claim) -> None:
        """Write the marks of a part of the claim. Raises StoreError."""
        self._transact(claim, lambda rows, now: self._missing_marks(claim, rows, now))

    def state_of(self, id: str) -> State:
        """Return what has happened to a task whose mark is not written."""
        return "published" if isinstance(self._answers.get(id), Sent) else "unpublished"

    def _transact(self, claim: Claim, decide: Decide) -> datetime:
        """Lock the rows of `claim`, write the marks of `decide` and return the commit timestamp. Raises StoreError.

        The commit also releases the deferred tasks that it makes key heads.
        """

        def locked(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, Mark]:
            self.timing.locked()
            decided = decide(rows, now)
            marks = {**decided, **rules.release_marks(claim, rows, decided, now, self._policy)}
            self.timing.decided(marks)
            return marks

        with self.timing.transaction():
            committed = self._tools.store.claim(claim.locks, locked)
        if self.timing.marks:
            self._tools.marking.committed()
        return committed

    def _release_heads(self) -> None:
        heads.release(self.claim, self._tools.store, skip_dead=self._policy.skip_dead, transact=self._transact)

    def _decide(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        """Publish the locked rows that may be sent, and return the marks. After an abort, it runs again."""
        eligible = self._eligible(self.claim, rows, now)
        self._expire(rules.to_publish(eligible, self._answers), now)
        self._publish(rules.to_publish(eligible, self._answers), now)
        return self._marks([*eligible, *rules.deferred_behind(self.claim, rows)], now)

    def _eligible(self, claim: Claim, rows: Sequence[LockedRow], now: datetime) -> list[LockedRow]:
        """Return the rows that this transaction may publish or mark. Keep the order of each ordering key.

        Leave out the rows that the claim may only release. Record why the rest are skipped. A task that failed before
        an abort loses its answer if its row has changed.
        """
        self._begin_run(claim, rows)
        skipped = rules.skip_reasons(claim, rows, now, self._published(), self._policy)
        self._decided |= skipped
        excluded = {*skipped, *(task.id for task in claim.releases)}
        return [row for row in rules.in_key_order(claim, rows) if row.id not in excluded]

    def _begin_run(self, claim: Claim, rows: Sequence[LockedRow]) -> None:
        """Forget earlier decisions about the claimed tasks, and the failures of rows that have changed.

        Record the versions of rows without an answer.
        """
        for id in claim.locks if self._decided else ():
            self._decided.pop(id, None)
        for row in rows if self._answers else ():
            if isinstance(self._answers.get(row.id), Failed) and self._versions.get(row.id) != Version.of(row):
                del self._answers[row.id]
        self._versions |= {row.id: Version.of(row) for row in rows if row.id not in self._answers}

    def _expire(self, rows: Sequence[LockedRow], now: datetime) -> None:
        self._answers |= {row.id: rules.expired(row) for row in rows if row.is_expired(now)}

    def _publish(self, rows: Sequence[LockedRow], now: datetime) -> None:
        """Publish rows that were locked at `now`."""
        if rows:
            answers = self._tools.publish(self.claim, rows)
            self.timing.published(rows, answers, now)
            self._answers |= answers

    def _marks(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        """Return the marks that follow from the answers. Keep the failed attempts and deferrals in `_decided`."""
        marks = rules.marks_of(self.claim, rows, self._answers, now, self._policy)
        self._decided |= {id: mark for id, mark in marks.items() if not isinstance(mark, Sent)}
        return marks

    def _begin_marking(self, error: StoreError) -> None:
        """Prepare to mark again. If Spanner has refused the commit, find the rows that are the reason."""
        self._error = str(error)
        is_refused = isinstance(error, Refused)
        # If Spanner has refused the commit, nothing is written. Then the failed attempts and deferrals of the claimed
        # tasks are kept, to be written again. Deferrals of the tasks in `releases` are dropped, because each later
        # commit decides about those tasks itself. After another error all are dropped, because the commit may have
        # succeeded.
        self._forget_unwritten([task.id for task in self.claim.releases] if is_refused else self.claim.locks)
        self.mark_retry.begin(self, [self.claim.part({*self._published(), *self._unwritten_marks()})])
        if is_refused and self.mark_retry.search():
            self._error = None  # the reasons are single rows, and each is reported as an Unmarked

    def _missing_marks(self, claim: Claim, rows: Sequence[LockedRow], now: datetime) -> dict[str, Mark]:
        """Return the marks of published tasks, and the unwritten marks of other tasks whose rows have not changed."""
        published, unwritten = self._published(), self._unwritten_marks()
        unsent = [row for row in rows if row.sent_at is None]
        marks: dict[str, Mark] = {
            row.id: MARKED for row in unsent if row.id in published and published[row.id].has_message_of(row)
        }
        others = {
            row.id: unwritten[row.id]
            for row in unsent
            if row.id in unwritten and self._versions[row.id] == Version.of(row)
        }
        self._forget_unwritten(claim.locks)
        self._decided |= others
        marks |= others
        return marks

    def _unwritten_marks(self) -> dict[str, NotSent | Deferred]:
        """Return the failed attempts and deferrals that the last run of the transaction has decided to write."""
        return {id: each for id, each in self._decided.items() if not isinstance(each, Skipped)}

    def _forget_unwritten(self, ids: Collection[str]) -> None:
        """Forget the failed attempts and deferrals of these tasks."""
        for id in self._unwritten_marks().keys() & set(ids):
            del self._decided[id]

    def _published(self) -> dict[str, Version]:
        return {id: self._versions[id] for id, answer in self._answers.items() if isinstance(answer, Sent)}

    def _delivered(self) -> Delivered:
        decided, unmarked = self._decided, self.mark_retry.unmarked
        return Delivered(
            self.claim,
            answers=dict(self._answers),
            skipped={id: each for id, each in decided.items() if isinstance(each, Skipped)},
            recorded={id: each for id, each in decided.items() if isinstance(each, NotSent) and id not in unmarked},
            deferred={id: each for id, each in decided.items() if isinstance(each, Deferred) and id not in unmarked},
            unmarked=unmarked,
            latencies=dict(self.timing.latencies),
            phases=dict(self.timing.phases),
            aborted=self.timing.aborted,
            error=self._error,
        )

"""Deliver one batch: claim its rows, publish its messages and mark its tasks. If the commit fails, mark them again.

`Delivery` publishes and marks in one transaction. The other kinds of delivery are in `kinds`.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from publishworker.delivery import rules
from publishworker.delivery.claim import Claim, Delivered, Recorded, State, Unmarked
from publishworker.delivery.marking import MarkRetry, release_heads
from publishworker.delivery.results import Results
from publishworker.delivery.timing import Timing
from publishworker.delivery.tools import Tools
from publishworker.spanner.errors import Refused, StoreError
from publishworker.spanner.store import Decide
from publishworker.types import Deferred, LockedRow, NotSent, Published, RowChange, Skipped


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
        self._results = Results()
        self.timing = Timing(tools.host.clock)
        self._error: str | None = None

    def run(self) -> Delivered:
        """Claim, publish and mark, in one transaction."""
        try:
            self._transact(self.claim, self._decide)
            self.mark_retry.set_all_written()  # nothing is left to mark
            if self.timing.aborted:  # while there were no locks, other workers may have deferred key heads
                self._release_heads()
        except StoreError as error:
            self._begin_marking(error)
        return self._delivered()

    def mark_again(self) -> Iterator[Unmarked | Recorded]:
        """Mark again, in transactions that publish nothing.

        Yield an Unmarked for each row that cannot be written although others can, and for tasks that are given up. At
        the end, yield the failed attempts that are written now.
        """
        if self.mark_retry.has_begun:
            to_mark = self.mark_retry.unmarked
            for unmarked in self.mark_retry.run():
                to_mark -= set(unmarked.claim.ids if unmarked.given_up else ())
                yield unmarked
            yield self._delivered().recorded_later(to_mark)
            if self.timing.transactions > 1:
                self._release_heads()

    def write_again(self, claim: Claim) -> None:
        """Write the marks of a part of the claim. Raises StoreError."""
        self._transact(claim, lambda rows, _now: self._results.decide_again(claim.locks, rows))

    def state_of(self, id: str) -> State:
        """Return what has happened to a task whose mark is not written."""
        return "published" if isinstance(self._results.answers.get(id), Published) else "unpublished"

    def _transact(self, claim: Claim, decide: Decide) -> datetime:
        """Lock the rows of `claim`, write what `decide` returns, and return the commit timestamp. Raises StoreError.

        If a deferred task becomes a key head by this commit, the commit also releases it.
        """

        def locked(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, RowChange]:
            self.timing.locked()
            decided = decide(rows, now)
            changes = {**decided, **rules.release_changes(claim, rows, decided, now, self._policy)}
            self.timing.committing(changes)
            return changes

        with self.timing.transaction():
            committed = self._tools.store.claim(claim.locks, locked)
        if self.timing.changes:
            self._tools.marking.committed()
        return committed

    def _release_heads(self) -> None:
        release_heads(self.claim, self._tools.store, skip_dead=self._policy.skip_dead, transact=self._transact)

    def _decide(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, RowChange]:
        """Publish the locked rows that may be sent, and return what to write. After an abort, it runs again."""
        eligible = self._eligible(self.claim, rows, now)
        self._expire(rules.to_publish(eligible, self._results.answers), now)
        self._publish(rules.to_publish(eligible, self._results.answers), now)
        return self._row_changes([*eligible, *rules.deferred_behind(self.claim, rows)], now)

    def _eligible(self, claim: Claim, rows: Sequence[LockedRow], now: datetime) -> list[LockedRow]:
        """Return the rows that this transaction may publish or mark. Keep the order of each ordering key.

        Leave out the rows of `claim.releases`. Record the skip reason of each other row that is left out. A task that
        failed before an abort loses its answer if its row has changed.
        """
        self._results.begin_run(claim.locks, rows)
        skipped = rules.skip_reasons(claim, rows, now, self._results.published(), self._policy)
        self._results.record(skipped)
        excluded = {*skipped, *(task.id for task in claim.releases)}
        return [row for row in rules.in_key_order(claim, rows) if row.id not in excluded]

    def _expire(self, rows: Sequence[LockedRow], now: datetime) -> None:
        self._results.answers |= {row.id: rules.expiry_failure(row) for row in rows if row.is_expired(now)}

    def _publish(self, rows: Sequence[LockedRow], now: datetime) -> None:
        """Publish rows that were locked at `now`."""
        if rows:
            answers = self._tools.publish(self.claim, rows)
            self.timing.published(rows, answers, now)
            self._results.answers |= answers

    def _row_changes(self, rows: Sequence[LockedRow], now: datetime) -> dict[str, RowChange]:
        """Return what to write because of the answers, and keep it in the results."""
        changes = rules.row_changes(self.claim, rows, self._results.answers, now, self._policy)
        self._results.record(changes)
        return changes

    def _begin_marking(self, error: StoreError) -> None:
        """Prepare to mark again.

        If Spanner has refused the commit, mark in parts now, until only the refused rows are left.
        """
        self._error = str(error)
        is_refused = isinstance(error, Refused)
        # If Spanner has refused the commit, nothing was written, so the failed attempts and deferrals of the claimed
        # tasks are kept and written later. The next commit decides anew about the tasks in `releases`, so their
        # deferrals are dropped. After any other error the commit may have succeeded, so all are dropped.
        self._results.forget_unwritten([task.id for task in self.claim.releases] if is_refused else self.claim.locks)
        self.mark_retry.begin(self, [self.claim.part(self._results.to_write())])
        if is_refused and self.mark_retry.search():
            self._error = None  # the reasons are single rows, and each is reported as an Unmarked

    def _delivered(self) -> Delivered:
        results, unmarked = self._results, self.mark_retry.unmarked
        return Delivered(
            self.claim,
            answers=dict(results.answers),
            skipped=results.decided(Skipped),
            recorded=results.decided(NotSent, without=unmarked),
            deferred=results.decided(Deferred, without=unmarked),
            deleted=frozenset(results.deleted),
            unmarked=unmarked,
            latencies=dict(self.timing.latencies),
            phases=dict(self.timing.phases),
            aborted=self.timing.aborted,
            error=self._error,
        )

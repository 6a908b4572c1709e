"""One group on its way: claim, publish, mark. What comes of it is data; nothing is counted or logged here."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from publishworker.failures import is_refused
from publishworker.publisher import Publisher
from publishworker.retries import Retries, is_charged, last_error
from publishworker.store import Decide, Store, StoreError
from publishworker.task import Charged, Failed, Group, GroupResult, Mark, Outcome, Row, Sent, Taken


class Delivery:
    """Delivers groups, several at once on threads of their own: it keeps nothing between them."""

    def __init__(self, store: Store, publisher: Publisher, retries: Retries, publish_seconds: float) -> None:
        """Publish each group within `publish_seconds` of the return of its lock query."""
        self._store = store
        self._publisher = publisher
        self._retries = retries
        self._publish_seconds = publish_seconds

    def deliver(self, group: Group) -> GroupResult:
        """Claim a group, publish what is still to be sent, mark it: one transaction, run again if it is aborted."""
        if group.at_most_once:
            return self._deliver_at_most_once(group)
        result = GroupResult(group)

        def publish(rows: Sequence[Row], now: datetime) -> Mapping[str, Mark]:
            result.runs += 1
            ours = _ours(result, rows, now)
            untried = [row for row in ours if row.id not in result.tried]
            result.tried |= {row.id: expired(row) for row in untried if row.is_expired(now)}
            self._publish(result, [row for row in untried if row.id not in result.tried])
            return self._marks(result, ours, now)

        self._claim(result, publish)
        return result

    def mark(self, group: Group, published: Decide) -> GroupResult:
        """Mark what `published` says was published before, in a transaction without publishing."""
        result = GroupResult(group)
        self._claim(result, published)
        return result

    def _deliver_at_most_once(self, group: Group) -> GroupResult:
        """Mark a group, and publish it once that is surely committed: if in doubt a loss, never a duplicate.

        What Pub/Sub surely has not taken gets its row back.
        """
        result = GroupResult(group)
        marked: dict[str, Row] = {}

        def mark_first(rows: Sequence[Row], now: datetime) -> Mapping[str, Mark]:
            result.runs += 1
            ours = _ours(result, rows, now)
            result.tried = {row.id: expired(row) for row in ours if row.is_expired(now)}
            result.tried |= self._publisher.refusals(group.topic, [row for row in ours if row.id not in result.tried])
            marked.clear()
            marked.update({row.id: row for row in ours if row.id not in result.tried})
            return self._marks(result, ours, now) | {id: Sent("") for id in marked}

        committed = self._claim(result, mark_first)
        if committed is None:
            result.in_doubt = list(marked)
            return result
        self._publish(result, list(marked.values()))
        back = {id: row for id, row in marked.items() if _is_surely_not_taken(result.tried.get(id))}
        result.in_doubt = [id for id in marked.keys() - back.keys() if not isinstance(result.tried[id], Sent)]
        if back:
            self._give_back(result, back, committed)
        return result

    def _give_back(self, result: GroupResult, before: Mapping[str, Row], committed: datetime) -> None:
        """Take our marks back, with the failures that are charged; what somebody has touched since is theirs."""
        charged_before = result.charged

        def give_back(rows: Sequence[Row], now: datetime) -> Mapping[str, Mark]:
            ours = [before[row.id] for row in rows if row.sent_at == committed]
            charges = self._marks(result, ours, now)
            result.charged |= charged_before
            return {row.id: charges.get(row.id) or _as_it_was(row, result.tried.get(row.id)) for row in ours}

        back = self.mark(Group(result.group.topic, tuple(before)), give_back)
        if back.error is not None:
            result.charged = charged_before
            result.in_doubt += before

    def _publish(self, result: GroupResult, rows: Sequence[Row]) -> None:
        """Publish rows; those that have failed before go singly, so that they take no others along."""
        if rows:
            singly = {row.id for row in rows if row.attempts or row.id in result.group.suspects}
            result.tried |= self._publisher.publish(result.group.topic, rows, self._publish_seconds, singly)

    def _marks(self, result: GroupResult, ours: Sequence[Row], now: datetime) -> dict[str, Mark]:
        """Return what to write of the outcomes, and note it in the result."""
        marks: dict[str, Mark] = {}
        result.charged = {}
        works = result.group.works or bool(result.published())
        for row in ours:
            outcome = result.tried.get(row.id)
            if outcome is None:
                continue
            result.outcomes[row.id] = outcome
            if isinstance(outcome, Sent):
                marks[row.id] = outcome
            elif isinstance(outcome, Failed) and is_charged(result.group, row.id, outcome, works=works):
                marks[row.id] = result.charged[row.id] = self._retries.charge(row, outcome, now)
        return marks

    def _claim(self, result: GroupResult, decide: Decide) -> datetime | None:
        try:
            return self._store.claim(result.group.ids, decide)
        except StoreError as error:
            result.error = str(error)
            return None


def _ours(result: GroupResult, rows: Sequence[Row], now: datetime) -> list[Row]:
    """Note what is not to be sent here, and return the rest."""
    result.outcomes = taken(result.group, rows, now, frozenset(result.published()))
    ours = [row for row in rows if row.id not in result.outcomes]
    result.created |= {row.id: row.created_at for row in ours}
    return ours


def taken(
    group: Group, rows: Sequence[Row], now: datetime, published: Collection[str] = frozenset()
) -> dict[str, Outcome]:
    """Return those of the group's tasks that are not to be sent here: gone, sent by another worker, not due, moved.

    Those that an earlier run of the transaction has `published` need their mark, unless they are gone or sent.
    """
    outcomes: dict[str, Outcome] = dict.fromkeys(group.ids, Taken("gone"))
    for row in rows:
        if row.sent_at is not None:
            outcomes[row.id] = Taken("sent")
        elif row.id in published:
            del outcomes[row.id]
        elif not row.is_due(now):
            outcomes[row.id] = Taken("not_due")
        elif row.topic != group.topic:
            outcomes[row.id] = Taken("moved")
        elif row.at_most_once and not group.at_most_once:
            outcomes[row.id] = Taken("at_most_once")
        else:
            del outcomes[row.id]
    return outcomes


def expired(row: Row) -> Failed:
    """Return the failure of a task whose ExpiresAt has passed."""
    return Failed("expired", f"ExpiresAt was {row.expires_at:%Y-%m-%dT%H:%M:%S.%fZ}")


def _is_surely_not_taken(outcome: Outcome | None) -> bool:
    """Tell whether Pub/Sub has surely not got the message: it was not tried, or it was refused."""
    return outcome is None or (isinstance(outcome, Failed) and is_refused(outcome.reason))


def _as_it_was(row: Row, outcome: Outcome | None) -> Charged:
    """Return the row as it was before it was marked; only LastError, which is not read, says what happened since."""
    error = last_error(outcome) if isinstance(outcome, Failed) else None
    return Charged(row.attempts, row.available_at, row.expires_at, error)

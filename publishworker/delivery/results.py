"""What a batch knows about its tasks: Pub/Sub's answers, and the decisions about tasks that get no SentAt."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from publishworker.types import (
    MARKED,
    Answer,
    Deferred,
    Failed,
    LockedRow,
    NotSent,
    Published,
    RowChange,
    Skipped,
    Version,
)

_T = TypeVar("_T", Skipped, NotSent, Deferred)


class Results:
    """The answers and decisions of a batch, by task ID, over all runs of its transactions."""

    def __init__(self) -> None:
        #: The answer of Pub/Sub, or the reason why no request was sent.
        self.answers: dict[str, Answer] = {}
        #: The version of the row that the answer is about. Without an answer, the version at the last lock.
        self._versions: dict[str, Version] = {}
        #: The last decision about each task that gets no SentAt.
        self._decided: dict[str, Skipped | NotSent | Deferred] = {}
        #: The published tasks that the last lock of their rows has not found any more.
        self.deleted: set[str] = set()

    def begin_run(self, ids: Collection[str], rows: Sequence[LockedRow]) -> None:
        """Forget earlier decisions about the claimed `ids`, and the failures of locked rows that have changed.

        Record the versions of rows without an answer.
        """
        self._find_deleted(ids, rows)
        for id in ids if self._decided else ():
            self._decided.pop(id, None)
        for row in rows if self.answers else ():
            if isinstance(self.answers.get(row.id), Failed) and self._versions.get(row.id) != Version.of(row):
                del self.answers[row.id]
        self._versions |= {row.id: Version.of(row) for row in rows if row.id not in self.answers}

    def record(self, decisions: Mapping[str, Skipped | RowChange]) -> None:
        """Record decisions. A task that is marked as sent needs none, because it has an answer."""
        self._decided |= {id: each for id, each in decisions.items() if not isinstance(each, Published)}

    def decided(self, kind: type[_T], *, without: Collection[str] = ()) -> dict[str, _T]:
        """Return the decisions of a kind, except those about the tasks in `without`."""
        return {id: each for id, each in self._decided.items() if isinstance(each, kind) and id not in without}

    def published(self) -> dict[str, Version]:
        """Return the published tasks, each with the version that was published."""
        return {id: self._versions[id] for id, answer in self.answers.items() if isinstance(answer, Published)}

    def to_write(self) -> set[str]:
        """Return the tasks whose rows must be written: published, with a failed attempt to record, or deferred."""
        return {*self.published(), *self._unwritten()}

    def decide_again(self, ids: Collection[str], rows: Sequence[LockedRow]) -> dict[str, RowChange]:
        """Return the changes that the unsent rows still need. Forget the decisions about other tasks of `ids`.

        A published task is marked if the row still holds its message. A failed attempt or a deferral is written only
        if the row has not changed at all, or only because an earlier part, which also locks this row, has written it.
        """
        self._find_deleted(ids, rows)
        published, unwritten = self.published(), self._unwritten()
        unsent = [row for row in rows if row.sent_at is None]
        others = {
            row.id: change
            for row in unsent
            if (change := unwritten.get(row.id)) is not None
            and Version.of(row) in (self._versions[row.id], self._versions[row.id].after(change))
        }
        self.forget_unwritten(ids)
        self._decided |= others
        ids_to_mark = (row.id for row in unsent if row.id in published and published[row.id].has_message_of(row))
        return {**dict.fromkeys(ids_to_mark, MARKED), **others}

    def forget_unwritten(self, ids: Collection[str]) -> None:
        """Forget the failed attempts and deferrals of these tasks."""
        for id in self._unwritten().keys() & set(ids):
            del self._decided[id]

    def _find_deleted(self, ids: Collection[str], rows: Sequence[LockedRow]) -> None:
        """Record which published tasks among `ids` are not in the locked rows."""
        if published := self.published():
            by_id = {row.id: row for row in rows}
            found = {id for id in ids if id in published and not published[id].is_of_task(by_id.get(id))}
            self.deleted = self.deleted.difference(ids) | found

    def _unwritten(self) -> dict[str, NotSent | Deferred]:
        return {id: each for id, each in self._decided.items() if not isinstance(each, Skipped)}

"""Transactions of applications and commands on the simulated Spanner, for the product's own functions.

A statement is known by its text, so it is the one that the product sends; what it returns is modeled here.
"""

import dataclasses
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any, TypeVar

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP

from outbox.base.schedules import ABORTED
from outbox.errors import OutboxError
from outbox.rows.task_table import TaskTable
from outbox.table.ddl import OPERATIONS, Layout
from outbox.table.shared_sql import LAYOUTS, LOCK_UNSENT, NEXT_OF_KEYS, NOW
from outbox.table.states import CANCELLED, NO_SEQUENCE, TASKS_TABLE, first_due, is_dead
from outbox_admin import operation_sql
from outbox_admin.change_kinds import ANY_UNSENT, MADE_UNSENT
from outbox_admin.changes import change_sql
from outbox_admin.tasks.selected import Row
from outbox_admin.tasks.selections import TaskSelection
from publishworker.types import TopicKey
from tests.simulation.audit import Audit, Known
from tests.simulation.spanner import Aborted, Mode, Spanner, Transaction
from tests.simulation.table import Table
from tests.support.fakes import StoredTask

#: Seconds after which a client no longer repeats an aborted transaction, and between two attempts.
ABORTED_SECONDS = 20.0
T = TypeVar("T")
#: A statement of `shared_sql.by_ids` for columns of the table.
_OF_IDS = re.compile(r"\nSELECT ((?:[A-Z]\w+, )*[A-Z]\w+)\nFROM UNNEST\(@ids\)")


def attribute(column: str) -> str:
    """Return the name of a column in StoredTask."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", column).lower()


def state_of(row: StoredTask, now: datetime) -> str:
    """Return the state of a task, as STATE_SQL does."""
    if row.sent_at is not None:
        return "sent" if row.cancelled_by is None else CANCELLED
    if row.available_at is None or row.available_at <= now:
        return "pending"
    if is_dead(row.available_at):
        return "dead"
    return "blocked" if row.blocked_by is not None else "retrying" if row.attempts > 0 else "scheduled"


def _value(row: StoredTask, column: str) -> Any:
    """Return the value of a column as the client returns it."""
    return b64encode(row.data) if column == "Data" else getattr(row, attribute(column))


def matches(selection: TaskSelection, row: StoredTask, now: datetime) -> bool:
    """Tell whether a task is selected."""
    at = row.created_at if row.sent_at is None else row.sent_at
    is_of_state = state_of(row, now) == selection.state
    if selection.state == CANCELLED:
        is_of_state = row.cancelled_by is not None and selection.cancelled_by in (None, row.cancelled_by)
    if selection.state == ANY_UNSENT:
        is_of_state = row.sent_at is None
    return (
        is_of_state
        and selection.topic in (None, row.topic)
        and selection.ordering_key in (None, row.ordering_key)
        and row.id.startswith(selection.id_prefix or "")
        and (selection.error or "") in (row.last_error or "").lower()
        and (selection.since is None or at >= selection.since)
        and (selection.until is None or at < selection.until)
    )


def _sequence(row: StoredTask) -> int:
    return NO_SEQUENCE if row.sequence is None else row.sequence


def _place(row: StoredTask) -> tuple[Any, ...]:
    """Return the place of a task in the order of `change_sql.order`, without its ID."""
    if row.sent_at is not None and row.cancelled_by is not None:
        return row.created_at, _sequence(row)
    return () if row.sent_at is None else (row.sent_at,)


def _row(selection: TaskSelection, row: StoredTask, now: datetime) -> Row:
    """Return what `task_sql.by_ids` selects."""
    values = dataclasses.asdict(row) | {"now": now, "error": row.last_error, "bytes": len(row.data)}
    is_made_unsent = row.cancelled_by is not None and row.sent_at is None
    state = MADE_UNSENT if is_made_unsent else state_of(row, now)
    values["due_at"] = first_due(Table.as_locked(row)) if state in ("retrying", "blocked") else None
    values |= {"state": state, "matches": matches(selection, row, now)}
    values["expires_at"] = row.expires_at if row.expires_at and row.expires_at > now else None
    return Row(*(values[name] for name in Row._fields))


class Work:
    """One transaction attempt, with the methods of the client that the product uses. Other tables are dictionaries."""

    def __init__(self, spanner: Spanner, transaction: Transaction, selection: TaskSelection | None) -> None:
        self._spanner, self._transaction, self._selection = spanner, transaction, selection
        self.table = spanner.table
        self.mutations: list[tuple[str, str, Mapping[str, Any]]] = []
        #: The tasks that it registers.
        self.known: dict[str, Known] = {}
        #: The states of the tasks that a command has locked.
        self.states: dict[str, str] = {}
        self.committed = False

    def query(self, statement: str, parameters: Mapping[str, Any]) -> list[Any]:
        self._spanner.wait(self._spanner.latencies.lock)
        return self._rows(statement, parameters)

    def execute_sql(self, sql: str, params: Mapping[str, Any], **_more: Any) -> list[Any]:
        return self.query(sql, params)

    def _lock(self, ids: Collection[str]) -> list[StoredTask]:
        self._spanner.lock(self._transaction, sorted(ids))
        if self._transaction.wounded:
            raise Aborted("wounded")
        return [self.table.rows[id] for id in sorted(ids) if id in self.table.rows]

    def _lock_others(self, rows: Iterable[tuple[str, str]], mode: Mode) -> None:
        """Lock rows of other tables by their keys."""
        for table, key in sorted(rows):
            self._transaction.asked_at = self._spanner.clockwork.now
            self._spanner.locks.acquire(self._transaction, f"{table} {key}", mode)

    def _rows(self, statement: str, values: Mapping[str, Any]) -> list[Any]:
        if statement == LAYOUTS:
            return []
        if statement == NOW:
            return [[self.table.time()]]
        if statement == LOCK_UNSENT:
            unsent = [row for row in self._lock([values["id"]]) if row.sent_at is None]
            return [[bool(unsent), unsent[0].ordering_key if unsent else None]]
        if statement == NEXT_OF_KEYS:
            heads: list[str] | None = None
            while heads != (heads := self.table.next_of_keys(values["ids"])):
                self._lock(heads)  # meanwhile another transaction may have taken one of them out
            return [[id, self.table.rows[id].available_at] for id in heads]
        rows, now = self._lock(values["ids"]), self.table.time()
        if columns := _OF_IDS.search(statement):
            return [[_value(row, name) for name in columns[1].split(", ")] for row in rows]
        assert self._selection is not None, statement
        found = [_row(self._selection, row, now) for row in rows]
        self.states |= {row.id: row.state for row in found}
        return found

    def read(self, table: str, columns: Sequence[str], keys: Any, **_more: Any) -> list[list[Any]]:
        if table == TASKS_TABLE:
            return [[_value(row, name) for name in columns] for row in self._lock([id for [id] in keys.keys])]
        rows = self._spanner.others[table]
        self._lock_others(((table, key) for [key] in keys.keys), Mode.SHARED)
        return [[rows[tuple(key)].get(name) for name in columns] for key in keys.keys if tuple(key) in rows]

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.mutations += [("insert", table, dict(zip(columns, row, strict=True))) for row in rows]

    def insert_or_update(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.insert(table, columns, rows)

    def update(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.mutations += [("update", table, dict(zip(columns, row, strict=True))) for row in rows]

    def delete(self, table: str, keys: Any) -> None:
        self.mutations += [("delete", table, {"Id": key}) for [key] in keys.keys]

    def commit(self, audit: Audit) -> None:
        """Apply the mutations. Raises Aborted, OutboxError."""
        spanner = self._spanner
        spanner.wait(spanner.latencies.commit)
        spanner.serve("change", len(self.mutations), urgent=False)
        changed = {row["Id"]: kind for kind, table, row in self.mutations if table == TASKS_TABLE}
        self._lock(changed)
        others = ((table, next(iter(row.values()))) for _, table, row in self.mutations if table != TASKS_TABLE)
        self._lock_others(others, Mode.EXCLUSIVE)
        if any(id in self.table.refused for id, kind in changed.items() if kind == "update"):
            raise OutboxError("a constraint is violated")
        self._check_existing(audit)
        self._transaction.commits = True
        committed = self.table.commit_time()
        for kind, table, given in self.mutations:
            row = {name: committed if value is COMMIT_TIMESTAMP else value for name, value in given.items()}
            if table == TASKS_TABLE:
                values = {attribute(name): value for name, value in row.items()}
                self._apply(kind, values, audit)
            else:
                key = tuple(row.values())[:1]
                spanner.others[table].setdefault(key, {}).update(row)
        spanner.locks.release(self._transaction)
        self.committed = True

    def _check_existing(self, audit: Audit) -> None:
        """Raise OutboxError if Spanner would refuse an update of a task that is gone, or to insert one that exists."""
        inserted = {row["Id"] for kind, table, row in self.mutations if (kind, table) == ("insert", TASKS_TABLE)}
        if inserted & self.table.rows.keys():
            raise OutboxError("ALREADY_EXISTS")
        gone = set[str]()
        for kind, table, row in self.mutations:
            if table == TASKS_TABLE and kind == "update" and (row["Id"] in gone or row["Id"] not in self.table.rows):
                audit.problem(f"a transaction updates {row['Id']} after it was deleted")
                raise OutboxError("NOT_FOUND")
            gone |= {row["Id"]} if (kind, table) == ("delete", TASKS_TABLE) else set()

    def _apply(self, kind: str, row: dict[str, Any], audit: Audit) -> None:
        id = row.pop("id")
        due = (row["available_at"] - self.table.epoch).total_seconds() if row.get("available_at") else 0.0
        if kind == "insert":
            self.table.insert(id, row.pop("topic"), b64decode(row.pop("data")), **row)
            if id in self.known:
                self.known[id].at = self.known[id].available_at = self._spanner.clockwork.now
                audit.committed(id, self.known[id])
            else:
                created_at = (self.table.rows[id].created_at - self.table.epoch).total_seconds()
                audit.restored(id, created_at, due)
        elif kind == "delete":
            if self.table.rows[id].sent_at is None:
                audit.problem(f"{id} is unsent, and was deleted")
            self.table.delete(id)
        else:
            before = self.table.rows[id]
            if row.get("cancelled_by"):
                audit.cancelled(id, before, follows_a_batch=self._follows_a_batch(before))
            elif "cancelled_by" in row:
                audit.put_back(id, before, before.cancelled_by)
            elif "attempts" in row and self.table.rows[id].sent_at is None:
                audit.retried(id, None if row["due_at"] else due)
            elif "attempts" in row:
                audit.reset(id, due)
            self.table.change(id, **row)

    def _follows_a_batch(self, row: StoredTask) -> bool:
        """Tell whether a batch may be publishing the tasks before this one of its key."""
        of_key = self.table.unsent_of(TopicKey(row.topic, row.ordering_key or ""))
        return any(map(self.table.is_due, takewhile(lambda each: each is not row, of_key)))


def transact(
    spanner: Spanner,
    audit: Audit,
    work: Callable[[Any], T],
    *,
    selection: TaskSelection | None = None,
) -> T:
    """Run `work` in a transaction, again after aborts, as old as the first attempt. Raises Aborted at last.

    If the answer to a commit is lost, the transaction runs again. `selection` is of a command of an operator.
    """
    clockwork, age = spanner.clockwork, spanner.age()
    began = clockwork.now
    while True:
        transaction = Transaction(age, asked_at=clockwork.now)
        attempt = Work(spanner, transaction, selection)
        try:
            result = work(attempt)
            attempt.commit(audit)
            if spanner.is_unanswered():
                return transact(spanner, audit, work, selection=selection)
        except Aborted:
            if clockwork.now >= began + ABORTED_SECONDS:
                raise
            spanner.wait(ABORTED.first)
        else:
            return result
        finally:
            spanner.roll_back(transaction)


class Commands(TaskTable):
    """The table as commands use it. It has one shard, because chunks are the same in all."""

    def __init__(self, spanner: Spanner, audit: Audit, selection: TaskSelection | None = None) -> None:
        self._spanner, self._audit, self._selection = spanner, audit, selection
        self.layout, self.name = Layout(1), "simulation"
        self._names = selection.names if selection else frozenset()
        rows = spanner.table.rows.values() if selection else ()
        #: The selected tasks as of now, each with its place without the ID.
        self.seen = {
            row.id: _place(row)
            for row in rows
            if selection and matches(selection, row, self.now())
            if selection.state != CANCELLED or row.sent_at is not None or selection.ids
            if not selection.ids or row.id in selection.ids
        }
        #: What a query by IDs returns as of now.
        self._of_ids = {
            row.id: (_row(selection, row, self.now()), dataclasses.replace(row))
            for row in rows
            if selection and row.id in (selection.ids or ())
        }
        #: What its transactions wrote.
        self.writes: list[tuple[str, str, Mapping[str, Any]]] = []
        #: The states of the tasks under its locks.
        self.states: dict[str, str] = {}

    principal = "operator"  # type: ignore[assignment]  # a property there

    def now(self) -> datetime:
        return self._spanner.table.time()

    def topics(self, count: int | None = None, at: datetime | None = None) -> list[str]:
        return sorted({row.topic for row in self._spanner.table.rows.values()})[:count]

    def query(
        self, statement: str, tag: str, parameters: Mapping[str, Any] | None = None, **_more: Any
    ) -> list[list[Any]]:
        """Return a page of the IDs that matched at the preview, rows of IDs as of then, or an operation."""
        self._spanner.wait(self._spanner.latencies.read)
        values: Mapping[str, Any] = parameters or {}
        if statement == operation_sql.OPERATION:
            row = self._spanner.others[OPERATIONS].get((values["id"],), {})
            names = ("OperationId", "Operation", "StartedAt", "FinishedAt", "Principal", "Selection", "Tasks")
            return [[row.get(name) for name in (*names, "Reason", "Selected", "SeenAt", "StoppedAt", "Position")]]
        if "ids" in values:
            found = [self._of_ids[id] for id in values["ids"] if id in self._of_ids]
            if statement == change_sql.PLACES:
                return [[row.id, row.topic, row.created_at, _sequence(row)] for _, row in found]
            return [[*row] for row, _ in found]
        assert statement == change_sql.next_ids(str(self._selection and self._selection.state), self._names), statement
        after = [values[name] for name in ("after", "after_created", "after_sequence", "after_id") if name in values]
        places = ([*place, id] for id, place in self.seen.items())
        return [[0, *place] for place in sorted(places) if place > after][: values["limit"]]

    def transact(self, tag: str, work: Callable[[Any], T]) -> T:
        attempts: list[Work] = []

        def noted(attempt: Work) -> T:
            attempts.append(attempt)
            return work(attempt)

        result = transact(self._spanner, self._audit, noted, selection=self._selection)
        for attempt in attempts:
            if attempt.committed:
                self.writes += attempt.mutations
                self.states |= attempt.states
        return result

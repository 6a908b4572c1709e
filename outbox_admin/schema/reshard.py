"""Change the number of shards of the table while workers run (docs/operations/upgrade.md).

The command adds a new layout (a shard column and its indexes) and waits until it contains all tasks. Workers poll
both layouts, then only the new one, and the command drops the old one. At every moment all live workers poll a common
layout, so no unsent task is in a shard that no worker polls. Each step is one commit or one schema update. The next
step follows from what is in the database, so any run can continue.
"""

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeySet

from outbox.base.schedules import FOLLOW
from outbox.base.values import counted, listed, shown
from outbox.errors import OutboxError
from outbox.rows import counts_sql
from outbox.rows.task_table import TaskTable, Transaction
from outbox.table import schema
from outbox.table.ddl import BUILDING, COLUMN, POLLED, RETIRED, Layout, statements
from outbox.table.shared_sql import WORKERS
from outbox_admin import operations
from outbox_admin.operations import UNNAMED, Author, Operation

_TABLE, _COLUMNS = "AsynchronousTaskShards", ("ColumnName", "Shards", "State")
_TAG = "outbox-reshard"


@dataclass(frozen=True, slots=True)
class LayoutStates:
    """The layouts and the workers, as the database has them.

    `found` are the layouts of the table, each with the states of its indexes by name. `recorded` are the states of
    layouts in AsynchronousTaskShards. `polled_by` are the columns that each live worker polls.
    """

    found: Mapping[Layout, Mapping[str, str]]
    recorded: Mapping[Layout, str]
    polled_by: Mapping[str, frozenset[str]]

    @property
    def layouts(self) -> list[Layout]:
        """Return all layouts, sorted by column name, so `Shard` comes first."""
        return sorted({*self.found, *self.recorded})

    def is_complete(self, layout: Layout) -> bool:
        """Tell whether every task is in the layout."""
        return layout in schema.complete(self.found)

    def layout_state(self, layout: Layout) -> str:
        """Return the state of a layout. Until the first change nothing is recorded, and workers poll the only one."""
        return self.recorded.get(layout, POLLED if not self.recorded else BUILDING)

    def workers(self, layout: Layout, *, polling: bool) -> tuple[str, ...]:
        """Return the live workers that poll the layout, or the others."""
        return tuple(sorted(id for id, columns in self.polled_by.items() if (layout.column in columns) is polling))


@dataclass(frozen=True, slots=True)
class Step:
    """The next step: `begin`, `build`, `set`, `drop`, `forget` or `wait`. `text` describes it for an operator."""

    kind: str
    layout: Layout
    text: str
    waits_for: tuple[str, ...] = ()  # workers
    state: str = ""  # the new state of the layout


class RecordedReshard(NamedTuple):
    """A change of the number of shards, as AsynchronousTaskOperations has it."""

    former: int
    target: int
    operation: Operation
    #: Whether it returns to the number before an earlier change.
    aborts: bool = False


class RunningReshard(NamedTuple):
    """A change that is under way, and its next step."""

    change: RecordedReshard
    step: Step

    def __str__(self) -> str:
        """Return what `outbox status` prints."""
        former, target, operation, _ = self.change
        return f"Changing from {former} to {target} shards since {shown(operation.started_at)}. Next: {self.step.text}"


def next_step(snapshot: LayoutStates, target: Layout) -> Step | None:
    """Return the next step to a table whose only layout is `target`, or None if it is done. Pure."""
    return next(_steps(snapshot, target), None)


def _steps(snapshot: LayoutStates, target: Layout) -> Iterator[Step]:
    if target not in snapshot.recorded and snapshot.layouts != [target]:
        yield Step("begin", target, f"Record that {target.column} is added", state=BUILDING)
    if not snapshot.is_complete(target):
        yield Step("build", target, f"Add column {target.column} and its indexes; all tasks are written to them")
    if snapshot.layout_state(target) != POLLED:
        yield Step("set", target, f"Let workers poll {target.column}", state=POLLED)
    for other in (each for each in snapshot.layouts if each != target):
        if snapshot.layout_state(other) != RETIRED:
            if workers := snapshot.workers(target, polling=False):
                yield Step("wait", target, f"Waiting until {_names(workers)} also polls {target.column}", workers)
            yield Step("set", other, f"Let workers stop polling {other.column}", state=RETIRED)
        if workers := snapshot.workers(other, polling=True):
            yield Step("wait", other, f"Waiting until {_names(workers)} no longer polls {other.column}", workers)
        if other in snapshot.found:
            yield Step("drop", other, f"Drop the indexes of {other.column} and the column")
        yield Step("forget", other, f"Remove {other.column} from {_TABLE}")


def _names(workers: Sequence[str]) -> str:
    return workers[0] if len(workers) == 1 else f"each of {len(workers)} workers ({listed(workers, 3)})"


class Resharding:
    """Reads snapshots, and runs steps. Every method raises NotReached or OutboxError."""

    def __init__(self, table: TaskTable, author: Author = UNNAMED) -> None:
        self._table, self._author = table, author

    def snapshot(self) -> LayoutStates:
        workers = self._table.query(WORKERS, _TAG)
        return LayoutStates(schema.layouts(self._table.database), self._recorded(), _polled_by(workers))

    def target(self, shards: int) -> Layout:
        """Return the layout with this number of shards, or a new one. Raises OutboxError during another change."""
        snapshot = self.snapshot()
        target = next((each for each in snapshot.layouts if each.shards == shards), Layout.added(shards))
        others = [each for each in snapshot.layouts if each != target]
        if len(others) > 1:
            latest = self._latest()
            former, new = (latest.former, latest.target) if latest else (others[0].shards, others[1].shards)
            raise OutboxError(
                f"{self._table.name}: a change from {former} to {new} shards is under way. "
                f"Continue it with --shards {new}, or end it with --abort."
            )
        return target

    def former(self) -> Layout:
        """Return the layout before the change. Raises OutboxError if none is under way, or if it is too late."""
        snapshot, latest = self.snapshot(), self._latest()
        if len(snapshot.layouts) < 2 or latest is None:
            raise OutboxError(f"{self._table.name}: no change of the number of shards is under way.")
        shards = latest.target if latest.aborts else latest.former  # an abort that was interrupted continues
        former = next((each for each in snapshot.layouts if each.shards == shards), None)
        if former is None or not snapshot.is_complete(former):
            raise OutboxError(
                f"{self._table.name}: the former indexes are being dropped, so the change cannot be aborted. "
                f"Continue it with --shards {latest.target}."
            )
        return former

    def report(self) -> Iterator[str]:
        """Yield a line for each layout, and one for a change that is under way."""
        snapshot = self.snapshot()
        workers = counted(len(snapshot.polled_by), "worker")
        for each in snapshot.layouts:
            polling = f"polled by {len(snapshot.workers(each, polling=True))} of {workers}"
            yield f"{each.column:<10} {counted(each.shards, 'shard'):>12}  {snapshot.layout_state(each):<8}  {polling}"
        if progress := self._progress(snapshot):
            yield f"{progress}. Continue with: outbox schema reshard --shards {progress.change.target}"

    def progress(self) -> RunningReshard | None:
        """Return the change that is under way and its next step, if there is one."""
        return self._progress(self.snapshot()) if len(self._recorded()) > 1 else None

    def _progress(self, snapshot: LayoutStates) -> RunningReshard | None:
        latest = self._latest() if len(snapshot.layouts) > 1 else None
        for target in snapshot.layouts:
            if latest and latest.target == target.shards and (step := next_step(snapshot, target)):
                return RunningReshard(latest, step)
        return None

    def run(self, target: Layout, *, aborts: bool = False) -> Iterator[str]:
        """Run all steps to `target`, and yield a line before each. Can be interrupted anywhere and run again.

        Raises OutboxError if another command has begun a change or an abort meanwhile.
        """
        id, waits = self._operation(target, aborts=aborts), ""
        while (step := next_step(self.snapshot(), target)) is not None:
            if step.kind != "wait" or step.text != waits:
                yield step.text
            waits = step.text if step.kind == "wait" else ""
            if (latest := self._latest()) and latest.operation.id != id:
                raise OutboxError(
                    f"{self._table.name}: another command has begun to change the number of shards to {latest.target}, "
                    "so this one has stopped. `outbox schema reshard --status` shows the progress"
                )
            self._do(step, target)
        if (latest := self._latest()) and latest.target == target.shards and not latest.operation.has_ended:
            operations.end(self._table, latest.operation.id)

    def _do(self, step: Step, target: Layout) -> None:
        match step.kind:
            case "wait":
                time.sleep(FOLLOW.first)
            case "build" | "drop":
                self._update(step)
            case "forget":
                keys = KeySet(keys=[[step.layout.column]])
                self._table.transact(_TAG, lambda transaction: transaction.delete(_TABLE, keys))
            case _:
                self._table.transact(_TAG, lambda transaction: self._record(transaction, step, target))

    def _record(self, transaction: Transaction, step: Step, target: Layout) -> None:
        """Write the new state of a layout. The workers are read in the same transaction, so no heartbeat is missed."""
        if step.state == RETIRED:
            polled_by = _polled_by(transaction.query(WORKERS, {}))
            if not all(target.column in columns for columns in polled_by.values()):
                return  # a worker has started meanwhile; the next step waits for it
        rows = [(step.layout.column, step.layout.shards, step.state)]
        if step.kind == "begin":
            found = schema.layouts(self._table.database)
            rows += [(each.column, each.shards, POLLED) for each in found if each != target]
        transaction.insert_or_update(_TABLE, _COLUMNS, rows)

    def _operation(self, target: Layout, *, aborts: bool) -> str | None:
        """Record who changes the number of shards, once for each change and each abort. Return the ID of the record."""
        snapshot, latest = self.snapshot(), self._latest()
        former = next((each for each in snapshot.layouts if each != target), None)
        # `_update` completes a layout that an earlier change added. `Shard` is created by `outbox schema apply`.
        if former is None and target.column == COLUMN and not snapshot.is_complete(target):
            raise OutboxError(
                f"{self._table.name}: an index of {target.column} is missing or does not contain all tasks yet, and "
                "workers poll no other layout. Run `outbox schema apply` to create a missing index. Then wait until "
                "the state of all its indexes is READ_WRITE."
            )
        if former is None or next_step(snapshot, target) is None or (latest and latest.target == target.shards):
            return latest.operation.id if latest else None
        id = operations.new_id()
        selection = {"from": former.shards, "to": target.shards} | ({"aborts": True} if aborts else {})

        def work(writer: Transaction) -> None:
            if latest and not latest.operation.has_ended:
                operations.update(writer, latest.operation.id, StoppedAt=COMMIT_TIMESTAMP)
            operations.record(writer, self._table, "reshard", selection, self._author, OperationId=id)

        self._table.transact(_TAG, work)
        return id

    def _latest(self) -> RecordedReshard | None:
        for each in operations.latest(self._table, 10, operation="reshard"):
            match operations.parsed(each.selection):
                case {"from": int(former), "to": int(target), **more}:
                    return RecordedReshard(former, target, each, aborts="aborts" in more)
        return None

    def _update(self, step: Step) -> None:
        """Add what a layout lacks, or drop it. A schema update that an earlier run began continues on the server.

        Spanner queues updates. If Spanner refuses this one because an earlier one has changed the layouts, such as that
        of an interrupted command, ignore the error: `run` chooses the next step from the new layouts.
        """
        found = schema.layouts(self._table.database)
        indexes = found.get(step.layout)
        if step.kind == "drop":
            statements = [] if indexes is None else dropped_layout(step.layout, indexes)
        else:
            column, *others = added_layout(step.layout)
            missing = [each for each in others if each.split()[2] not in (indexes or {})]
            statements = missing if indexes is not None else [column, *missing]
        try:
            if statements:
                with schema.service_errors(self._table.name):
                    self._table.database.update_ddl(statements).result()
            elif step.kind == "build":
                time.sleep(FOLLOW.first)  # an index is not READ_WRITE yet
        except OutboxError:
            if schema.layouts(self._table.database) == found:
                raise

    def _recorded(self) -> dict[Layout, str]:
        rows = self._table.query(counts_sql.RECORDED_SHARDS, _TAG)
        found = ((Layout.recorded(name, shards), state) for name, shards, state in rows)
        return {layout: state for layout, state in found if layout}


def _polled_by(rows: list[list[Any]]) -> dict[str, frozenset[str]]:
    """Return the columns that each worker polls. A worker counts for twice its liveness timeout: it may be slow."""
    return {
        worker: frozenset((polls or COLUMN).split(",")) for worker, age, seconds, polls in rows if age < 2000 * seconds
    }


def added_layout(layout: Layout) -> list[str]:
    """Return the DDL that adds a layout to a table: its column, and its indexes."""
    table, *others = statements(layout.shards, layout=layout)
    [column] = re.findall(rf"^  ({layout.column} .+),$", table, re.MULTILINE)
    indexes = [each for each in others if re.match(r"CREATE INDEX \w+\s+ON AsynchronousTasks \(", each)]
    return [f"ALTER TABLE AsynchronousTasks ADD COLUMN {' '.join(column.split())}", *indexes]


def dropped_layout(layout: Layout, indexes: Collection[str]) -> list[str]:
    """Return the DDL that removes a layout from a table that still has these of its indexes."""
    drops = [f"DROP INDEX {each}" for each in sorted(indexes)]
    return [*drops, f"ALTER TABLE AsynchronousTasks DROP COLUMN {layout.column}"]

"""Change the number of shards of the table while workers run (docs/operations/reshard.md).

A new layout is added and contains all tasks from then on. Workers poll both layouts, then only the new one, and the old
one is dropped. At every moment all live workers poll a common layout, so no unsent task is in a shard that no worker
polls. Each step is one commit or one schema update. The database says which step is next, so any run can continue.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database

from outbox.admin import operations, statements
from outbox.admin.table import TaskTable, Transaction
from outbox.errors import OutboxError
from outbox.storage import ddl, schema
from outbox.storage.layout import COLUMN, Layout

#: States of a layout in AsynchronousTaskShards.
BUILDING, POLLED, RETIRED = "building", "polled", "retired"
#: Seconds between two looks at what the workers poll.
WAIT_SECONDS = 1.0

_TABLE, _COLUMNS = "AsynchronousTaskShards", ("ColumnName", "Shards", "State")
_TAG = "outbox-reshard"


@dataclass(frozen=True, slots=True)
class State:
    """What the database says.

    `found` are the layouts of the table, each with the states of its indexes by name. `recorded` are the states of
    layouts in AsynchronousTaskShards. `polled_by` are the columns that each live worker polls.
    """

    found: Mapping[Layout, Mapping[str, str]]
    recorded: Mapping[Layout, str]
    polled_by: Mapping[str, frozenset[str]]

    @property
    def layouts(self) -> list[Layout]:
        """Return all layouts, the first one first."""
        return sorted({*self.found, *self.recorded})

    def is_complete(self, layout: Layout) -> bool:
        """Tell whether every task is in the layout."""
        return list(self.found.get(layout, {}).values()) == ["READ_WRITE"] * 2

    def status(self, layout: Layout) -> str:
        """Return the state of a layout. Until the first change nothing is recorded, and workers poll the only one."""
        return self.recorded.get(layout, POLLED if not self.recorded else BUILDING)

    def not_polling(self, layout: Layout) -> list[str]:
        """Return the live workers that do not poll the layout."""
        return sorted(worker for worker, columns in self.polled_by.items() if layout.column not in columns)

    def polling(self, layout: Layout) -> list[str]:
        """Return the live workers that poll the layout."""
        return sorted(self.polled_by.keys() - {*self.not_polling(layout)})


@dataclass(frozen=True, slots=True)
class Step:
    """The next step: `begin`, `build`, `set`, `drop`, `forget` or `wait`. `text` tells an operator what happens."""

    kind: str
    layout: Layout
    text: str
    state: str = ""


def next_step(state: State, target: Layout) -> Step | None:
    """Return the next step to a table whose only layout is `target`, or None if it is done. Pure."""
    return next(_steps(state, target), None)


def _steps(state: State, target: Layout) -> Iterator[Step]:
    """Yield what is left to do, in order."""
    if target not in state.recorded and state.layouts != [target]:
        yield Step("begin", target, f"Record that {target.column} is added", BUILDING)
    if not state.is_complete(target):
        yield Step("build", target, f"Add column {target.column} and its indexes; all tasks are written to them")
    if state.status(target) != POLLED:
        yield Step("set", target, f"Let workers poll {target.column}", POLLED)
    for other in (each for each in state.layouts if each != target):
        retired = state.status(other) == RETIRED
        if not retired and (workers := state.not_polling(target)):
            yield Step("wait", target, f"Waiting until {_names(workers)} also polls {target.column}")
        if not retired:
            yield Step("set", other, f"Let workers stop polling {other.column}", RETIRED)
        if workers := state.polling(other):
            yield Step("wait", other, f"Waiting until {_names(workers)} no longer polls {other.column}")
        if other in state.found:
            yield Step("drop", other, f"Drop the indexes of {other.column} and the column")
        yield Step("forget", other, f"Remove {other.column} from {_TABLE}")


def _names(workers: list[str]) -> str:
    return workers[0] if len(workers) == 1 else f"each of {len(workers)} workers ({', '.join(workers[:3])}, ...)"


class Resharding:
    """Reads the state, and runs steps. Every method raises NotReached or OutboxError."""

    def __init__(self, database: Database) -> None:
        """Read the table's layout."""
        self._database: Any = database  # its methods carry no types
        self._table = TaskTable(database)

    def state(self) -> State:
        """Return what the database says now."""
        workers = self._table.query(statements.WORKERS_POLL, _TAG)
        return State(schema.layouts(self._database), self._recorded(), _polled_by(workers))

    def target(self, shards: int) -> Layout:
        """Return the layout of so many shards. Raises OutboxError if another change is under way."""
        state = self.state()
        target = next((each for each in state.layouts if each.shards == shards), Layout(shards, str(shards)))
        others = [each for each in state.layouts if each != target]
        if len(others) > 1:
            raise OutboxError(
                f"{self._table.name}: a change from {others[0].shards} to {others[1].shards} shards is under way. "
                f"Continue it with --shards {others[1].shards}, or end it with --abort."
            )
        return target

    def former(self) -> Layout:
        """Return the layout before the change. Raises OutboxError if none is under way, or if it is too late."""
        state, latest = self.state(), self._latest()
        if len(state.layouts) < 2 or latest is None:
            raise OutboxError(f"{self._table.name}: no change of the number of shards is under way.")
        former = next((each for each in state.layouts if each.shards == latest["from"]), None)
        if former is None or not state.is_complete(former):
            raise OutboxError(
                f"{self._table.name}: the former indexes are being dropped, so the change cannot be aborted. "
                f"Continue it with --shards {latest['to']}."
            )
        return former

    def report(self) -> Iterator[str]:
        """Yield a line for each layout, and one for the next step of a change that is under way."""
        state, latest = self.state(), self._latest()
        workers = len(state.polled_by)
        for each in state.layouts:
            polling = f"{len(state.polling(each))} of {workers} workers poll it"
            yield f"{each.column:<10} {each.shards:>4} shards  {state.status(each):<8}  {polling}"
        if len(state.layouts) > 1 and latest:
            target = next(each for each in state.layouts if each.shards == latest["to"])
            if (step := next_step(state, target)) is not None:
                yield f"Next: {step.text}. Continue with: outbox schema reshard --shards {target.shards}"

    def run(self, target: Layout, sleep: Callable[[float], object] = time.sleep) -> Iterator[str]:
        """Run all steps to `target`, and yield a line before each. Can be interrupted anywhere and run again."""
        self._record_operation(target)
        waits = ""
        while (step := next_step(self.state(), target)) is not None:
            if step.kind != "wait" or step.text != waits:
                yield step.text
            waits = step.text if step.kind == "wait" else ""
            self.do(step, target, sleep)

    def do(self, step: Step, target: Layout, sleep: Callable[[float], object] = time.sleep) -> None:
        """Run one step."""
        match step.kind:
            case "wait":
                sleep(WAIT_SECONDS)
            case "build":
                self._build(target)
            case "drop":
                self._update(ddl.dropped_layout(step.layout.suffix, schema.layouts(self._database)[step.layout]))
            case "forget":
                keys = KeySet(keys=[[step.layout.column]])
                self._table.transact(_TAG, lambda transaction: transaction.delete(_TABLE, keys))
            case _:
                self._table.transact(_TAG, lambda transaction: self._record(transaction, step, target))

    def _record(self, transaction: Transaction, step: Step, target: Layout) -> None:
        """Write the new state of a layout. The workers are read in the same transaction, so no heartbeat is missed."""
        if step.state == RETIRED:
            polled_by = _polled_by(transaction.query(statements.WORKERS_POLL, {}))
            if not all(target.column in columns for columns in polled_by.values()):
                return  # a worker has started meanwhile; the next step waits for it
        rows = [(step.layout.column, step.layout.shards, step.state)]
        if step.kind == "begin":
            found = schema.layouts(self._database)
            rows += [(each.column, each.shards, POLLED) for each in found if each != target]
        transaction.insert_or_update(_TABLE, _COLUMNS, rows)

    def _record_operation(self, target: Layout) -> None:
        """Write who changes the number of shards, once for each change and each return."""
        state, latest = self.state(), self._latest()
        if next_step(state, target) is None or (latest and latest["to"] == target.shards):
            return
        former = next(each for each in state.layouts if each != target)
        change = {"from": former.shards, "to": target.shards}
        principal = self._table.principal
        self._table.transact(_TAG, lambda transaction: operations.record(transaction, principal, "reshard", change))

    def _latest(self) -> dict[str, int] | None:
        """Return `from` and `to` of the latest change, if there is one."""
        rows = self._table.query(statements.LATEST_RESHARD, _TAG)
        return json.loads(rows[0][0]) if rows else None

    def _build(self, target: Layout) -> None:
        """Create what is missing. A schema update that an earlier run began continues on the server."""
        found = schema.layouts(self._database)
        column, *indexes = ddl.added_layout(target.shards)
        missing = [each for each in indexes if each.split()[2] not in found.get(target, {})]
        if target not in found:
            missing.insert(0, column)
        if missing:
            self._update(missing)
        else:
            time.sleep(WAIT_SECONDS)  # an index is not READ_WRITE yet

    def _update(self, statements: list[str]) -> None:
        with schema.service_errors(self._table.name):
            self._database.update_ddl(statements).result()

    def _recorded(self) -> dict[Layout, str]:
        rows = self._table.query(statements.RECORDED_SHARDS, _TAG)
        return {Layout(shards, name.removeprefix(COLUMN)): state for name, shards, state in rows}


def _polled_by(rows: list[list[Any]]) -> dict[str, frozenset[str]]:
    """Return the columns that each worker polls. Workers of versions without this column poll `Shard`."""
    return {worker: frozenset((polls or COLUMN).split(",")) for worker, polls in rows}

"""A model of the Spanner emulator on a machine whose cores all processes share.

It is the check of the simulation: measured runs on the emulator are compared with runs on this model. The emulator runs
one read-write transaction at a time in a database. It aborts the transaction that comes later, or one time in five the
other one. Its requests take time in proportion to the rows of the table.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from publishworker.spanner.store import ABORTED_DELAY_SECONDS
from publishworker.types import Mark
from tests.simulation.clockwork import Clockwork, Process, VirtualQueue
from tests.simulation.spanner import Aborted, Latencies, Spanner, Transaction

#: How often the emulator aborts the older transaction: `--abort_current_transaction_probability`, in percent 20.
ABORT_OLDER = 0.2
#: Seconds for which a request keeps a core while others want it, as a thread of Linux does.
SLICE_SECONDS = 0.004
#: Seconds after which the application of the benchmark tries its aborted commit again.
APPLICATION_RETRY_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a request: fixed, for each row of the table, and for each row that it reads or writes."""

    fixed: float
    of_table: float
    of_request: float

    def seconds(self, table: int, rows: int) -> float:
        return self.fixed + self.of_table * table + self.of_request * rows


class Emulator(Spanner):
    """The emulator; `times` are measured. Every request and every worker needs a core while it runs."""

    def __init__(
        self, clockwork: Clockwork, shards: int, latencies: Latencies, *, times: Mapping[str, Time], cores: int = 2
    ) -> None:
        super().__init__(clockwork, shards, latencies)
        self._times = times
        self._free_at = [0.0] * cores
        self._owner: Transaction | None = None
        self._slots: dict[Process, VirtualQueue] = {}

    def may_wait(self, kind: str) -> bool:
        return True

    def ways(self, median: float) -> tuple[float, float]:
        return 0.0, 0.0

    def _run(self, kind: str, rows: int) -> None:
        seconds = self._times[kind].seconds(len(self.table.rows), rows)
        while seconds > 0:
            self._use_core(min(seconds, SLICE_SECONDS))
            seconds -= SLICE_SECONDS

    def _use_core(self, seconds: float, earliest: float = 0.0) -> float:
        """Wait for a core and use it. Return when it is free again."""
        now, core = self.clockwork.now, self._free_at.index(min(self._free_at))
        end = self._free_at[core] = max(now, earliest, self._free_at[core]) + seconds
        self.clockwork.sleep(end - now)
        return end

    def use_cpu(self, process: Process, seconds: float) -> None:
        process.worked += seconds
        now = self.clockwork.now
        process.busy_until = max(now, process.busy_until) + seconds  # what the others of the process wait for
        process.busy_until = max(process.busy_until, self._use_core(seconds, process.busy_until - seconds))

    def serve(self, kind: str, rows: int = 0, *, urgent: bool) -> None:
        """Run a read, or a transaction of one commit, which is tried until it gets the database."""
        if kind in ("lock", "commit"):
            return
        if kind in ("insert", "heartbeat"):
            transaction = Transaction(self.age())
            while not self._gets_database(transaction):
                self.clockwork.sleep(APPLICATION_RETRY_SECONDS if kind == "insert" else ABORTED_DELAY_SECONDS)
            self._run("commit", max(1, rows))
            self._release(transaction)
        else:
            for _ in range(rows):  # each scans the table
                self._run(kind, 0)

    def book(self, kind: str, rows: int, *, urgent: bool) -> float:
        """Take the time that the rows of a poll take."""
        if kind == "rows":
            self._use_core(self._times["poll"].of_request * rows)
        return 0.0

    def _gets_database(self, transaction: Transaction) -> bool:
        if self._owner is not None and self._owner is not transaction:
            if self._owner.commits or self.clockwork.random.random() >= ABORT_OLDER:
                return False
            self.locks.wound(self._owner)
        self._owner = transaction
        return True

    def _release(self, transaction: Transaction) -> None:
        if self._owner is transaction:
            self._owner = None

    def lock(self, transaction: Transaction, ids: Sequence[str]) -> list[Any]:
        if not self._gets_database(transaction):
            raise Aborted("another transaction runs")
        self._run("lock", len(ids))
        return super().lock(transaction, ids)

    def commit(self, transaction: Transaction, marks: Mapping[str, Mark]) -> datetime:
        if transaction.wounded:
            raise Aborted("the emulator aborted it for another one")
        transaction.commits = True
        self._run("commit", len(marks))
        try:
            return super().commit(transaction, marks)
        finally:
            self._release(transaction)

    def roll_back(self, transaction: Transaction) -> None:
        super().roll_back(transaction)
        self._release(transaction)

    @contextlib.contextmanager
    def slot(self, process: Process) -> Iterator[None]:
        """As EmulatorStore: the transactions of a worker wait for one another."""
        if process not in self._slots:
            self._slots[process] = VirtualQueue(self.clockwork)
            self._slots[process].put(None)
        self._slots[process].get()
        try:
            yield
        finally:
            self._slots[process].put(None)

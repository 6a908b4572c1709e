"""The simulated Spanner for the contract tests: each call of the store is played to its end in virtual time."""

from collections.abc import Callable
from typing import Any

from publishworker.spanner.store import SpannerStore
from tests.simulation.clockwork import Clockwork, Process
from tests.simulation.spanner import DEFAULT_LATENCIES, Connection, Spanner
from tests.simulation.table import Table
from tests.support.store_harness import FakeHarness

#: Virtual seconds within which each call must end.
LIMIT = 600.0


class SimulatedHarness(FakeHarness):
    """The simulated store; its rows are those of a fake store with index ranges."""

    def __init__(self) -> None:
        self._clockwork = Clockwork(seed=1)
        spanner = Spanner(self._clockwork, 10, DEFAULT_LATENCIES)
        self._fake: Table = spanner.table
        self._process = Process("contract")
        connection: Any = Connection(spanner, self._process)
        self.store: SpannerStore = _Played(self._clockwork, self._process, connection)  # type: ignore[assignment]  # by name

    def delete(self, id: str) -> None:
        self._fake.delete(id)


class _Played:
    """Runs each method of a connection in a fiber, and the clock until the fiber has ended."""

    def __init__(self, clockwork: Clockwork, process: Process, connection: Connection) -> None:
        self._clockwork, self._process, self._connection = clockwork, process, connection

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._connection, name)
        return (lambda *a, **k: self._play(lambda: value(*a, **k))) if callable(value) else value

    def _play(self, call: Callable[[], Any]) -> Any:
        answers: list[tuple[Any, BaseException | None]] = []

        def run() -> None:
            try:
                answers.append((call(), None))
            except Exception as error:
                answers.append((None, error))

        self._clockwork.spawn(self._process, run)
        assert self._clockwork.run(self._clockwork.now + LIMIT, lambda: bool(answers))
        [(value, error)] = answers
        if error is not None:
            raise error
        return value

"""The change stream of the simulated Spanner, read by the product's ChangeStream on virtual threads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest import mock

from google.api_core.exceptions import ServiceUnavailable

from publishworker.spanner import change_stream, relay_sql
from publishworker.spanner.change_stream import ChangeStream
from tests.simulation.clockwork import Clockwork, Process, VirtualThreads
from tests.simulation.spanner import Spanner


class Records:
    """The database of a ChangeStream. There is one partition, with a record for each commit and each second."""

    def __init__(self, spanner: Spanner) -> None:
        self._spanner, self.is_broken = spanner, False
        self._commits: list[Any] = []
        self._waiters: list[Callable[[Any], None]] = []

    def committed(self, at: datetime) -> None:
        """Tasks were inserted."""
        self._commits.append(at)
        self._wake()

    def set_broken(self, is_broken: bool) -> None:
        """Let each request fail, or no longer."""
        self.is_broken = is_broken
        self._wake()

    def _wake(self) -> None:
        for wake in self._waiters:
            wake(True)
        self._waiters.clear()

    @contextmanager
    def snapshot(self) -> Iterator["Records"]:
        yield self

    def execute_sql(self, statement: str, values: Any, *_types: Any, **_more: Any) -> Iterator[Any]:
        clockwork, table = self._spanner.clockwork, self._spanner.table
        clockwork.sleep(self._spanner.drawn(self._spanner.latencies.read))
        self._raise_if_broken()
        if statement != relay_sql.CHANGES:
            yield [table.time()]
        elif values["token"] is None:
            yield [[([], [], [(values["start"], "0", [("partition", [])])])]]
        else:
            after = values["start"]
            while table.time() < values["end"]:
                new = [at for at in self._commits if at >= after]
                after = table.commit_time()
                yield [[(new, [], [])]]
                self._waiters.append(clockwork.waiter())
                clockwork.park(1.0)
                self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self.is_broken:
            raise ServiceUnavailable("the change stream is broken")


@contextmanager
def virtual_readers(clockwork: Clockwork) -> Iterator[None]:
    """Let readers run on fibers."""
    threads = VirtualThreads(clockwork, Process("streams"))

    def thread(target: Callable[..., None], args: Any = (), **_more: Any) -> Any:
        return threads.thread("", target, *args)

    def attempt() -> Any:
        return real(answers=threads.queue())  # type: ignore[arg-type]  # as a SimpleQueue

    real = change_stream._Attempt
    virtual = SimpleNamespace(Thread=thread, Event=threads.event)
    with mock.patch.multiple(change_stream, threading=virtual, _Attempt=attempt):
        yield


def reader(spanner: Spanner, records: Records, inserted: Callable[[], None]) -> ChangeStream:
    """Start a reader, within `virtual_readers`."""
    found = ChangeStream(records, inserted, lambda: spanner.clockwork.now)
    found._retry._random = spanner.clockwork.random
    found.start()
    return found

"""The setup of every section: emulators, fresh tables, the number of rounds."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterable, Iterator
from unittest import mock

from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.instance import Instance
from tqdm import tqdm

from outbox.devtools.emulators import Emulators
from tests.support import spanner
from tests.support.pubsub import PubSub
from tests.support.relays import register

#: Rows of a table wherever speeds are compared: the emulator scans whole tables, so all have the same size.
ROWS = 200
#: The message of every task.
MESSAGE = b"x" * 300


@dataclasses.dataclass(frozen=True)
class Bench:
    emulators: Emulators
    rounds: int
    quick: bool

    @functools.cached_property
    def instance(self) -> Instance:
        return spanner.instance(self.emulators.spanner_host)

    @functools.cached_property
    def pubsub(self) -> PubSub:
        return PubSub.on(self.emulators.pubsub_host)

    def choose(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def each_round(self, name: str) -> Iterable[int]:
        return tqdm(range(self.rounds), desc=name, disable=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A fresh database with a topic of its own; a section connects with one task, then registers the others."""

    database: Database
    topic: str

    @property
    def id(self) -> str:
        return str(self.database.database_id)

    def fill(self, count: int = ROWS) -> list[str]:
        return register(self.database, self.topic, count, MESSAGE)


@contextlib.contextmanager
def fresh_table(bench: Bench) -> Iterator[Table]:
    with spanner.outbox_database(bench.instance) as database:
        yield Table(database, bench.pubsub.new_topic())


@contextlib.contextmanager
def connecting_to(hosts: Emulators) -> Iterator[None]:
    with mock.patch.dict(os.environ, hosts.environment()):
        yield


@dataclasses.dataclass(slots=True)
class Stopwatch:
    """How long a block took, on the clock and in CPU of this process."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


@contextlib.contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    watch = Stopwatch()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    yield watch
    watch.seconds, watch.cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    tasks: int
    watch: Stopwatch

    def samples(self, row: str) -> Iterator[tuple[str, str, float]]:
        yield row, "tasks/s", self.tasks / self.watch.seconds
        yield row, "client CPU us/task", self.watch.cpu_seconds / self.tasks * 1e6

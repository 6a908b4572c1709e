"""A trial of the relay under faults: registered and rolled back tasks, compared with received messages.

trial = Trial(emulators, database, pubsub, 1, folder)
with trial.workers(3) as workers, trial.load():
    workers[trial.random.randrange(3)].stop(signal.SIGKILL)
trial.settle()
assert trial.audit(duplicates=IN_FLIGHT).kept()
"""

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from google.cloud.spanner_v1 import KeySet
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.param_types import TIMESTAMP
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox.devtools.emulators import Emulators
from tests.specification import checker
from tests.support.processes import Process
from tests.support.proxy import Proxy
from tests.support.pubsub import PubSub
from tests.support.relays import compare, divided, execute, unsent, worker
from tests.support.rpc import Fault, Faulty
from tests.support.spanner import count, query
from tests.support.waiting import INTERVAL, eventually

BATCH_SIZE, BATCHES = 20, 4
#: Max tasks in flight in one worker. A killed worker may have published them without marking them.
IN_FLIGHT = BATCH_SIZE * BATCHES
OPTIONS = (
    "--batch-size", f"{BATCH_SIZE}", "--concurrency", f"{BATCHES}", "--poll-interval", "0.2",
    "--backoff-initial", "0.5", "--backoff-max", "2", "--shutdown-timeout", "10",
)  # fmt: skip
KEYS = [f"key-{number}" for number in range(5)]
#: Tasks of a transaction. Half of them have an ordering key.
TOGETHER = 6
#: One in this many transactions is rolled back, after its tasks were registered and its statements sent.
ROLLED_BACK = 5
#: Max seconds until all tasks are marked, or one transaction is registered.
SETTLE_SECONDS, REGISTER_SECONDS = 480.0, 120.0
#: Seconds between two counts of the backlog.
CHECK_SECONDS = 0.1
#: Seconds after which a long trial deletes sent tasks, because the emulator scans the table for each poll.
RETENTION_SECONDS = 30
_ANY_SENT = "SELECT Id FROM AsynchronousTasks WHERE SentAt IS NOT NULL"
_AGAIN = "UPDATE AsynchronousTasks SET SentAt = NULL WHERE SentAt IS NOT NULL AND Id IN"
_SENT = "SELECT Id FROM AsynchronousTasks WHERE SentAt < @before LIMIT 500"


class _RollBack(Exception):
    pass


@dataclasses.dataclass(slots=True)
class Ledger:
    """The application's tasks: IDs of committed and of rolled back ones, and the IDs of each ordering key in order."""

    committed: set[str] = dataclasses.field(default_factory=set)
    rolled_back: set[str] = dataclasses.field(default_factory=set)
    again: list[str] = dataclasses.field(default_factory=list)
    orders: dict[str, list[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """The result of a trial. Duplicates are messages that the relay published again; the max is promised.

    `recovery` are the seconds from the end of the last fault until everything was marked.
    """

    registered: int
    rolled_back: int
    lost: int
    sent_though_rolled_back: int
    unexpected: int
    duplicates: int
    duplicates_allowed: int
    out_of_order: int
    recovery: float

    def kept(self) -> bool:
        wrong = (self.lost, self.sent_though_rolled_back, self.unexpected, self.out_of_order)
        return self.registered > 0 and wrong == (0, 0, 0, 0) and self.duplicates <= self.duplicates_allowed


class Trial:
    """One database, one topic without and one with ordering keys, an application, workers, two subscribers.

    `spanner_host` and `pubsub_host` are what workers connect to; a scenario may put its proxies there. The application
    and the subscribers always use the emulators themselves: they are the audit.

    Half of the tasks have ordering keys. `folder` gets the trace of all workers, and the history for the independent
    checker.
    """

    def __init__(self, emulators: Emulators, database: Database, pubsub: PubSub, seed: int, folder: Path) -> None:
        self._folder = folder
        self.emulators, self.database, self.pubsub, self.seed = emulators, database, pubsub, seed
        self.spanner_host, self.pubsub_host = emulators.spanner_host, emulators.pubsub_host
        self.random = Random(seed)
        self.ledger = Ledger()
        self.topic, self.ordered_topic = pubsub.new_topic(), pubsub.new_topic()
        self._subscriptions = (
            pubsub.new_subscription(self.ordered_topic, ordered=True), pubsub.new_subscription(self.topic)
        )  # fmt: skip
        self._recovery = 0.0
        self.figures: Figures | None = None
        #: Further measurements of a scenario.
        self.notes: dict[str, float] = {}

    @contextlib.contextmanager
    def worker(self, *flags: str, **environment: str) -> Iterator[Process]:
        hosts = {"SPANNER_EMULATOR_HOST": self.spanner_host, "PUBSUB_EMULATOR_HOST": self.pubsub_host}
        more: dict[str, Any] = {"trace": self._folder / "trace.jsonl"} | hosts | environment
        with worker(self.emulators, self.database, *OPTIONS, *flags, **more) as process:
            yield process

    @contextlib.contextmanager
    def workers(self, count: int, *flags: str) -> Iterator[list[Process]]:
        """Run workers, and return when all of them poll, their parts of the shards; they are killed at the end.

        While shards change hands two workers may meet, and the emulator may abort the one that has published: then a
        batch comes twice.
        """
        with contextlib.ExitStack() as stack:
            created = [stack.enter_context(self.worker(*flags)) for _ in range(count)]
            for each in created:
                each.wait_for_text("relaying")
            if count > 1:
                eventually(lambda: divided(created), seconds=40, message="the workers divide the shards")
            yield created

    @contextlib.contextmanager
    def proxy(self, service: str) -> Iterator[Proxy]:
        host = f"{service}_host"
        with Proxy(getattr(self, host)) as proxy, mock.patch.object(self, host, proxy.address):
            yield proxy

    @contextlib.contextmanager
    def faulty(self, service: str) -> Iterator[Faulty]:
        host = getattr(self.emulators, f"{service}_host")
        with self.proxy(service) as proxy, Faulty(host, proxy) as faulty:
            yield faulty

    def chance(self, share: float, fault: Fault, method: str) -> Callable[[str], Fault | None]:
        random = Random(self.seed + 2)
        return lambda name: fault if name == method and random.random() < share else None

    def register(self, tasks: int) -> None:
        """Register so many tasks, or a few more, and roll some transactions back."""
        before = len(self.ledger.committed)
        while len(self.ledger.committed) < before + tasks:
            self.transaction(self.random)

    @contextlib.contextmanager
    def load(self, per_second: float = 8) -> Iterator[None]:
        """Do so many transactions a second during the block, or as many as the emulator takes.

        The block begins after a commit: a short one can meet only transactions that are rolled back.
        """
        random, before = Random(self.seed + 1), len(self.ledger.committed)
        with in_background(lambda: self.transaction(random), every=1 / per_second):
            eventually(
                lambda: len(self.ledger.committed) > before, seconds=REGISTER_SECONDS, message="a transaction commits"
            )
            yield

    def transaction(self, random: Random) -> None:
        keys = random.sample(KEYS, 2)
        rolls_back = random.randrange(ROLLED_BACK) == 0
        ids: list[tuple[str, str]] = []

        def work(transaction: Any) -> None:
            ids.clear()  # the emulator aborts us, or a worker
            for place in range(TOGETHER):
                key = keys[place // 2 % 2] if place % 2 else ""
                topic = self.ordered_topic if key else self.topic
                ids.append((outbox.register(transaction, topic, b"x" * 100, ordering_key=key), key))
            if rolls_back:
                list(transaction.execute_sql("SELECT 1"))
                raise _RollBack

        try:
            self.database.run_in_transaction(work, timeout_secs=REGISTER_SECONDS)
        except _RollBack:
            self.ledger.rolled_back.update(id for id, _ in ids)
            return
        for id, key in ids:
            self.ledger.committed.add(id)
            if key:
                self.ledger.orders.setdefault(key, []).append(id)

    def settle(self, seconds: float = SETTLE_SECONDS) -> float:
        # The emulator reads the whole table for each count.
        self._recovery = seconds_until(lambda: self.backlog() == 0, seconds, "all tasks marked", CHECK_SECONDS)
        return self._recovery

    def wait_for_first_task(self) -> None:
        # `committed` is read first, because applications register tasks meanwhile.
        eventually(lambda: len(self.ledger.committed) > self.backlog(), seconds=30, message="a task is sent")

    def wait_for_backlog(self, tasks: int) -> None:
        eventually(lambda: self.backlog() <= tasks, seconds=30.0, message=f"at most {tasks} tasks are not marked")

    def backlog(self) -> int:
        return len(unsent(self.database))

    def send_again(self, tasks: int) -> int:
        """Make some sent tasks unsent, as an operator does by SQL; return how many there were."""
        ids = [id for [id] in query(self.database, f"{_ANY_SENT} LIMIT {tasks}")]
        self.ledger.again += ids
        quoted = ", ".join(f"'{id}'" for id in ids)
        return execute(self.database, f"{_AGAIN} ({quoted})") if ids else 0

    def delete_sent(self) -> list[str]:
        """Delete some of the tasks that were sent so many seconds ago, as a retention rule does; return their ids."""
        before = datetime.now(UTC) - timedelta(seconds=RETENTION_SECONDS)
        with self.database.snapshot() as snapshot:
            ids = [id for (id,) in snapshot.execute_sql(_SENT, {"before": before}, {"before": TIMESTAMP})]
        with self.database.batch() as batch:
            batch.delete("AsynchronousTasks", KeySet(keys=[[id] for id in ids]))
        return ids

    def audit(self, *, duplicates: int) -> Figures:
        """Compare received messages with registered tasks; at most so many duplicates are promised.

        The independent checker does it. The traces of the workers are compared with the specification.
        """
        received = [message for each in self._subscriptions for message in each.drain()]
        history = self._folder / "history.jsonl"
        history.write_text("".join(json.dumps(each) + "\n" for each in self._history(received)))
        found = checker.check(checker.read(history))
        rolled_back = len({id_of(each) for each in received} & self.ledger.rolled_back)
        self.figures = Figures(
            registered=len(self.ledger.committed),
            rolled_back=len(self.ledger.rolled_back),
            lost=found["lost"],
            sent_though_rolled_back=rolled_back,
            unexpected=found["unexpected"] - rolled_back,
            duplicates=found["duplicate_messages"] + len(self.ledger.again),
            duplicates_allowed=duplicates,
            out_of_order=found["order_violations"],
            recovery=round(self._recovery, 1),
        )
        compare(self._folder / "trace.jsonl")
        return self.figures

    def _history(self, messages: list[PubsubMessage]) -> Iterator[dict[str, str]]:
        keys = {id: key for key, ids in self.ledger.orders.items() for id in ids}
        for id in [*keys, *(self.ledger.committed - keys.keys())]:
            yield {"event": "register", "task": id, "key": keys.get(id, "")}
            yield {"event": "commit", "task": id}
        for id in self.ledger.rolled_back:
            yield {"event": "register", "task": id}
            yield {"event": "rollback", "task": id}
        yield from ({"event": "retry", "task": id} for id in self.ledger.again)
        yield from ({"event": "receive", "task": id_of(each), "message": each.message_id} for each in messages)


@contextlib.contextmanager
def in_background(work: Callable[[], object], *, every: float) -> Iterator[None]:
    end, failures = threading.Event(), list[BaseException]()

    def loop() -> None:
        try:
            while not end.wait(every):
                work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(REGISTER_SECONDS)
    assert not thread.is_alive(), "the background work hangs"
    if failures:
        raise failures[0]


def id_of(message: PubsubMessage) -> str:
    id: str = message.attributes[outbox.TASK_ID_ATTRIBUTE]
    return id


def rss_mb(pid: int) -> float:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024


def seconds_until(condition: Callable[[], Any], seconds: float, message: str, interval: float = INTERVAL) -> float:
    begin = time.monotonic()
    eventually(condition, seconds=seconds, message=message, interval=interval)
    return time.monotonic() - begin


def recorded(database: Database) -> int:
    return count(database, "Attempts > 0 OR LastError IS NOT NULL OR AvailableAt IS NOT NULL")


def log_count(process: Process, action: str) -> int:
    return sum(json.loads(line)["action"] == action for line in process.stderr.splitlines())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

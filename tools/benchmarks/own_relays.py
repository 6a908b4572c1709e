"""What two relays of one's own do with tasks that fail and with kills, beside this project's worker."""

import base64
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from google.cloud.spanner_v1 import COMMIT_TIMESTAMP
from tqdm import tqdm

import outbox
from outbox.devtools.emulators import Emulators
from outbox.message import RawPubsubMessage
from tests.support.processes import Process, started
from tests.support.pubsub import Subscription
from tests.support.relays import register, worker
from tests.support.spanner import PROJECT
from tests.support.waiting import eventually
from tools.benchmarks.bench import MESSAGE, Bench, Table, fresh_table
from tools.benchmarks.results import Section, figures

#: Seconds of a scenario; tasks that can be sent, behind those that cannot; tasks a second and seconds between kills.
SECONDS, GOOD, MISSING, RATE, KILL = 30.0, 50, 3, 10, 3.0
#: Seconds until all tasks must have arrived after the last kill. A killed worker counts as live for up to 30 s.
PATIENCE = 60.0
#: More than the 10,000,000 bytes of a publish request. Another program than `register` has inserted it.
TOO_LARGE = 10_000_100
DESIGNS = {
    "own, a transaction per batch": "batch",
    "own, a transaction per task": "careful",
    "publishworker": "",
}

CONDITIONS = f"""\
- Two relays each, {SECONDS:.0f} s. *Missing topic*: {GOOD} tasks behind {MISSING} of a topic that does not exist. *Too
  large*: {GOOD} tasks behind one that Pub/Sub refuses. *Kills*: {RATE} tasks a second, and each {KILL:.0f} s one relay
  in turn is killed and started again.
- [own.py](../tools/benchmarks/own.py): the first locks, publishes and marks a batch in one transaction. The second
  has a transaction for each task, and keeps a failure in the row.
- *All*: seconds until each task that can be sent was received. *Missed*: those that never were. The emulator aborts
  overlapping transactions, so each design has more duplicates than on Spanner."""


@dataclass(slots=True)
class Received:
    """The messages of the tasks that can be sent, by task ID."""

    subscription: Subscription
    counts: dict[str, int] = field(default_factory=dict)

    def update(self) -> None:
        for message in self.subscription._pull():
            id = message.attributes[outbox.TASK_ID_ATTRIBUTE]
            self.counts[id] = self.counts.get(id, 0) + 1

    @property
    def duplicates(self) -> int:
        return sum(self.counts.values()) - len(self.counts)


def run(bench: Bench) -> Section:
    scenarios: dict[str, Callable[[Table], None]] = {"missing topic": missing, "too large": too_large, "kills": alone}
    samples: list[tuple[str, str, float]] = []
    for _ in bench.each_round("own relays"):
        for scenario, prepare in scenarios.items():
            for name, design in tqdm(DESIGNS.items(), desc=scenario, disable=None):
                with fresh_table(bench) as table:
                    samples += measured(bench, table, f"{scenario}: {name}", design, prepare)
    section = Section("Relays of your own", figures(samples), CONDITIONS, "the duplicates and losses.")
    section.at_most("missed", max(section.value(f"{each}: publishworker", "missed") for each in scenarios), 0)
    for scenario in ("missing topic", "too large"):
        section.at_most(scenario, section.value(f"{scenario}: publishworker", "duplicates"), 0)
    return section


def missing(table: Table) -> None:
    register(table.database, f"projects/{PROJECT}/topics/never-created", MISSING, MESSAGE)


def too_large(table: Table) -> None:
    data = RawPubsubMessage(data=bytes(TOO_LARGE)).SerializeToString()
    columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
    row = (str(uuid.uuid4()), table.topic, base64.b64encode(data), int(outbox.Priority.NORMAL), COMMIT_TIMESTAMP)
    with table.database.batch() as batch:
        batch.insert("AsynchronousTasks", columns, [row])


def alone(_table: Table) -> None:
    """Nothing that fails."""


def measured(
    bench: Bench, table: Table, row: str, design: str, prepare: Callable[[Table], None]
) -> Iterator[tuple[str, str, float]]:
    received = Received(bench.pubsub.new_subscription(table.topic))
    seconds, kills = bench.choose(int(SECONDS), 6), prepare is alone
    with contextlib.ExitStack() as stack:
        relays = [stack.enter_context(relay(bench.emulators, table, design)) for _ in range(2)]
        for process in relays:
            process.wait_for_text("relaying", 60)
        [first] = register(table.database, table.topic, 1, MESSAGE)
        eventually(lambda: received.update() or first in received.counts, seconds=60, message="the first task")
        received.counts.clear()
        prepare(table)
        ids = [] if kills else register(table.database, table.topic, GOOD, MESSAGE)
        begin, all_at, killed = time.monotonic(), 0.0, 0
        while (passed := time.monotonic() - begin) < seconds or (kills and not all_at and passed < seconds + PATIENCE):
            if kills and passed < seconds:
                ids += register(table.database, table.topic, 1, MESSAGE)
                if passed > (killed + 1) * KILL:
                    place = killed % 2
                    relays[place].stop(signal.SIGKILL)
                    relays[place] = stack.enter_context(relay(bench.emulators, table, design))
                    killed += 1
                time.sleep(max(0.0, begin + len(ids) / RATE - time.monotonic()))
            else:
                time.sleep(0.05)
            received.update()
            if passed >= seconds * kills and not all_at and received.counts.keys() >= {*ids}:
                all_at = time.monotonic() - begin
    received.update()
    received.counts = {id: received.counts.get(id, 0) for id in ids}
    yield row, "missed", sum(count == 0 for count in received.counts.values())
    yield row, "duplicates", received.duplicates + sum(count == 0 for count in received.counts.values())
    yield row, "all, s", all_at or float(seconds)


@contextlib.contextmanager
def relay(hosts: Emulators, table: Table, design: str) -> Iterator[Process]:
    """Start a relay, ours without a design."""
    if not design:
        with worker(hosts, table.database) as process:
            yield process
        return
    environment = hosts.environment() | {"PATH": os.environ["PATH"]}
    arguments = (design, hosts.spanner_host, table.id)
    with started("tools.benchmarks.own", *arguments, environment=environment) as process:
        yield process

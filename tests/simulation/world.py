"""One history: workers, applications and an operator on models of Spanner and Pub/Sub, with faults, by a seed."""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from math import inf
from random import Random
from typing import Any
from unittest import mock

from outbox.table.controls import NO_CONTROLS
from outbox.table.ddl import INDEXES, Layout
from outbox_admin.changes import chunks
from outbox_admin.schema.reshard import POLLED, RETIRED, LayoutStates, next_step
from outbox_admin.tasks import selected
from publishworker.telemetry.metrics import Client
from publishworker.turn.membership import Membership
from publishworker.turn.relay import Relay
from publishworker.turn.worker import Worker
from tests.simulation.audit import BAD, GOOD, Audit, Known
from tests.simulation.clockwork import Clockwork, Event, Process, VirtualThreads
from tests.simulation.operators import CHUNK, Follower, Operators, virtual_time
from tests.simulation.plan import FAULTS, Fault, Plan
from tests.simulation.pubsub import PubSub
from tests.simulation.spanner import MAX_QUEUE_SECONDS, Aborted, Connection, Spanner
from tests.specification.trace import Trace
from tests.support.fakes import serialized
from tests.support.parts import relay_of

#: The indexes of a layout that has all tasks.
COMPLETE = dict.fromkeys(INDEXES, "READ_WRITE")

#: The kinds of requests that write. A trouble names a kind, "writes" or "all".
WRITES = ("commit", "heartbeat", "record")

#: The data of a large message: three of them need more than one request.
LARGE = bytes(4_000_000)
STORED_LARGE = serialized(LARGE)


def _stored(task: Known) -> bytes:
    return BAD if task.bad else STORED_LARGE if task.data is LARGE else GOOD


class Node:
    """One worker process, and what it may meet."""

    def __init__(self, world: "World", number: int) -> None:
        self.world, self.number = world, number
        world.started += 1
        self.started = 0
        self.cut: list[str] = []  # services that it does not reach
        self.process = Process("")
        self.stop = Event(world.clockwork)
        self.relay: Relay
        self.membership: Membership
        self.start()

    def start(self, *, previous: bool = False) -> None:
        """Start the process, of the previous version if that is wanted."""
        world, plan = self.world, self.world.plan
        self.started += 1
        world.audit.rates.started()
        self.previous = previous
        process = self.process = Process(f"worker-{self.number}.{self.started}")
        self.stop = Event(world.clockwork)
        random = Random(f"{plan.seed}/{process.name}")
        if plan.mixed:
            size, places = random.choice([1, 3, plan.batch_size]), random.choice([1, plan.concurrency])
            plan = dataclasses.replace(
                plan, batch_size=size, concurrency=places, poll_interval=random.choice([1.0, 10.0])
            )
        store = Connection(
            world.spanner, process, self._fate("spanner"), exclusive=plan.exclusive, cpu=plan.cpu, audit=world.audit,
            max_deferral=timedelta(seconds=plan.longest_backoff),
            only=(Layout(plan.shards),) if previous else (), commit_delay=plan.commit_delay,
        )  # fmt: skip
        publisher = world.pubsub.publisher(process, self.clock, plan.latencies.publish, self._fate("pubsub"))
        membership = self.membership = Membership(store, process.name, clock=self.clock)
        relay = self.relay = relay_of(
            store,  # type: ignore[arg-type]  # as the real store
            publisher,
            world.metrics,
            size=plan.batch_size,
            batches=plan.concurrency,
            batch_bytes=8_000_000,
            fair_share=plan.fair_share,
            membership=membership,
            retries={"longest": plan.longest_backoff},
            skip_dead=plan.skip_dead,
            shutdown_seconds=20.0,
            discovery_seconds=min(plan.poll_interval / 2, 1.0),
            clock=self.clock,
            random=random,
            threads=VirtualThreads(world.clockwork, process),
            trace=None if world.steps is None else Trace(world.steps.append, process.name),
        )
        long = max(plan.poll_interval, plan.idle_interval)
        idle_interval = (lambda: long if membership.follows_stream else plan.poll_interval) if plan.wake else None
        worker = Worker(
            relay, membership, poll_interval=plan.poll_interval, idle_interval=idle_interval, touch_file=lambda: None,
            random=random, clock=self.clock,
        )  # fmt: skip
        stop: Any = self.stop

        def run() -> None:
            worker.run(stop)
            process.alive = False  # its threads end with it

        world.clockwork.spawn(process, run)

    def clock(self) -> float:
        return self.world.clockwork.now + self.process.skew

    def kill(self) -> None:
        if self.process.alive:
            self.process.alive = False
            self.world.audit.messages.touch(self.process)

    def _fate(self, service: str) -> Callable[[str], str | None]:
        def fate(kind: str) -> str | None:
            if service in self.cut:
                return "lost"
            for name, part, what in self.world.troubles:
                is_meant = name in (kind, "all") or (name == "writes" and kind in WRITES)
                if is_meant and self.world.clockwork.random.random() < part:
                    return what
            return None

        return fate


class World:
    """Everything of one history."""

    def __init__(
        self,
        plan: Plan,
        steps: list[dict[str, Any]] | None = None,
        metrics: Client | None = None,
    ) -> None:
        self.plan, self.metrics = plan, metrics
        #: The trace of all workers, if it is wanted.
        self.steps = steps
        self.clockwork = Clockwork(plan.seed)
        self.audit = Audit(self.clockwork, plan.skip_dead)
        self.spanner = Spanner(self.clockwork, plan.shards, plan.latencies)
        random = Random(f"{plan.seed}/unanswered")
        self.spanner.is_unanswered = lambda: random.random() < plan.unanswered
        self.pubsub = PubSub(self.clockwork, self.audit)
        self.topics = ("orders", "invoices", "refunds")
        #: Which requests fail, the part of them, and how.
        self.troubles: list[tuple[str, float, str]] = []
        #: More than 0 while the readers of the change stream are stopped.
        self.silent = 0
        #: The records of the change stream that workers have read.
        self.records = 0
        self.application = Process("application")
        #: Workers so far, not counting restarts.
        self.started = 0
        self.nodes = [Node(self, number) for number in range(plan.workers)]
        self.operators = Operators(self)
        self.follower = Follower(self) if plan.reads else None
        self._count = 0
        self._resharding = bool(plan.reshard)
        #: The workers that were live at the last change of what is polled.
        self._known: frozenset[str] | None = None
        #: Whether the live workers polled no common layout at the last check.
        self._apart = False

    def register(self, random: Random) -> None:
        """One transaction of an application: one to four tasks, sometimes rolled back."""
        tasks = [self._drawn(random) for _ in range(random.choice([1, 1, 2, 4]))]
        priority = random.choice([50, 50, 50, 0, 100])
        self.spanner.wait(self.plan.latencies.commit)
        try:
            self.spanner.serve("insert", len(tasks), urgent=True)
        except Aborted:
            return  # the caller gives up
        if random.random() < 0.1:
            return  # it is rolled back
        created_at, now = self.spanner.table.commit_time(), self.clockwork.now
        for sequence, (id, task) in enumerate(tasks):
            delay, lifetime = task.available_at, task.expires_at
            task.at, task.available_at, task.expires_at = now, now + delay, now + lifetime
            self.spanner.table.insert(
                id, task.topic, _stored(task), ordering_key=task.key or None, priority=priority,
                created_at=created_at, sequence=sequence, at_most_once=task.once,
                available_at=created_at + timedelta(seconds=delay) if delay else None,
                expires_at=None if lifetime == inf else created_at + timedelta(seconds=lifetime),
            )  # fmt: skip
            self.audit.committed(id, task)
            if now < self.plan.seconds and random.random() < self.plan.refused:
                self.spanner.table.refused.add(id)
        self.clockwork.after(random.uniform(0.03, 0.15), self._wake)

    def _wake(self) -> None:
        """Report an insert to the workers, as the change stream does."""
        if self.plan.wake and not self.silent:
            for node in self.nodes:
                if node.process.alive and node.membership.follows_stream:
                    self.records += 1
                    node.relay.wake()

    def _drawn(self, random: Random) -> tuple[str, Known]:
        """Return a task with its ID. Its times are seconds after the commit."""
        self._count += 1
        plan = self.plan
        key = f"key-{random.randrange(5)}" if random.random() < plan.keys else ""
        delay, lifetime = random.choice([0.0] * 8 + [2.0, 20.0]), random.choice(plan.lifetimes)
        task = Known(
            random.choice(self.topics), key, 0.0, delay, inf if lifetime is None else delay + lifetime,
            bad=random.random() < plan.bad, once=not key and random.random() < plan.once,
        )  # fmt: skip
        if plan.large and not task.bad and random.random() < plan.large:
            task.data = LARGE
        return f"{random.randrange(10**6):06}-{self._count}", task

    def add(self, id: str, topic: str = "orders", *, priority: int = 50, seconds: float = 0.0, key: str = "") -> Known:
        """Register a task, which becomes due after so many seconds, and wake no worker."""
        table, now = self.spanner.table, self.clockwork.now
        at = table.commit_time()
        due = at + timedelta(seconds=seconds) if seconds else None
        table.insert(id, topic, GOOD, created_at=at, priority=priority, available_at=due, ordering_key=key or None)
        task = Known(topic, key, now, now + seconds)
        self.audit.committed(id, task)
        return task

    def load(self, tasks: int, topic: str = "orders", priority: int = 50) -> None:
        """Register a backlog at once."""
        for number in range(tasks):
            self.add(f"{self.clockwork.random.randrange(10**9):09}-{number}", topic, priority=priority)

    def applications(self) -> None:
        """Register until the end of the history."""
        random = Random(f"{self.plan.seed}/application")
        while self.clockwork.now + (pause := random.expovariate(self.plan.rate)) < self.plan.seconds:
            self.clockwork.sleep(pause)
            self.clockwork.spawn(self.application, lambda: self.register(random))

    def _watch_keys(self) -> None:
        while True:
            self.clockwork.sleep(1.0)
            # While requests fail, a release may fail several times.
            self.audit.heads({} if self.troubles else self.spanner.table.deferred_heads(skip_dead=self.plan.skip_dead))

    def set_paused(self, topic: str, *, paused: bool) -> None:
        """Pause or resume a topic, as `outbox pause` and `outbox resume`."""
        self.spanner.table.control(topic, paused=paused)
        self.audit.set_paused(topic, paused=paused)

    def _route(self) -> None:
        """Route topics, also to topics that have tasks, and end the routes; at last end all.

        Sometimes SQL sets a name that is no topic. As the command does, refuse a route whose end is routed.
        """
        random = Random(f"{self.plan.seed}/route")
        while self.clockwork.now < self.plan.seconds:
            self.clockwork.sleep(random.expovariate(1 / 4))
            topic, other = random.sample(self.topics, 2)
            to = random.choice([f"{topic}-v2", f"{topic}-v2", f"{topic}-v3", other, "no topic", None])
            if to != other or (
                self.destination(other) == other and topic not in map(self.destination, {*self.topics} - {topic})
            ):
                self.set_route(topic, to)
        for topic in self.topics:
            self.set_route(topic, None)

    def set_route(self, topic: str, to: str | None) -> None:
        """Route a topic, or end its route, as `outbox topics set --route` and `unset`."""
        self.spanner.table.control(topic, publish_to=to)
        self.audit.set_route(topic, None if to == "no topic" else self.destination(topic))

    def destination(self, topic: str) -> str:
        """Return the topic to which the messages of a topic go now."""
        return self.spanner.table.controls.get(topic, NO_CONTROLS).publish_to or topic

    def _reshard(self) -> None:
        """Run the steps of `outbox schema reshard`, with pauses; sometimes return to the former number, and go on."""
        random, table = Random(f"{self.plan.seed}/reshard"), self.spanner.table
        [former] = table.built
        target = new = Layout(self.plan.reshard, str(self.plan.reshard))
        while True:
            self.clockwork.sleep(random.expovariate(1 / 3))
            snapshot = LayoutStates(dict.fromkeys(table.built, COMPLETE), table.recorded, table.polled_by_live())
            if (step := next_step(snapshot, target)) is None:
                self._resharding = False
                return
            if step.state != RETIRED and former in table.built and random.random() < 0.1:
                target = random.choice([former, new])
                continue
            match step.kind:
                case "begin":
                    table.recorded |= {former: POLLED, target: step.state}
                case "build":
                    table.build(*table.built, target)
                case "set":
                    table.recorded[step.layout] = step.state
                    self._known = frozenset(snapshot.polled_by)
                case "drop":
                    table.build(target)
                case "forget":
                    del table.recorded[step.layout]
            for _ in range(random.randrange(8)):
                self._check_layouts()
                self.clockwork.sleep(0.7)

    def _check_layouts(self) -> None:
        """Check that the live workers poll a common layout, so that no shard with unsent tasks is without a worker.

        A worker that was cut off since its start learns the layouts by its first heartbeat, a moment after it is live.
        """
        live, known = self.spanner.table.workers().live, self._known
        nodes = [node for node in self.nodes if node.process.name in live and node.process.alive]
        # A worker of the previous version that appears only then is not supported (docs/operations/upgrade.md).
        nodes = [node for node in nodes if not node.previous or known is None or node.process.name in known]
        polled = [{*node.membership.layouts} for node in nodes]
        apart = not set(self.spanner.table.built).intersection(*polled)
        if apart and self._apart:
            self.audit.problem(f"the live workers poll no common layout: {polled}")
        self._apart = apart

    def _begin(self, fault: Fault) -> None:
        node = self.nodes[fault.which % len(self.nodes)]
        self.clockwork.after(fault.seconds, FAULTS[fault.kind](self, node, fault))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Run for so many seconds, or until a condition is true."""
        self.clockwork.run(self.clockwork.now + seconds, until)

    def run_until(self, *, unsent: int) -> float:
        """Run until at most so many tasks are unsent, or for two hours; return the time."""
        if self.spanner.table.unsent_count > unsent:
            self.run(7200, lambda: self.spanner.table.unsent_count <= unsent)
        return self.clockwork.now

    def play(self, limit: float = 3600.0) -> Audit:
        """Play the history to its end: until all is sent after the faults, or for `limit` seconds."""
        with quiet(), named(self.audit), virtual_time(self.clockwork):
            self.clockwork.spawn(self.application, self.applications)
            self.operators.start()
            if self.follower:
                self.clockwork.spawn(self.application, self.follower.run)
            self.clockwork.spawn(self.application, self._watch_keys)
            if self._resharding:
                self.clockwork.spawn(self.application, self._reshard)
            if self.plan.routes:
                self.clockwork.spawn(self.application, self._route)
            for fault in self.plan.faults:
                self.clockwork.after(fault.at, functools.partial(self._begin, fault))
            last = max((fault.at + fault.seconds for fault in self.plan.faults), default=0.0)
            self.clockwork.run(max(self.plan.seconds + 1.0 + MAX_QUEUE_SECONDS, last))
            end, table = self.clockwork.now + limit, self.spanner.table
            self.clockwork.run(end, lambda: not (table.unsent_count or self._resharding))
            if self._resharding:
                self.audit.problem("the number of shards is still being changed")
            # A worker names the first tasks of a minute at once, and the others after it.
            self.run(90.0, lambda: self.audit.cancelled_received <= self.audit.named)
            # At-most-once tasks are published after their mark. One may be refused, or reset by an operator.
            self.clockwork.run(end, lambda: not table.unsent_count and self.clockwork.now > self.audit.marked_at + 6.0)
            self.audit.end(self.spanner.table.rows, faults=bool(self.plan.faults))
            if follower := self.follower:
                last = self.clockwork.now
                self.run(limit, lambda: follower.caught_up >= last)
                follower.end()
            self.clockwork.close()
        return self.audit


class Named(logging.Handler):
    """Notes the tasks that workers name because they cannot mark them: cancelled ones, and those that they give up."""

    def __init__(self, audit: Audit) -> None:
        super().__init__()
        self._audit = audit

    def emit(self, record: logging.LogRecord) -> None:
        outcome = getattr(record, "fields", {}).get("outcome")
        if outcome == "given_up" or getattr(record, "action", "") == "cancelled_after_publish":
            ids = re.findall(r"[\w+-]+", record.getMessage())
            self._audit.named.update(ids)
            self._audit.given_up.update(ids if outcome == "given_up" else ())


@contextmanager
def named(audit: Audit) -> Iterator[None]:
    """Tell the audit what workers log."""
    with mock.patch.multiple(
        logging.getLogger("publishworker"),
        handlers=[Named(audit)],
        level=logging.WARNING,
        propagate=False,
        disabled=False,
    ):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Disable the logs, and let operations have small chunks."""
    with ExitStack() as stack:
        for name in ("publishworker", "outbox"):
            stack.enter_context(mock.patch.object(logging.getLogger(name), "disabled", True))
        stack.enter_context(mock.patch.object(selected, "CHUNK", CHUNK))
        stack.enter_context(mock.patch.multiple(chunks, CHUNK=CHUNK, PAGE_IDS=2 * CHUNK))
        yield


@contextmanager
def staged(plan: Plan) -> Iterator[World]:
    """Yield a world that a test moves on, without operators and logs."""
    with quiet():
        world = World(plan)
        yield world
        world.clockwork.close()


def shortest(plan: Plan) -> Plan:
    """Return the smallest plan found that still fails: without some of the faults, and cut off earlier."""

    def fails(candidate: Plan) -> bool:
        return bool(World(candidate).play().problems)

    smaller = True
    while smaller:
        smaller = False
        for fault in plan.faults:
            candidate = dataclasses.replace(plan, faults=tuple(each for each in plan.faults if each is not fault))
            if fails(candidate):
                plan, smaller = candidate, True
                break
    while plan.seconds > 1 and fails(shorter := dataclasses.replace(plan, seconds=plan.seconds / 2)):
        plan = shorter
    return plan

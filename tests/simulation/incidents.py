"""Plays incidents: two workers of a history run the gauges of the product, and the files in k8s say what alerts."""

import dataclasses
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import greenlet
import grpc

from outbox import observing
from outbox.errors import NotReached
from outbox.rows import backlog, counts_sql
from outbox.rows.task_table import TaskTable
from outbox.table.controls import TopicControls
from outbox.table.ddl import Layout
from outbox.table.shared_sql import WORKERS
from outbox.table.states import first_due
from outbox_admin.status import problems
from outbox_admin.tasks.lookup import BlockedHead
from publishworker.process.gauges import BacklogSampler, WorkerGauges, send_ages, send_backlog, worker_info
from publishworker.process.worker_settings import RelaySettings
from publishworker.telemetry import metrics as m
from publishworker.telemetry.history import WorkerHistory
from publishworker.telemetry.metrics import Metrics
from publishworker.turn import membership
from publishworker.turn.worker import Worker
from tests.simulation import world as simulation
from tests.simulation.audit import BAD, GOOD, Known
from tests.simulation.client import state_of
from tests.simulation.plan import Plan
from tests.simulation.world import Node, World, quiet
from tests.support.alerting import UNACKED, Datadog, Packets, Prometheus
from tests.support.fakes import FakeStore, StoredTask

MINUTE = 60.0
#: Minutes until an incident begins, and its minutes.
HEALTHY, LASTS = 6, 24
#: Seconds until the platform starts a worker again that has ended.
RESTART_SECONDS = 10.0
EPOCH = FakeStore().now
SETTINGS = RelaySettings.read({"project": "test-project", "instance": "main", "database": "shop"}, {})


class Stage:
    """A world whose workers send metrics, and what an incident does to it."""

    def __init__(self) -> None:
        self.packets = Packets(lambda: self.clockwork.now, self._sender)
        #: When each process was started, and seconds that all clocks of the workers are behind.
        self.started: dict[str, datetime] = {}
        self.behind = 0.0
        #: Processes whose counts of the backlog have no answer.
        self.cannot_count: set[str] = set()
        Reporting.stage = self
        plan = Plan(1, rate=0.1, seconds=1e6, poll_interval=10.0, longest_backoff=3600.0)
        self.world = World(plan, metrics=self.packets)
        self.clockwork, self.pubsub, self.table = self.world.clockwork, self.world.pubsub, self.world.spanner.table

    @staticmethod
    def _sender() -> str:
        fiber: Any = greenlet.getcurrent()
        return fiber.process.name if hasattr(fiber, "process") else "others"

    @property
    def nodes(self) -> Sequence[Node]:
        return self.world.nodes

    def wall(self) -> datetime:
        """Return the time by the clocks of the workers."""
        return EPOCH + timedelta(seconds=self.clockwork.now - self.behind)

    def node(self) -> Node:
        """Return the worker whose process is running."""
        process = greenlet.getcurrent().process  # type: ignore[attr-defined]  # a fiber
        return next(node for node in self.nodes if node.process is process)

    def every(self, seconds: float, call: Callable[[], object], *, times: int = 10**6) -> None:
        """Call now, and again every so many seconds."""
        call()
        if times > 1:
            self.clockwork.after(seconds, lambda: self.every(seconds, call, times=times - 1))

    def kill(self, node: Node) -> None:
        """Kill a worker. Its platform starts another one."""
        node.kill()
        self.clockwork.after(RESTART_SECONDS, node.start)

    def replace(self, node: Node) -> None:
        """Stop a worker gracefully, and start another one, as in a deployment."""
        node.stop.set()
        node.relay.wake()
        self.clockwork.after(15.0, node.start)

    def stop(self) -> None:
        """Stop all workers, and start none."""
        for node in self.nodes:
            node.stop.set()
            node.relay.wake()

    def hang(self, *nodes: Node) -> None:
        for node in nodes:
            node.process.paused_until = 1e9

    def cut(self, service: str) -> None:
        """Cut all workers off a service. Applications still reach it."""
        for node in self.nodes:
            node.cut.append(service)

    def refuse(self, *kinds: str) -> None:
        """Let the service refuse all requests of these kinds."""
        self.world.troubles += [(kind, 1.0, "refused") for kind in kinds]

    def break_topics(self, code: grpc.StatusCode, *topics: str) -> None:
        for topic in topics or self.world.topics:
            self.pubsub.broken[topic] = code

    def line(self, key: str, *, head: bytes = GOOD, seconds: float = 0.0) -> None:
        """Register tasks of one ordering key, whose head is due after so many seconds."""
        at = self.table.commit_time()
        for number in range(4):
            due = at + timedelta(seconds=seconds) if seconds and not number else None
            self._registered(
                f"{key}-{number}", "orders", GOOD if number else head, ordering_key=key, created_at=at,
                sequence=number, available_at=due, seconds=0.0 if number else seconds,
            )  # fmt: skip

    def load(self, tasks: int, **limits: Any) -> None:
        """Limit a topic, and register many tasks at once."""
        self.table.control("orders", **limits)
        at = self.table.commit_time()
        for number in range(tasks):
            self._registered(f"bulk-{number:05}", "orders", GOOD, created_at=at)

    def _registered(self, id: str, topic: str, data: bytes, *, seconds: float = 0.0, **columns: Any) -> None:
        self.table.insert(id, topic, data, **columns)
        now = self.clockwork.now
        known = Known(topic, columns.get("ordering_key", ""), now, now + seconds, bad=data is BAD)
        self.world.audit.committed(id, known)

    def fail_subscriber(self) -> None:
        """Let the inbox of a subscriber fail, as its handler counts it, and Google Cloud measure the subscription."""
        begin = self.clockwork.now
        self.every(10.0, lambda: observing.count_delivery("billing", "failed"))
        tags = ["project_id:my-project", "subscription_id:billing"]
        self.every(60.0, lambda: self.packets.gauge(UNACKED, self.clockwork.now - begin + 600, tags))

    def problems(self) -> list[problems.Problem]:
        """Return what `outbox status` and the console say now."""
        found = backlog.read(IncidentTable(self, lambda: None))
        rows = self.table.unsent_rows()
        behind = Counter(row.blocked_by for row in rows if row.blocked_by)
        heads = [self._head(id, number) for id, number in behind.most_common(1) if id]
        return problems.find(found, orphans=[], controls=self.table.controls, changed_by={}, blocked=heads)

    def _head(self, id: str, number: int) -> BlockedHead:
        row = self.table.rows[id]
        columns = {"Topic": row.topic, "OrderingKey": row.ordering_key, "CreatedAt": row.created_at}
        columns |= {"LastError": row.last_error}
        task: Any = SimpleNamespace(state=state_of(row, self.table.time()), columns=columns)
        return BlockedHead(id, row.topic, number, task)


class IncidentTable(TaskTable):
    """The tables as the gauges and `outbox status` read them, always as of now."""

    def __init__(self, stage: Stage, fate: Callable[[], object]) -> None:
        self._stage, self._fate, self._rows = stage, fate, stage.table
        self.layout, self.name = Layout(stage.world.plan.shards), "simulation"

    def _answer(self) -> None:
        if self._fate():
            self._stage.clockwork.sleep(5.0)
            raise NotReached("Spanner did not answer")

    def now(self) -> datetime:
        self._answer()
        return self._rows.time()

    def controls(self, at: datetime | None = None) -> dict[str, TopicControls]:
        self._answer()
        return dict(self._rows.controls)

    def topics(self, count: int | None = None, at: datetime | None = None) -> list[str]:
        self._answer()
        return sorted({row.topic for row in self._rows.unsent_rows()} | self._rows.controls.keys())[:count]

    def query(self, statement: str, tag: str, values: Mapping[str, Any] | None = None, **_more: Any) -> list[list[Any]]:
        self._answer()
        now = self._rows.time()
        if statement in (WORKERS, counts_sql.WORKERS_AT):
            columns = 4 if statement == WORKERS else 7
            return [self._worker(id, at, now)[:columns] for id, at in self._rows.seen_at.items()]
        ranges = {
            counts_sql.COUNT_READY: ("pending", lambda row: row.available_at is None),
            counts_sql.COUNT_DUE: ("pending", lambda row: row.available_at and row.available_at <= now),
            counts_sql.COUNT_LATER: ("retrying scheduled blocked", lambda row: row.available_at),
            counts_sql.COUNT_DEAD: ("dead", lambda _row: True),
            counts_sql.COUNT_SENT: ("sent", lambda row: row.sent_at > now - timedelta(minutes=1)),
        }
        states, is_in = ranges[statement]
        places: dict[tuple[int, str | None], list[StoredTask]] = defaultdict(list)
        is_sent = states == "sent"
        for row in self._rows.rows.values() if is_sent else self._rows.unsent_rows():
            if state_of(row, now) in states.split() and is_in(row):
                places[row.shards[0], None if is_sent else row.topic].append(row)
        given = [(values or {})[name] for name in ("range_shards", "range_topics")]
        found: list[list[Any]] = []
        for shard, topic in zip(*given, strict=True):
            found += self._counted(shard, topic, places[shard, topic], now)
        return found

    def _counted(self, shard: int, topic: str | None, rows: Iterable[StoredTask], now: datetime) -> list[list[Any]]:
        groups: dict[tuple[str, str], list[StoredTask]] = defaultdict(list)
        for row in rows:
            state = state_of(row, now)
            groups[row.topic, "sent_last_minute" if state == "sent" else state].append(row)
        found = []
        for (of, state), group in groups.items():
            # As `counts_sql`: only pending and retrying tasks have an age.
            aged = [first_due(self._rows.as_locked(row)) for row in group if row.blocked_by is None]
            oldest = min((each for each in aged if each <= now and state in ("pending", "retrying")), default=None)
            found.append([shard, topic, of, state, len(group), oldest, None, 0])
        return found

    def _worker(self, id: str, at: datetime, now: datetime) -> list[Any]:
        age, info = (now - at).total_seconds(), self._rows.info.get(id) or {}
        started = self._stage.started.get(id, now)
        return [id, age * 1000, self._rows.live_for(id), None, started, at, json.dumps(info)]


class Reporting(Worker):
    """A worker that sends metrics. If it fails, its process ends, and the platform starts another one."""

    stage: Stage

    def __init__(self, relay: Any, membership: Any, **options: Any) -> None:
        stage, clock = self.stage, options["clock"]
        self._metrics = Metrics(stage.packets, clock)
        super().__init__(relay, membership, report=WorkerGauges(self._metrics, membership, relay, clock), **options)

    def run(self, stop: Any, until: Any = lambda _turn: False) -> None:
        stage, node = self.stage, self.stage.node()
        process, history = node.process, WorkerHistory(lambda: stage.wall().timestamp())
        stage.started[process.name] = stage.table.time()
        node.membership.info = functools.partial(worker_info, SETTINGS, node.relay, history)
        fate = node._fate("spanner")
        table = IncidentTable(stage, lambda: fate("poll") or process.name in stage.cannot_count)
        for sample in (
            functools.partial(send_ages, self._metrics, history),
            lambda table: send_backlog(self._metrics, history, node.relay.discoverer.active_topics, table),
        ):
            sampler = BacklogSampler(sample, lambda: table, node.membership, node.clock)
            sampler._stop = stop
            stage.clockwork.spawn(process, sampler._run)
        try:
            super().run(stop, until)
        except Exception:
            process.alive = False
            stage.clockwork.after(RESTART_SECONDS, node.start)


#: The names of the alerts in each minute, from HEALTHY - 1 on.
Alerts: TypeAlias = dict[int, set[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """The alerts of both systems, and what `outbox status` says at the end."""

    datadog: Alerts
    prometheus: Alerts
    problems: Sequence[problems.Problem]


def play(begin: Callable[[Stage], object], *, minutes: int = LASTS) -> Played:
    """Play an incident of so many minutes."""
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(mock.patch.object(simulation, "Worker", Reporting))
        clock = SimpleNamespace(
            now=lambda _zone: Reporting.stage.wall() if hasattr(Reporting.stage, "world") else EPOCH
        )
        stack.enter_context(mock.patch.object(membership, "datetime", clock))
        stage = Stage()
        stack.callback(stage.clockwork.close)
        stack.callback(observing.set_metrics, None)
        observing.set_metrics(stage.packets)
        for job in ("archive", "certificate"):
            stage.packets.increment(m.PIPELINE_RUNS.name, 1, [f"job:{job}", "result:done", "service:outbox-pipeline"])
        stage.clockwork.spawn(stage.world.application, stage.world.applications)
        stage.world.run(HEALTHY * MINUTE)
        begin(stage)
        stage.world.run(minutes * MINUTE)
        end = HEALTHY + minutes
        systems = Datadog(stage.packets.sent, end), Prometheus(stage.packets.sent, end)
        found = [{minute: each.alerts(minute) for minute in range(HEALTHY - 1, end + 1)} for each in systems]
        return Played(*found, stage.problems())

"""The autoscaler of k8s/components/autoscaling in virtual time: its metric, with all delays, and Kubernetes' rules.

The rules are those of https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ with the numbers of
the manifest. The delays are those of docs/operations/scaling.md.
"""

import re
import statistics
from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf
from pathlib import Path
from typing import Any

import yaml

from outbox.rows.backlog import COUNT_LIMIT, STALENESS
from publishworker.process.gauges import REPORT_SECONDS
from publishworker.telemetry import metrics as m
from tests.simulation.world import Node, World

FOLDER = Path(__file__).parents[2] / "k8s/components/autoscaling"
#: Seconds: of a point of the query, between two queries, after which a value is unknown, between two decisions, and
#: until a new pod runs.
ROLLUP, REFRESH, MAX_AGE, SYNC, START = 60.0, 30.0, 300.0, 15.0, 20.0
#: Part by which the metric may differ from the target without any change.
TOLERANCE = 0.1


def manifest(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["spec"]
    return spec


def commit_limit() -> float:
    """Return the seconds of a commit above which the query has no value."""
    found = re.search(r"cutoff_max\(.*phase:commit.*, ([\d.]+)\)", manifest("datadogmetric.yaml")["query"])
    return float(found[1]) if found else inf


class Durations:
    """A metrics client: the durations of commits since the last point of the query."""

    def __init__(self) -> None:
        self.commits: list[float] = []

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
        if metric == m.PHASE_DURATION.name and f"phase:{m.COMMIT}" in tags:
            self.commits.append(value)

    def increment(self, *_arguments: object, **_more: object) -> None: ...

    gauge = stop = increment


@dataclass
class Autoscaler:
    """Changes the number of workers of a world. All numbers of tasks are divided by `scale`."""

    world: World
    scale: int = 1
    #: Seconds of a commit above which the metric has no value.
    limit: float = inf
    durations: Durations = field(default_factory=Durations)
    #: Time, backlog, workers and seconds of a commit, at each decision.
    history: list[tuple[float, int, int, float]] = field(default_factory=list)
    _counts: deque[int] = field(default_factory=lambda: deque(maxlen=1 + round(STALENESS.total_seconds() / 5)))
    _point: list[int] = field(default_factory=list)
    #: Time and value of the last point.
    _value: tuple[float, float] | None = None
    _wanted: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)
    _commit: float = 0.0

    def __post_init__(self) -> None:
        spec = manifest("horizontalpodautoscaler.yaml")
        self._min, self._max, self._rules = spec["minReplicas"], spec["maxReplicas"], spec["behavior"]
        [metric] = spec["metrics"]
        self._target = float(metric["external"]["target"]["averageValue"]) / self.scale
        self.replicas = len(self.world.nodes)
        for seconds, step in (
            (5.0, self._count),
            (REPORT_SECONDS, self._sample),
            (ROLLUP, self._roll_up),
            (SYNC, self._decide),
        ):
            self._every(seconds, step)

    def _every(self, seconds: float, step: Any) -> None:
        def run() -> None:
            step()
            self.world.clockwork.after(seconds, run)

        self.world.clockwork.after(seconds, run)

    def _count(self) -> None:
        """Note what a worker counts: up to a limit for each shard and topic."""
        ready = self.world.spanner.table._ready
        self._counts.append(sum(min(len(found), COUNT_LIMIT // self.scale) for found in ready.values()))

    def _sample(self) -> None:
        if not any(name == "all" for name, *_ in self.world.troubles):  # otherwise Spanner does not answer
            self._point.append(self._counts[0])

    def _roll_up(self) -> None:
        self._commit = statistics.mean(self.durations.commits or [0.0])
        self.durations.commits.clear()
        if self._point and self._commit <= self.limit:
            value = float(max(self._point))
            found = self.world.clockwork.now, value
            self.world.clockwork.after(REFRESH / 2, lambda: setattr(self, "_value", found))
        self._point.clear()

    def _decide(self) -> None:
        now = self.world.clockwork.now
        self.history.append((now, self.world.spanner.table.unsent_count * self.scale, self.replicas, self._commit))
        if self._value is None or now - self._value[0] > MAX_AGE:
            return
        value = self._value[1]
        is_near = abs(value / (self._target * self.replicas) - 1) <= TOLERANCE
        self._wanted.append((now, self.replicas if is_near else ceil(value / self._target)))
        window = self._rules["scaleDown"]["stabilizationWindowSeconds"]
        lowest = self._wanted[-1][1]
        highest = max(wanted for at, wanted in self._wanted if now - at <= window)
        wanted = min(max(self.replicas, lowest), highest)  # up at once, and down only to the most of the window
        most = self._bound("scaleUp", now, 1)
        least = self._bound("scaleDown", now, -1)
        self._set(max(self._min, min(self._max, max(least, min(most, wanted)))))

    def _bound(self, direction: str, now: float, sign: int) -> int:
        """Return the replicas that the policies allow: the policy that allows most counts."""
        bounds = []
        for policy in self._rules[direction]["policies"]:
            recent = [by for at, by in self._changes if now - at < policy["periodSeconds"] and by * sign > 0]
            began = self.replicas - sum(recent)
            by = policy["value"] if policy["type"] == "Pods" else ceil(began * policy["value"] / 100)
            bounds.append(began + sign * by)
        return max(bounds) if sign > 0 else min(bounds)

    def _set(self, replicas: int) -> None:
        world = self.world
        if replicas != self.replicas:
            self._changes.append((world.clockwork.now, replicas - self.replicas))
        for _ in range(replicas - self.replicas):
            world.clockwork.after(START, self._start)
        for _ in range(self.replicas - replicas):
            node = world.nodes.pop()
            node.stop.set()
            node.relay.wake()
        self.replicas = replicas

    def _start(self) -> None:
        self.world.nodes.append(Node(self.world, self.world.started))

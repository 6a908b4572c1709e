"""Evaluates the files of k8s: Datadog's monitors and objective, and the rules in PromQL, on the packets of workers.

Only what these files use. Datadog has minutes and a series for each sender, and joins gaps of a gauge of up to five
minutes. To Prometheus, each sender exports every minute. An instant looks back five minutes, and `increase` does not
extrapolate.
"""

import functools
import itertools
import json
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import promql_parser as promql
import yaml

from publishworker.telemetry.clients import attribute_of
from publishworker.telemetry.metrics import METRICS, PIPELINE

K8S = Path(__file__).parents[2] / "k8s"
METRIC = re.compile(
    r"(?P<aggregator>[a-z]\w*):(?P<name>[a-zA-Z][\w.]*)\{(?P<scope>[^}]*)\}"
    r"(?: by \{(?P<by>[^}]*)\})?(?P<calls>(?:\.\w+\([^()]*\))*)"
)
ALARM = re.compile(r"(?P<time>min|max|sum)\(last_\d+[mhd]\):(?P<expression>.+) (?P<sign><=?|>=?) (?P<threshold>[\d.]+)")
#: Minutes of a gap of a gauge that Datadog joins, and minutes for which Prometheus takes the last sample as current.
GAP = LOOKBACK = 5
#: The metric of Google Cloud, as Datadog and Prometheus name it.
UNACKED = "gcp.pubsub.subscription.oldest_unacked_message_age"
_GOOGLE = {UNACKED: "pubsub_googleapis_com:subscription_oldest_unacked_message_age"}
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_NUMBERS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_AGGREGATE: dict[str, Callable[[Iterable[float]], float]] = {"max": max, "min": min, "sum": sum}

_ZERO = timedelta()

Labels: TypeAlias = tuple[tuple[str, str], ...]
Samples: TypeAlias = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Packet:
    """A value that a process has sent, by its type: count, gauge or distribution. `at` is in seconds."""

    at: float
    sender: str
    type: str
    name: str
    value: float
    tags: Labels

    @property
    def minute(self) -> int:
        return int(self.at // 60)


@dataclass
class Packets:
    """A metrics client that keeps what it is sent, with the virtual time and the sending process."""

    now: Callable[[], float]
    sender: Callable[[], str]
    sent: list[Packet] = field(default_factory=list)

    def _add(self, type: str, name: str, value: float, tags: list[str]) -> None:
        pairs = tuple(sorted((key, text) for key, _, text in (tag.partition(":") for tag in tags)))
        self.sent.append(Packet(self.now(), self.sender(), type, name, value, pairs))

    def increment(self, metric: str, value: float, tags: list[str]) -> None:
        self._add("count", metric, value, tags)

    def gauge(self, metric: str, value: float, tags: list[str]) -> None:
        self._add("gauge", metric, value, tags)

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
        self._add("distribution", metric, value, tags)

    def stop(self, timeout: float) -> None:
        """Nothing is buffered."""


Row: TypeAlias = list[float | None]


class Series:
    """The values of some minutes, by group. None is a gap. Arithmetic combines equal groups, or one with all."""

    def __init__(self, rows: Mapping[Labels, Row]) -> None:
        self.rows = dict(rows)

    def _with(self, other: Any, call: Callable[[Any, Any], Any]) -> "Series":
        if not isinstance(other, Series):
            return Series(
                {group: [None if a is None else call(a, other) for a in row] for group, row in self.rows.items()}
            )
        groups = self.rows.keys() & other.rows.keys()
        pairs = {group: zip(self.rows[group], other.rows[group], strict=True) for group in groups}
        return Series(
            {g: [None if a is None or b is None else call(a, b) for a, b in each] for g, each in pairs.items()}
        )

    def __add__(self, other: Any) -> "Series":
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> "Series":
        return self._with(other, operator.sub)

    def __rsub__(self, other: Any) -> "Series":
        return self._with(other, lambda own, number: number - own)

    def __mul__(self, other: Any) -> "Series":
        return self._with(other, operator.mul)

    __rmul__ = __mul__


def monitors() -> dict[str, dict[str, Any]]:
    """Return the monitors of Datadog by the names of the alerts."""
    files = {file.stem: file for file in (K8S / "datadog/monitors").glob("*.json")}
    files["error-budget"] = K8S / "datadog/burn-rate.json"
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}


class Datadog:
    """The monitors and the objective of k8s/datadog. `alerts` must be called minute by minute."""

    def __init__(self, packets: list[Packet], minutes: int) -> None:
        self._points: dict[str, dict[tuple[str, Labels], dict[int, list[float]]]] = {}
        self._types: dict[str, str] = {}
        for each in packets:
            self._types[each.name] = each.type
            series = self._points.setdefault(each.name, defaultdict(lambda: defaultdict(list)))
            series[each.sender, each.tags][each.minute].append(each.value)
        self._monitors = monitors()
        self._slo = json.loads((K8S / "datadog/slo.json").read_text(encoding="utf-8"))
        self._last: dict[str, set[Labels]] = defaultdict(set)
        self._bad = self._bad_minutes(minutes)

    def alerts(self, minute: int) -> set[str]:
        """Return the names of the monitors that alert after so many minutes."""
        return {name for name, monitor in self._monitors.items() if self._alerts(name, monitor, minute)}

    def _alerts(self, name: str, monitor: Mapping[str, Any], minute: int) -> bool:
        if monitor["type"] == "slo alert":
            windows = [self._bad[max(0, minute - length) : minute] for length in (60, 5)]
            budget = 1 - self._slo["target_threshold"] / 100
            return all(sum(row) / len(row) / budget > monitor["options"]["thresholds"]["critical"] for row in windows)
        alarm = ALARM.fullmatch(monitor["query"])
        assert alarm, monitor["query"]
        number, unit = re.search(r"last_(\d+)([mhd])", monitor["query"]).groups()  # type: ignore[union-attr]  # all have it
        minutes = int(number) * {"m": 1, "h": 60, "d": 1440}[unit]
        found = self._value(alarm["expression"], minute - minutes, minute, total=alarm["time"] == "sum")
        missing, alerting = monitor["options"]["on_missing_data"], set[Labels]()
        for group, row in found.rows.items() or [((), [])]:
            values = [value for value in row if value is not None]
            if not values and missing == "default" and ".as_count()" in monitor["query"]:
                values = [0.0]
            if values:
                value = _AGGREGATE[alarm["time"]](values)
                alerts = _COMPARE[alarm["sign"]](value, float(alarm["threshold"]))
            else:
                alerts = missing == "show_and_notify_no_data" or (missing == "default" and group in self._last[name])
            alerting |= {group} if alerts else set()
        self._last[name] = alerting
        return bool(alerting)

    def _bad_minutes(self, minutes: int) -> list[bool]:
        part = self._slo["sli_specification"]["time_slice"]
        [formula], [query] = part["query"]["formulas"], part["query"]["queries"]
        found = self._value(formula["formula"].replace(query["name"], query["query"]), 0, minutes, total=False)
        [row] = found.rows.values()
        return [value is not None and not _COMPARE[part["comparator"]](value, part["threshold"]) for value in row]

    def _value(self, expression: str, begin: int, end: int, *, total: bool) -> Series:
        queries = [self._query(each, begin, end, total=total) for each in METRIC.finditer(expression)]
        numbers = itertools.count()
        text = METRIC.sub(lambda _: f"q[{next(numbers)}]", expression)
        found: Series = eval(text, {"__builtins__": {}}, {"q": queries, "default_zero": _default_zero})
        return found

    def _query(self, query: re.Match[str], begin: int, end: int, *, total: bool) -> Series:
        """Return a query's values in these minutes, or their sums if the monitor adds up counts."""
        by = [part.strip() for part in (query["by"] or "").split(",") if part.strip()]
        groups: dict[Labels, list[Row]] = {} if by else {(): []}
        type = self._types.get(query["name"], "gauge")
        for (_, own), points in self._points.get(query["name"], {}).items():
            if self._selects(query["scope"], dict(own)):
                group = tuple((key, dict(own).get(key, "")) for key in by)
                groups.setdefault(group, []).append(
                    _minutes(type, points, begin, end, fill=".fill(last, 300)" in query["calls"])
                )
        aggregate = {"avg": _mean}.get(query["aggregator"]) or _AGGREGATE[query["aggregator"]]
        rows = {group: [_of(aggregate, column) for column in zip(*each, strict=True)] for group, each in groups.items()}
        rows = {group: row or [None] * (end - begin) for group, row in rows.items()}
        return Series({group: [_of(sum, row)] for group, row in rows.items()} if total else rows)

    @staticmethod
    def _selects(scope: str, tags: Mapping[str, str]) -> bool:
        own = {"env": "production", "service": "publishworker", **tags}
        pairs = (part.strip().partition(":") for part in scope.split(","))
        return all((own.get(key.lstrip("!")) == value) is not key.startswith("!") for key, _, value in pairs)


def _default_zero(series: Series) -> Series:
    return Series({group: [value or 0.0 for value in row] for group, row in series.rows.items()})


def _minutes(type: str, points: Mapping[int, list[float]], begin: int, end: int, *, fill: bool = False) -> Row:
    """Return the values of a series. With `fill`, a gauge keeps its last value for GAP minutes."""
    combine: Callable[[list[float]], float] = _mean if type == "distribution" else sum if type == "count" else max
    row: Row = [combine(points[at]) if at in points else None for at in range(begin, end)]
    if type == "gauge":
        known = [place for place, value in enumerate(row) if value is not None]
        for left, right in itertools.pairwise(known):
            if right - left <= GAP:
                first, last = row[left] or 0.0, row[right] or 0.0
                for place in range(left + 1, right):
                    row[place] = first + (last - first) * (place - left) / (right - left)
        if fill and known:
            row[known[-1] : known[-1] + GAP] = [row[known[-1]]] * len(row[known[-1] : known[-1] + GAP])
    return row


def _of(aggregate: Callable[[Any], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return aggregate(known) if known else None


def _mean(values: Iterable[float]) -> float:
    known = [*values]
    return sum(known) / len(known)


Vector: TypeAlias = dict[Labels, float]


class Prometheus:
    """The rules of k8s/prometheus."""

    def __init__(self, packets: list[Packet], minutes: int) -> None:
        self._series: dict[str, dict[Labels, Samples]] = defaultdict(lambda: defaultdict(list))
        for name, labels, samples in _exported(packets, minutes):
            self._series[name][labels] = samples
        self._rules: dict[str, Any] = {}
        for file in (K8S / "prometheus").glob("*.yaml"):
            for group in yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]["groups"]:
                self._rules |= {rule["alert"]: promql.parse(rule["expr"]) for rule in group["rules"]}

    def alerts(self, minute: int) -> set[str]:
        """Return the names of the rules that alert after so many minutes."""
        self._at.cache_clear()
        return {name for name, tree in self._rules.items() if self._evaluate(tree, float(minute))}

    def _evaluate(self, node: Any, at: float) -> Any:
        """Return a number, or values by labels. Times are in minutes."""
        match node:
            case promql.NumberLiteral():
                return node.val
            case promql.ParenExpr():
                return self._evaluate(node.expr, at)
            case promql.VectorSelector():
                last = {labels: self._last(samples, at) for labels, samples in self._selected(node).items()}
                return {labels: value for labels, value in last.items() if value is not None}
            case promql.AggregateExpr():
                kept = set(node.modifier.labels) if node.modifier else set()
                groups: dict[Labels, list[float]] = defaultdict(list)
                for labels, value in self._evaluate(node.expr, at).items():
                    groups[tuple(pair for pair in labels if pair[0] in kept)].append(value)
                return {labels: _AGGREGATE[str(node.op)](values) for labels, values in groups.items()}
            case promql.Call():
                return self._call(node, at)
            case promql.BinaryExpr():
                return self._binary(node, self._evaluate(node.lhs, at), self._evaluate(node.rhs, at))
        raise NotImplementedError(node)

    def _call(self, node: Any, at: float) -> Vector:
        [argument] = node.args
        if node.func.name == "vector":
            return {(): self._evaluate(argument, at)}
        ranges = self._range(argument, at)
        if node.func.name == "absent_over_time":
            return {} if any(ranges.values()) else {(): 1.0}
        calls: dict[str, Callable[[list[float]], float | None]] = {
            "min_over_time": min, "max_over_time": max, "avg_over_time": _mean, "count_over_time": len,
            "increase": _rise,
        }  # fmt: skip
        call = calls[node.func.name]
        found = {labels: call([value for _, value in samples]) for labels, samples in ranges.items() if samples}
        return {labels: value for labels, value in found.items() if value is not None}

    def _range(self, node: Any, at: float) -> Mapping[Labels, Samples]:
        minutes = node.range.total_seconds() / 60
        if isinstance(node, promql.MatrixSelector):
            end = at - (node.vector_selector.offset or _ZERO).total_seconds() / 60
            found = self._selected(node.vector_selector)
            return {labels: [each for each in row if end - minutes < each[0] <= end] for labels, row in found.items()}
        rows: dict[Labels, Samples] = defaultdict(list)
        for time in range(int(at - minutes) + 1, int(at) + 1):
            for labels, value in self._at(node.expr, float(time)).items():
                rows[labels].append((time, value))
        return rows

    @functools.cache  # noqa: B019 - cleared for each minute
    def _at(self, node: Any, at: float) -> Vector:
        found: Vector = self._evaluate(node, at)
        return found

    def _selected(self, node: Any) -> dict[Labels, Samples]:
        name, matchers = node.name, [(each.name, each.op, each.value) for each in node.matchers.matchers]
        name = name or next(value for key, _, value in matchers if key == "__name__")
        wanted = [(key, op == promql.MatchOp.NotEqual, value) for key, op, value in matchers if key != "__name__"]
        rows = self._series.get(name, {}).items()
        return {
            labels: row
            for labels, row in rows
            if all((dict(labels).get(key, "") != value) is differs for key, differs, value in wanted)
        }

    @staticmethod
    def _last(samples: Samples, at: float) -> float | None:
        return next((value for time, value in reversed(samples) if at - LOOKBACK < time <= at), None)

    @staticmethod
    def _binary(node: Any, left: Any, right: Any) -> Any:
        op, modifier = str(node.op), node.modifier
        on = modifier.matching.labels if modifier and modifier.matching else None

        def key(labels: Labels) -> Labels:
            return labels if on is None else tuple(pair for pair in labels if pair[0] in on)

        if op in ("and", "unless", "or"):
            theirs = {key(labels) for labels in (left if op == "or" else right)}
            if op == "or":
                return left | {labels: value for labels, value in right.items() if key(labels) not in theirs}
            return {labels: value for labels, value in left.items() if (key(labels) in theirs) is (op == "and")}
        if not isinstance(left, dict) and not isinstance(right, dict):
            return _NUMBERS[op](left, right)
        pairs = _paired(left, right)
        if op in _COMPARE and not (modifier and modifier.return_bool):
            return {labels: a for labels, a, b in pairs if _COMPARE[op](a, b)}
        if op == "/":
            return {labels: a / b if b else inf for labels, a, b in pairs if a or b}
        return {labels: float((_COMPARE | _NUMBERS)[op](a, b)) for labels, a, b in pairs}


def _paired(left: Any, right: Any) -> list[tuple[Labels, float, float]]:
    if not isinstance(right, dict):
        return [(labels, value, right) for labels, value in left.items()]
    if not isinstance(left, dict):
        return [(labels, left, value) for labels, value in right.items()]
    return [(labels, left[labels], right[labels]) for labels in left if labels in right]


def _rise(values: list[float]) -> float | None:
    return values[-1] - values[0] if len(values) > 1 else None


def _exported(packets: list[Packet], minutes: int) -> Iterator[tuple[str, Labels, Samples]]:
    """Yield what each process exports every minute: gauges that it has set since, and counters until it ends."""
    rows: dict[tuple[str, str, str, Labels], list[Packet]] = defaultdict(list)
    ends: dict[str, int] = {}
    for each in packets:
        rows[each.sender, each.type, each.name, each.tags].append(each)
        ends[each.sender] = each.minute + 1
    ours = {metric.name for metric in (*METRICS, *PIPELINE)}
    for (sender, type, name, tags), sent in rows.items():
        named = {attribute_of(key) if name in ours else key: value for key, value in tags}
        of_worker = {"job": "publishworker", "instance": sender}
        labels = tuple(sorted((of_worker | named).items()))
        by_minute = {at: [*each] for at, each in itertools.groupby(sent, lambda each: each.minute)}
        if type == "gauge":
            yield _GOOGLE.get(name, name), labels, [(at + 1, each[-1].value) for at, each in by_minute.items()]
            continue
        suffixes: dict[str, Callable[[Packet], float]] = {"": lambda each: each.value}
        if type == "distribution":
            suffixes = {"_sum": lambda each: each.value, "_count": lambda _: 1.0}
        for suffix, value in suffixes.items():
            total, samples = 0.0, Samples()
            for at in range(sent[0].minute, min(ends[sender], minutes)):
                total += sum(map(value, by_minute.get(at, ())))
                samples.append((at + 1, total))
            yield name + suffix, labels, samples

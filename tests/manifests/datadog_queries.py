"""Datadog's query language, as far as the dashboard and the monitors use it, held against the table of metrics.

Every check is a function that returns complaints, so that a test can show that it complains.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from publishworker.telemetry import metrics as m

PERCENTILES = frozenset({"p50", "p75", "p90", "p95", "p99"})
#: What each worker says of the whole table or of the fleet: to add it up is wrong by the number of workers.
BY_MAX_ONLY = {each.name for each in (m.PENDING, m.TOPIC_TASKS, m.OLDEST_AGE, m.WORKERS, m.BREAKER_STATE, m.BUILD)}
#: Unified service tags, which the client takes from its environment.
OF_THE_SERVICE = frozenset({"env", "service", "version"})
#: Values that a tag can have, where the code knows all.
VALUES = {"state": set(m.TASK_STATES), "phase": {m.POLL, m.CLAIM, m.PUBLISH, m.COMMIT}}

#: What Datadog calls the units that we use, of its list: docs.datadoghq.com/metrics/units.
UNITS = frozenset(
    {"event", "instance", "packet", "percent", "row", "second", "shard", "task", "transaction", "unit", "worker"}
)

METRIC = re.compile(
    r"(?P<aggregator>[a-z]\w*):(?P<name>[a-zA-Z][\w.]*)\{(?P<scope>[^}]*)\}"
    r"(?: by \{(?P<by>[^}]*)\})?(?P<calls>(?:\.\w+\([^()]*\))*)"
)
_MONITOR = re.compile(
    r"(?P<time>avg|sum|min|max)\(last_(?P<window>\d+[mhd])\):(?P<expression>.+) (?P<sign><=?|>=?) (?P<threshold>[\d.]+)"
)
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.Constant, ast.Call, ast.Name, ast.operator, ast.expr_context)


@dataclass(frozen=True)
class Known:
    """What may be asked of a metric."""

    type: str
    tags: frozenset[str]
    aggregators: frozenset[str]
    unit: str
    required: frozenset[str]


def _of_table(metric: m.Metric) -> Known:
    aggregators = {
        "count": frozenset({"sum"}),
        "gauge": frozenset({"max"}) if metric.name in BY_MAX_ONLY else frozenset({"avg", "max", "min", "sum"}),
        "distribution": frozenset({"avg", "max", "min"}) | PERCENTILES,
    }[metric.type]
    # Registrations carry the service of the application, not of the worker.
    required = frozenset({"env"}) if metric is m.REGISTERED else frozenset({"env", "service"})
    tags = OF_THE_SERVICE - ({"service"} if metric is m.REGISTERED else set())
    return Known(metric.type, tags | set(metric.tags), aggregators, metric.unit, required)


def _of_kubernetes(*tags: str) -> Known:
    where = {"kube_cluster_name", "kube_namespace"}
    return Known("gauge", where | frozenset(tags), frozenset({"max"}), "instance", frozenset(tags[:1]))


#: Metrics that are not ours, and who says so.
FOREIGN = {
    # The check kubernetes_state_core of the Cluster Agent. Names and labels: `defaultMetricNamesMapper` and
    # `defaultLabelsMapper` in pkg/collector/corechecks/cluster/ksm/kubernetes_state_defaults.go of the Agent; tags:
    # docs.datadoghq.com/integrations/kubernetes_state_core; `initTags` of the check adds kube_cluster_name. Deployments
    # take on env, service and version from their labels (`defaultLabelJoins`), autoscalers do not.
    **{
        f"kubernetes_state.hpa.{name}_replicas": _of_kubernetes("horizontalpodautoscaler")
        for name in ("current", "desired", "min", "max")
    },
    **{
        f"kubernetes_state.deployment.replicas_{name}": _of_kubernetes("service", "env", "version", "kube_deployment")
        for name in ("desired", "available")
    },
    # The telemetry of the DogStatsD client: `TELEMETRY_FORMATTING_STR` and `_flush_telemetry` in
    # datadog/dogstatsd/base.py; docs.datadoghq.com/developers/dogstatsd/high_throughput.
    "datadog.dogstatsd.client.packets_dropped": Known(
        "count",
        OF_THE_SERVICE | {"client", "client_version", "client_transport"},
        frozenset({"sum"}),
        "packet",
        frozenset({"env", "service"}),
    ),
}
KNOWN: Mapping[str, Known] = {each.name: _of_table(each) for each in (*m.METRICS, m.REGISTERED, *m.PIPELINE)} | FOREIGN


@dataclass(frozen=True)
class Query:
    """One metric, asked for: `aggregator:name{scope} by {tags}.calls()`."""

    aggregator: str
    name: str
    scope: tuple[str, ...]
    by: tuple[str, ...]
    calls: tuple[str, ...]


def metrics_in(expression: str) -> list[Query]:
    """Return the metrics that an expression asks for."""
    return [
        Query(
            found["aggregator"],
            found["name"],
            _split(found["scope"]),
            _split(found["by"] or ""),
            tuple(re.findall(r"\.(\w+)\(", found["calls"])),
        )
        for found in METRIC.finditer(expression)
    ]


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def complaints_about(expression: str, variables: Iterable[str] = ()) -> Iterator[str]:
    """Yield what is wrong with an expression; `variables` are those of the dashboard."""
    queries = metrics_in(expression)
    if not queries:
        yield f"no metric is asked for in {expression!r}"
    yield from _about_arithmetic(expression)
    for query in queries:
        known = KNOWN.get(query.name)
        if known is None:
            yield f"{query.name} is in no table"
        else:
            yield from _about_form(query, known)
            yield from _about_tags(query, known, set(variables))


def _about_arithmetic(expression: str) -> Iterator[str]:
    """What is left without the metrics is numbers, signs and `default_zero`."""
    left = METRIC.sub("1", expression)
    try:
        nodes = list(ast.walk(ast.parse(left, mode="eval")))
    except SyntaxError:
        yield f"{expression!r} is no expression"
        return
    yield from (f"{ast.dump(node)} in {expression!r}" for node in nodes if not isinstance(node, _ARITHMETIC))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    yield from (f"{name} is no function that we use" for name in sorted(names - {"default_zero"}))


def _about_form(query: Query, known: Known) -> Iterator[str]:
    if query.aggregator not in known.aggregators:
        yield f"{query.aggregator}: of {query.name}, which is to be asked for by {', '.join(sorted(known.aggregators))}"
    as_what = [call for call in query.calls if call in {"as_count", "as_rate"}]
    if len(as_what) != (1 if known.type == "count" else 0):
        yield f"{query.name} is a {known.type} and has {as_what}"
    others = [call for call in query.calls if call not in as_what and (call != "rollup" or known.type != "gauge")]
    yield from (f"{query.name}.{call}() is nothing that we use" for call in others)


def _about_tags(query: Query, known: Known, variables: set[str]) -> Iterator[str]:
    keys = set()
    for part in query.scope:
        key, _, value = part.lstrip("!$").partition(":")
        keys.add(key)
        if part.startswith("$") and key not in variables:
            yield f"the dashboard has no variable ${key}"
        if not part.startswith("$") and not value:
            yield f"{part!r} of {query.name} is no tag"
        if key in VALUES and value not in VALUES[key]:
            yield f"{key} of {query.name} is never {value}"
    yield from (f"{query.name} has no tag {key}" for key in sorted((keys | set(query.by)) - known.tags))
    yield from (f"{query.name} is asked for in every {key}" for key in sorted(known.required - keys))


@dataclass(frozen=True)
class Alarm:
    """The query of a monitor: over which time, what, and when it alarms."""

    time: str
    window: str
    expression: str
    sign: str
    threshold: float


def alarm(query: str) -> Alarm | None:
    """Return the parts of a monitor's query, or None if it is none."""
    found = _MONITOR.fullmatch(query)
    if found is None:
        return None
    return Alarm(found["time"], found["window"], found["expression"], found["sign"], float(found["threshold"]))


def complaints_about_alarm(query: str, options: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with a monitor's query, by itself and beside its options."""
    parts = alarm(query)
    if parts is None:
        yield f"{query!r} is no query of a monitor"
        return
    yield from complaints_about(parts.expression)
    thresholds = options["thresholds"]
    assert isinstance(thresholds, dict)
    critical, warning = thresholds.get("critical"), thresholds.get("warning")
    if critical != parts.threshold:
        yield f"the query alarms at {parts.threshold}, the options say {critical}"
    if warning is not None and (warning < parts.threshold) != parts.sign.startswith(">"):
        yield f"a warning at {warning} comes after the alarm at {parts.threshold}"
    # Datadog adds up counts over the window before it calculates, and knows no other way (guide as-count-in-monitor-
    # evaluations); rates it calculates with point by point.
    if ".as_count()" in query and parts.time != "sum":
        yield f"{parts.time} of a count"
    # Datadog refuses any other value beside default_zero (terraform-provider-datadog, issue 2815).
    if "default_zero(" in query and options["on_missing_data"] != "default":
        yield f"on_missing_data is {options['on_missing_data']} beside default_zero"

"""The queries of the dashboard and the monitors, compared with the table of metrics."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from publishworker.telemetry import metrics as m

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s" / "datadog"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
MONITORS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted((FOLDER / "monitors").glob("*.json"))
}
SLO: dict[str, Any] = json.loads((FOLDER / "slo.json").read_text(encoding="utf-8"))
BURN_RATE: dict[str, Any] = json.loads((FOLDER / "burn-rate.json").read_text(encoding="utf-8"))

OURS = (*m.METRICS, *m.APPLICATION, *m.PIPELINE)
PERCENTILES = frozenset({"p50", "p75", "p90", "p95", "p99"})
#: Each worker reports these of the whole table or of all workers, so a sum would be wrong by the number of workers.
BY_MAX_ONLY = {m.PENDING, m.TOPIC_TASKS, m.OLDEST_AGE, m.TOPIC_OLDEST_AGE, m.WORKERS, m.CIRCUIT_STATE}
#: Values that a tag can have, where the code knows all.
VALUES = {"state": set(m.TASK_STATES), "phase": set(m.PHASES)}
#: The units in use, in the words of docs.datadoghq.com/metrics/units; Datadog's graphs omit others silently.
UNITS = {
    "event", "instance", "message", "packet", "percent", "row", "second", "shard", "task", "transaction", "unit",
    "worker",
}  # fmt: skip

METRIC = re.compile(
    r"(?P<aggregator>[a-z]\w*):(?P<name>[a-zA-Z][\w.]*)\{(?P<scope>[^}]*)\}"
    r"(?: by \{(?P<by>[^}]*)\})?(?P<calls>(?:\.\w+\([^()]*\))*)"
)
ALARM = re.compile(r"(?P<time>min|max|sum)\(last_\d+[mhd]\):(?P<expression>.+) (?P<sign><=?|>=?) (?P<threshold>[\d.]+)")


@dataclass(frozen=True, slots=True)
class Known:
    """The aggregations that a metric allows, and the tags by which a query must select."""

    type: str
    unit: str
    tags: frozenset[str]
    required: frozenset[str] = frozenset({"env", "service"})
    aggregators: frozenset[str] = frozenset({"max"})


def _known(metric: m.Metric) -> Known:
    # Registrations carry the service of the application.
    required = frozenset({"env"} if metric in m.APPLICATION else {"env", "service"})
    aggregators = {
        "count": frozenset({"sum"}),
        "gauge": frozenset({"max"} if metric in BY_MAX_ONLY else {"avg", "max", "min", "sum"}),
        "distribution": frozenset({"avg", "max", "min"}) | PERCENTILES,
    }
    return Known(metric.type, metric.unit, required | {"version", *metric.tags}, required, aggregators[metric.type])


_HPA, _WHERE = frozenset({"horizontalpodautoscaler"}), frozenset({"kube_cluster_name", "kube_namespace"})
_DEPLOYMENT = Known("gauge", "instance", _WHERE | {"env", "service", "version", "kube_deployment"})
KNOWN = {metric.name: _known(metric) for metric in OURS} | {
    # The check kubernetes_state_core of the Cluster Agent: `defaultMetricNamesMapper` and `defaultLabelsMapper` in
    # pkg/collector/corechecks/cluster/ksm/kubernetes_state_defaults.go of the Agent. Deployments have env, service and
    # version from their labels (`defaultLabelJoins`), autoscalers do not.
    **{
        f"kubernetes_state.hpa.{name}_replicas": Known("gauge", "instance", _WHERE | _HPA, _HPA)
        for name in ("current", "desired", "min", "max")
    },
    "kubernetes_state.deployment.replicas_desired": _DEPLOYMENT,
    "kubernetes_state.deployment.replicas_available": _DEPLOYMENT,
    # The telemetry of the DogStatsD client: `_flush_telemetry` in datadog/dogstatsd/base.py.
    "datadog.dogstatsd.client.packets_dropped": Known(
        "count", "packet", frozenset({"env", "service", "version"}), aggregators=frozenset({"sum"})
    ),
}


def split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def complaints_about(expression: str, variables: Iterable[str] = ()) -> Iterator[str]:
    queries = list(METRIC.finditer(expression))
    if not queries:
        yield f"no metric in {expression!r}"
    for query in queries:
        if (known := KNOWN.get(query["name"])) is None:
            yield f"{query['name']} is in no table"
            continue
        if query["aggregator"] not in known.aggregators:
            yield f"{query['aggregator']} of {query['name']}"
        calls = re.findall(r"\.(\w+)\(", query["calls"])
        if sorted(call for call in calls if call != "rollup" or known.type == "count") not in (
            [["as_count"], ["as_rate"]] if known.type == "count" else [[]]
        ):
            yield f"{query['name']} is a {known.type} with {calls}"
        keys = set()
        for part in split(query["scope"]):
            key, _, value = part.lstrip("!$").partition(":")
            keys.add(key)
            if (key not in variables) if part.startswith("$") else not value:
                yield f"{part} of {query['name']} is no variable and no tag"
            if value and value not in VALUES.get(key, {value}):
                yield f"{key} of {query['name']} is never {value}"
        yield from (f"{query['name']} has no tag {key}" for key in sorted((keys | {*split(query["by"])}) - known.tags))
        yield from (f"{query['name']} of every {key}" for key in sorted(known.required - keys))

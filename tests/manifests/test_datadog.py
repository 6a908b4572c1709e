"""The dashboard and the monitors: Datadog's API accepts them, and they query the metrics that the worker sends."""

import contextlib
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from datadog_api_client.model_utils import (
    ModelComposed,
    ModelNormal,
    OpenApiModel,
    UnparsedObject,
    validate_and_convert_types,
)
from datadog_api_client.v1.model.dashboard import Dashboard
from datadog_api_client.v1.model.monitor import Monitor
from datadog_api_client.v1.model.service_level_objective_request import ServiceLevelObjectiveRequest
from datadog_api_client.v2.model.metric_tag_configuration_create_request import MetricTagConfigurationCreateRequest

from outbox.errors import SettingError
from outbox_admin import cli as outbox_cli
from publishworker.process import cli as publishworker_cli
from publishworker.telemetry import metrics as m
from tests.manifests.rendering import ROOT, rendered
from tests.support.alerting import ALARM, METRIC, UNACKED

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
BY_MAX_ONLY = {
    m.PENDING, m.TOPIC_TASKS, m.OLDEST_AGE, m.TOPIC_OLDEST_AGE, m.WORKERS, m.DIED_WORKERS, m.CIRCUIT_STATE,
}  # fmt: skip
#: Values that a tag can have, where the code knows all.
VALUES = {"state": set(m.TASK_STATES), "phase": set(m.PHASES)}
#: The units in use, in the words of docs.datadoghq.com/metrics/units; Datadog's graphs omit others silently.
UNITS = {
    "event", "instance", "message", "packet", "percent", "row", "second", "shard", "task", "transaction", "unit",
    "worker",
}  # fmt: skip


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
    # https://docs.datadoghq.com/integrations/google_cloud_pubsub
    UNACKED: Known("gauge", "second", frozenset({"project_id", "subscription_id"}), frozenset({"project_id"})),
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
        # An objective has no windows, so it joins gaps itself.
        calls = re.findall(r"\.(\w+)\(", query["calls"].replace(".fill(last, 300)", ""))
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


Document = dict[str, Any]
PARSERS = {"outbox": outbox_cli._parser(), "publishworker": publishworker_cli._parser()}
#: The parts of each message, in this order.
PARTS = r"\*\*What it means:\*\*.*\*\*What users feel:\*\*.*\*\*Do first:\*\*.*\*\*Runbook:\*\*"
PAGE = (ROOT / "docs/operations/monitoring.md").read_text(encoding="utf-8")


def of_api(document: Document, model: type[OpenApiModel]) -> Iterator[str]:
    """Yield values and fields unknown to the API's model: the client itself accepts them silently."""

    def walk(value: object, path: str) -> Iterator[str]:
        # A model with an unparsed part is unparsed itself, so the walk names the deepest part.
        if isinstance(value, ModelComposed | list):
            for each in value if isinstance(value, list) else value._composed_instances:
                yield from walk(each, path)
        elif isinstance(value, ModelNormal) and not isinstance(value, UnparsedObject):
            for name, each in value._data_store.items():
                if name not in value.openapi_types:
                    yield f"{path}.{name} is no field"
                yield from walk(each, f"{path}.{name}")
        elif isinstance(value, UnparsedObject) or getattr(value, "_unparsed", False):
            yield f"{path} is unknown"

    try:
        parsed = validate_and_convert_types(document, (model,), [model.__name__], True, True)
    except (TypeError, ValueError, AttributeError) as error:
        yield f"{type(error).__name__}: {error}"
    else:
        yield from walk(parsed, model.__name__)


def leaves(widgets: list[Document]) -> Iterator[Document]:
    for definition in (widget["definition"] for widget in widgets):
        yield from leaves(definition["widgets"]) if definition["type"] == "group" else [definition]


def requests(document: Document) -> Iterator[tuple[str, Document]]:
    for definition in leaves(document["widgets"]):
        yield from ((definition["title"], request) for request in definition.get("requests", []))


def of_dashboard(document: Document) -> Iterator[str]:
    variables = {each["name"] for each in document["template_variables"]}
    for title, request in requests(document):
        queries = {query["name"]: query["query"] for query in request["queries"]}
        for query in queries.values():
            yield from (f"{title}: {each}" for each in complaints_about(query, variables))
            if not METRIC.fullmatch(query):
                yield f"{title}: {query} is more than one metric"
        words = {word for each in request["formulas"] for word in re.findall(r"[a-z]\w*", each["formula"])}
        if (named := words - {"default_zero"}) != queries.keys():
            yield f"{title}: formulas of {sorted(named)}, queries {sorted(queries)}"
        for each in request["formulas"]:
            unit = each.get("number_format", {}).get("unit", {})
            shown = (unit.get("unit_name"), unit.get("per_unit_name") == "second")
            if shown[0] not in UNITS:
                yield f"{title}: {each['formula']} has no unit of Datadog's"
            query = queries.get(each["formula"], "")  # shown as it is, so its unit is that of the table
            known = KNOWN.get(found["name"]) if (found := METRIC.match(query)) else None
            if known and shown != (known.unit, ".as_rate()" in query):
                yield f"{title}: {query} is shown in {unit}"
    used = {name for _, request in requests(document) for name in re.findall(r"\$(\w+)", str(request["queries"]))}
    yield from (f"no query has ${name}" for name in variables - used)


def of_monitor(monitor: Document) -> Iterator[str]:
    alarm, options = ALARM.fullmatch(monitor["query"]), monitor["options"]
    if alarm is None:
        yield "no query of a monitor"
        return
    yield from of_message(monitor)
    yield from complaints_about(alarm["expression"])
    threshold, warning = float(alarm["threshold"]), options["thresholds"].get("warning")
    if options["thresholds"].get("critical") != threshold:
        yield f"the query alarms at {threshold}, the options have others"
    if warning is not None and (warning < threshold) != alarm["sign"].startswith(">"):
        yield "the warning comes after the alarm"
    # Datadog adds up counts over the window before it calculates (its guide as-count-in-monitor-evaluations).
    if ".as_count()" in monitor["query"] and alarm["time"] != "sum":
        yield f"{alarm['time']} of a count"
    # Datadog refuses any other value with default_zero (terraform-provider-datadog, issue 2815); its model does not.
    if "default_zero(" in monitor["query"] and options["on_missing_data"] != "default":
        yield f"default_zero with {options['on_missing_data']}"
    scopes = {part for query in METRIC.finditer(monitor["query"]) for part in split(query["scope"]) if part[0] != "!"}
    if not scopes | {f"severity:{'page' if monitor['priority'] <= 2 else 'warn'}"} <= set(monitor["tags"]):
        yield "the tags are not those of the query and the priority"


def of_message(monitor: Document) -> Iterator[str]:
    message = monitor["message"]
    if not re.search(PARTS, message, re.DOTALL):
        yield "the message lacks a part"
    batches = {tag for query in METRIC.finditer(monitor["query"]) for tag in split(query["by"])}
    named = set(re.findall(r"\{\{(\w+)\.name\}\}", message + monitor["name"]))
    yield from (f"the alarm is not by {tag}" for tag in named - batches)
    links = [
        (f"docs{page}", heading)
        for page, heading in re.findall(r"\]\(\$\{docs_url\}(/[\w/-]+\.md)#([\w-]+)\)", message)
    ]
    if len(links) != len(re.findall(r"\.md\b", message)):
        yield "a link does not begin with ${docs_url}"
    yield from (f"{page}#{heading} is no heading" for page, heading in links if heading not in headings(page))
    lines = [line for block in re.findall(r"```\n(.*?)```", message, re.DOTALL) for line in block.splitlines()]
    yield from (output for line in lines if (output := of_command(line)))
    if not links or not lines:
        yield "the message has no link or no command"


def headings(page: str) -> set[str]:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in found}


def of_command(line: str) -> str:
    """Return why a command of a message does not run, or that the runbook does not use it, or nothing."""
    program, *arguments = shlex.split(re.sub(r"\{\{(\w+)\.name\}\}", r"\1", line))
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            PARSERS[program].parse_args(arguments)
    except (KeyError, SystemExit, SettingError) as error:
        return f"{line!r}: {error!r} {output.getvalue()}"
    runbook = (ROOT / "docs/operations/runbook.md").read_text(encoding="utf-8")
    used = re.search(rf"^\$ {program} {arguments[0]}\b", runbook, re.MULTILINE)
    return "" if used else f"the runbook does not use {program} {arguments[0]}"


def test_the_dashboard_fits_the_api_and_queries_existing_metrics() -> None:
    """Fields and values are those of Datadog's model; metrics, tags, aggregators and units those of the table."""
    assert [*of_api(DASHBOARD, Dashboard), *of_dashboard(DASHBOARD)] == []


@pytest.mark.parametrize("name", MONITORS)
def test_a_monitor_fits_the_api_and_queries_existing_metrics(name: str) -> None:
    """The thresholds agree, the message has commands that parse and headings that exist."""
    assert [*of_api(MONITORS[name], Monitor), *of_monitor(MONITORS[name])] == []


def test_the_objective_and_its_monitor_fit_the_api() -> None:
    assert [*of_api(SLO, ServiceLevelObjectiveRequest), *of_api(BURN_RATE, Monitor), *of_message(BURN_RATE)] == []
    [query] = SLO["sli_specification"]["time_slice"]["query"]["queries"]
    assert list(complaints_about(query["query"])) == []
    alarm = re.fullmatch(r'burn_rate\("\$\{slo_id\}"\)\.over\("(\w+)"\)\..*> ([\d.]+)', BURN_RATE["query"])
    assert alarm
    assert (alarm[1], float(alarm[2])) == (SLO["timeframe"], BURN_RATE["options"]["thresholds"]["critical"])
    assert set(SLO["tags"]) < set(BURN_RATE["tags"])


def test_the_page_has_each_monitor() -> None:
    """Its table has the files and their severities; no alarm is removed by accident, and names differ."""
    rows = re.findall(r"^\| `([\w-]+)` \|.* (page|warn) \|$", PAGE, re.MULTILINE)
    assert {name: f"severity:{severity}" for name, severity in rows} == {
        name: tag for name, each in MONITORS.items() for tag in each["tags"] if tag.startswith("severity:")
    }
    assert len({monitor["name"] for monitor in MONITORS.values()}) == len(MONITORS) == 22


QUERIES = [
    *(query["query"] for _, request in requests(DASHBOARD) for query in request["queries"]),
    *(monitor["query"] for monitor in MONITORS.values()),
]


#: The names of a release in the page's commands.
NAMES = "env=production service=publishworker"
#: Prints what it would send. The objective comes from a file, and its answer has the ID of the new objective.
CURL = """curl() { case "$*" in */slo\\ *) echo '{"data": [{"id": "slo-1"}]}' ;; *) tr -d '\\n'; echo ;; esac; }"""


def test_the_page_applies_all_files_with_full_links() -> None:
    """The commands for the API, with a `curl` that prints what it would send, with the names of another release."""
    [script] = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    sent = subprocess.run(
        ["bash", "-euc", f"DD_API_KEY=a DD_APP_KEY=b\n{CURL}\n{script.replace(NAMES, 'env=staging service=eu')}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    documents = [json.loads(line) for line in sent.splitlines()]
    assert len(documents) == 2 * len(MONITORS) + 2
    assert documents[-1]["query"] == BURN_RATE["query"].replace("${slo_id}", "slo-1")
    assert NAMES in script
    assert not re.findall(r"env:production|service:publishworker", sent)
    assert all('"Outbox eu, staging: ' in line for line in sent.splitlines())
    links = re.findall(r"[^\s(]+\.md\b", sent)
    assert {link.partition("/docs/")[0] for link in links} == {"https://github.com/my-org/outbox/blob/main"}
    assert "${" not in sent
    texts = json.dumps([DASHBOARD, MONITORS, SLO, BURN_RATE])
    assert {*re.findall(r"[$%]\{.*?\}", texts)} == {"${docs_url}", "${slo_id}"}
    assert "my-project" not in sent


def test_every_metric_is_queried_and_has_a_unit_that_datadog_knows() -> None:
    """By the dashboard or a monitor."""
    assert {metric.unit for metric in OURS} <= UNITS
    assert {metric.name for metric in OURS} <= {query["name"] for text in QUERIES for query in METRIC.finditer(text)}


def test_dashboard_and_alarm_have_the_same_objective() -> None:
    markers = [each for graph in leaves(DASHBOARD["widgets"]) for each in graph.get("markers", [])]
    lines = {float(each["value"].removeprefix("y = ")) for each in markers if each["label"].startswith("objective")}
    [now] = [request for title, request in requests(DASHBOARD) if title == "Age of the oldest task"]
    colours = [colour for formula in now["formulas"] for colour in formula["conditional_formats"]]
    red = {colour["value"] for colour in colours if colour["palette"] == "white_on_red"}
    objective = SLO["sli_specification"]["time_slice"]["threshold"]
    assert lines == red == {objective} == {MONITORS["oldest-age"]["options"]["thresholds"]["critical"]}


def test_queries_use_the_names_of_production() -> None:
    """Monitors and dashboard query the overlay's environment, service and autoscaler, whose own query is correct."""
    objects = rendered("overlays/production")
    labels = objects.template()["metadata"]["labels"]
    defaults = {each["name"]: each["defaults"] for each in DASHBOARD["template_variables"]}
    for tag in ("env", "service"):
        value = labels[f"tags.datadoghq.com/{tag}"]
        assert defaults[tag] == [value]
        values = {value, "outbox-pipeline"} if tag == "service" else {value}
        tags = [each for monitor in MONITORS.values() for each in monitor["tags"] if each.startswith(f"{tag}:")]
        assert {each.removeprefix(f"{tag}:") for each in tags} == values
    scaler = objects.the("HorizontalPodAutoscaler")["metadata"]["name"]
    assert {*re.findall(r"horizontalpodautoscaler:([\w-]+)", " ".join(QUERIES))} == {scaler}
    assert list(complaints_about(objects.the("DatadogMetric")["spec"]["query"])) == []


def test_the_page_switches_on_the_percentiles_that_are_queried() -> None:
    """The page's requests are of the API, for each distribution with a percentile, and keep all of its tags."""
    bodies = [json.loads(body) for body in re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
    assert [each for body in bodies for each in of_api(body, MetricTagConfigurationCreateRequest)] == []
    found = {query["name"] for text in QUERIES for query in METRIC.finditer(text) if query["aggregator"] in PERCENTILES}
    assert {body["data"]["id"]: {*body["data"]["attributes"]["tags"]} for body in bodies} == {
        name: KNOWN[name].tags for name in found
    }

"""The alerts in PromQL: each Datadog monitor has a twin, which queries metrics that the worker sends."""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml

from publishworker.telemetry.clients import attribute_of
from publishworker.telemetry.metrics import PIPELINE
from tests.manifests.rendering import validate
from tests.manifests.test_datadog import ALARM, BURN_RATE, METRIC, MONITORS, OURS, ROOT, SLO

RULES: list[dict[str, Any]] = [
    yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "k8s/prometheus").glob("*.yaml"))
]
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for each in RULES for group in each["spec"]["groups"] for rule in group["rules"]
}
TABLE = {metric.name: metric for metric in OURS}
#: One metric is of the DogStatsD client. A worker without a collector sends no heartbeats either: `no-heartbeat`. The
#: other one is sent by the client of an application, which decides how it is named elsewhere.
ONLY_IN_DATADOG = {"lost-metrics", "inbox-failing"}
#: The metric is of Google Cloud, and has names of its own.
OF_GOOGLE = {"subscription-late"}


def parts(expression: Any, calls: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield each selector, subquery and aggregation, with the functions around it."""
    match expression:
        case promql.BinaryExpr():
            yield from (*parts(expression.lhs, calls), *parts(expression.rhs, calls))
        case promql.ParenExpr():
            yield from parts(expression.expr, calls)
        case promql.AggregateExpr() | promql.SubqueryExpr():
            yield expression, calls
            yield from parts(expression.expr, calls)
        case promql.Call():
            for each in expression.args:
                yield from parts(each, (*calls, expression.func.name))
        case promql.MatrixSelector() | promql.VectorSelector():
            yield expression, calls


def selected(selector: Any) -> tuple[str, dict[str, str]]:
    """Return the metric's name and the other labels of a selector. A histogram is a sum and a count."""
    vector = selector.vector_selector if isinstance(selector, promql.MatrixSelector) else selector
    labels = {each.name: each.value for each in vector.matchers.matchers}
    name = labels.pop("__name__")
    base = re.sub("_(sum|count)$", "", name)
    return base if base in TABLE and TABLE[base].type == "distribution" else name, labels


def complaints_about(expression: str, minutes: int) -> Iterator[str]:
    """Yield what is wrong with an alert that looks at the last `minutes`."""
    found = list(parts(promql.parse(expression)))
    ranges = [part for part, _ in found if isinstance(part, promql.SubqueryExpr)]
    # What is before the window, by an offset, may be of any length.
    ranges += [part for part, _ in found if isinstance(part, promql.MatrixSelector) and not part.vector_selector.offset]
    if windows := {part.range.total_seconds() / 60 for part in ranges} - {minutes}:
        yield f"windows of {windows} minutes, the monitor has {minutes}"
    allowed = set()
    for part, calls in found:
        if isinstance(part, promql.MatrixSelector | promql.VectorSelector):
            name, labels = selected(part)
            metric = TABLE.get(name)
            allowed |= {attribute_of(tag) for tag in (metric.tags if metric else ())}
            if metric is None:
                yield f"{name} is in no table"
            elif metric in PIPELINE:  # a run of a job counts once
                if calls[-1] != "max_over_time":
                    yield f"{name} in {calls}"
            elif (metric.type != "gauge") != bool(calls and calls[-1] in ("increase", "rate")):
                yield f"{name} is a {metric.type} in {calls}"
            if labels.pop("job", "") != ("" if metric in PIPELINE else "publishworker") or labels.keys() - allowed:
                yield f"{name} of {labels}"
    aggregations = [part for part, _ in found if isinstance(part, promql.AggregateExpr) and part.modifier]
    yield from (
        f"no metric has all of {each.modifier.labels}" for each in aggregations if set(each.modifier.labels) - allowed
    )


@pytest.mark.parametrize("name", sorted(MONITORS.keys() - ONLY_IN_DATADOG - OF_GOOGLE))
def test_an_alert_is_the_twin_of_its_monitor(name: str) -> None:
    """The same metrics, window and threshold, the same severity, text and page of the runbook."""
    monitor, alert = MONITORS[name], ALERTS[name]
    query = ALARM.fullmatch(monitor["query"])
    assert query
    number, unit = re.search(r"last_(\d+)([mh])", monitor["query"]).groups()  # type: ignore[union-attr]  # all have it
    minutes = int(number) * {"m": 1, "h": 60}[unit]
    assert list(complaints_about(alert["expr"], minutes)) == []
    tree = promql.parse(alert["expr"])
    names = {
        selected(part)[0] for part, _ in parts(tree) if isinstance(part, promql.MatrixSelector | promql.VectorSelector)
    }
    assert names == {each["name"] for each in METRIC.finditer(query["expression"])}
    # "And none is published" is a large factor there, and a missing archive is missing data. Both are `unless` here.
    # Other missing data is `absent_over_time`.
    if name not in ("backlog-stalled", "archive-missing", "certificate-missing", "not-measured"):
        assert (str(tree.op), tree.rhs.val) == (query["sign"], float(query["threshold"]))
    if query["time"] == "min" and name not in ("poll-latency", "not-measured"):  # an average of the window there
        assert "min_over_time(" in alert["expr"]
    text = monitor["name"].removeprefix("Outbox: ")
    for tag in ("topic", "reason", "job", "result"):
        text = text.replace(f"{{{{{tag}.name}}}}", f'{{{{ index $labels "{attribute_of(tag)}" }}}}')
    assert alert["annotations"]["summary"] == text
    assert f"severity:{alert['labels']['severity']}" in monitor["tags"]
    assert f"${{docs_url}}/{alert['annotations']['runbook']})" in monitor["message"]


def test_the_error_budget_is_the_twin_of_the_burn_rate() -> None:
    """The same objective, budget, factor, windows and text."""
    alert, age = ALERTS["error-budget"], SLO["sli_specification"]["time_slice"]["threshold"]
    promql.parse(alert["expr"])
    factor, budget = BURN_RATE["options"]["thresholds"]["critical"], round(1 - SLO["target_threshold"] / 100, 6)
    assert re.findall(
        r'"outbox.oldest_task_age".* > bool (\d+)\)\[(\w+):1m\]\s*\) > ([\d.]+) \* ([\d.]+)', alert["expr"]
    ) == [
        (str(age), window, str(factor), str(budget)) for window in re.findall(r'window\("(\w+)"\)', BURN_RATE["query"])
    ]
    assert alert["annotations"]["summary"] == BURN_RATE["name"].removeprefix("Outbox: ")
    assert f"${{docs_url}}/{alert['annotations']['runbook']})" in BURN_RATE["message"]


def test_the_alert_on_the_metric_of_google_is_the_twin_of_its_monitor() -> None:
    """The same window, threshold, text and page of the runbook. Its project is replaced by the same text."""
    alert, monitor = ALERTS["subscription-late"], MONITORS["subscription-late"]
    query = ALARM.fullmatch(monitor["query"])
    assert query
    tree = promql.parse(alert["expr"])
    assert (str(tree.op), tree.rhs.val) == (query["sign"], float(query["threshold"]))
    assert "[15m:1m]" in alert["expr"]
    assert "last_15m" in monitor["query"]
    assert alert["annotations"]["summary"] == monitor["name"].removeprefix("Outbox: ").replace(
        "{{subscription_id.name}}", '{{ index $labels "subscription_id" }}'
    )
    assert ("my-project" in alert["expr"], "project_id:my-project" in monitor["query"]) == (True, True)
    assert f"${{docs_url}}/{alert['annotations']['runbook']})" in monitor["message"]


def test_there_is_no_other_alert() -> None:
    assert ALERTS.keys() == MONITORS.keys() - ONLY_IN_DATADOG | {"error-budget"}
    assert [each["kind"] for each in RULES] == ["Rules", "GlobalRules"]
    for each in RULES:
        validate(each | {"kind": "Rules"})  # both have one schema

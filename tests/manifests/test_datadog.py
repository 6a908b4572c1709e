"""The dashboard and the monitors: Datadog's API would take them, and they ask for what the worker sends."""

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from datadog_api_client.v1.model.dashboard import Dashboard
from datadog_api_client.v1.model.monitor import Monitor

from publishworker.telemetry import metrics as m
from tests.manifests import datadog_documents as documents
from tests.manifests.datadog_queries import (
    KNOWN,
    PERCENTILES,
    UNITS,
    Query,
    complaints_about,
    complaints_about_alarm,
    metrics_in,
)

DASHBOARD = documents.dashboard()
MONITORS = documents.monitors()

each_monitor = pytest.mark.parametrize("name", MONITORS)


def test_the_api_takes_the_dashboard() -> None:
    """No field, widget or value in it is one that Datadog's own model does not know."""
    assert list(documents.complaints_of_api(DASHBOARD, Dashboard)) == []


@each_monitor
def test_the_api_takes_each_monitor(name: str) -> None:
    """No field or value in it is one that Datadog's own model does not know."""
    assert list(documents.complaints_of_api(MONITORS[name], Monitor)) == []


def test_the_dashboard_asks_for_what_is_sent() -> None:
    """Metrics, tags, aggregators and units are those of the table; formulas and places fit."""
    assert list(documents.complaints_of_dashboard(DASHBOARD)) == []


@each_monitor
def test_each_monitor_asks_for_what_is_sent_and_says_what_to_do(name: str) -> None:
    """The query is of the table, the thresholds agree, the message has commands that parse and headings that exist."""
    assert list(documents.complaints_of_monitor(MONITORS[name])) == []


def test_the_monitors_of_the_design_are_there() -> None:
    """Nobody removes an alarm by accident."""
    assert set(MONITORS) == {
        *("oldest-age", "backlog-stalled", "no-heartbeat", "dead-tasks", "failure-rate", "failed-commits"),
        *("topic-rests", "at-most-once-in-doubt", "drain-timeout", "stuck-group", "lost-metrics"),
    }
    assert len({monitor["name"] for monitor in MONITORS.values()}) == len(MONITORS)


def queries() -> list[Query]:
    """Return what the dashboard and the monitors ask for."""
    asked = [query["query"] for _, request in documents.requests(DASHBOARD) for query in request["queries"]]
    asked += [monitor["query"] for monitor in MONITORS.values()]
    return [query for expression in asked for query in metrics_in(expression)]


def test_every_metric_is_shown() -> None:
    """A metric that nobody can see is not sent for anybody, least of all one that is bad news when it rises."""
    assert {each.name for each in (*m.METRICS, m.REGISTERED, *m.PIPELINE)} - {
        query.name for query in queries()
    } == set()


def test_the_objective_in_the_dashboard_is_that_of_the_alarm() -> None:
    """Whoever changes it changes lines, colours and alarm."""
    lines = {
        float(marker["value"].removeprefix("y = "))
        for definition in documents.leaves(DASHBOARD["widgets"])
        for marker in definition.get("markers", [])
        if marker["label"].startswith("objective")
    }
    red = {
        colour["value"]
        for title, request in documents.requests(DASHBOARD)
        for formula in request["formulas"]
        for colour in formula.get("conditional_formats", [])
        if title == "Longest wait now" and colour["palette"] == "white_on_red"
    }
    assert lines == red == {MONITORS["oldest-age"]["options"]["thresholds"]["critical"]}


def test_names_are_those_of_the_manifests() -> None:
    """The monitors and the dashboard look at what the production overlay runs, and at its autoscaler."""
    k8s = documents.FOLDER.parent
    labels = [*(k8s / "base").glob("*.yaml"), *(k8s / "overlays" / "production").glob("*.yaml")]
    text = "".join(file.read_text(encoding="utf-8") for file in labels)
    defaults = {each["name"]: each["defaults"] for each in DASHBOARD["template_variables"]}
    for tag in ("env", "service"):
        values = set(re.findall(rf"tags\.datadoghq\.com/{tag}: (\w+)", text)) - {"unset"}
        assert defaults[tag] == list(values)
        assert all(f"{tag}:{value}" in monitor["tags"] for value in values for monitor in MONITORS.values())
    autoscaler = (k8s / "components/autoscaling/horizontalpodautoscaler.yaml").read_text(encoding="utf-8")
    name = re.search(r"^metadata:\n  name: (\S+)", autoscaler, re.MULTILINE)
    assert name is not None
    named = {part for query in queries() for part in query.scope if part.startswith("horizontalpodautoscaler:")}
    assert named == {f"horizontalpodautoscaler:{name[1]}"}


def test_the_autoscaler_asks_for_what_is_sent() -> None:
    """Its query is of the same language and the same table."""
    file = documents.FOLDER.parent / "components/autoscaling/datadogmetric.yaml"
    query = re.search(r"^  query: (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert query is not None
    assert list(complaints_about(query[1])) == []


def test_units_of_the_table_are_datadogs() -> None:
    """Others are left out of its graphs without a word."""
    assert {each.unit for each in (*m.METRICS, m.REGISTERED, *m.PIPELINE)} <= UNITS


def test_the_page_names_each_monitor() -> None:
    """The table of the page is that of the files."""
    page = (documents.ROOT / "docs/operations/datadog.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|.* (page|warn) \|$", page, re.MULTILINE)
    assert dict(rows) == {
        name: "page" if "severity:page" in monitor["tags"] else "warn" for name, monitor in MONITORS.items()
    }


def test_the_page_switches_on_the_percentiles_that_are_asked_for() -> None:
    """The bodies in the page are of the API, for each distribution with a percentile, and keep all of its tags."""
    from datadog_api_client.v2.model.metric_tag_configuration_create_request import MetricTagConfigurationCreateRequest

    page = (documents.ROOT / "docs/operations/datadog.md").read_text(encoding="utf-8")
    bodies = [json.loads(body) for body in re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)]
    for body in bodies:
        assert list(documents.complaints_of_api(body, MetricTagConfigurationCreateRequest)) == []
    asked = {query.name for query in queries() if query.aggregator in PERCENTILES}
    assert {body["data"]["id"]: set(body["data"]["attributes"]["tags"]) for body in bodies} == {
        name: set(KNOWN[name].tags) for name in asked
    }


def changed(document: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the document with one piece of text replaced in all strings, which must occur."""
    found = 0

    def walk(value: Any) -> Any:
        nonlocal found
        if isinstance(value, dict):
            return {key: walk(each) for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each) for each in value]
        if isinstance(value, str) and old in value:
            found += 1
            return value.replace(old, new)
        return value

    result: dict[str, Any] = walk(document)
    assert found, old
    return result


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("outbox.pending_task_count", "outbox.pending_tasks_count", "is in no table"),
        ("max:outbox.pending_task_count", "sum:outbox.pending_task_count", "sum: of"),
        ("p99:outbox.task_latency", "p98:outbox.task_latency", "p98: of"),
        ("max:outbox.topic_task_count", "p95:outbox.topic_task_count", "p95: of"),
        ("by {topic,reason}", "by {topic,cause}", "has no tag cause"),
        ("outbox.oldest_task_age{$env,$service}", "outbox.oldest_task_age{$env,$service,$topic}", "has no tag topic"),
        ("{$env,$topic}", "{$env,$service,$topic}", "has no tag service"),
        ("outbox.oldest_task_age{$env,$service}", "outbox.oldest_task_age{$env}", "in every service"),
        ("{$env,$service,$topic}", "{$env,$service,$queue}", "no variable $queue"),
        ("state:pending", "state:waiting", "never waiting"),
        (".as_count()", "", "is a count and has []"),
        ("outbox.task_latency{$env,$service,$topic}", "outbox.task_latency{$env}.as_count()", "is a distribution and"),
        ("outbox.owned_shard_count{$env,$service}", "outbox.owned_shard_count{$env,$service", "no metric is asked"),
        ("kubernetes_state.hpa.", "kubernetes_state.autoscaler.", "is in no table"),
        (" + published", " + sent", "no query is named sent"),
        ("default_zero(late)", "1", "no formula shows late"),
        ("packet", "shard", "is shown in"),
        ("packet", "parcel", "has no unit"),
    ],
)
def test_a_wrong_query_of_the_dashboard_is_noticed(old: str, new: str, complaint: str) -> None:
    """The check of the dashboard bites."""
    assert complaint in " ".join(documents.complaints_of_dashboard(changed(DASHBOARD, old, new)))


def test_widgets_in_one_place_are_noticed() -> None:
    """A graph on top of another one is seen by nobody."""
    document = copy.deepcopy(DASHBOARD)
    document["widgets"][1]["definition"]["widgets"][1]["layout"]["x"] = 5
    assert "where others are" in " ".join(documents.complaints_of_dashboard(document))


def test_what_the_api_does_not_know_is_noticed_in_the_dashboard() -> None:
    """The model is asked strictly: a widget, a value, a field and a field too few, deep in a group."""
    wrongs: list[Callable[[dict[str, Any]], object]] = [
        lambda graph: graph.update(type="time_series"),
        lambda graph: graph["requests"][0].update(display_type="curve"),
        lambda graph: graph["requests"][0]["queries"][0].update(data_source="metric"),
        lambda graph: graph["requests"][0]["formulas"][0].update(alais="oldest"),
        lambda graph: graph["requests"][0]["formulas"][0].pop("formula"),
        lambda graph: graph["requests"][0]["formulas"][0]["number_format"]["unit"].update(type="unit"),
        lambda graph: graph.update(markers=[{"label": "objective"}]),
    ]
    for number, wrong in enumerate(wrongs):
        small = {**DASHBOARD, "widgets": copy.deepcopy(DASHBOARD["widgets"][1:2])}
        wrong(small["widgets"][0]["definition"]["widgets"][0]["definition"])
        assert list(documents.complaints_of_api(small, Dashboard)), number


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "metric alarm"},
        {"query": 5},
        {"options": {"on_missing_data": "ignore"}},
        {"options": {"notify_nodata": True}},
        {"options": {"thresholds": {"critical": "many"}}},
        {"options": {"thresholds": {"fatal": 1}}},
        {"team": "orders"},
    ],
)
def test_what_the_api_does_not_know_is_noticed_in_a_monitor(wrong: dict[str, Any]) -> None:
    """The model is asked strictly."""
    assert list(documents.complaints_of_api(MONITORS["oldest-age"] | wrong, Monitor))


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("oldest-age", "> 300", "> 600", "the options say 300"),
        ("oldest-age", "last_5m", "5m", "no query of a monitor"),
        ("backlog-stalled", "default_zero", "default_one", "default_one is no function"),
        ("backlog-stalled", "as_rate", "as_count", "min of a count"),
        ("dead-tasks", "by {topic,reason}", "by {reason}", "has no {{topic.name}}"),
        ("dead-tasks", "#a-poison-message", "#a-poisonous-message", "is no heading"),
        ("dead-tasks", "list --state dead", "list --state died", "is not allowed"),
        ("dead-tasks", "outbox list", "outbox lists", "invalid choice"),
        ("no-heartbeat", "publishworker check", "publishworker run", "the runbook does not use"),
        ("no-heartbeat", "publishworker check", "kubectl get pods", "none of our commands"),
        ("no-heartbeat", "**Do first:**", "**Then:**", "does not have the parts"),
        ("no-heartbeat", "severity:page", "severity:warn", "not tagged severity:page"),
        ("no-heartbeat", "env:production,", "env:staging,", "the monitor looks at"),
    ],
)
def test_a_wrong_monitor_is_noticed(name: str, old: str, new: str, complaint: str) -> None:
    """The check of the monitors bites."""
    assert complaint in " ".join(documents.complaints_of_monitor(changed(MONITORS[name], old, new)))


@pytest.mark.parametrize(("query", "warning"), [("> 300", 400), ("< 300", 200)])
def test_a_warning_after_the_alarm_is_noticed(query: str, warning: float) -> None:
    """It would never be given."""
    options = MONITORS["oldest-age"]["options"] | {"thresholds": {"critical": 300, "warning": warning}}
    changed_query = MONITORS["oldest-age"]["query"].replace("> 300", query)
    assert "comes after the alarm" in " ".join(complaints_about_alarm(changed_query, options))


def test_default_zero_with_a_state_for_missing_data_is_noticed() -> None:
    """Datadog's API refuses it, its model does not."""
    monitor = MONITORS["topic-rests"]
    options = monitor["options"] | {"on_missing_data": "resolve"}
    assert "beside default_zero" in " ".join(complaints_about_alarm(monitor["query"], options))

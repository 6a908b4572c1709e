"""The numbers of production's autoscaler are those that docs/operations/scaling.md calculates."""

import re

import yaml

from outbox.admin.backlog import COUNT_LIMIT, STALENESS
from outbox.cli.schema import DEFAULT_SHARDS
from publishworker.telemetry.gauges import INTERVAL
from tests.manifests.rendering import OVERLAYS, ROOT, rendered, the

TEXT = (ROOT / "docs/operations/scaling.md").read_text(encoding="utf-8")
PROSE = " ".join(TEXT.split())
#: How far the benchmark's figure may be from the one of the page, which is rounded and not generated.
APART = 2


def figure(name: str) -> int:
    [value] = re.findall(rf"^\| `?{re.escape(name)}`? \| ([\d,]+) \|", TEXT, re.MULTILINE)
    return int(value.replace(",", ""))


def test_the_target_follows_from_the_figures_and_the_examples_from_the_target() -> None:
    """The target is rate times seconds. The count of one topic can request all workers, one for each shard."""
    scaler = the(rendered(OVERLAYS["production"]), "HorizontalPodAutoscaler")["spec"]
    [metric] = scaler["metrics"]
    target = figure("tasks a second and worker") * figure("seconds to clear the backlog")
    assert target == figure("averageValue") == int(metric["external"]["target"]["averageValue"])
    assert scaler["maxReplicas"] == DEFAULT_SHARDS == 10
    wanted = target * scaler["maxReplicas"]
    assert f"one worker for {target:,} pending tasks and ten for {wanted:,}." in PROSE
    assert f"enough for {target * scaler['minReplicas']:,} pending tasks." in PROSE
    assert f"up to {COUNT_LIMIT:,} tasks for each shard and topic" in PROSE
    assert f"up to {COUNT_LIMIT * DEFAULT_SHARDS:,}, which is more than the {wanted:,}" in PROSE
    assert wanted <= COUNT_LIMIT * DEFAULT_SHARDS
    down = scaler["behavior"]["scaleDown"]
    assert (down["stabilizationWindowSeconds"], down["policies"][0]["periodSeconds"]) == (600, 60)
    assert "enough for ten minutes, the autoscaler removes one worker per minute" in PROSE


def test_no_workers_are_added_while_spanner_is_the_limit() -> None:
    """Then the query has no value: 0 times the duration of commits is 0, but nothing above the limit of the page."""
    [limit] = re.findall(r"more than ([\d.]+) s on average", PROSE)
    component = ROOT / "k8s/components/autoscaling/datadogmetric.yaml"
    metrics = {
        "production": the(rendered(OVERLAYS["production"]), "DatadogMetric"),
        "unset": yaml.safe_load(component.read_text()),
    }
    for env, metric in metrics.items():
        tags = f"env:{env},service:publishworker"
        backlog = f"max:outbox.pending_task_count{{{tags}}}.rollup(max, 60)"
        commits = f"avg:outbox.phase_duration{{{tags},phase:commit}}.rollup(avg, 60)"
        assert metric["spec"]["query"] == f"{backlog} + 0 * cutoff_max(default_zero({commits}), {limit})"


def test_the_rate_is_that_of_the_benchmark() -> None:
    """Both have the same order; the benchmark is run again more often than the page is written."""
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    section = text.partition("## Throughput with network delay")[2].partition("\n## ")[0]
    [measured] = re.findall(r"^\| relay, defaults \| ([\d,]+) ", section, re.MULTILINE)
    ratio = int(measured.replace(",", "")) / figure("tasks a second and worker")
    assert 1 / APART < ratio < APART


def test_the_patch_replaces_values_that_the_autoscaler_has() -> None:
    """The page's patch fits production's autoscaler; its values are those of the example of the page about sizing."""
    [block] = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    [patch] = yaml.safe_load(block)["patches"]
    scaler = the(rendered(OVERLAYS["production"]), patch["target"]["kind"], patch["target"]["name"])
    example = (ROOT / "docs/operations/scaling.md").read_text(encoding="utf-8")
    for change in yaml.safe_load(patch["patch"]):
        *parents, last = change["path"].strip("/").split("/")
        found = scaler
        for step in parents:
            found = found[int(step) if step.isdigit() else step]
        assert type(found[last]) is type(change["value"])
        assert re.search(rf"`{last}` to (\S+ x \S+ s = )?{int(change['value']):,}\b", example)


def test_the_delays_add_up() -> None:
    """The sum is that of the rows above it, and the worker's parts are those of its code."""
    rows = TEXT.partition("| step | seconds |")[2].partition("\n\n")[0]
    values = [int(value) for value in re.findall(r"\| (\d+) \|$", rows, re.MULTILINE)]
    assert sum(values[:-1]) == values[-1]
    assert values[:2] == [STALENESS.total_seconds(), INTERVAL]

"""The numbers of the autoscaler are those that docs/operations/scaling.md works out."""

import re
from typing import Any

import pytest

from outbox.cli.schema import DEFAULT_SHARDS
from outbox.operations.backlog import COUNTED, STALENESS
from publishworker.reporting import INTERVAL
from tests.manifests.rendering import OVERLAYS, ROOT, of_kind, rendered

TEXT = (ROOT / "docs/operations/scaling.md").read_text(encoding="utf-8")
#: How far the benchmark's figure may be from the one of the page, which is rounded and not generated.
APART = 2


def figure(name: str) -> int:
    """Return the number in the row of that name."""
    [value] = re.findall(rf"^\| `?{re.escape(name)}`? \| ([\d,]+) \|", TEXT, re.MULTILINE)
    return int(value.replace(",", ""))


@pytest.fixture
def autoscaler() -> dict[str, Any]:
    """The spec of production's autoscaler."""
    [found] = of_kind(rendered(OVERLAYS["production"]), "HorizontalPodAutoscaler")
    spec: dict[str, Any] = found["spec"]
    return spec


def test_the_target_is_the_product_of_the_figures(autoscaler: dict[str, Any]) -> None:
    """Rate of a worker times tolerated seconds, on the page and in the manifest."""
    product = figure("tasks a second and worker") * figure("seconds tolerated")
    assert product == figure("averageValue")
    [metric] = autoscaler["metrics"]
    assert int(metric["external"]["target"]["averageValue"]) == product


def test_the_rate_is_that_of_the_benchmark() -> None:
    """Of the same order as what was measured last: the benchmark is run again more often than the page is written."""
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    section = text.partition("## Throughput with network delay")[2].partition("\n## ")[0]
    [measured] = re.findall(r"^\| relay, defaults \| ([\d,]+) ", section, re.MULTILINE)
    ratio = int(measured.replace(",", "")) / figure("tasks a second and worker")
    assert 1 / APART < ratio < APART


def test_the_examples_follow_from_the_target(autoscaler: dict[str, Any]) -> None:
    """What the page says that so many tasks want."""
    target = figure("averageValue")
    assert f"{target:,} tasks want one worker" in TEXT
    assert f"enough for {target * autoscaler['minReplicas']:,}" in TEXT
    assert f"{target * autoscaler['maxReplicas']:,} want ten" in TEXT
    assert autoscaler["maxReplicas"] == DEFAULT_SHARDS == 10


def test_the_delays_add_up() -> None:
    """The sum is that of the rows above it, and the worker's parts are those of its code."""
    rows = TEXT.partition("| step | seconds |")[2].partition("\n\n")[0]
    values = [int(value) for value in re.findall(r"\| (\d+) \|$", rows, re.MULTILINE)]
    assert sum(values[:-1]) == values[-1]
    assert values[:2] == [STALENESS.total_seconds(), INTERVAL]


def test_all_workers_can_be_wanted_with_one_topic(autoscaler: dict[str, Any]) -> None:
    """Counting stops at so many tasks of each shard and topic: that is more than what asks for all workers."""
    wanted = figure("averageValue") * autoscaler["maxReplicas"]
    assert f"up to {COUNTED:,} tasks for each shard and topic" in TEXT
    assert f"up to {COUNTED * DEFAULT_SHARDS:,}, more than the {wanted:,}" in TEXT
    assert wanted <= COUNTED * DEFAULT_SHARDS


def test_it_scales_down_as_the_page_says(autoscaler: dict[str, Any]) -> None:
    """Ten minutes without need, then one worker a minute."""
    down = autoscaler["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == 600
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]

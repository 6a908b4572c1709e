"""The numbers of production's autoscaler are those that docs/operations/scaling.md calculates."""

import os
import re
from pathlib import Path

import yaml

from outbox.admin.backlog import COUNT_LIMIT, STALENESS
from outbox.cli.schema_commands import DEFAULT_SHARDS
from publishworker.process.gauges import INTERVAL
from tests.manifests.rendering import OVERLAYS, ROOT, rendered, the, worker

TEXT = (ROOT / "docs/operations/scaling.md").read_text(encoding="utf-8")
PROSE = " ".join(TEXT.split())
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


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
    assert f"enough for {target * scaler['minReplicas']:,} pending tasks" in PROSE
    assert f"at most {COUNT_LIMIT:,} tasks for each shard and topic" in PROSE
    most = COUNT_LIMIT * DEFAULT_SHARDS
    assert f"up to {most:,} tasks. With the target of {target:,}, these request {most // target:.0f} workers" in PROSE
    assert wanted <= COUNT_LIMIT * DEFAULT_SHARDS
    down = scaler["behavior"]["scaleDown"]
    assert (down["stabilizationWindowSeconds"], down["policies"][0]["periodSeconds"]) == (600, 60)
    assert "fewer workers for ten minutes, the autoscaler removes one per minute" in PROSE


def test_the_patch_replaces_values_that_the_autoscaler_has() -> None:
    """The page's patch fits production's autoscaler; its values are those of the example of the page about sizing."""
    [patch] = yaml.safe_load(BLOCKS[0])["patches"]
    scaler = the(rendered(OVERLAYS["production"]), patch["target"]["kind"], patch["target"]["name"])
    example = (ROOT / "docs/operations/scaling.md").read_text(encoding="utf-8")
    for change in yaml.safe_load(patch["patch"]):
        *parents, last = change["path"].strip("/").split("/")
        found = scaler
        for step in parents:
            found = found[int(step) if step.isdigit() else step]
        assert type(found[last]) is type(change["value"])
        assert re.search(rf"`{last}` to (\S+ x \S+ s = )?{int(change['value']):,}\b", example)


def test_a_standby_cluster_has_no_replicas(tmp_path: Path) -> None:
    """The page's entry also works in an overlay with the autoscaler, which removes the number of replicas."""
    overlay = {"resources": [os.path.relpath(OVERLAYS["production"], tmp_path)], **yaml.safe_load(BLOCKS[1])}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    assert worker(rendered(tmp_path))["spec"]["replicas"] == 0


def test_the_delays_add_up() -> None:
    """The sum is that of the rows above it, and the worker's parts are those of its code."""
    rows = TEXT.partition("| step | seconds |")[2].partition("\n\n")[0]
    values = [int(value) for value in re.findall(r"\| (\d+) \|$", rows, re.MULTILINE)]
    assert sum(values[:-1]) == values[-1]
    assert values[:2] == [STALENESS.total_seconds(), INTERVAL]

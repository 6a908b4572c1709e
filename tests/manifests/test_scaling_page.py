"""The numbers of production's autoscaler are those that docs/operations/scaling.md calculates."""

import os
import re
from pathlib import Path

import yaml

from outbox.admin.backlog import COUNT_LIMIT
from outbox.table.ddl import DEFAULT_SHARDS
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
    assert f"at most {COUNT_LIMIT:,} tasks for each shard and topic" in PROSE
    assert wanted <= COUNT_LIMIT * DEFAULT_SHARDS
    down = scaler["behavior"]["scaleDown"]
    assert (down["stabilizationWindowSeconds"], down["policies"][0]["periodSeconds"]) == (600, 60)
    assert "fewer workers for ten minutes, the autoscaler removes one per minute" in PROSE


def test_a_standby_cluster_has_no_replicas(tmp_path: Path) -> None:
    """The page's entry also works in an overlay with the autoscaler, which removes the number of replicas."""
    overlay = {"resources": [os.path.relpath(OVERLAYS["production"], tmp_path)], **yaml.safe_load(BLOCKS[1])}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    assert worker(rendered(tmp_path))["spec"]["replicas"] == 0

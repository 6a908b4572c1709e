"""Every overlay, and every component on the base, renders and is what Kubernetes and our own rules allow."""

import itertools
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.manifests.rendering import (
    COMPONENTS,
    K8S,
    KUBERNETES,
    OVERLAYS,
    Objects,
    composed,
    of_kind,
    rendered,
    worker,
)
from tests.manifests.rules import RULES, Rule, images

#: Components that exclude each other: two ways for metrics.
EITHER = {"datadog-csi", "datadog-udp"}
SETS = [
    names
    for length in range(len(COMPONENTS) + 1)
    for names in itertools.combinations(COMPONENTS, length)
    if not set(names) >= EITHER
]

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
each_set = pytest.mark.parametrize("names", SETS, ids=lambda names: "+".join(names) or "base")
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


def validate(objects: Objects) -> None:
    """Raise for what the schemas of Kubernetes do not allow, unknown fields included; they know no DatadogMetric."""
    assert objects
    for each in objects:
        if not each["apiVersion"].startswith("datadoghq.com/"):
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_there_are_two_overlays_and_components() -> None:
    """So that a folder that is moved is not simply no longer tested."""
    assert {"production", "development"} <= OVERLAYS.keys()
    assert {"autoscaling", "network-policy", *EITHER} <= COMPONENTS.keys()


@each_overlay
def test_an_overlay_is_valid(overlay: str) -> None:
    """Strictly: a field that Kubernetes would drop without a word is an error."""
    validate(rendered(OVERLAYS[overlay]))


@each_overlay
@each_rule
def test_an_overlay_keeps_the_rules(overlay: str, rule: Rule) -> None:
    """No rule has a complaint."""
    assert list(rule(rendered(OVERLAYS[overlay]))) == []


@each_set
def test_components_go_with_the_base_in_any_set(names: tuple[str, ...], tmp_path: Path) -> None:
    """Valid, and no rule complains but the one for images: an overlay names those."""
    objects = composed(tmp_path, [COMPONENTS[name] for name in names])
    validate(objects)
    complaints = [complaint for rule in RULES if rule is not images for complaint in rule(objects)]
    assert complaints == []


def test_production_has_what_production_needs() -> None:
    """Autoscaling, a network policy, metrics; no Service, because the worker has no port; no Secret."""
    objects = rendered(OVERLAYS["production"])
    kinds = sorted(each["kind"] for each in objects)
    assert kinds == [
        "ConfigMap", "DatadogMetric", "Deployment", "HorizontalPodAutoscaler", "Namespace", "NetworkPolicy",
        "PodDisruptionBudget", "ServiceAccount",
    ]  # fmt: skip
    [account] = of_kind(objects, "ServiceAccount")
    assert not account["metadata"].get("annotations")  # the direct form of Workload Identity needs none


def test_production_is_set_in_one_place() -> None:
    """All that a user must set is between the two lines of production's kustomization.yaml, and in no other file."""
    text = (OVERLAYS["production"] / "kustomization.yaml").read_text(encoding="utf-8")
    _, between, rest = re.split(r"^# -{100,}$", text, flags=re.MULTILINE)
    values = yaml.safe_load(between)
    assert set(values) == {"images", "configMapGenerator", "labels", "patches"}
    for placeholder in ("my-project", "placeholder", "production,", "=main", "=shop"):
        assert placeholder in between
        assert placeholder not in rest
    # The pipeline's jobs have a place of their own (test_spark.py).
    places = (OVERLAYS["production"], K8S / "spark")
    others = [path for path in K8S.rglob("*.yaml") if path.parent not in places]
    assert not [path for path in others if "my-project" in path.read_text(encoding="utf-8")]


def test_a_changed_setting_starts_new_pods(tmp_path: Path) -> None:
    """The pods name the ConfigMap with a hash of its content."""
    names = set()
    for value in ("8", "9"):
        folder = tmp_path / value
        folder.mkdir()
        composed(folder, [])
        more = f"configMapGenerator: [{{name: publishworker, behavior: merge, literals: [OUTBOX_CONCURRENCY={value}]}}]"
        changed = tmp_path / f"changed-{value}"
        changed.mkdir()
        (changed / "kustomization.yaml").write_text(f"resources: [../{value}]\nnamespace: outbox\n{more}\n")
        [config] = of_kind(rendered(changed), "ConfigMap")
        names.add(config["metadata"]["name"])
    assert len(names) == 2


@pytest.mark.parametrize(
    "change",
    [{"replicas": "two"}, {"replicaz": 2}, {"strategy": {"type": "RollingUpdate", "maxSurge": 1}}],
    ids=str,
)
def test_the_validation_bites(change: dict[str, object]) -> None:
    """A wrong type and unknown fields, also further in, are errors: `kubectl kustomize` lets them through."""
    objects = rendered(OVERLAYS["production"])
    worker(objects)["spec"].update(change)
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(objects)

"""The Helm chart renders the objects of the kustomize base. Helm itself renders it, as a library."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox import __version__
from tests.manifests.rendering import K8S, Objects, check_golden, composed, kubectl, rendered, templates

CHART = K8S / "helm"
SETTINGS = {"OUTBOX_PROJECT": "bank-1", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop", "OUTBOX_WAKE": "off"}
DIGEST = "sha256:" + "0123456789abcdef" * 4
JOB = {"name": "job", "args": ["status"]}
#: What each overlay of kustomize sets.
UNSET = {"image": {"repository": "publishworker", "tag": "unset"}, "env": "unset"}
#: All values at once. The variables are those of components/opentelemetry.
VALUES = {
    "image": {"repository": "europe-docker.pkg.dev/bank-1/outbox/publishworker", "tag": "1.2", "digest": DIGEST},
    "env": "staging",
    "settings": SETTINGS | {"OUTBOX_SHUTDOWN_TIMEOUT": "600"},
    "extraEnv": [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "service.instance.id=$(POD_NAME)"},
    ],
    "autoscaling": {"enabled": True, "maxReplicas": 32, "averageValue": "9"},
    "job": JOB,
}


@pytest.fixture(scope="module")
def chart() -> Any:
    helm = pytest.importorskip("helm_python", reason="its wheels are for few machines")
    return helm.Chart.load(CHART)


def installed(chart: Any, release: str = "publishworker", /, **values: Any) -> Objects:
    """Return what `helm template` prints, by kind."""
    chart.validate_schema(values)
    texts = chart.render(values, name=release, namespace="outbox").values()
    return in_order(Objects(filter(None, map(yaml.safe_load, texts))))


def in_order(objects: Objects) -> Objects:
    return Objects(sorted(objects, key=lambda each: str(each["kind"])))


def kustomized(folder: Path | str) -> Objects:
    """Return the objects by kind, with the settings where the chart has them, so that an old pod keeps its own."""
    objects = rendered(folder)
    settings = objects.the("ConfigMap")
    objects.remove(settings)
    values = [{"name": name, "value": value} for name, value in sorted(settings["data"].items())]
    for template in (template for each in objects for template in templates(each)):
        [container] = template["spec"]["containers"]
        del container["envFrom"]
        container["env"] = [*values, *container.get("env", [])]
    return in_order(objects)


def test_the_files_are_those_that_the_script_writes() -> None:
    """A change of the base or of the version without `make chart` fails here."""
    kubectl()
    spec = importlib.util.spec_from_file_location("chart", K8S / "chart.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kept = {str(file.relative_to(CHART)): file.read_text() for file in CHART.rglob("*") if file.is_file()}
    assert kept == script.files(), "run `make chart`"


def test_the_chart_renders_the_base(chart: Any) -> None:
    assert installed(chart, **UNSET) == kustomized("base")


def test_the_chart_renders_the_autoscaler_and_the_job_of_the_components(chart: Any, tmp_path: Path) -> None:
    """The autoscaler sets the number of workers, and a Job runs a command with all of the worker's settings."""
    literals = [f"{name}={value}" for name, value in SETTINGS.items()]
    settings = {"name": "publishworker", "behavior": "merge", "literals": literals}
    folder = composed(tmp_path, "base", "autoscaling", "job", configMapGenerator=[settings])
    objects = installed(chart, **UNSET, settings=SETTINGS, autoscaling={"enabled": True}, job=JOB)
    assert objects == kustomized(folder)


@pytest.mark.parametrize("name", ["eu", "publishworker"])
def test_a_release_with_values_renders_as_its_golden_file(chart: Any, name: str) -> None:
    """With all values, and with a number of workers instead of an autoscaler."""
    values = VALUES if name == "eu" else {"image": VALUES["image"], "replicas": 5, "settings": SETTINGS}
    objects = installed(chart, name, **values)
    check_golden(f"chart-{name}.yaml", yaml.safe_dump_all(list(objects)))
    objects.validate()


def test_two_releases_in_a_namespace_share_no_object_and_no_pod(chart: Any) -> None:
    a, b = (installed(chart, release) for release in ("eu", "us-publishworker"))
    assert [each["metadata"]["name"] for each in (*a, *b)] == ["eu-publishworker"] * 3 + ["us-publishworker"] * 3
    assert a.selectors().isdisjoint(b.selectors())
    for objects in (a, b):
        labels = objects.the("Deployment")["metadata"]["labels"]
        assert labels["tags.datadoghq.com/service"] == objects[0]["metadata"]["name"]


@pytest.mark.parametrize(
    ("image", "reference", "version"),
    [
        ({}, f"publishworker:{__version__}", __version__),
        ({"repository": "localhost:5000/a/b", "tag": "x" * 62 + ".-1"}, f"localhost:5000/a/b:{'x' * 62}.-1", "x" * 62),
        ({"tag": "_1_"}, "publishworker:_1_", "1"),
    ],
)
def test_the_tag_is_the_label_and_a_digest_pins_the_image(
    chart: Any, image: dict[str, str], reference: str, version: str
) -> None:
    objects = installed(chart, image=image)
    objects.validate()
    template = objects.the("Deployment")["spec"]["template"]
    assert template["spec"]["containers"][0]["image"] == reference
    assert template["metadata"]["labels"]["tags.datadoghq.com/version"] == version


@pytest.mark.parametrize(("replicas", "found"), [(0, [0]), (None, [])])
def test_an_autoscaler_keeps_its_number_of_workers(chart: Any, replicas: int | None, found: list[int]) -> None:
    spec = installed(chart, replicas=replicas).the("Deployment")["spec"]
    assert [spec[key] for key in spec if key == "replicas"] == found


@pytest.mark.parametrize(("seconds", "grace"), [(None, 60), ("0", 30), ("0.5", 31)])
def test_the_grace_period_follows_the_shutdown_timeout(chart: Any, seconds: str | None, grace: int) -> None:
    pod = installed(chart, settings={"OUTBOX_SHUTDOWN_TIMEOUT": seconds}).template()
    assert pod["spec"]["terminationGracePeriodSeconds"] == grace


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"settings": {"OUTBOX_BATCHSIZE": "1"}}, "OUTBOX_BATCHSIZE"),
        ({"settings": {"OUTBOX_BATCH_SIZE": 8000000}}, "got number, want string"),
        ({"settings": {"OUTBOX_LOG_FORMAT": "yaml"}}, "value must be one of 'auto', 'json', 'text'"),
        ({"replicas": "two"}, "got string, want null or integer"),
        ({"setting": {}}, "additional properties 'setting' not allowed"),
        ({"settings": {"OTEL_SERVICE_NAME": "a"}}, "additional properties 'OTEL_SERVICE_NAME' not allowed"),
        ({"settings": {"OUTBOX_ARCHIVE": "gs://a"}}, "additional properties 'OUTBOX_ARCHIVE' not allowed"),
        ({"image": {"repository": "a/b:1.2"}}, "image/repository"),
        ({"image": {"repository": "a/b@" + DIGEST}}, "image/repository"),
        ({"image": {"repository": 'a" b'}}, "image/repository"),
        ({"image": {"tag": f"1.2@{DIGEST}"}}, "image/tag"),
        ({"image": {"digest": "sha256:1"}}, "image/digest"),
        ({"env": "my env"}, "'/env'"),
        ({"extraEnv": [{"value": "a"}]}, "missing property 'name'"),
        ({"job": {"args": "retry"}}, "got string, want array"),
        ({"autoscaling": {"averageValue": 5000}}, "got number, want string"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(chart: Any, wrong: dict[str, Any], sentence: str) -> None:
    """Helm validates values before it renders. A number without quotes would become 8e+06."""
    with pytest.raises(Exception, match=re.escape(sentence)):
        chart.validate_schema(chart.merge_values(wrong))

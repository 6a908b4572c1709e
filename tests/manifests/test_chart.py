"""The Helm chart renders the objects of the kustomize base. Helm itself renders it, as a library."""

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox import __version__
from tests.manifests.rendering import K8S, Object, Objects, check_golden, composed, kubectl, rendered, templates

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
    "metrics": "datadog-udp",
    "networkPolicy": {"enabled": True},
    "console": {"enabled": True},
}


@pytest.fixture(scope="module")
def chart() -> Any:
    helm = pytest.importorskip("helm_python", reason="its wheels are for few machines")
    return helm.Chart.load(CHART)


def installed(chart: Any, release: str = "publishworker", /, **values: Any) -> Objects:
    """Return what `helm template` prints, by kind."""
    chart.validate_schema(values)
    texts = chart.render(values, name=release, namespace="outbox").values()
    return in_order(Objects(each for text in texts for each in yaml.safe_load_all(text) if each))


def in_order(objects: Objects) -> Objects:
    for container in (each for one in objects for each in containers(one)):
        names = [each["name"] for each in container["env"]]
        assert len(names) == len({*names}), names
        container["env"].sort(key=lambda each: str(each["name"]))
    return Objects(sorted(objects, key=lambda each: (str(each["kind"]), str(each["metadata"]["name"]))))


def containers(each: Object) -> list[Object]:
    return [container for template in templates(each) for container in template["spec"]["containers"][:1]]


def kustomized(objects: Objects) -> Objects:
    """Return the objects in order, with the settings where the chart has them, so that an old pod keeps its own."""
    maps = {each["metadata"]["name"]: each["data"] for each in objects.of_kind("ConfigMap")}
    for container in (each for one in objects for each in containers(one)):
        given = {}
        for each in container.pop("envFrom"):
            given |= maps[each["configMapRef"]["name"]]
        values = [{"name": name, "value": value} for name, value in given.items()]
        container["env"] = [*values, *container.get("env", [])]
    return in_order(Objects(each for each in objects if each["kind"] != "ConfigMap"))


def test_the_files_are_those_that_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the base or of the version without `make chart` fails here."""
    kubectl()
    monkeypatch.syspath_prepend(str(K8S))
    script = importlib.import_module("chart")
    kept = {str(file.relative_to(CHART)): file.read_text() for file in CHART.rglob("*") if file.is_file()}
    assert kept == script.files(), "run `make chart`"


def test_the_chart_renders_the_base(chart: Any) -> None:
    assert installed(chart, **UNSET) == kustomized(rendered("base"))


#: Components, and the values that install the same objects.
SAME: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("autoscaling", "datadog-csi"), {"autoscaling": {"enabled": True}, "metrics": "datadog-csi"}),
    (("network-policy", "datadog-udp"), {"networkPolicy": {"enabled": True}, "metrics": "datadog-udp"}),
    (("opentelemetry", "job"), {"metrics": "opentelemetry", "job": JOB}),
    (("network-policy", "console"), {"networkPolicy": {"enabled": True}, "console": {"enabled": True}}),
]


@pytest.mark.parametrize(("components", "values"), SAME, ids=str)
def test_the_chart_renders_the_components(
    chart: Any, tmp_path: Path, components: tuple[str, ...], values: dict[str, Any]
) -> None:
    """The console and a Job have all of the worker's settings. The names contain the release."""
    literals = [f"{name}={value}" for name, value in SETTINGS.items()]
    settings = {"name": "publishworker", "behavior": "merge", "literals": literals}
    folder = composed(tmp_path, "base", *components, configMapGenerator=[settings])
    console = {"image": {"tag": "unset"}, **values.get("console", {})}
    objects = installed(chart, **UNSET, settings=SETTINGS, **values | {"console": console})
    # Two consoles in a namespace have different names and selectors, as the releases have.
    text = re.sub(
        r"(?m)^(  name|.*serviceAccountName): outbox-console$", r"\1: publishworker-console", rendered(folder).text
    )
    text = text.replace("instance: outbox-console", "instance: publishworker")
    assert objects == kustomized(Objects(yaml.safe_load_all(text)))


@pytest.mark.parametrize("name", ["eu", "publishworker"])
def test_a_release_with_values_renders_as_its_golden_file(chart: Any, name: str) -> None:
    """With all values, and with a number of workers instead of an autoscaler."""
    values = VALUES if name == "eu" else {"image": VALUES["image"], "replicas": 5, "settings": SETTINGS}
    objects = installed(chart, name, **values)
    check_golden(f"chart-{name}.yaml", yaml.safe_dump_all(list(objects)))
    objects.validate()


def test_two_releases_in_a_namespace_share_no_object_and_no_pod(chart: Any) -> None:
    """With all objects that the chart has. The longest names of a release differ at their ends."""
    everything = {**VALUES, "labels": {"team": "shop"}}
    for releases in (("eu", "us-publishworker"), ("x" * 52 + "a", "x" * 52 + "b")):
        a, b = (installed(chart, release, **everything) for release in releases)
        for objects in (a, b):
            objects.validate()
            names = [each["metadata"]["name"] for each in objects]
            services = [each["metadata"]["labels"].get("tags.datadoghq.com/service") for each in objects]
            assert {*filter(None, services)} <= {*names}
            assert max(map(len, names)) <= 63
            assert all(each["metadata"]["labels"]["team"] == "shop" for each in objects)
        assert not {(each["kind"], each["metadata"]["name"]) for each in a} & {
            (each["kind"], each["metadata"]["name"]) for each in b
        }
        assert a.selectors().isdisjoint(b.selectors())


def test_a_parent_chart_installs_it_twice_or_not_at_all(tmp_path: Path) -> None:
    """By aliases in one release. A condition of the parent is the value `enabled`."""
    helm = pytest.importorskip("helm_python", reason="its wheels are for few machines")
    shutil.copytree(CHART, tmp_path / "shop/charts/publishworker")
    one = {"name": "publishworker", "version": __version__, "repository": ""}
    dependencies = [one | {"alias": name, "condition": f"{name}.enabled"} for name in ("eu", "us", "off")]
    parent = {"apiVersion": "v2", "name": "shop", "version": "1.0.0", "dependencies": dependencies}
    (tmp_path / "shop/Chart.yaml").write_text(yaml.safe_dump(parent))
    values = {"eu": {"enabled": True, "console": {"enabled": True}}, "us": {}, "off": {"enabled": False}}
    (tmp_path / "shop/values.yaml").write_text(yaml.safe_dump(values))
    objects = installed(helm.Chart.load(tmp_path / "shop"), "shop")
    names = [each["metadata"]["name"] for each in objects.of_kind("Deployment")]
    assert names == ["shop-eu", "shop-eu-console", "shop-us"]
    assert len(objects.selectors()) == 3


@pytest.mark.parametrize(
    ("image", "reference", "version"),
    [
        ({}, f"publishworker:{__version__}", __version__),
        ({"repository": "localhost:5000/a/b", "tag": "x" * 62 + ".-1"}, f"localhost:5000/a/b:{'x' * 62}.-1", "x" * 62),
        ({"tag": "_1_"}, "publishworker:_1_", "1"),
        ({"repository": "[fd00::1]:5000/a/b", "tag": "1"}, "[fd00::1]:5000/a/b:1", "1"),
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
    variables = [{"name": "OUTBOX_SHUTDOWN_TIMEOUT", "value": seconds}] if seconds else []
    for values in ({"settings": {"OUTBOX_SHUTDOWN_TIMEOUT": seconds}}, {"extraEnv": variables}):
        assert installed(chart, **values).template()["spec"]["terminationGracePeriodSeconds"] == grace


POD, CONTAINER = "spec.template.spec", "spec.template.spec.containers.0"
TOLERATION = {"key": "dedicated", "operator": "Equal", "value": "outbox", "effect": "NoSchedule"}
SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
SELECTED = SPREAD | {"labelSelector": {"matchLabels": {"app.kubernetes.io/instance": "shop"}}}
SECRET = {"secretRef": {"name": "proxy"}}
AFFINITY = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
VOLUME = {"name": "ca", "configMap": {"name": "ca"}}
CPU = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}
RULE = {"to": [{"ipBlock": {"cidr": "10.8.0.10/32"}}]}
CLOSED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
LITTLE = {"requests": {"cpu": "1m", "memory": "9Mi"}, "limits": {"memory": "9Mi"}}
SIDE = {"name": "proxy", "image": "proxy:1", "securityContext": CLOSED, "resources": LITTLE}
#: Values that people set, the kind of an object, a place in it, and what is there. A list has it as its last item.
USUAL: list[tuple[dict[str, Any], str, str, Any]] = [
    ({"resources": {"limits": {"memory": "1Gi"}}}, "Deployment", f"{CONTAINER}.resources.limits.memory", "1Gi"),
    ({"resources": {"requests": {"cpu": 2}}}, "Deployment", f"{CONTAINER}.resources.limits.memory", "512Mi"),
    ({"nodeSelector": {"pool": "a"}}, "Deployment", f"{POD}.nodeSelector", {"pool": "a"}),
    ({"tolerations": [TOLERATION]}, "Deployment", f"{POD}.tolerations", [TOLERATION]),
    ({"affinity": AFFINITY}, "Deployment", f"{POD}.affinity", AFFINITY),
    ({"imagePullSecrets": [{"name": "key"}]}, "Deployment", f"{POD}.imagePullSecrets.0.name", "key"),
    ({"image": {"pullPolicy": "Always"}}, "Deployment", f"{CONTAINER}.imagePullPolicy", "Always"),
    ({"annotations": {"a/b": "c"}}, "Deployment", "metadata.annotations", {"a/b": "c"}),
    ({"podAnnotations": {"a": "b"}}, "Deployment", "spec.template.metadata.annotations.a", "b"),
    ({"labels": {"team": "shop"}}, "PodDisruptionBudget", "metadata.labels.team", "shop"),
    ({"podLabels": {"team": "shop"}}, "Deployment", "spec.template.metadata.labels.team", "shop"),
    ({"serviceAccount": {"name": "me"}}, "ServiceAccount", "metadata.name", "me"),
    ({"serviceAccount": {"name": "mine", "create": False}}, "Deployment", f"{POD}.serviceAccountName", "mine"),
    ({"serviceAccount": {"annotations": {"a": "b"}}}, "ServiceAccount", "metadata.annotations", {"a": "b"}),
    ({"priorityClassName": "high"}, "Deployment", f"{POD}.priorityClassName", "high"),
    ({"runtimeClassName": "gvisor"}, "Deployment", f"{POD}.runtimeClassName", "gvisor"),
    ({"dnsConfig": {"searches": ["a"]}}, "Deployment", f"{POD}.dnsConfig.searches", ["a"]),
    ({"hostAliases": [{"ip": "10.0.0.1"}]}, "Deployment", f"{POD}.hostAliases.0.ip", "10.0.0.1"),
    ({"volumes": [VOLUME]}, "Deployment", f"{POD}.volumes.-1", VOLUME),
    ({"volumeMounts": [{"name": "ca", "mountPath": "/ca"}]}, "Deployment", f"{CONTAINER}.volumeMounts.-1.name", "ca"),
    ({"podSecurityContext": {"runAsUser": 1000}}, "Deployment", f"{POD}.securityContext.runAsUser", 1000),
    ({"podSecurityContext": {"fsGroup": None}}, "Deployment", f"{POD}.securityContext.fsGroup", None),
    ({"securityContext": {"capabilities": {"drop": ["ALL"]}}}, "Deployment", f"{CONTAINER}.securityContext", CLOSED),
    ({"envFrom": [SECRET]}, "Deployment", f"{CONTAINER}.envFrom", [SECRET]),
    ({"initContainers": [SIDE]}, "Deployment", f"{POD}.initContainers", [SIDE]),
    ({"extraContainers": [SIDE]}, "Deployment", f"{POD}.containers.-1", SIDE),
    ({"topologySpreadConstraints": [SELECTED]}, "Deployment", f"{POD}.topologySpreadConstraints", [SELECTED]),
    ({"podDisruptionBudget": {"maxUnavailable": "25%"}}, "PodDisruptionBudget", "spec.maxUnavailable", "25%"),
    ({"nameOverride": "relay"}, "Deployment", "metadata.name", "shop-relay"),
    ({"fullnameOverride": "relay"}, "Deployment", "metadata.name", "relay"),
    ({"replicas": 5}, "Deployment", "spec.replicas", 5),
    (
        {"autoscaling": {"enabled": True, "metrics": [CPU], "minReplicas": 3}},
        "HorizontalPodAutoscaler", "spec.metrics.0.resource.name", "cpu",
    ),
    ({"networkPolicy": {"enabled": True, "egress": [RULE]}}, "NetworkPolicy", "spec.egress", [RULE]),
    ({"job": JOB}, "Job", f"{POD}.serviceAccountName", "shop-publishworker-job"),
    ({"job": {**JOB, "serviceAccountName": "me"}}, "Job", f"{POD}.serviceAccountName", "me"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "kind", "place", "expected"), USUAL, ids=[str(each[0])[:60] for each in USUAL])
def test_a_usual_value_has_its_place(chart: Any, values: dict[str, Any], kind: str, place: str, expected: Any) -> None:
    objects = installed(chart, "shop", **values)
    objects.validate()
    found: Any = objects.the(kind)
    for part in place.split("."):
        found = found[int(part)] if isinstance(found, list) else found.get(part)
    assert found == expected


def test_parts_can_be_left_out(chart: Any) -> None:
    assert installed(chart, enabled=False) == []
    kinds = {each["kind"] for each in installed(chart, podDisruptionBudget={"enabled": False})}
    assert kinds == {"Deployment", "ServiceAccount"}
    settings = {"settings": SETTINGS | {"OUTBOX_DATABASE_ROLE": "publishworker"}}
    of_job = {"OUTBOX_DATABASE_ROLE": "outbox_operator"}
    job = installed(chart, **settings, job=JOB | {"settings": of_job}).the("Job")
    [role] = [each["value"] for each in containers(job)[0]["env"] if each["name"] == "OUTBOX_DATABASE_ROLE"]
    assert role == "outbox_operator"


@pytest.mark.parametrize("metrics", ["datadog-csi", "datadog-udp", "opentelemetry"])
def test_a_variable_of_your_own_replaces_that_of_the_chart(chart: Any, metrics: str) -> None:
    """In all pods, because the API server refuses a name that comes twice. A setting replaces one of a component."""
    values = {"metrics": metrics, "settings": SETTINGS | {"OUTBOX_METRICS": "opentelemetry"}}
    parts = {"job": JOB, "console": {"enabled": True}}
    [container] = installed(chart, **values).template()["spec"]["containers"]
    given = [{"name": each["name"], "value": "mine"} for each in container["env"]]
    objects = installed(chart, **values, **parts, extraEnv=given)
    assert objects.template()["spec"]["containers"][0]["env"] == given
    assert len(objects.of_kind("Deployment") + objects.of_kind("Job")) == 3


def test_an_autoscaler_without_a_metric_is_refused(chart: Any) -> None:
    for metrics in ("", "opentelemetry"):
        with pytest.raises(Exception, match=r"autoscaling\.enabled needs Datadog's metrics"):
            installed(chart, metrics=metrics, autoscaling={"enabled": True})
    assert chart.metadata["kubeVersion"] == ">=1.27.0-0"


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
        ({"podDisruptionBudget": {"maxUnavailable": "some"}}, "podDisruptionBudget/maxUnavailable"),
        ({"job": {"args": "retry"}}, "got string, want array"),
        ({"autoscaling": {"averageValue": 5000}}, "got number, want string"),
        ({"metrics": "datadog"}, "value must be one of '', 'datadog-csi', 'datadog-udp', 'opentelemetry'"),
        ({"resources": {"limit": {}}}, "additional properties 'limit' not allowed"),
        ({"tolerations": [{"operater": "Exists"}]}, "additional properties 'operater' not allowed"),
        ({"affinity": {"nodeAfinity": {}}}, "additional properties 'nodeAfinity' not allowed"),
        ({"podSecurityContext": {"runAsuser": 1}}, "additional properties 'runAsuser' not allowed"),
        ({"volumes": [{"configMap": {}}]}, "missing property 'name'"),
        ({"imagePullSecrets": ["key"]}, "got string, want object"),
        ({"serviceAccount": {"create": "no"}}, "got string, want boolean"),
        ({"labels": {"app.kubernetes.io/name": "a"}}, "app.kubernetes.io/name"),
        ({"podLabels": {"team": 1}}, "got number, want string"),
        ({"labels": {"team": "my shop"}}, "'my shop' does not match pattern"),
        ({"topologySpreadConstraints": [SPREAD]}, "missing property 'labelSelector'"),
        ({"console": {"settings": {"OUTBOX_ALLOW_ACTION": "true"}}}, "OUTBOX_ALLOW_ACTION"),
        ({"networkpolicy": {}}, "additional properties 'networkpolicy' not allowed"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(chart: Any, wrong: dict[str, Any], sentence: str) -> None:
    """Helm validates values before it renders. A number without quotes would become 8e+06."""
    with pytest.raises(Exception, match=re.escape(sentence)):
        chart.validate_schema(chart.merge_values(wrong))


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()


@pytest.mark.parametrize("bind", ["0.0.0.0", "[::]", "127.0.0.1"])
def test_the_probe_of_the_console_asks_the_port_of_its_setting(chart: Any, bind: str) -> None:
    """Otherwise the kubelet would restart the console at another port again and again."""
    objects = installed(chart, console={"enabled": True})
    [container] = objects.the("Deployment", "publishworker-console")["spec"]["template"]["spec"]["containers"]
    _, _, program = container["livenessProbe"]["exec"]["command"]
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"OUTBOX_BIND": f"{bind}:{server.server_port}"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, check=False, capture_output=True)
        server.shutdown()
    assert done.returncode == 0, done.stderr

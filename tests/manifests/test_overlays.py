"""Each kustomization of k8s: it renders as its file in golden/, it is valid, and it agrees with the worker's code."""

import contextlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from jsonschema import Draft202012Validator

from outbox.devtools.child_process import LOOPBACK
from outbox.devtools.emulators import PUBSUB, SPANNER, Emulators, running_one
from outbox.program.settings import NAMES, PREFIX, DatabaseSettings, fields_of
from outbox.rows.backlog import COUNT_LIMIT
from outbox.table.connection import COMMIT_SECONDS, UNARY_SECONDS
from outbox.table.ddl import DEFAULT_SHARDS
from outbox.table.schema import SCHEMA_SECONDS
from outbox_admin.cli import _parser
from outbox_admin.web.console_settings import ConsoleSettings
from publishworker.process.worker_settings import WorkerSettings
from publishworker.spanner.grants import GRANT_SECONDS
from publishworker.spanner.store import HEARTBEAT_TIMEOUT_SECONDS
from tests.manifests.rendering import K8S, OVERLAYS, ROOT, Objects, check_golden, composed, rendered
from tests.support.processes import Process, run, started
from tests.support.waiting import eventually

#: Seconds from the end of the drain timeout to the end of the process: a commit (10), the heartbeat's row, metrics.
GRACE_MARGIN = 15
#: Variables in the ConfigMap that other libraries read, all in docs/reference/settings.md.
FOREIGN = {"SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST", "GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW"}
TAG = "tags.datadoghq.com"


#: The components of each golden file that is no overlay. Production has the others.
COMPONENTS = {
    "components": ("autoscaling", "network-policy", "datadog-udp"),
    "console": ("console",),
    "job": ("job",),
    "opentelemetry": ("opentelemetry", "network-policy"),
}


def with_components(folder: Path, name: str) -> Path:
    images = [{"name": image, "newTag": "1.0.0"} for image in ("publishworker", "outbox-console")]
    return composed(folder, "base", *COMPONENTS[name], namespace="outbox", images=images)


@pytest.mark.parametrize("name", [*OVERLAYS, "spark", *COMPONENTS])
def test_a_kustomization_renders_as_its_golden_file_and_is_valid(name: str, tmp_path: Path) -> None:
    objects = rendered(with_components(tmp_path, name) if name in COMPONENTS else name)
    # Without the texts of scripts in a ConfigMap, whose name has their hash.
    text = re.sub(r"(?m)^(  \w+\.py: )\|\n(?: {4}.*\n| *\n)+", r"\1...\n", objects.text)
    check_golden(f"{name.removeprefix('overlays/')}.yaml", text)
    objects.validate()


def test_two_databases_share_a_namespace(tmp_path: Path) -> None:
    """With `namePrefix`, which kustomize adds to names, no object covers the pods of the other deployment."""
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s/overlays/production/kustomization.yaml"
    text = file.read_text().replace("\ncomponents:\n", "\ncomponents:\n  - ../../components/console\n")
    file.write_text(text)
    a = rendered(file.parent)
    pinned = text.replace("newTag: 0.0.0-placeholder", f"newTag: 1.2.3\n    digest: sha256:{'0' * 64}")
    shutil.copytree(file.parent, tmp_path / "k8s/overlays/eu")
    (tmp_path / "k8s/overlays/eu/kustomization.yaml").write_text(
        pinned.replace("\nnamespace: outbox\n", "\nnamespace: shop\nnamePrefix: eu-\n")
    )
    b = rendered(tmp_path / "k8s/overlays/eu")
    for objects, prefix, namespace in ((a, "", "outbox"), (b, "eu-", "shop")):
        names = {f"{prefix}{name}" for name in ("publishworker", "outbox-console")}
        assert {each["metadata"]["name"] for each in objects.of_kind("Deployment")} == names
        [metric] = objects.the("HorizontalPodAutoscaler")["spec"]["metrics"]
        assert metric["external"]["metric"]["name"] == f"datadogmetric@{namespace}:{prefix}publishworker-backlog"
    assert a.selectors().isdisjoint(b.selectors())
    labels = b.template("eu-publishworker")["metadata"]["labels"]
    assert (labels[f"{TAG}/service"], labels[f"{TAG}/version"]) == ("eu-publishworker", "1.2.3")


def test_the_console_is_closed_and_reads_the_database_of_the_worker(tmp_path: Path) -> None:
    """It listens on the pod's loopback address, nobody may act, and the page lets its probe's host in."""
    objects = rendered(with_components(tmp_path, "console"))
    console = ("console", "outbox-console")
    given = objects.environment(*console)
    database = {"OUTBOX_PROJECT": "project", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop"}
    settings = ConsoleSettings.read({}, given)
    assert (settings.bind, settings.identity_header, settings.allow_actions) == (("127.0.0.1", 8080), "", False)
    assert DatabaseSettings.read({}, given | database).database_role == "outbox_viewer"
    page = (K8S.parent / "docs/operations/console.md").read_text()
    [*_, probe] = objects.container(*console)["livenessProbe"]["exec"]["command"]
    hosts = re.findall(r"OUTBOX_ALLOWED_HOSTS=([\w.,]+)", page)
    assert hosts
    assert all(urlsplit(re.findall(r'"(http.+?)"', probe)[0]).hostname in each.split(",") for each in hosts)


def test_a_job_runs_the_command_of_the_page_as_the_worker(tmp_path: Path) -> None:
    """With the image and settings of the worker, whose selectors do not match its pod."""
    shutil.copytree(K8S, tmp_path / "k8s")
    file = tmp_path / "k8s/overlays/production/kustomization.yaml"
    page = (ROOT / "docs/operations/deploy.md").read_text(encoding="utf-8")
    [[component, patch]] = re.findall(r"```yaml\ncomponents:\n(.*?)patches:\n(.*?)```", page, re.DOTALL)
    text = file.read_text().replace("\ncomponents:\n", f"\ncomponents:\n{component}")
    file.write_text(text.replace("\npatches:\n", f"\npatches:\n{patch}"))
    objects = rendered(file.parent)
    job, found = objects.the("Job"), objects.container()
    [command] = job["spec"]["template"]["spec"]["containers"]
    # The ConfigMap exists: its name, which has the hash of its content, is that of the worker's overlay.
    assert (command["image"], command["envFrom"]) == (found["image"], found["envFrom"])
    assert command["envFrom"] == rendered("overlays/production").container()["envFrom"]
    assert command["env"] == [{"name": "OUTBOX_DATABASE_ROLE", "value": "outbox_operator"}]
    pod = job["spec"]["template"]
    assert not any(json.loads(each).items() <= pod["metadata"]["labels"].items() for each in objects.selectors())
    # What `kubectl apply --selector` creates: all that the pod needs, and nothing of the worker.
    [(key, value)] = [each.split("=") for each in re.findall(r"kubectl apply --filename=- --selector=(\S+)", page)]
    selected = [each for each in objects if each["metadata"].get("labels", {}).get(key) == value]
    assert [each["kind"] for each in selected] == ["ServiceAccount", "Job"]
    assert selected[0]["metadata"]["name"] == pod["spec"]["serviceAccountName"] != "publishworker"
    assert [*command["command"], *command["args"]][:2] == ["outbox", "retry"]
    # "Remove" deletes both, and nothing of a second database.
    [removed] = re.findall(r"delete jobs,serviceaccounts .*\n +--selector=(\S+)", page)
    labels = dict(each.split("=") for each in removed.split(","))
    assert [each for each in objects if labels.items() <= each["metadata"]["labels"].items()] == selected
    assert vars(_parser().parse_args(command["args"]))["reason"] == job["metadata"]["name"] == "ticket-4711"


def test_deleting_the_overlay_keeps_the_namespace() -> None:
    """Which may contain the workers of another database. The namespace is that of the overlay."""
    objects = rendered("overlays/production")
    assert objects.of_kind("Namespace") == []
    namespace = yaml.safe_load((K8S / "overlays/production/namespace.yaml").read_text())
    assert {each["metadata"]["namespace"] for each in objects} == {namespace["metadata"]["name"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_settings_fit_the_worker_and_its_pod(overlay: str) -> None:
    """The worker knows and accepts each variable, can write its heartbeat, and has time for a graceful shutdown."""
    objects = rendered(overlay)
    template, found, values = objects.template(), objects.container(), objects.environment()
    known = {field.variable for field in fields_of(WorkerSettings)} | FOREIGN
    assert {name for name in values if not name.startswith("DD_")} <= known
    settings = WorkerSettings.read({}, values)
    assert template["spec"]["terminationGracePeriodSeconds"] >= settings.shutdown_timeout + GRACE_MARGIN
    file = PurePosixPath(settings.heartbeat_file)
    [mount] = [each for each in found["volumeMounts"] if file.is_relative_to(each["mountPath"])]
    assert not mount.get("readOnly")
    assert [each for each in template["spec"]["volumes"] if each["name"] == mount["name"] and "emptyDir" in each]


def test_the_startup_probe_waits_for_all_requests_of_a_start() -> None:
    """Two sessions, two reads of the schema, two reads and two commits for the permissions, and a heartbeat."""
    requests = 2 * UNARY_SECONDS["create_session"] + 2 * SCHEMA_SECONDS + 2 * GRANT_SECONDS + 2 * COMMIT_SECONDS
    probe = rendered("overlays/production").container()["startupProbe"]
    imports = 10
    assert probe["periodSeconds"] * probe["failureThreshold"] >= requests + HEARTBEAT_TIMEOUT_SECONDS + imports


SCHEMA: dict[str, Any] = json.loads((ROOT / "docs/reference/settings.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_schema_has_all_settings_and_accepts_their_defaults() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert {name.removeprefix(PREFIX) for name in SCHEMA["properties"]} == NAMES
    defaults = {name: each["default"] for name, each in SCHEMA["properties"].items() if "default" in each}
    assert len(defaults) > 25
    VALIDATOR.validate(defaults)


@pytest.mark.parametrize("folder", [*OVERLAYS, "spark"])
def test_a_config_map_matches_the_schema(folder: str) -> None:
    """Names and forms of the values. Variables of other programs are any text."""
    data = [each["data"] for each in rendered(folder).of_kind("ConfigMap")]
    [settings] = [each for each in data if any(name.startswith(PREFIX) for name in each)]
    VALIDATOR.validate(settings)


TEXT = (ROOT / "docs/operations/scaling.md").read_text(encoding="utf-8")
PROSE = " ".join(TEXT.split())
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def figure(name: str) -> int:
    [value] = re.findall(rf"^\| `?{re.escape(name)}`? \| ([\d,]+) \|", TEXT, re.MULTILINE)
    return int(value.replace(",", ""))


def test_the_target_follows_from_the_figures_and_the_examples_from_the_target() -> None:
    """The target is rate times seconds. The count of one topic can request all workers, one for each shard."""
    scaler = rendered("overlays/production").the("HorizontalPodAutoscaler")["spec"]
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


def test_an_update_of_all_workers_ends_within_the_time_of_the_page() -> None:
    """A new pod counts after its start and `minReadySeconds`, and each wave has as many pods as `maxSurge` allows."""
    objects = rendered("overlays/production")
    workers, spec = objects.the("HorizontalPodAutoscaler")["spec"]["maxReplicas"], objects.the("Deployment")["spec"]
    surge = math.ceil(workers * int(spec["strategy"]["rollingUpdate"]["maxSurge"].removesuffix("%")) / 100)
    [start] = re.findall(r"^\| start of a pod on an existing node \| (\d+) \|", TEXT, re.MULTILINE)
    seconds = math.ceil(workers / surge) * (int(start) + spec["minReadySeconds"])
    page = (ROOT / "docs/operations/deploy.md").read_text(encoding="utf-8")
    assert {60 * int(each) for each in re.findall(r"rollout status .+ --timeout=(\d+)m", page)} == {300}
    assert seconds < 300


def test_a_standby_cluster_has_no_replicas(tmp_path: Path) -> None:
    """The page's entry also works in an overlay with the autoscaler, which removes the number of replicas."""
    standby = rendered(composed(tmp_path, "overlays/production", **yaml.safe_load(BLOCKS[1])))
    assert standby.the("Deployment")["spec"]["replicas"] == 0


#: Where the image and the ConfigMap put files of the repository.
FOLDERS = {"/opt/examples": ROOT / "docs" / "examples", "/opt/development": K8S / "overlays/development"}


def variables(objects: Objects, pod: str, name: str, emulators: Emulators, scratch: Path) -> dict[str, str]:
    values = objects.environment(name, pod)
    here = {"emulators:9010": emulators.spanner_host, "emulators:8085": emulators.pubsub_host, "/tmp": str(scratch)}
    here |= {folder: str(path) for folder, path in FOLDERS.items()}
    for there, path in here.items():
        values = {variable: value.replace(there, path) for variable, value in values.items()}
    return values


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_development_sends_orders(emulators: Emulators, tmp_path: Path) -> None:
    """The init containers run twice, as they do when a worker starts again. The probe finds the heartbeat file."""
    objects = rendered("overlays/development")

    @contextlib.contextmanager
    def running(pod: str, name: str) -> Iterator[Process]:
        found = objects.container(name, pod)
        # The entry points of our two images.
        entry = [] if found["image"].startswith("publishworker-demo:") else ["publishworker"]
        module, *arguments = found.get("command") or [*entry, *found["args"]]
        with started(module, *arguments, environment=variables(objects, pod, name, emulators, tmp_path)) as process:
            yield process

    def received(process: Process) -> int:
        return max(map(int, re.findall(r"(\d+) of \d+ received", process.stdout)), default=0)

    def probe() -> int:
        command = objects.container()["startupProbe"]["exec"]["command"]
        given = variables(objects, "publishworker", "publishworker", emulators, tmp_path)
        return run(*command, environment=given).code

    init = [each["name"] for each in objects.template()["spec"]["initContainers"]]
    assert init == ["prepare", "schema"]
    for name in init * 2:
        with running("publishworker", name) as process:
            assert process.wait(60) == 0
    assert probe() == 1
    with running("publishworker", "publishworker") as relay:
        with running("orders", "orders") as orders:
            eventually(lambda: received(orders) >= 5, seconds=60, message="tasks received")
            assert probe() == 0
            orders.stop()
            assert orders.wait() == 0
        relay.stop()
        assert relay.wait() == 0
        lines = [json.loads(line) for line in relay.stderr.splitlines()]  # OUTBOX_LOG_FORMAT
    assert {"start", "stopped"} <= {line["action"] for line in lines}


@pytest.mark.usefixtures("emulators")  # skips where there are none
def test_the_emulators_are_started_as_outbox_emulators_does() -> None:
    """The same programs below the SDK's root, but for the address: pods call them from outside; flags are known."""
    objects = rendered("overlays/development")
    for name, program in (("spanner", SPANNER), ("pubsub", PUBSUB)):
        found = objects.container(name, "emulators")
        command = " ".join(found["command"])
        port = found["ports"][0]["containerPort"]
        wanted = " ".join([f"/google-cloud-sdk/{program.path}", *program.arguments])
        assert command.startswith(wanted.replace(LOOPBACK, "0.0.0.0").replace("{port}", str(port)))
    with running_one(SPANNER, flags=objects.container("spanner", "emulators")["command"][3:]) as host:
        assert host

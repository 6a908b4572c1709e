"""Each kustomization of k8s: it renders as its file in golden/, it is valid, and it agrees with the worker's code."""

import json
import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
from jsonschema import Draft202012Validator

from outbox.cli import _parser
from outbox.console.command import ConsoleSettings
from outbox.program.settings import NAMES, PREFIX, DatabaseSettings, fields_of
from outbox.table.connection import COMMIT_SECONDS, UNARY_SECONDS
from outbox.table.schema import SCHEMA_SECONDS
from publishworker.process.worker_settings import WorkerSettings
from publishworker.spanner.grants import GRANT_SECONDS
from publishworker.spanner.store import HEARTBEAT_TIMEOUT_SECONDS
from tests.manifests.rendering import (
    K8S,
    OVERLAYS,
    ROOT,
    SPARK,
    check_golden,
    container,
    environment,
    of_kind,
    pods,
    rendered,
    rendered_text,
    selectors,
    the,
    validate,
    worker,
)

#: Seconds from the end of the drain timeout to the end of the process: a commit (10), the heartbeat's row, metrics.
GRACE_MARGIN = 15
#: Variables in the ConfigMap that other libraries read, all in docs/reference/settings.md.
FOREIGN = {"SPANNER_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST", "GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW"}
TAG = "tags.datadoghq.com"

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def composed(folder: Path, *components: str) -> Path:
    folder.mkdir()
    lines = ["resources:", f"  - {os.path.relpath(K8S / 'base', folder)}", "namespace: outbox"]
    tags = [f"{{name: {image}, newTag: 1.0.0}}" for image in ("publishworker", "outbox-console")]
    lines += [f"images: [{', '.join(tags)}]", "components:"]
    lines += [f"  - {os.path.relpath(K8S / 'components' / each, folder)}" for each in components]
    (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("name", [*OVERLAYS, "components", "console", "job", "opentelemetry", "spark"])
def test_a_kustomization_renders_as_its_golden_file_and_is_valid(name: str, tmp_path: Path) -> None:
    """`components` is the base with all components but datadog-csi, which production has, and opentelemetry."""
    folder = OVERLAYS.get(name, SPARK)
    if name == "components":
        folder = composed(tmp_path / name, "autoscaling", "network-policy", "datadog-udp")
    if name in ("console", "job"):
        folder = composed(tmp_path / name, name)
    if name == "opentelemetry":
        folder = composed(tmp_path / name, "opentelemetry", "network-policy")
    # Without the texts of scripts in a ConfigMap, whose name has their hash.
    check_golden(f"{name}.yaml", re.sub(r"(?m)^(  \w+\.py: )\|\n(?: {4}.*\n| *\n)+", r"\1...\n", rendered_text(folder)))
    for each in rendered(folder):
        validate(each)


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
        deployments = of_kind(objects, "Deployment")
        names = {f"{prefix}{name}" for name in ("publishworker", "outbox-console")}
        assert {each["metadata"]["name"] for each in deployments} == names
        assert selectors(objects) == {json.dumps(pods(each)) for each in deployments}
        [metric] = the(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]
        assert metric["external"]["metric"]["name"] == f"datadogmetric@{namespace}:{prefix}publishworker-backlog"
    assert selectors(a).isdisjoint(selectors(b))
    labels = the(b, "Deployment", "eu-publishworker")["spec"]["template"]["metadata"]["labels"]
    assert (labels[f"{TAG}/service"], labels[f"{TAG}/version"]) == ("eu-publishworker", "1.2.3")


def test_the_console_is_closed_and_reads_the_database_of_the_worker(tmp_path: Path) -> None:
    """It listens on the pod's loopback address, nobody may act, and the page lets its probe's host in."""
    objects = rendered(composed(tmp_path / "console", "console"))
    deployment = the(objects, "Deployment", "outbox-console")
    given = environment(objects, deployment["spec"]["template"], container(deployment, "console"))
    database = {"OUTBOX_PROJECT": "project", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop"}
    settings = ConsoleSettings.read({}, given)
    assert (settings.bind, settings.identity_header, settings.allow_actions) == (("127.0.0.1", 8080), "", False)
    assert DatabaseSettings.read({}, given | database).database_role == "outbox_viewer"
    page = (K8S.parent / "docs/operations/console.md").read_text()
    [*_, probe] = container(deployment, "console")["livenessProbe"]["exec"]["command"]
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
    job, found = the(objects, "Job"), container(worker(objects), "publishworker")
    [command] = job["spec"]["template"]["spec"]["containers"]
    assert (command["image"], command["envFrom"]) == (found["image"], found["envFrom"])
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert not any(json.loads(each).items() <= labels.items() for each in selectors(objects))
    assert [*command["command"], *command["args"]][:2] == ["outbox", "retry"]
    assert vars(_parser().parse_args(command["args"]))["reason"] == job["metadata"]["name"] == "ticket-4711"


@each_overlay
def test_the_settings_fit_the_worker_and_its_pod(overlay: str) -> None:
    """The worker knows and accepts each variable, can write its heartbeat, and has time for a graceful shutdown."""
    objects = rendered(OVERLAYS[overlay])
    template = worker(objects)["spec"]["template"]
    found = container(worker(objects), "publishworker")
    values = environment(objects, template, found)
    known = {field.variable for field in fields_of(WorkerSettings)} | FOREIGN
    assert {name for name in values if not name.startswith("DD_")} <= known
    settings = WorkerSettings.read({}, values)
    assert template["spec"]["terminationGracePeriodSeconds"] >= settings.shutdown_timeout + GRACE_MARGIN
    file = PurePosixPath(settings.heartbeat_file)
    [mount] = [each for each in found["volumeMounts"] if file.is_relative_to(each["mountPath"])]
    assert not mount.get("readOnly")
    assert [each for each in template["spec"]["volumes"] if each["name"] == mount["name"] and "emptyDir" in each]


def test_the_startup_probe_waits_for_all_requests_of_a_start() -> None:
    """Two sessions, two reads of the schema, one read and two commits for the permissions, and a heartbeat."""
    requests = 2 * UNARY_SECONDS["create_session"] + 2 * SCHEMA_SECONDS + GRANT_SECONDS + 2 * COMMIT_SECONDS
    probe = container(worker(rendered(OVERLAYS["production"])), "publishworker")["startupProbe"]
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


@pytest.mark.parametrize("folder", [*OVERLAYS.values(), SPARK], ids=lambda folder: folder.name)
def test_a_config_map_matches_the_schema(folder: Any) -> None:
    """Names and forms of the values. Variables of other programs are any text."""
    settings = [each["data"] for each in rendered(folder) if each["kind"] == "ConfigMap"]
    settings = [data for data in settings if any(name.startswith(PREFIX) for name in data)]
    assert len(settings) == 1
    VALIDATOR.validate(settings[0])

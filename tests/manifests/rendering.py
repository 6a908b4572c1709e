"""Render with `kubectl kustomize`, which needs no cluster, and look at what comes out.

objects = rendered(OVERLAYS["production"])
deployment = the(objects, "Deployment", "publishworker")
"""

import copy
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = {path.name: path for path in sorted((K8S / "overlays").iterdir()) if path.is_dir()}
COMPONENTS = {path.name: path for path in sorted((K8S / "components").iterdir()) if path.is_dir()}
#: The version of Kubernetes whose schemas are asked; GKE's regular channel had it when this was written.
KUBERNETES = "1.33"

Object = dict[str, Any]
Objects = list[Object]


@functools.cache
def kubectl() -> str:
    """Return the path of kubectl. Without one the test is skipped, and fails where CI is set."""
    if found := shutil.which("kubectl"):
        return found
    if gcloud := shutil.which("gcloud"):
        beside = Path(gcloud).resolve().parent / f"kubectl.{KUBERNETES}"
        if beside.is_file():
            return str(beside)
    missing = f"no kubectl in PATH, and no kubectl.{KUBERNETES} beside gcloud: gcloud components install kubectl"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


@functools.cache
def _rendered(directory: Path) -> Objects:
    done = subprocess.run([kubectl(), "kustomize", directory], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def rendered(directory: Path) -> Objects:
    """Return the objects of a kustomization, new ones each time: a test may change them."""
    return copy.deepcopy(_rendered(directory))


def composed(directory: Path, components: Sequence[Path]) -> Objects:
    """Return what the base becomes with `components`, by a kustomization that is written to `directory`."""
    lines = ["resources:", f"  - {os.path.relpath(K8S / 'base', directory)}", "namespace: outbox", "components:"]
    lines += [f"  - {os.path.relpath(component, directory)}" for component in components]
    (directory / "kustomization.yaml").write_text("\n".join(lines) + "\n")
    return rendered(directory)


def of_kind(objects: Objects, kind: str) -> Objects:
    """Return the objects of a kind."""
    return [each for each in objects if each["kind"] == kind]


def the(objects: Objects, kind: str, name: str) -> Object:
    """Return the only object of that kind and name."""
    [found] = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def worker(objects: Objects) -> Object:
    """Return the Deployment of the worker."""
    return the(objects, "Deployment", "publishworker")


def pod(deployment: Object) -> Object:
    """Return the spec of the pods of a Deployment."""
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def containers(deployment: Object) -> Iterator[Object]:
    """Yield all containers of a Deployment, those that run first first."""
    yield from pod(deployment).get("initContainers", [])
    yield from pod(deployment)["containers"]


def container(deployment: Object, name: str) -> Object:
    """Return one container by its name."""
    [found] = [each for each in containers(deployment) if each["name"] == name]
    return found


def environment(objects: Objects, deployment: Object, of: Object) -> dict[str, str]:
    """Return the variables of a container as Kubernetes would set them: `env` wins over `envFrom`."""
    result: dict[str, str] = {}
    for source in of.get("envFrom", []):
        result |= the(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in of.get("env", []):
        result[variable["name"]] = variable["value"] if "value" in variable else _field(deployment, variable)
    return result


def _field(deployment: Object, variable: Object) -> str:
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
        return str(deployment["spec"]["template"]["metadata"]["labels"][label[1]])
    return {"status.hostIP": "127.0.0.1", "metadata.uid": "00000000-0000-0000-0000-000000000000"}[path]

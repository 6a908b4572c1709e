"""Render with `kubectl kustomize`, which needs no cluster, and compare with the files in golden/.

A golden file pins every value of a manifest, so each change of a manifest is a change of such a file, which a reviewer
reads. This command writes the golden files again:

    GOLDEN=write .venv/bin/python -m pytest tests/manifests
"""

import copy
import difflib
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(f"overlays/{path.name}" for path in (K8S / "overlays").iterdir() if path.is_dir())
GOLDEN = Path(__file__).parent / "golden"
#: The version of Kubernetes with whose schemas objects are validated; it is the one of GKE's regular channel.
KUBERNETES = "1.33"
#: JSON schemas of the custom resources, which no package has, and of the pods that this project allows.
SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))

Object = dict[str, Any]


class Objects(list[Object]):
    """The objects of a kustomization or of a release of the chart."""

    #: The YAML that kustomize prints.
    text = ""

    def validate(self) -> None:
        for each in self:
            validate(each)

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self if each["kind"] == kind]

    def the(self, kind: str, name: str | None = None) -> Object:
        [found] = [each for each in self.of_kind(kind) if name in (None, each["metadata"]["name"])]
        return found

    def template(self, name: str = "publishworker") -> Object:
        """Return the template of the pods of a Deployment."""
        return dict(self.the("Deployment", name)["spec"]["template"])

    def container(self, name: str = "publishworker", pod: str = "publishworker") -> Object:
        spec = self.template(pod)["spec"]
        [found] = [each for each in [*spec.get("initContainers", []), *spec["containers"]] if each["name"] == name]
        return dict(found)

    def environment(self, name: str = "publishworker", pod: str = "publishworker") -> dict[str, str]:
        """Return the variables of a container, as Kubernetes would set them in its pod; none is set twice."""
        result: dict[str, str] = {}
        of = self.container(name, pod)
        for source in of.get("envFrom", []):
            result |= self.the("ConfigMap", source["configMapRef"]["name"])["data"]
        for variable in of.get("env", []):
            assert variable["name"] not in result
            given = "value" in variable
            result[variable["name"]] = variable["value"] if given else _field(self.template(pod), variable)
        return result

    def selectors(self) -> set[str]:
        """Return each selection of pods, as JSON: those by which Deployments select their pods, which have them."""
        found: set[str] = set()

        def find(value: Any) -> None:
            if isinstance(value, dict):
                found.update([json.dumps(value["matchLabels"], sort_keys=True)] if "matchLabels" in value else [])
            for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
                find(each)

        # An egress rule selects the pods of others.
        find([{key: each["spec"][key] for key in each["spec"] if key != "egress"} for each in self if "spec" in each])
        deployments = [each["spec"] for each in self.of_kind("Deployment")]
        assert found == {json.dumps(each["selector"]["matchLabels"], sort_keys=True) for each in deployments}
        for each in deployments:
            assert each["selector"]["matchLabels"].items() <= each["template"]["metadata"]["labels"].items()
        return found


def programs(*names: str) -> None:
    if missing := [name for name in names if shutil.which(name) is None]:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"not in PATH: {', '.join(missing)}")


@functools.cache
def kubectl() -> str:
    """Return the path of kubectl. Without one the test is skipped, and fails where CI is set."""
    if (gcloud := shutil.which("gcloud")) and not shutil.which("kubectl"):
        beside = Path(gcloud).resolve().parent / f"kubectl.{KUBERNETES}"
        if beside.is_file():
            return str(beside)
    programs("kubectl")
    return "kubectl"


@functools.cache
def _rendered(folder: Path) -> Objects:
    done = subprocess.run([kubectl(), "kustomize", folder], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    objects = Objects(_parsed(done.stdout))
    objects.text = done.stdout
    return objects


def _parsed(text: str) -> list[Object]:
    return list(yaml.load_all(text, yaml.CSafeLoader))


def rendered(folder: Path | str) -> Objects:
    """Return the objects of a folder, which can be a name in k8s."""
    return copy.deepcopy(_rendered(K8S / folder))


def composed(folder: Path, base: str, *components: str, **more: Any) -> Path:
    """Write a kustomization of a folder and of components of k8s. Return its own folder, which no other test has."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    paths = [os.path.relpath(K8S / each, folder) for each in (base, *(f"components/{name}" for name in components))]
    kustomization = {"resources": paths[:1], "components": paths[1:], **more}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder


def check_golden(name: str, text: str) -> None:
    file = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    pinned = file.read_text(encoding="utf-8") if file.exists() else ""
    if text == pinned or (name.endswith(".yaml") and _parsed(text) == _parsed(pinned)):
        return
    lines = difflib.unified_diff(pinned.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
    pytest.fail("\n".join([*lines, "If this is intended: GOLDEN=write .venv/bin/python -m pytest tests/manifests"]))


def validate(each: Object) -> None:
    if each["kind"] in SCHEMAS:
        jsonschema.validate(each, SCHEMAS[each["kind"]])
    else:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    for template in templates(each):
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(pods, KUBERNETES, strict=True)
        jsonschema.validate(template["spec"], SCHEMAS["restricted"])


def templates(each: Object) -> Iterator[Object]:
    if each["kind"] in ("Deployment", "Job"):
        yield each["spec"]["template"]
    elif each["kind"] == "ScheduledSparkApplication":
        yield from (each["spec"]["template"][role]["template"] for role in ("driver", "executor"))
    elif each["kind"] == "Pod":
        yield {key: each[key] for key in ("metadata", "spec")}


def _field(pod: Object, variable: Object) -> str:
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
        return str(pod["metadata"]["labels"][label[1]])
    here = {"status.hostIP": "127.0.0.1", "status.podIP": "127.0.0.1", "metadata.uid": "0-0-0"}
    return here.get(path) or str(pod["metadata"]["name"])

"""Write the Helm chart in k8s/helm from the kustomize base: `make chart`. A test compares what both render."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parent
CHART = K8S / "helm"
#: What the values replace. In the base these are the only places with these texts.
TAG = "{{ .Values.image.tag | default .Chart.AppVersion }}"
#: In the pod's template, because `helm upgrade` would delete or change a ConfigMap that older pods still read.
SETTINGS = """\
        env:
        {{- range $name, $value := .Values.settings }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
"""
REPLICAS = """\
  {{- if not (kindIs "invalid" .Values.replicas) }}
  replicas: {{ .Values.replicas }}
  {{- end }}
"""
#: As in the base, 30 s more than the setting, whose value can be a fraction.
GRACE = '{{ add 30 (ceil (float64 (default "30" .Values.settings.OUTBOX_SHUTDOWN_TIMEOUT))) }}'
NOTE = "# Written by `make chart` from k8s/base. Change the base, whose files say why, and not this file.\n"
VALUES = """\
# The image without a tag; the tag is the version of the chart if it is empty.
image:
  repository: publishworker
  tag: ""
# null if an autoscaler of your own sets the number. Otherwise each `helm upgrade` would reset it.
replicas: 2
# The environment in Datadog.
env: production
# Environment variables, all as texts: docs/reference/settings.md. A changed setting starts new pods.
# Add OUTBOX_PROJECT, OUTBOX_INSTANCE and OUTBOX_DATABASE.
settings:
"""


def main() -> None:
    """Write the chart."""
    for name, text in files().items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote k8s/helm/{name}")


def files() -> dict[str, str]:
    """Return the text of each file of the chart. Needs kubectl, but no cluster."""
    command = ["kubectl", "kustomize", str(K8S / "base")]
    base = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "{{" in base:
        raise ValueError("the base contains {{, which Helm would read")
    objects = list(yaml.safe_load_all(base))
    [settings] = [each["data"] for each in objects if each["kind"] == "ConfigMap"]
    return {
        "Chart.yaml": NOTE + "\n".join(_chart()) + "\n",
        "values.yaml": NOTE + VALUES + "".join(f"  {name}: {json.dumps(settings[name])}\n" for name in settings),
        "values.schema.json": _schema(),
        **{f"templates/{each['kind'].lower()}.yaml": NOTE + _template(each) for each in objects if "data" not in each},
    }


def _chart() -> Iterator[str]:
    code = (K8S.parent / "outbox/_version.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    yield from ("apiVersion: v2", "name: publishworker", "type: application")
    yield "description: The worker of the transactional outbox for Spanner and Pub/Sub"
    yield from (f"version: {version}", f'appVersion: "{version}"')


def _template(manifest: dict[str, Any]) -> str:
    text = yaml.safe_dump(manifest, sort_keys=False, width=1000)
    text = re.sub(r"(tags.datadoghq.com/version: )unset", rf"\1{TAG.replace(' }}', ' | quote }}')}", text)
    text = re.sub(r"(tags.datadoghq.com/env: )unset", r"\1{{ .Values.env | quote }}", text)
    text = re.sub(r" +envFrom:\n.*\n.*\n", "", text).replace("        env:\n", SETTINGS)
    text = text.replace("image: publishworker:unset", f'image: "{{{{ .Values.image.repository }}}}:{TAG}"')
    text = text.replace("terminationGracePeriodSeconds: 60", f"terminationGracePeriodSeconds: {GRACE}")
    return text.replace("  replicas: 2\n", REPLICAS)


def _schema() -> str:
    """Return the schema of the values, so that Helm refuses a misspelled setting."""
    text = {"type": "string"}
    image = {"type": "object", "properties": {"repository": text, "tag": text}, "additionalProperties": False}
    settings = json.loads((K8S.parent / "docs/reference/settings.schema.json").read_text(encoding="utf-8"))
    properties = {
        "image": image,
        "replicas": {"type": ["integer", "null"], "minimum": 0},
        "env": text,
        "settings": {key: value for key, value in settings.items() if key not in {"$schema", "title", "$comment"}},
        "global": {"type": "object"},
    }
    schema = {"$schema": settings["$schema"], "type": "object", "properties": properties, "additionalProperties": False}
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    main()

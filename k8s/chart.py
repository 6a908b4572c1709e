"""Write the Helm chart in k8s/helm from the kustomize base: `make chart`. A test compares what both render."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from outbox.program.settings import fields_of
from publishworker.process.worker_settings import WorkerSettings

K8S = Path(__file__).parent
CHART = K8S / "helm"
#: The names of the objects contain the release, so two releases fit into one namespace. A tag can be too long for a
#: label.
HELPERS = """\
{{- define "publishworker.name" -}}
{{- $name := printf "%s-%s" .Release.Name .Chart.Name -}}
{{- ternary .Release.Name $name (contains .Chart.Name .Release.Name) | trunc 63 | trimSuffix "-" -}}
{{- end }}
{{- define "publishworker.tag" -}}
{{- .Values.image.tag | default .Chart.AppVersion -}}
{{- end }}
{{- define "publishworker.version" -}}
{{- include "publishworker.tag" . | trunc 63 | trimAll "-_." -}}
{{- end }}
"""
#: What the values replace. In the base these are the only places with these texts.
NAME = '{{ include "publishworker.name" . }}'
REPLACED = {
    r"(app.kubernetes.io/instance: )publishworker": r"\1{{ .Release.Name | quote }}",
    r"(tags.datadoghq.com/service: )publishworker": rf"\1{NAME}",
    r"(tags.datadoghq.com/version: )unset": r'\1{{ include "publishworker.version" . | quote }}',
    r"(tags.datadoghq.com/env: )unset": r"\1{{ .Values.env | quote }}",
    r"(?m)^(  name: )publishworker$": rf"\1{NAME}",
    r"(serviceAccountName: )publishworker": rf"\1{NAME}",
    r"image: publishworker:unset": 'image: "{{ .Values.image.repository }}:{{ include "publishworker.tag" . }}'
    '{{ with .Values.image.digest }}@{{ . }}{{ end }}"',
}
#: The files of components whose objects the chart has if these values are set, and what other values replace in them.
COMPONENTS = {
    "autoscaling/datadogmetric.yaml": "autoscaling.enabled",
    "autoscaling/horizontalpodautoscaler.yaml": "autoscaling.enabled",
    "job/job.yaml": "job.args",
}
OF_COMPONENTS = {
    r"(name: )publishworker-backlog": rf"\1{NAME}-backlog",
    r"datadogmetric@outbox:publishworker": f"datadogmetric@{{{{ .Release.Namespace }}}}:{NAME}",
    r"env:unset,service:publishworker": f"env:{{{{ .Values.env }}}},service:{NAME}",
    r"(?m)^(    name: )publishworker$": rf"\1{NAME}",
    r"(minReplicas|maxReplicas): \d+": r"\1: {{ .Values.autoscaling.\1 }}",
    r"averageValue: '5000'": "averageValue: {{ .Values.autoscaling.averageValue | quote }}",
    r"(?m)^(  name: )publishworker-job$": rf"\1{NAME}-{{{{ .Values.job.name }}}}",
    r" +- status\n": "        {{- toYaml .Values.job.args | nindent 8 }}\n",
}
#: In the pod's template, because `helm upgrade` would delete or change a ConfigMap that older pods still read.
SETTINGS = """\
        env:
        {{- range $name, $value := .Values.settings }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
        {{- with .Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
"""
REPLICAS = """\
  {{- if not (or .Values.autoscaling.enabled (kindIs "invalid" .Values.replicas)) }}
  replicas: {{ .Values.replicas }}
  {{- end }}
"""
#: As in the base, 30 s more than the setting, whose value can be a fraction.
GRACE = '{{ add 30 (ceil (float64 (default "30" .Values.settings.OUTBOX_SHUTDOWN_TIMEOUT))) }}'
NOTE = "# Written by `make chart` from k8s/base and components. Change those, which say why, and not this file.\n"
VALUES = """\
# The repository has no tag. An empty tag is the version of the chart. A digest such as sha256:... pins the image. The
# tag is then only the label `version`.
image:
  repository: publishworker
  tag: ""
  digest: ""
# null if an autoscaler of your own sets the number. Otherwise each `helm upgrade` would reset it.
replicas: 2
# The component `autoscaling`, with Datadog's metric: docs/operations/scaling.md. It sets the number of workers.
autoscaling:
  enabled: false
  minReplicas: 2
  maxReplicas: 10
  averageValue: "5000"
# With args, a Job runs one `outbox` command. Its name ends with this one.
job:
  name: command
  args: []
# The environment in Datadog.
env: production
# Variables of other libraries, and variables with `valueFrom`, as in a container of a pod.
extraEnv: []
# The worker's settings, all as texts: docs/reference/settings.md. A changed setting starts new pods.
# Add OUTBOX_PROJECT, OUTBOX_INSTANCE and OUTBOX_DATABASE.
settings:
"""
#: What a registry and a label accept, so that a wrong value fails here and not in a pod.
_PART = "[a-z0-9]+([._-]+[a-z0-9]+)*"
REPOSITORY = rf"^([A-Za-z0-9.-]+(:[0-9]+)?/)?{_PART}(/{_PART})*$"
IMAGE = {
    "repository": REPOSITORY,
    "tag": r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$",
    "digest": "^(sha256:[0-9a-f]{64})?$",
}
LABEL = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"


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
        "templates/_helpers.tpl": HELPERS,
        **{f"templates/{each['kind'].lower()}.yaml": NOTE + _template(each) for each in objects if "data" not in each},
        **{f"templates/{Path(file).name}": NOTE + _optional(file, value) for file, value in COMPONENTS.items()},
    }


def _chart() -> Iterator[str]:
    code = (K8S.parent / "outbox/_version.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    yield from ("apiVersion: v2", "name: publishworker", "type: application")
    yield "description: The worker of the transactional outbox for Spanner and Pub/Sub"
    yield from (f"version: {version}", f'appVersion: "{version}"')


def _template(manifest: dict[str, Any]) -> str:
    text = yaml.safe_dump(manifest, sort_keys=False, width=1000)
    env = "        env:\n"
    text = re.sub(r" +envFrom:\n.*\n.*\n", "" if env in text else env, text).replace(env, SETTINGS)
    for old, new in REPLACED.items():
        text = re.sub(old, new, text)
    text = text.replace("terminationGracePeriodSeconds: 60", f"terminationGracePeriodSeconds: {GRACE}")
    return text.replace("  replicas: 2\n", REPLICAS)


def _optional(file: str, value: str) -> str:
    """Return the template of an object of a component, which the chart has if the value is true."""
    text = _template(yaml.safe_load((K8S / "components" / file).read_text(encoding="utf-8")))
    for old, new in OF_COMPONENTS.items():
        text = re.sub(old, new, text)
    return f"{{{{- if .Values.{value} }}}}\n{text}{{{{- end }}}}\n"


def _schema() -> str:
    """Return the schema of the values, so that Helm refuses a misspelled setting."""
    reference = json.loads((K8S.parent / "docs/reference/settings.schema.json").read_text(encoding="utf-8"))
    settings = {field.variable: reference["properties"][field.variable] for field in fields_of(WorkerSettings)}
    variable = _object(
        {"name": _text("^[A-Za-z_.-][A-Za-z0-9_.-]*$"), "value": _text(), "valueFrom": {"type": "object"}}
    )
    properties = {
        "image": _object({name: _text(pattern) for name, pattern in IMAGE.items()}),
        "replicas": {"type": ["integer", "null"], "minimum": 0},
        "autoscaling": _object(
            {
                "enabled": {"type": "boolean"},
                "minReplicas": {"type": "integer", "minimum": 1},
                "maxReplicas": {"type": "integer", "minimum": 1},
                "averageValue": _text("^[0-9]+$"),
            }
        ),
        "job": _object({"name": _text("^[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?$"), "args": _list(_text())}),
        "env": _text(LABEL),
        "settings": _object(dict(sorted(settings.items()))),
        "extraEnv": _list(variable | {"required": ["name"]}),
        "global": {"type": "object"},
    }
    return json.dumps({"$schema": reference["$schema"], **_object(properties)}, indent=2) + "\n"


def _text(pattern: str | None = None) -> dict[str, Any]:
    return {"type": "string", **({"pattern": pattern} if pattern else {})}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


if __name__ == "__main__":
    main()

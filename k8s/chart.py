"""Write the Helm chart in k8s/helm from the kustomize base: `make chart`. A test compares what both render.

The objects are those of the base and of components. A hole is a key or an item such as "@labels", at the place where
values of a release go, and `_holes` has their templates.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from chart_schema import METRICS, POD, schema

K8S = Path(__file__).parent
CHART = K8S / "helm"
#: The first Kubernetes with all fields of the manifests: `matchLabelKeys` and `unhealthyPodEvictionPolicy`.
KUBE_VERSION = ">=1.27.0-0"
#: The names of the objects contain the release, so two releases fit into one namespace. A label has at most 63
#: characters, so a name is cut before its suffix. A parent chart can contain this one twice, with an alias for each, in
#: one release. A tag can be too long for a label.
HELPERS = """\
{{- define "publishworker.name" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- default $name .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}
{{- define "publishworker.named" -}}
{{- $suffix := last . -}}
{{- include "publishworker.name" (first .) | trunc (int (sub 62 (len $suffix))) | trimSuffix "-" }}-{{ $suffix -}}
{{- end }}
{{- define "publishworker.instance" -}}
{{- ternary .Release.Name (include "publishworker.name" .) (eq .Chart.Name "publishworker") -}}
{{- end }}
{{- define "publishworker.tag" -}}
{{- .Values.image.tag | default .Chart.AppVersion -}}
{{- end }}
{{- define "publishworker.given" -}}
{{- range .Values.extraEnv }}{{ .name }} {{ end -}}
{{- end }}
{{- define "publishworker.version" -}}
{{- include "publishworker.tag" . | trunc 63 | trimAll "-_." -}}
{{- end }}
"""
NAME = 'include "publishworker.name" .'
ACCOUNT = f"default ({NAME}) .Values.serviceAccount.name"
BACKLOG, JOB, CONSOLE = (
    f'include "publishworker.named" (list . {suffix})' for suffix in ('"backlog"', '"job"', '"console"')
)
JOB_NAME = 'include "publishworker.named" (list . .Values.job.name)'
#: What the values replace. In the objects these are the only places with these texts.
REPLACED = {
    r"(instance: )(publishworker|outbox-console)$": r'\1{{ include "publishworker.instance" . | quote }}',
    r"(service: )publishworker$": rf"\1{{{{ {NAME} }}}}",
    r"(version: )unset$": r'\1{{ include "publishworker.version" . | quote }}',
    r"(env: )unset$": r"\1{{ .Values.env | quote }}",
    r"env:unset,service:publishworker": f"env:{{{{ .Values.env }}}},service:{{{{ {NAME} }}}}",
    r"^(  name: )publishworker-backlog$": rf"\1{{{{ {BACKLOG} }}}}",
    r"datadogmetric@outbox:publishworker-backlog$": f"datadogmetric@{{{{ .Release.Namespace }}}}:{{{{ {BACKLOG} }}}}",
    r"(kind: ServiceAccount\n(?:.*\n)+?  name: )publishworker$": rf"\1{{{{ {ACCOUNT} }}}}",
    r"^(  name: )publishworker$": rf"\1{{{{ {NAME} }}}}",
    r"^(  scaleTargetRef:\n.*\n.*\n    name: )publishworker$": rf"\1{{{{ {NAME} }}}}",
    r"(serviceAccountName: )publishworker$": rf"\1{{{{ {ACCOUNT} }}}}",
    r"(kind: Job\nmetadata:\n  name: )publishworker-job$": rf"\1{{{{ {JOB_NAME} }}}}",
    r"^(  name: )publishworker-job$": rf"\1{{{{ {JOB} }}}}",
    r"(serviceAccountName: )publishworker-job$": rf"\1{{{{ default ({JOB}) .Values.job.serviceAccountName }}}}",
    r"^(  name: )outbox-console$": rf"\1{{{{ {CONSOLE} }}}}",
    r"(serviceAccountName: )outbox-console$": rf"\1{{{{ default ({CONSOLE}) .Values.console.serviceAccountName }}}}",
    r"image: publishworker:unset$": 'image: "{{ .Values.image.repository }}:{{ include "publishworker.tag" . }}'
    '{{ with .Values.image.digest }}@{{ . }}{{ end }}"',
    r"image: outbox-console:unset$": "{{- with .Values.console.image }}\n        "
    'image: "{{ .repository }}:{{ default (include "publishworker.tag" $) .tag }}{{ with .digest }}@{{ . }}{{ end }}"\n'
    "        {{- end }}",
    r"(replicas: 2)$": '{{- if not (or .Values.autoscaling.enabled (kindIs "invalid" .Values.replicas)) }}\n'
    "  replicas: {{ .Values.replicas }}\n  {{- end }}",
    r"(minReplicas|maxReplicas): \d+$": r"\1: {{ .Values.autoscaling.\1 }}",
    r"^(spec:\n  maxUnavailable: )1$": r"\1{{ .Values.podDisruptionBudget.maxUnavailable }}",
    r"averageValue: '5000'$": "averageValue: {{ .Values.autoscaling.averageValue | quote }}",
    # As in the base, 30 s more than the setting, whose value can be a fraction. A variable of extraEnv replaces it.
    r"(terminationGracePeriodSeconds: )60$": '{{- $timeout := default "30" '
    ".Values.settings.OUTBOX_SHUTDOWN_TIMEOUT }}\n"
    '      {{- range .Values.extraEnv }}{{ if eq .name "OUTBOX_SHUTDOWN_TIMEOUT" }}'
    "{{ $timeout = default $timeout .value }}{{ end }}{{ end }}\n"
    r"      \1{{ add 30 (ceil (float64 $timeout)) }}",
}  # fmt: skip
#: The templates of the chart: the files of their objects, none for an object of the base, and when the chart has them.
TEMPLATES = {
    "deployment": ([], ""),
    "serviceaccount": ([], ".Values.serviceAccount.create"),
    "poddisruptionbudget": ([], ".Values.podDisruptionBudget.enabled"),
    "datadogmetric": (
        ["autoscaling/datadogmetric"], "(and .Values.autoscaling.enabled (not .Values.autoscaling.metrics))",
    ),
    "horizontalpodautoscaler": (["autoscaling/horizontalpodautoscaler"], ".Values.autoscaling.enabled"),
    "networkpolicy": (["network-policy/networkpolicy"], ".Values.networkPolicy.enabled"),
    "job": (["job/serviceaccount", "job/job"], ".Values.job.args"),
    "console": (["console/serviceaccount", "console/deployment"], ".Values.console.enabled"),
    "console-networkpolicy": (
        ["console/networkpolicy"], "(and .Values.console.enabled .Values.networkPolicy.enabled)",
    ),
}  # fmt: skip
NO_METRIC = (
    "autoscaling.enabled needs Datadog's metrics: set metrics=datadog-csi or metrics=datadog-udp, and enable the "
    "external metrics of the Cluster Agent. Or set autoscaling.metrics to metrics of your own"
)
NOTE = "# Written by `make chart` from k8s/base and components. Change those, which say why, and not this file.\n"
#: Resources and security contexts follow from the manifests.
VALUES = """\
# false for a parent chart that installs no worker.
enabled: true
# The repository has no tag. An empty tag is the version of the chart. A digest such as sha256:... pins the image. The
# tag is then only the label `version`.
image:
  repository: publishworker
  tag: ""
  digest: ""
  pullPolicy: ""
imagePullSecrets: []
# null if an autoscaler of your own sets the number. Otherwise each `helm upgrade` would reset it.
replicas: 2
# The worker's settings, all as texts: docs/reference/settings.md. A changed setting starts new pods.
# Add OUTBOX_PROJECT, OUTBOX_INSTANCE and OUTBOX_DATABASE.
settings:
@settings@
# Variables of other libraries, and variables with `valueFrom`, as in a container of a pod. They replace the chart's.
extraEnv: []
envFrom: []
# Where the metrics go, by a component: datadog-csi, datadog-udp or opentelemetry. Without one, there are none.
metrics: ""
# The environment in Datadog.
env: production
# Sets the number of workers by Datadog's metric of the backlog, and needs one of Datadog's `metrics`:
# docs/operations/scaling.md. `metrics` of an autoscaler (autoscaling/v2) replace that metric.
autoscaling:
  enabled: false
  minReplicas: 2
  maxReplicas: 10
  averageValue: "5000"
  metrics: []
podDisruptionBudget:
  enabled: true
  maxUnavailable: 1
# Denies all ingress. `egress` replaces the rules, which are those of GKE: docs/operations/deploy.md.
networkPolicy:
  enabled: false
  egress: []
# The account has the name of the Deployment, or this one. With create=false it exists already.
serviceAccount:
  create: true
  name: ""
  annotations: {}
# With args, a Job runs one `outbox` command. Its name ends with this one. Its settings override those of the worker.
# Its account is a new one whose name ends with job, or this one.
job:
  name: command
  args: []
  settings: {}
  serviceAccountName: ""
  resources: @job@
# docs/operations/console.md. Its settings override those of the worker.
console:
  enabled: false
  image:
    repository: outbox-console
    tag: ""
    digest: ""
  serviceAccountName: ""
  settings:
@console-settings@
  resources: @console@
# Names end with the chart's name, or with this one. The second one is the whole name.
nameOverride: ""
fullnameOverride: ""
# Of all objects; of the worker's Deployment; of all pods.
labels: {}
annotations: {}
podLabels: {}
podAnnotations: {}
# Of all pods.
priorityClassName: ""
runtimeClassName: ""
nodeSelector: {}
tolerations: []
affinity: {}
dnsConfig: {}
hostAliases: []
podSecurityContext: @podSecurityContext@
# Of all containers.
securityContext: @securityContext@
# Of the worker. Without constraints, its pods are spread over zones and nodes.
topologySpreadConstraints: []
resources: @resources@
volumes: []
volumeMounts: []
initContainers: []
extraContainers: []
"""
#: Keys of small maps in one line.
SMALL = {
    "protocol",
    "port",
    "cidr",
    "fieldPath",
    "type",
    "value",
    "periodSeconds",
    "medium",
    "sizeLimit",
    "memory",
    "cpu",
}


class Compact(yaml.SafeDumper):
    """Writes lists of texts and small maps in one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        """Return the node of a list, in one line if it has only texts without holes."""
        node = super().represent_sequence(tag, sequence, flow_style)
        node.flow_style = all(isinstance(each, yaml.ScalarNode) and each.value[:1] != "@" for each in node.value)
        return node

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        """Return the node of a map, in one line if it has only such keys, with texts."""
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = all(isinstance(value, yaml.ScalarNode) and key.value in SMALL for key, value in node.value)
        return node


def dumped(value: Any) -> str:
    """Return YAML."""
    return yaml.dump(value, Dumper=Compact, sort_keys=False, width=1000)


def main() -> None:
    """Write the chart."""
    for name, text in files().items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote k8s/helm/{name}")


def files() -> dict[str, str]:
    """Return the text of each file of the chart. Needs kubectl, but no cluster."""
    base = {each["kind"].lower(): each for each in _kustomized("base")}
    parts = {
        name: [_component(f"{file}.yaml") for file in found] or [base[name]] for name, (found, _) in TEMPLATES.items()
    }
    return {
        "Chart.yaml": NOTE + "\n".join(_chart()) + "\n",
        "values.yaml": NOTE + _values(base["configmap"]["data"], parts),
        "values.schema.json": schema(),
        "templates/_helpers.tpl": HELPERS + _pod_helper(),
        **{f"templates/{name}.yaml": NOTE + _template(name, parts[name]) for name in TEMPLATES},
    }


def _kustomized(folder: str) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(K8S / folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "{{" in text:
        raise ValueError(f"{folder} contains {{{{, which Helm would read")
    return list(yaml.safe_load_all(text))


def _component(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((K8S / "components" / file).read_text(encoding="utf-8"))
    return found


def _chart() -> Iterator[str]:
    code = (K8S.parent / "outbox/_version.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    yield from ("apiVersion: v2", "name: publishworker", "type: application")
    yield "description: The worker of the transactional outbox for Spanner and Pub/Sub"
    yield from (f"version: {version}", f'appVersion: "{version}"', f'kubeVersion: "{KUBE_VERSION}"')


def _values(settings: dict[str, str], parts: dict[str, list[dict[str, Any]]]) -> str:
    pods = {name: parts[name][-1]["spec"]["template"]["spec"] for name in ("deployment", "job", "console")}
    [map] = _component("console/kustomization.yaml")["configMapGenerator"]
    of_console = dict(each.split("=", 1) for each in map["literals"])
    given: dict[str, Any] = {
        "job": pods["job"]["containers"][0]["resources"],
        "console": pods["console"]["containers"][0]["resources"],
        "resources": pods["deployment"]["containers"][0]["resources"],
        "podSecurityContext": pods["deployment"]["securityContext"],
        "securityContext": pods["deployment"]["containers"][0]["securityContext"],
    }
    text = VALUES
    for name, value in given.items():
        indent = "    " if name in ("job", "console") else "  "
        text = text.replace(f" @{name}@", "\n" + _indented(dumped(value), indent).rstrip())
    for name, found, indent in (("settings", settings, "  "), ("console-settings", of_console, "    ")):
        text = text.replace(f"@{name}@", "\n".join(f"{indent}{key}: {json.dumps(found[key])}" for key in sorted(found)))
    return text


def _template(name: str, objects: list[dict[str, Any]]) -> str:
    """Return a template, with the objects that it has if its value and `enabled` are true."""
    texts = []
    for each in objects:
        text = dumped(_with_holes(name, each))
        for old, new in REPLACED.items():
            text = re.sub(old, new, text, flags=re.MULTILINE)
        text = _with_values(text)
        if each["kind"] == "ServiceAccount" and len(objects) > 1:
            text = f"{{{{- if not .Values.{name}.serviceAccountName }}}}\n{text}---\n{{{{- end }}}}\n"
        texts.append(text)
    needs = TEMPLATES[name][1]
    condition = f"and .Values.enabled {needs}" if needs else ".Values.enabled"
    check = (
        f'{{{{- if and (not .Values.autoscaling.metrics) (not (hasPrefix "datadog" .Values.metrics)) }}}}\n'
        f"{{{{- fail {json.dumps(NO_METRIC)} }}}}\n{{{{- end }}}}\n"
        if name == "horizontalpodautoscaler"
        else ""
    )
    return f"{{{{- if {condition} }}}}\n{check}{''.join(texts)}{{{{- end }}}}\n"


def _with_holes(name: str, manifest: dict[str, Any]) -> dict[str, Any]:
    metadata, spec = manifest["metadata"], manifest.get("spec", {})
    if "labels" in metadata:
        metadata["labels"]["@+labels"] = None
    else:
        metadata["@labels"] = None
    if manifest["kind"] == "Deployment" and name == "deployment":
        metadata["@annotations"] = None
    if manifest["kind"] == "ServiceAccount" and name == "serviceaccount":
        metadata["@serviceAccount.annotations"] = None
    if manifest["kind"] == "ServiceAccount":
        return manifest
    if "egress" in spec:
        added = [] if name == "console-networkpolicy" else ["@metrics/egress"]
        manifest["spec"] = _or_else("networkPolicy.egress", {**spec, "egress": [*spec["egress"], *added]})
    if "metrics" in spec:
        manifest["spec"] = _or_else("autoscaling.metrics", spec)
    if "template" in spec:
        spec["template"] = _pod(name, spec["template"])
    return manifest


def _or_else(value: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with holes around the one that a value replaces."""
    key = value.rpartition(".")[2]
    found = {}
    for each, old in fields.items():
        found |= {f"@?{value}": None, each: old, "@end": None} if each == key else {each: old}
    return found


def _pod(name: str, template: dict[str, Any]) -> dict[str, Any]:
    metadata, spec = template["metadata"], template["spec"]
    metadata["labels"]["@+podLabels"] = None
    if "annotations" in metadata:
        metadata["annotations"]["@+podAnnotations"] = None
    else:
        metadata["@podAnnotations"] = None
    [container] = spec["containers"]
    container |= {"securityContext": "@", "resources": "@"}
    place = {"deployment": "", "job": "job.", "console": "console."}[name]
    result = {}
    for key, value in container.items():
        new = {
            "image": {"image": value, "@image.pullPolicy": None},
            "args": {"@job.args": None} if name == "job" else {"args": value},
            "envFrom": {"@envFrom": None},
            "env": {},
            "resources": {f"@{place}resources": None},
            "securityContext": {"@securityContext": None},
            "volumeMounts": {"volumeMounts": [*value, "@metrics/volumeMounts", "@+volumeMounts"]},
        }.get(key, {key: value})
        if key == "envFrom":
            new["env"] = [
                f"@settings/{place}",
                *_unless_given(container.get("env", [])),
                *_of_worker(name, "@metrics/env"),
                "@+extraEnv",
            ]
        result |= new
    spec["containers"] = [result, *_of_worker(name, "@+extraContainers")]
    spec["securityContext"] = "@"
    pod: dict[str, Any] = {}
    for key, value in spec.items():
        if key == "securityContext":
            pod["@pod"] = None
        elif key == "topologySpreadConstraints":
            pod |= _or_else(key, {key: value})
        elif key == "volumes":
            pod[key] = [*value, "@metrics/volumes", "@+volumes"]
        else:
            pod[key] = value
    if name == "deployment":
        pod["@initContainers"] = None
    return {**template, "spec": pod}


def _unless_given(variables: list[dict[str, Any]]) -> Iterator[Any]:
    """Yield variables, with holes around each one that `extraEnv` replaces: the server refuses a second one."""
    for each in variables:
        yield from (f"@unless/{each['name']}", each, "@end")


def _of_worker(name: str, *holes: str) -> tuple[str, ...]:
    return holes if name == "deployment" else ()


def _with_values(text: str) -> str:
    return re.sub(r"^( *)(?:- '@(.+)'|'@(.+)': null)\n", _filled, text, flags=re.MULTILINE)


def _filled(hole: re.Match[str]) -> str:
    """Return the template of a hole. `toYaml` begins with a new line."""
    indent, what = len(hole[1]), hole[2] or hole[3]
    kind, value = (what[0], what[1:]) if what[0] in "+?" else ("", what)
    key = {
        "podSecurityContext": "securityContext",
        "podAnnotations": "annotations",
        "image.pullPolicy": "imagePullPolicy",
    }.get(what, value.rpartition(".")[2])
    if what == "end":
        lines = "{{- end }}\n"
    elif what.startswith("unless/"):
        lines = f'{{{{- if not (has "{what.partition("/")[2]}" $given) }}}}\n'
    elif what.startswith("settings/"):
        lines = _settings(what.partition("/")[2])
    elif what.startswith("metrics/"):
        lines = "".join(_metrics(what.partition("/")[2]))
    elif what == "pod":
        lines = f'{{{{- include "publishworker.pod" . | nindent {indent} }}}}\n'
    elif POD.get(what) == "" or what == "image.pullPolicy":
        lines = f"{{{{- with .Values.{value} }}}}\n{key}: {{{{ . }}}}\n{{{{- end }}}}\n"
    elif kind == "+":
        lines = f"{{{{- with .Values.{value} }}}}\n{{{{- toYaml . | nindent {indent} }}}}\n{{{{- end }}}}\n"
    else:
        lines = f"{{{{- with .Values.{value} }}}}\n{key}:\n  {{{{- toYaml . | nindent {indent + 2} }}}}\n"
        lines += "{{- else }}\n" if kind == "?" else "{{- end }}\n"
    return _indented(lines, hole[1])


def _pod_helper() -> str:
    """Return the template of the values that all pods have."""
    fields = "\n".join(f"'@{each}': null" for each in (*POD, "podSecurityContext"))
    return '{{- define "publishworker.pod" -}}\n' + _with_values(fields + "\n") + "{{- end }}\n"


def _settings(place: str) -> str:
    """Return the variables of a pod. `helm upgrade` would change a ConfigMap that older pods still read."""
    given = '{{- $given := include "publishworker.given" . | splitList " " }}\n'
    variables = (
        "{{- range $name, $value := .Values.%ssettings }}\n{{- if not (has $name $given) }}\n"
        "- name: {{ $name }}\n  value: {{ $value | quote }}\n{{- end }}\n{{- end }}\n"
    )
    names = "{{- $given = concat $given (keys .Values.%ssettings) }}\n"
    own = variables % place + names % place
    return given + own + (variables % "" if place else "")


def _metrics(place: str) -> Iterator[str]:
    """Yield what the components of metrics add to a list."""
    for component in METRICS:
        patches = _component(f"{component}/kustomization.yaml")["patches"]
        operations = [each for patch in patches for each in yaml.safe_load(patch["patch"])]
        added = [each["value"] for each in operations if each["path"].endswith(f"/{place}/-")]
        if added:
            text = _with_values(dumped([*_unless_given(added)] if place == "env" else added))
            yield f'{{{{- if eq .Values.metrics "{component}" }}}}\n{text}{{{{- end }}}}\n'


def _indented(text: str, indent: str) -> str:
    return "".join(f"{indent}{line}\n" for line in text.splitlines())


if __name__ == "__main__":
    main()

"""The schema of the chart's values, so that Helm refuses a misspelled one."""

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate

from outbox.program.settings import DatabaseSettings, fields_of
from outbox_admin.web.console_settings import ConsoleSettings
from publishworker.process.worker_settings import WorkerSettings

REFERENCE = Path(__file__).parents[1] / "docs/reference/settings.schema.json"
#: The Kubernetes whose fields the values may have.
FIELDS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema/v1.33.0-local-strict"
#: The components from which the value `metrics` chooses one.
METRICS = ("datadog-csi", "datadog-udp", "opentelemetry")
#: The values that are fields of each pod, with the object of Kubernetes whose fields the value, or each item, has.
#: Others are a text, or a map of texts.
POD = {
    "imagePullSecrets": "localobjectreference-v1", "priorityClassName": "", "runtimeClassName": "",
    "nodeSelector": None, "tolerations": "toleration-v1", "affinity": "affinity-v1", "dnsConfig": "poddnsconfig-v1",
    "hostAliases": "hostalias-v1",
}  # fmt: skip
#: What a registry and a label accept, so that a wrong value fails here and not in a pod.
_PART = "[a-z0-9]+([._-]+[a-z0-9]+)*"
REPOSITORY = rf"^(([A-Za-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?/)?{_PART}(/{_PART})*$"
IMAGE = {
    "repository": REPOSITORY,
    "tag": r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$",
    "digest": "^(sha256:[0-9a-f]{64})?$",
}
LABEL = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
#: The name of an object, or none.
NAMED = r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$"
_LOOKS = re.compile(r"\(\?<?[!=]")
#: Labels of the chart, which the values cannot set a second time.
OWN_LABELS = r"^(app\.kubernetes\.io/(name|instance|part-of)|tags\.datadoghq\.com/.*)$"


def schema() -> str:
    """Return the schema as JSON."""
    return (
        json.dumps({"$schema": _settings_schema()["$schema"], **_object(_of_release() | _of_pods())}, indent=1) + "\n"
    )


def _of_release() -> dict[str, Any]:
    """Return the schemas of what a release installs, and of names and labels."""
    yes, account = {"type": "boolean"}, _text(NAMED)
    map = {"type": "object", "additionalProperties": _text()}
    own_labels = {
        "type": "object",
        "additionalProperties": _text(f"^$|{LABEL}"),
        "propertyNames": {"not": {"pattern": OWN_LABELS}},
    }
    image = {name: _text(pattern) for name, pattern in IMAGE.items()}
    return {
        "enabled": yes,
        "image": _object(image | {"pullPolicy": {"enum": ["", "Always", "IfNotPresent", "Never"]}}),
        "replicas": {"type": ["integer", "null"], "minimum": 0},
        "settings": _settings(WorkerSettings),
        "metrics": {"enum": ["", *METRICS]},
        "env": _text(LABEL),
        "autoscaling": _object(
            {
                "enabled": yes,
                "minReplicas": {"type": "integer", "minimum": 1},
                "maxReplicas": {"type": "integer", "minimum": 1},
                "averageValue": _text("^[0-9]+$"),
                "metrics": _list(_fields("metricspec-autoscaling-v2")),
            }
        ),
        "podDisruptionBudget": _object(
            {
                "enabled": yes,
                "maxUnavailable": {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]{1,3}%$"},
            }
        ),
        "networkPolicy": _object({"enabled": yes, "egress": _list(_fields("networkpolicyegressrule-networking-v1"))}),
        "serviceAccount": _object({"create": yes, "name": account, "annotations": map}),
        "job": _object(
            {
                "name": _text("^[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?$"),
                "args": _list(_text()),
                "settings": _settings(DatabaseSettings),
                "serviceAccountName": account,
                "resources": _fields("resourcerequirements-v1"),
            }
        ),
        "console": _object(
            {
                "enabled": yes,
                "image": _object(image),
                "serviceAccountName": account,
                "settings": _settings(ConsoleSettings, DatabaseSettings, WorkerSettings),
                "resources": _fields("resourcerequirements-v1"),
            }
        ),
        **dict.fromkeys(("nameOverride", "fullnameOverride"), account),
        **dict.fromkeys(("labels", "podLabels"), own_labels),
        **dict.fromkeys(("annotations", "podAnnotations"), map),
        "global": {"type": "object"},
    }


def _of_pods() -> dict[str, Any]:
    """Return the schemas of the values that are fields of pods and containers."""
    variable = _object(
        {
            "name": _text("^[A-Za-z_.-][A-Za-z0-9_.-]*$"),
            "value": _text(),
            "valueFrom": {"type": "object"},
        }
    )
    return {
        "extraEnv": _list(variable | {"required": ["name"]}),
        "envFrom": _list(_fields("envfromsource-v1")),
        **{name: _of_pod(name, fields) for name, fields in POD.items()},
        "podSecurityContext": _fields("podsecuritycontext-v1"),
        "securityContext": _fields("securitycontext-v1"),
        # Without a selector, a constraint has no effect.
        "topologySpreadConstraints": _list(_fields("topologyspreadconstraint-v1", "labelSelector")),
        "resources": _fields("resourcerequirements-v1"),
        "volumes": _list(_fields("volume-v1")),
        "volumeMounts": _list(_fields("volumemount-v1")),
        "initContainers": _list(_fields("container-v1")),
        "extraContainers": _list(_fields("container-v1")),
    }


def _settings_schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return found


def _settings(*classes: Any) -> dict[str, Any]:
    """Return the schema of environment variables. Helm's regular expressions look neither ahead nor behind."""
    known = _settings_schema()["properties"]
    names = sorted({field.variable for each in classes for field in fields_of(each)})
    return _object({name: {k: v for k, v in known[name].items() if not _LOOKS.search(str(v))} for name in names})


def _of_pod(name: str, fields: str | None) -> dict[str, Any]:
    if not fields:
        return _text() if fields == "" else {"type": "object", "additionalProperties": _text()}
    return _fields(fields) if name in ("affinity", "dnsConfig") else _list(_fields(fields))


def _fields(name: str, *needed: str) -> dict[str, Any]:
    """Return the schema of an object of Kubernetes: the names of its fields, their types, and which it needs."""
    found = json.loads((FIELDS / f"{name}.json").read_text(encoding="utf-8"))
    types = {key: {"type": each["type"]} if "type" in each else {} for key, each in found["properties"].items()}
    required = [*found.get("required", []), *needed]
    return _object(types) | ({"required": required} if required else {})


def _text(pattern: str | None = None) -> dict[str, Any]:
    return {"type": "string", **({"pattern": pattern} if pattern else {})}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}

"""The fields of the Spark operator's kinds, which no package of schemas has, and a check of objects against them.

Fields, types and what is required are those of
https://github.com/kubeflow/spark-operator/blob/07f3cecdbf9afe670d991dfbdb911334eb29930b/api/v1beta2/sparkapplication_types.go
https://github.com/kubeflow/spark-operator/blob/0dc641bd1d7d262e4a8c5564c926fc4716bcf722/api/v1beta2/scheduledsparkapplication_types.go

Kubernetes drops a field that a definition does not know without a word; here it is a complaint.
"""

from collections.abc import Iterator
from typing import Any

import kubernetes_validate

from tests.manifests.rendering import KUBERNETES, Object

#: A field of a type that is not looked into, because nothing here uses it.
UNUSED: dict[str, Any] = {}

_POD: dict[str, Any] = {
    "template": "PodTemplateSpec",
    "cores": int,
    "coreLimit": str,
    "memory": str,
    "memoryOverhead": str,
    "gpu": UNUSED,
    "image": str,
    "configMaps": UNUSED,
    "secrets": UNUSED,
    "env": UNUSED,
    "envVars": {str: str},
    "envFrom": UNUSED,
    "envSecretKeyRefs": UNUSED,
    "labels": {str: str},
    "annotations": {str: str},
    "volumeMounts": UNUSED,
    "affinity": UNUSED,
    "tolerations": UNUSED,
    "podSecurityContext": UNUSED,
    "securityContext": UNUSED,
    "schedulerName": str,
    "sidecars": UNUSED,
    "initContainers": UNUSED,
    "hostNetwork": bool,
    "nodeSelector": {str: str},
    "dnsConfig": UNUSED,
    "terminationGracePeriodSeconds": int,
    "serviceAccount": str,
    "hostAliases": UNUSED,
    "shareProcessNamespace": bool,
    "runtimeClassName": str,
    "coreRequest": str,
    "javaOptions": str,
    "lifecycle": UNUSED,
    "ports": UNUSED,
    "priorityClassName": str,
}
APPLICATION: dict[str, Any] = {
    "type": ("Java", "Python", "Scala", "R"),
    "sparkVersion": str,
    "mode": ("cluster", "client"),
    "proxyUser": str,
    "image": str,
    "imagePullPolicy": str,
    "imagePullSecrets": [str],
    "mainClass": str,
    "mainApplicationFile": str,
    "arguments": [str],
    "sparkConf": {str: str},
    "hadoopConf": {str: str},
    "sparkConfigMap": str,
    "hadoopConfigMap": str,
    "volumes": UNUSED,
    "driver": _POD
    | {"podName": str, "kubernetesMaster": str, "serviceAnnotations": {str: str}, "serviceLabels": {str: str}},
    "executor": _POD | {"instances": int, "deleteOnTermination": bool},
    "deps": UNUSED,
    "restartPolicy": {
        "type": ("Never", "Always", "OnFailure"),
        "onSubmissionFailureRetries": int,
        "onFailureRetries": int,
        "onSubmissionFailureRetryInterval": int,
        "onFailureRetryInterval": int,
    },
    "nodeSelector": {str: str},
    "failureRetries": int,
    "retryInterval": int,
    "pythonVersion": ("2", "3"),
    "memoryOverheadFactor": str,
    "monitoring": UNUSED,
    "batchScheduler": str,
    "timeToLiveSeconds": int,
    "batchSchedulerOptions": UNUSED,
    "sparkUIOptions": UNUSED,
    "driverIngressOptions": UNUSED,
    "dynamicAllocation": UNUSED,
}
SCHEDULED: dict[str, Any] = {
    "schedule": str,
    "template": APPLICATION,
    "suspend": bool,
    "concurrencyPolicy": ("Allow", "Forbid", "Replace"),
    "successfulRunHistoryLimit": int,
    "failedRunHistoryLimit": int,
}
REQUIRED = {
    "spec": {"schedule", "template"},
    "spec.template": {"type", "sparkVersion", "mainApplicationFile", "driver", "executor"},
}


def complaints(each: Object) -> Iterator[str]:
    """Yield what the definition of ScheduledSparkApplication, and of the pods in it, has against an object."""
    if (each["apiVersion"], each["kind"]) != ("sparkoperator.k8s.io/v1beta2", "ScheduledSparkApplication"):
        yield f"no kind of the Spark operator: {each['apiVersion']} {each['kind']}"
    yield from _against(each["spec"], SCHEDULED, "spec")


def _against(value: Any, wanted: Any, path: str) -> Iterator[str]:
    if wanted == "PodTemplateSpec":
        yield from _pod_template(value, path)
    elif wanted is UNUSED:
        yield f"{path} is not in the table of types yet"
    elif not isinstance(wanted, dict):
        yield from _leaf(value, wanted, path)
    elif not isinstance(value, dict):
        yield f"{path} is no object"
    elif str in wanted:
        yield from (f"{path}.{key} is no str" for key, item in value.items() if type(item) is not str)
    else:
        yield from (f"{path}.{key} is missing" for key in REQUIRED.get(path, set()) - value.keys())
        yield from (f"{path}.{key} is no field" for key in value.keys() - wanted.keys())
        for key in value.keys() & wanted.keys():
            yield from _against(value[key], wanted[key], f"{path}.{key}")


def _leaf(value: Any, wanted: Any, path: str) -> Iterator[str]:
    if isinstance(wanted, tuple):
        if value not in wanted:
            yield f"{path} is {value!r}, not one of {wanted}"
    elif isinstance(wanted, list):
        if not isinstance(value, list) or not all(type(item) is wanted[0] for item in value):
            yield f"{path} is no list of {wanted[0].__name__}"
    elif type(value) is not wanted:
        yield f"{path} is no {wanted.__name__}"


def _pod_template(value: Any, path: str) -> Iterator[str]:
    # The one object of Kubernetes that is nothing but a template of pods.
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": value}
    try:
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{path}: {error.message}"

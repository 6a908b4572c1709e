"""What must hold for rendered objects: each rule is a function from objects to complaints, none of which is good.

A linter of Kubernetes would say some of this; the rest only this project can know. `RULES` has them all.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from outbox.cli.schema import DEFAULT_SHARDS
from outbox.errors import SettingError
from outbox.settings import fields_of
from publishworker.settings import WorkerSettings
from tests.manifests.rendering import Object, Objects, container, containers, environment, of_kind, pod, the, worker

#: Seconds from the end of the drain timeout to the end of the process: a commit (10), the fleet's row, metrics.
GRACE_MARGIN = 15
#: Fields of DatadogMetric's spec that are for users; `externalMetricName` is "reserved for internal use". From
#: https://github.com/DataDog/datadog-operator/blob/main/api/datadoghq/v1alpha1/datadogmetric_types.go
METRIC_FIELDS = {"query", "maxAge", "timeWindow"}
#: Kinds of volumes that Pod Security "restricted" allows, from
#: https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
#: Variables in the ConfigMap that are not ours, all in docs/reference/settings.md.
FOREIGN = {
    "SPANNER_EMULATOR_HOST",
    "PUBSUB_EMULATOR_HOST",
    "GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS_FOR_RW",
}
#: Where the worker may go: (address or anywhere, protocol, port).
EGRESS = {
    ("anywhere", "UDP", 53),
    ("anywhere", "TCP", 53),
    ("anywhere", "TCP", 443),
    ("anywhere", "UDP", 8125),
    ("169.254.169.252/32", "TCP", 988),
    ("169.254.169.254/32", "TCP", 80),
}
TAGS = ("tags.datadoghq.com/env", "tags.datadoghq.com/service", "tags.datadoghq.com/version")


def pod_security(objects: Objects) -> Iterator[str]:
    """Pod Security "restricted", field by field: what is said of pods."""
    for deployment in of_kind(objects, "Deployment"):
        spec = pod(deployment)
        context = spec.get("securityContext", {})
        if context.get("runAsNonRoot") is not True:
            yield "the pod may run as root"
        if not (context.get("runAsUser") or 0) > 0 or not (context.get("runAsGroup") or 0) > 0:
            yield "user and group are no numbers above 0"
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield "no seccomp profile"
        if context.get("sysctls"):
            yield "sysctls are set"
        yield from (f"{field} is set" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field))
        for volume in spec.get("volumes", []):
            yield from (f"volume of kind {kind}" for kind in volume.keys() - {"name"} - VOLUMES)


def container_security(objects: Objects) -> Iterator[str]:
    """The same of containers; and, beyond it, a read-only root file system."""
    for deployment in of_kind(objects, "Deployment"):
        for each in containers(deployment):
            own = each.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False:
                yield f"{each['name']}: privileges may escalate"
            if own.get("capabilities") != {"drop": ["ALL"]}:
                yield f"{each['name']}: capabilities are not dropped"
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{each['name']}: the root file system can be written"
            if own.keys() - {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"}:
                yield f"{each['name']}: the container changes what the pod says"
            if any("hostPort" in port for port in each.get("ports", [])):
                yield f"{each['name']}: a port of the node"


def identity(objects: Objects) -> Iterator[str]:
    """No token of Kubernetes in any pod, and the worker has an account of its own."""
    for deployment in of_kind(objects, "Deployment"):
        if pod(deployment).get("automountServiceAccountToken") is not False:
            yield "a token is mounted"
        if pod(deployment).get("enableServiceLinks") is not False:
            yield "variables for every Service"
    accounts = {each["metadata"]["name"]: each for each in of_kind(objects, "ServiceAccount")}
    account = accounts.get(pod(worker(objects)).get("serviceAccountName", ""))
    if account is None:
        yield "the worker's account is not there"
    elif account.get("automountServiceAccountToken") is not False:
        yield "the account mounts a token"


def images(objects: Objects) -> Iterator[str]:
    """Every image has a tag, and none that moves or was forgotten."""
    for deployment in of_kind(objects, "Deployment"):
        for each in containers(deployment):
            name, _, tag = each["image"].partition(":")
            if not tag or tag in ("latest", "stable", "unset") or "unset" in tag:
                yield f"{each['name']}: image {each['image']}"
            if "/" in tag or "@" in name:
                yield f"{each['name']}: the version cannot be read from {each['image']}"


def probes(objects: Objects) -> Iterator[str]:
    """The worker is asked whether its loop turns, soon after the start and later; there is nothing to be ready for."""
    found = container(worker(objects), "publishworker")
    for name, least, most in (("startupProbe", 30, 300), ("livenessProbe", 60, 300)):
        probe = found.get(name, {})
        if probe.get("exec", {}).get("command") != ["publishworker", "healthcheck"]:
            yield f"{name}: not `publishworker healthcheck`"
        if not least <= probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3) <= most:
            yield f"{name}: kills too soon or too late"
        if probe.get("timeoutSeconds", 1) < 5:
            yield f"{name}: a slow node fails it"
    if "preStop" in found.get("lifecycle", {}):
        yield "a preStop hook: no traffic is routed to a worker, it only delays the stop"


def resources(objects: Objects) -> Iterator[str]:
    """Memory is requested as it is limited; CPU is requested and not limited; emptyDirs are bounded."""
    for deployment in of_kind(objects, "Deployment"):
        for each in containers(deployment):
            request = each.get("resources", {}).get("requests", {})
            limit = each.get("resources", {}).get("limits", {})
            if not request.get("memory") or request["memory"] != limit.get("memory"):
                yield f"{each['name']}: memory is not requested as it is limited"
            if not request.get("cpu") or "cpu" in limit:
                yield f"{each['name']}: CPU is not requested, or limited"
        for volume in pod(deployment).get("volumes", []):
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"volume {volume['name']} has no limit"


def rollout(objects: Objects) -> Iterator[str]:
    """An update adds a worker before it takes one away; pods are spread, and still scheduled on a small cluster."""
    spec = worker(objects)["spec"]
    if spec.get("strategy") != {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}:
        yield "an update takes a worker away first"
    if not 1 <= spec.get("revisionHistoryLimit", 10) <= 9:
        yield "no limit of old ReplicaSets, or none to go back to"
    spread = {each["topologyKey"]: each for each in pod(worker(objects)).get("topologySpreadConstraints", [])}
    if spread.keys() != {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}:
        yield "not spread over zones and nodes"
    for each in spread.values():
        if each["whenUnsatisfiable"] != "ScheduleAnyway":
            yield "a small cluster cannot schedule it"
        if not _selects(each["labelSelector"], worker(objects)):
            yield "the spread selects other pods"


def selectors(objects: Objects) -> Iterator[str]:
    """Whatever selects pods selects some, and a Deployment its own; nothing selects by what changes."""
    deployments = of_kind(objects, "Deployment")
    for each in deployments:
        if not _selects(each["spec"]["selector"], each):
            yield f"Deployment {each['metadata']['name']}: its selector does not match its pods"
        if set(each["spec"]["selector"].get("matchLabels", {})) & set(TAGS):
            yield f"Deployment {each['metadata']['name']}: a selector cannot be changed, a version must be"
    for each in of_kind(objects, "Service"):
        selected = [other for other in deployments if _selects({"matchLabels": each["spec"]["selector"]}, other)]
        if not selected or worker(objects) in selected:
            yield f"Service {each['metadata']['name']}: selects no pod, or a worker"


def disruption(objects: Objects) -> Iterator[str]:
    """Workers may be evicted one at a time, and an unhealthy one at any time."""
    for each in of_kind(objects, "PodDisruptionBudget"):
        if not _selects(each["spec"]["selector"], worker(objects)):
            yield "the PodDisruptionBudget is for other pods"
        if "minAvailable" in each["spec"] or each["spec"].get("maxUnavailable") != 1:
            yield "the PodDisruptionBudget may block the drain of a node"
        if each["spec"].get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield "an unhealthy worker blocks the drain of a node"
    if not of_kind(objects, "PodDisruptionBudget"):
        yield "no PodDisruptionBudget"


def namespaces(objects: Objects) -> Iterator[str]:
    """All is in one namespace, and if that is made here, its pods must be "restricted"."""
    names = {each["metadata"].get("namespace") for each in objects if each["kind"] != "Namespace"}
    if len(names) != 1:
        yield f"several namespaces: {names}"
    for each in of_kind(objects, "Namespace"):
        if each["metadata"]["name"] not in names:
            yield "another namespace is made than is used"
        if each["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
            yield "Pod Security is not enforced"


def tags(objects: Objects) -> Iterator[str]:
    """Unified service tagging: labels on Deployment and pods, variables from them, the version from the image."""
    deployment = worker(objects)
    template = deployment["spec"]["template"]["metadata"]
    found = container(deployment, "publishworker")
    wanted = found["image"].partition(":")[2]
    for labels in (deployment["metadata"].get("labels", {}), template.get("labels", {})):
        yield from (f"label {tag} is missing" for tag in TAGS if not labels.get(tag))
        if labels.get(TAGS[2]) != wanted:
            yield f"version {labels.get(TAGS[2])} of image {found['image']}"
    for name, tag in zip(("DD_ENV", "DD_SERVICE", "DD_VERSION"), TAGS, strict=True):
        source = {"fieldRef": {"fieldPath": f"metadata.labels['{tag}']"}}
        if {"name": name, "valueFrom": source} not in found.get("env", []):
            yield f"{name} is not the label"
    if "ad.datadoghq.com/publishworker.logs" not in template.get("annotations", {}):
        yield "the log lines have no source"


def variables(objects: Objects) -> Iterator[str]:
    """No variable is set twice, and metrics go one way."""
    for deployment in of_kind(objects, "Deployment"):
        for each in containers(deployment):
            names = [variable["name"] for variable in each.get("env", [])]
            for source in each.get("envFrom", []):
                names += the(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
            yield from (f"{each['name']}: {name} is set twice" for name, count in Counter(names).items() if count > 1)
            if {"DD_DOGSTATSD_URL", "DD_AGENT_HOST"} <= set(names):
                yield f"{each['name']}: two ways for metrics"


def config_maps(objects: Objects) -> Iterator[str]:
    """A ConfigMap has a hash in its name, so that a change starts new pods, and somebody uses it."""
    used = set()
    for deployment in of_kind(objects, "Deployment"):
        used |= {volume["configMap"]["name"] for volume in pod(deployment)["volumes"] if "configMap" in volume}
        for each in containers(deployment):
            used |= {source["configMapRef"]["name"] for source in each.get("envFrom", [])}
    names = {each["metadata"]["name"] for each in of_kind(objects, "ConfigMap")}
    yield from (f"ConfigMap {name} is not there" for name in used - names)
    yield from (f"ConfigMap {name} is not used" for name in names - used)
    yield from (f"ConfigMap {name} has no hash" for name in names if not re.search(r"-[a-z0-9]{10}$", name))


def settings(objects: Objects) -> Iterator[str]:
    """Each variable is a setting, the worker itself takes the value, and nothing that is required is missing."""
    values = environment(objects, worker(objects), container(worker(objects), "publishworker"))
    known = {field.twin for field in fields_of(WorkerSettings)} | FOREIGN
    yield from (f"{name} is no setting" for name in values if name not in known and not name.startswith("DD_"))
    if is_base(objects):
        values = {"OUTBOX_PROJECT": "p", "OUTBOX_INSTANCE": "main", "OUTBOX_DATABASE": "shop"} | values
    try:
        read = WorkerSettings.read({}, values)
    except SettingError as error:
        yield str(error)
        return
    grace = pod(worker(objects)).get("terminationGracePeriodSeconds", 30)
    if grace < read.drain_timeout + GRACE_MARGIN:
        yield f"{grace} s of grace for a drain of {read.drain_timeout:g} s"
    if not _writable(worker(objects), read.heartbeat_file):
        yield f"{read.heartbeat_file} cannot be written"


def autoscaling(objects: Objects) -> Iterator[str]:
    """The autoscaler names the Deployment, an existing DatadogMetric of its namespace, and bounds that make sense."""
    metrics = {each["metadata"]["name"]: each for each in of_kind(objects, "DatadogMetric")}
    for each in of_kind(objects, "HorizontalPodAutoscaler"):
        spec = each["spec"]
        if spec["scaleTargetRef"] != {"apiVersion": "apps/v1", "kind": "Deployment", "name": "publishworker"}:
            yield "the autoscaler is for something else"
        if "replicas" in worker(objects)["spec"]:
            yield "each apply would set the number of workers back"
        if not 2 <= spec.get("minReplicas", 1) <= spec["maxReplicas"] <= DEFAULT_SHARDS:
            yield f"not 2 to {DEFAULT_SHARDS} workers, the shards"
        for metric in spec["metrics"]:
            namespace, _, name = metric["external"]["metric"]["name"].removeprefix("datadogmetric@").partition(":")
            if namespace != each["metadata"].get("namespace") or name not in metrics:
                yield f"no DatadogMetric {namespace}:{name}"
            if metric["external"]["target"]["type"] != "AverageValue":
                yield "the target is not for each worker"
        down = spec.get("behavior", {}).get("scaleDown", {})
        up = spec.get("behavior", {}).get("scaleUp", {})
        if down.get("stabilizationWindowSeconds", 300) < 300 or down.get("policies", [{}])[0].get("type") != "Pods":
            yield "it scales down fast"
        if up.get("stabilizationWindowSeconds", 0) > 0 or up.get("selectPolicy", "Max") != "Max":
            yield "it scales up slowly"


def datadog_metrics(objects: Objects) -> Iterator[str]:
    """Fields as the CRD has them; max, never sum; the tags that the worker's metrics have."""
    labels = worker(objects)["spec"]["template"]["metadata"].get("labels", {})
    for each in of_kind(objects, "DatadogMetric"):
        if each["apiVersion"] != "datadoghq.com/v1alpha1":
            yield "another version of DatadogMetric"
        yield from (f"DatadogMetric has no field {field}" for field in each["spec"].keys() - METRIC_FIELDS)
        query = each["spec"].get("query", "")
        parts = re.fullmatch(r"(\w+):(outbox\.\w+)\{([^}]*)\}\.rollup\(max, 60\)", query)
        if parts is None:
            yield f"not a query: {query}"
            continue
        if parts[1] != "max":
            yield "two workers may report the same backlog: max, not " + parts[1]
        if parts[2] != "outbox.pending_task_count":
            yield f"not the backlog: {parts[2]}"
        if parts[3] != f"env:{labels.get(TAGS[0])},service:{labels.get(TAGS[1])}":
            yield f"tags {parts[3]} are not those of the worker"


def network(objects: Objects) -> Iterator[str]:
    """Nobody calls the worker; it reaches names, Google, the Agent and the metadata server, nothing else."""
    for each in of_kind(objects, "NetworkPolicy"):
        spec = each["spec"]
        if not _selects(spec["podSelector"], worker(objects)):
            yield "the policy is for other pods"
        if set(spec.get("policyTypes", [])) != {"Ingress", "Egress"} or spec.get("ingress"):
            yield "somebody may call the worker"
        found = {
            (peer.get("ipBlock", {}).get("cidr", "anywhere"), port["protocol"], port["port"])
            for rule in spec.get("egress", [])
            for port in rule.get("ports", [{"protocol": "any", "port": 0}])
            for peer in rule.get("to", [{}])
        }
        yield from (f"egress to {' '.join(map(str, way))} is missing" for way in sorted(EGRESS - found))
        yield from (f"egress to {' '.join(map(str, way))} is not needed" for way in sorted(found - EGRESS))


def is_base(objects: Objects) -> bool:
    """Tell whether this is the base with components, which has no database and no image yet."""
    return bool(container(worker(objects), "publishworker")["image"] == "publishworker:unset")


def _selects(selector: Object, deployment: Object) -> bool:
    wanted = selector.get("matchLabels", {})
    labels = deployment["spec"]["template"]["metadata"].get("labels", {})
    return bool(wanted) and wanted.items() <= labels.items()


def _writable(deployment: Object, file: str) -> bool:
    spec = pod(deployment)
    empty = {volume["name"] for volume in spec.get("volumes", []) if "emptyDir" in volume}
    mounts = container(deployment, "publishworker").get("volumeMounts", [])
    return any(
        each["name"] in empty and not each.get("readOnly") and PurePosixPath(file).is_relative_to(each["mountPath"])
        for each in mounts
    )


Rule = Callable[[Objects], Iterator[str]]
RULES: tuple[Rule, ...] = (
    pod_security,
    container_security,
    identity,
    images,
    probes,
    resources,
    rollout,
    selectors,
    disruption,
    namespaces,
    tags,
    variables,
    config_maps,
    settings,
    autoscaling,
    datadog_metrics,
    network,
)

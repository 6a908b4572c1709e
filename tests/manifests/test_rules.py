"""Each rule bites: what is broken on purpose is noticed, by that rule and with that complaint."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.manifests import rules
from tests.manifests.rendering import OVERLAYS, Object, Objects, container, of_kind, pod, rendered, worker
from tests.manifests.rules import RULES, Rule

Break = Callable[[Objects], Any]


def first(objects: Objects, kind: str) -> Object:
    """Return the first object of a kind."""
    return of_kind(objects, kind)[0]


def main(objects: Objects) -> Object:
    """Return the worker's container."""
    return container(worker(objects), "publishworker")


def template(objects: Objects) -> Object:
    """Return the metadata of the worker's pods."""
    metadata: Object = worker(objects)["spec"]["template"]["metadata"]
    return metadata


def config(objects: Objects) -> Object:
    """Return the settings."""
    data: Object = first(objects, "ConfigMap")["data"]
    return data


def external(objects: Objects) -> Object:
    """Return the metric of the autoscaler."""
    metric: Object = first(objects, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["external"]
    return metric


def spec(objects: Objects, kind: str) -> Object:
    """Return the spec of the first object of a kind."""
    found: Object = first(objects, kind)["spec"]
    return found


def query(objects: Objects, old: str, new: str) -> None:
    """Change the DatadogMetric's query."""
    of = spec(objects, "DatadogMetric")
    assert old in of["query"]
    of["query"] = of["query"].replace(old, new)


#: Rule, a part of its complaint, and how production is broken.
BROKEN: list[tuple[Rule, str, Break]] = [
    (rules.pod_security, "as root", lambda o: pod(worker(o))["securityContext"].pop("runAsNonRoot")),
    (rules.pod_security, "no numbers", lambda o: pod(worker(o))["securityContext"].update(runAsUser=0)),
    (rules.pod_security, "no numbers", lambda o: pod(worker(o))["securityContext"].pop("runAsGroup")),
    (rules.pod_security, "seccomp", lambda o: pod(worker(o))["securityContext"].pop("seccompProfile")),
    (rules.pod_security, "hostNetwork", lambda o: pod(worker(o)).update(hostNetwork=True)),
    (rules.pod_security, "sysctls", lambda o: pod(worker(o))["securityContext"].update(sysctls=[{"name": "a"}])),
    (rules.pod_security, "hostPath", lambda o: pod(worker(o))["volumes"].append({"name": "x", "hostPath": {}})),
    (rules.container_security, "escalate", lambda o: main(o)["securityContext"].pop("allowPrivilegeEscalation")),
    (rules.container_security, "not dropped", lambda o: main(o)["securityContext"].pop("capabilities")),
    (rules.container_security, "can be written", lambda o: main(o)["securityContext"].pop("readOnlyRootFilesystem")),
    (rules.container_security, "changes", lambda o: main(o)["securityContext"].update(privileged=True)),
    (rules.container_security, "port of the node", lambda o: main(o).update(ports=[{"hostPort": 80}])),
    (rules.identity, "token", lambda o: pod(worker(o)).pop("automountServiceAccountToken")),
    (rules.identity, "every Service", lambda o: pod(worker(o)).pop("enableServiceLinks")),
    (rules.identity, "not there", lambda o: pod(worker(o)).update(serviceAccountName="default")),
    (rules.identity, "mounts", lambda o: first(o, "ServiceAccount").pop("automountServiceAccountToken")),
    (rules.images, ":latest", lambda o: main(o).update(image="publishworker:latest")),
    (rules.images, "image publishworker", lambda o: main(o).update(image="publishworker")),
    (rules.images, "unset", lambda o: main(o).update(image="publishworker:unset")),
    (rules.images, "cannot be read", lambda o: main(o).update(image="host:5000/publishworker:1.0")),
    (rules.probes, "startupProbe: not", lambda o: main(o).pop("startupProbe")),
    (rules.probes, "livenessProbe: not", lambda o: main(o).pop("livenessProbe")),
    (rules.probes, "livenessProbe: not", lambda o: main(o)["livenessProbe"]["exec"].update(command=["true"])),
    (rules.probes, "too soon", lambda o: main(o)["livenessProbe"].update(periodSeconds=2)),
    (rules.probes, "slow node", lambda o: main(o)["startupProbe"].pop("timeoutSeconds")),
    (rules.probes, "preStop", lambda o: main(o).update(lifecycle={"preStop": {"exec": {"command": ["sleep", "9"]}}})),
    (rules.resources, "memory", lambda o: main(o)["resources"].pop("limits")),
    (rules.resources, "memory", lambda o: main(o)["resources"]["requests"].update(memory="1Mi")),
    (rules.resources, "CPU", lambda o: main(o)["resources"]["limits"].update(cpu="1")),
    (rules.resources, "CPU", lambda o: main(o)["resources"]["requests"].pop("cpu")),
    (rules.resources, "no limit", lambda o: pod(worker(o))["volumes"][0]["emptyDir"].pop("sizeLimit")),
    (rules.rollout, "first", lambda o: worker(o)["spec"].pop("strategy")),
    (rules.rollout, "first", lambda o: worker(o)["spec"]["strategy"]["rollingUpdate"].update(maxUnavailable=1)),
    (rules.rollout, "ReplicaSets", lambda o: worker(o)["spec"].pop("revisionHistoryLimit")),
    (rules.rollout, "not spread", lambda o: pod(worker(o)).pop("topologySpreadConstraints")),
    (
        rules.rollout,
        "small cluster",
        lambda o: pod(worker(o))["topologySpreadConstraints"][0].update(whenUnsatisfiable="DoNotSchedule"),
    ),
    (
        rules.rollout,
        "other pods",
        lambda o: pod(worker(o))["topologySpreadConstraints"][0].update(labelSelector={"matchLabels": {"a": "b"}}),
    ),
    (rules.selectors, "does not match", lambda o: template(o)["labels"].pop("app.kubernetes.io/name")),
    (
        rules.selectors,
        "cannot be changed",
        lambda o: spec(o, "Deployment")["selector"]["matchLabels"].update({rules.TAGS[2]: "1"}),
    ),
    (
        rules.selectors,
        "or a worker",
        lambda o: o.append(
            {"kind": "Service", "metadata": {"name": "x"}, "spec": {"selector": template(o)["labels"]}},
        ),
    ),
    (rules.disruption, "for other pods", lambda o: spec(o, "PodDisruptionBudget").update(selector={})),
    (rules.disruption, "block", lambda o: spec(o, "PodDisruptionBudget").update(minAvailable=1)),
    (rules.disruption, "unhealthy", lambda o: spec(o, "PodDisruptionBudget").pop("unhealthyPodEvictionPolicy")),
    (rules.disruption, "no Pod", lambda o: o.remove(first(o, "PodDisruptionBudget"))),
    (rules.namespaces, "several", lambda o: worker(o)["metadata"].update(namespace="other")),
    (rules.namespaces, "another", lambda o: first(o, "Namespace")["metadata"].update(name="other")),
    (rules.namespaces, "not enforced", lambda o: first(o, "Namespace")["metadata"].pop("labels")),
    (rules.tags, "is missing", lambda o: template(o)["labels"].pop("tags.datadoghq.com/env")),
    (rules.tags, "version 0.0.0", lambda o: main(o).update(image="publishworker:1.2.3")),
    (rules.tags, "is not the label", lambda o: main(o)["env"].pop(0)),
    (rules.tags, "no source", lambda o: template(o).pop("annotations")),
    (rules.variables, "twice", lambda o: main(o)["env"].append({"name": "DD_ENV", "value": "x"})),
    (rules.variables, "twice", lambda o: main(o)["env"].append({"name": "OUTBOX_PROJECT", "value": "x"})),
    (rules.variables, "two ways", lambda o: main(o)["env"].append({"name": "DD_AGENT_HOST", "value": "x"})),
    (
        rules.config_maps,
        "is not there",
        lambda o: pod(worker(o))["volumes"].append({"name": "x", "configMap": {"name": "x"}}),
    ),
    (rules.config_maps, "is not used", lambda o: main(o).pop("envFrom")),
    (rules.config_maps, "no hash", lambda o: first(o, "ConfigMap")["metadata"].update(name="publishworker")),
    (rules.settings, "is no setting", lambda o: config(o).update(OUTBOX_GROUPSIZE="10")),
    (rules.settings, "OUTBOX_GROUP_SIZE: 'many'", lambda o: config(o).update(OUTBOX_GROUP_SIZE="many")),
    (rules.settings, "--database is missing", lambda o: config(o).pop("OUTBOX_DATABASE")),
    (rules.settings, "of grace", lambda o: config(o).update(OUTBOX_DRAIN_TIMEOUT="50")),
    (rules.settings, "of grace", lambda o: pod(worker(o)).pop("terminationGracePeriodSeconds")),
    (rules.settings, "cannot be written", lambda o: config(o).update(OUTBOX_HEARTBEAT_FILE="/var/heartbeat")),
    (rules.settings, "cannot be written", lambda o: main(o).pop("volumeMounts")),
    (rules.settings, "cannot be written", lambda o: main(o)["volumeMounts"][0].update(readOnly=True)),
    (
        rules.autoscaling,
        "something else",
        lambda o: spec(o, "HorizontalPodAutoscaler")["scaleTargetRef"].update(name="worker"),
    ),
    (rules.autoscaling, "set the number", lambda o: worker(o)["spec"].update(replicas=2)),
    (rules.autoscaling, "the shards", lambda o: spec(o, "HorizontalPodAutoscaler").update(maxReplicas=11)),
    (rules.autoscaling, "the shards", lambda o: spec(o, "HorizontalPodAutoscaler").update(minReplicas=1)),
    (rules.autoscaling, "no DatadogMetric", lambda o: o.remove(first(o, "DatadogMetric"))),
    (
        rules.autoscaling,
        "no DatadogMetric",
        lambda o: external(o)["metric"].update(name="datadogmetric@default:publishworker-backlog"),
    ),
    (rules.autoscaling, "each worker", lambda o: external(o)["target"].update(type="Value")),
    (
        rules.autoscaling,
        "down fast",
        lambda o: spec(o, "HorizontalPodAutoscaler")["behavior"]["scaleDown"].update(stabilizationWindowSeconds=0),
    ),
    (
        rules.autoscaling,
        "up slowly",
        lambda o: spec(o, "HorizontalPodAutoscaler")["behavior"]["scaleUp"].update(selectPolicy="Min"),
    ),
    (rules.datadog_metrics, "version", lambda o: first(o, "DatadogMetric").update(apiVersion="datadoghq.com/v1")),
    (rules.datadog_metrics, "no field", lambda o: spec(o, "DatadogMetric").update(externalMetricName="x")),
    (rules.datadog_metrics, "not a query", lambda o: query(o, ".rollup(max, 60)", "")),
    (rules.datadog_metrics, "max, not sum", lambda o: query(o, "max:", "sum:")),
    (rules.datadog_metrics, "not the backlog", lambda o: query(o, "pending_task_count", "topic_task_count")),
    (rules.datadog_metrics, "not those", lambda o: query(o, "env:production", "env:staging")),
    (rules.network, "other pods", lambda o: spec(o, "NetworkPolicy")["podSelector"].update(matchLabels={"a": "b"})),
    (rules.network, "may call", lambda o: spec(o, "NetworkPolicy").update(policyTypes=["Egress"])),
    (rules.network, "may call", lambda o: spec(o, "NetworkPolicy").update(ingress=[{}])),
    (rules.network, "is missing", lambda o: spec(o, "NetworkPolicy")["egress"].pop(1)),
    (rules.network, "not needed", lambda o: spec(o, "NetworkPolicy")["egress"].append({})),
    (rules.network, "not needed", lambda o: spec(o, "NetworkPolicy")["egress"][-1].pop("to")),
]


@pytest.mark.parametrize(
    ("rule", "complaint", "damage"),
    BROKEN,
    ids=[f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(BROKEN)],
)
def test_what_is_broken_is_noticed(rule: Rule, complaint: str, damage: Break) -> None:
    """The rule is silent before, and names the damage after."""
    objects = rendered(OVERLAYS["production"])
    assert list(rule(objects)) == []
    damage(objects)
    assert [each for each in rule(objects) if complaint in each], list(rule(objects))


def test_every_rule_is_broken_at_least_once() -> None:
    """A rule that nothing breaks may be one that never complains."""
    assert {rule for rule, _, _ in BROKEN} == set(RULES)

"""The pipeline's jobs on Kubernetes, k8s/spark: rendered, valid, by the rules; and each rule bites."""

import re
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.manifests import spark_rules as rules
from tests.manifests.rendering import K8S, KUBERNETES, Object, Objects, of_kind, rendered
from tests.manifests.rules import TAGS, Rule
from tests.manifests.spark_rules import SPARK_RULES, jobs, part, refusals
from tests.manifests.sparkoperator import complaints

SPARK = K8S / "spark"
Break = Callable[[Objects], Any]

each_rule = pytest.mark.parametrize("rule", SPARK_RULES, ids=lambda rule: rule.__name__)


def test_it_is_what_the_two_jobs_need() -> None:
    """An account, its role, the settings, the jobs; both jobs have their placeholders' values."""
    objects = rendered(SPARK)
    assert sorted(each["kind"] for each in objects) == [
        "ConfigMap", "Role", "RoleBinding", "ScheduledSparkApplication", "ScheduledSparkApplication", "ServiceAccount",
    ]  # fmt: skip
    assert {job["spec"]["template"]["arguments"][0] for job in jobs(objects)} == {"archive", "register"}


def test_the_objects_are_valid() -> None:
    """Kubernetes' own strictly by its schemas, with the templates of pods; the operator's by its types."""
    for each in rendered(SPARK):
        if each["apiVersion"].startswith("sparkoperator.k8s.io/"):
            assert list(complaints(each)) == []
        else:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("complaint", "change"),
    [
        ("spec.schedule is missing", lambda job: job["spec"].pop("schedule")),
        ("spec.concurrencyPolicy is 'Never'", lambda job: job["spec"].update(concurrencyPolicy="Never")),
        ("spec.timeZone is no field", lambda job: job["spec"].update(timeZone="UTC")),
        ("spec.template.driver is missing", lambda job: job["spec"]["template"].pop("driver")),
        ("cores is no int", lambda job: part(job, "driver").update(cores="1")),
        ("memory is no str", lambda job: part(job, "driver").update(memory=2)),
        ("executor.podName is no field", lambda job: part(job, "executor").update(podName="x")),
        ("spark.ui.port is no str", lambda job: job["spec"]["template"]["sparkConf"].update({"spark.ui.port": 1})),
        ("arguments is no list of str", lambda job: job["spec"]["template"].update(arguments=["archive", 1])),
        ("restartPolicy is no object", lambda job: job["spec"]["template"].update(restartPolicy="Never")),
        ("affinity is not in the table", lambda job: part(job, "driver").update(affinity={})),
        ("driver.template", lambda job: part(job, "driver")["template"]["spec"].update(container=[])),
        ("no kind", lambda job: job.update(apiVersion="sparkoperator.k8s.io/v1beta1")),
    ],
)
def test_the_validation_of_the_operators_kinds_bites(complaint: str, change: Callable[[Object], Any]) -> None:
    """A missing field, an unknown one, a wrong type, and what is wrong in a template of pods."""
    job = jobs(rendered(SPARK))[0]
    change(job)
    assert [each for each in complaints(job) if complaint in each], list(complaints(job))


@each_rule
def test_the_rules_hold(rule: Rule) -> None:
    """No rule has a complaint."""
    assert list(rule(rendered(SPARK))) == []


def job_of(objects: Objects, name: str) -> Object:
    """Return the spec of a job."""
    [found] = [job["spec"] for job in jobs(objects) if job["spec"]["template"]["arguments"][0] == name]
    spec: Object = found
    return spec


def archive(objects: Objects) -> Object:
    """Return the archive's application."""
    template: Object = job_of(objects, "archive")["template"]
    return template


def pods(objects: Objects, role: str) -> Object:
    """Return the archive's template of pods."""
    template: Object = archive(objects)[role]["template"]
    return template


def driver(objects: Objects) -> Object:
    """Return the archive's driver container."""
    container: Object = pods(objects, "driver")["spec"]["containers"][0]
    return container


def config(objects: Objects) -> Object:
    """Return the settings."""
    data: Object = of_kind(objects, "ConfigMap")[0]["data"]
    return data


def role_rule(objects: Objects) -> Object:
    """Return the only rule of the role."""
    [rule] = of_kind(objects, "Role")[0]["rules"]
    found: Object = rule
    return found


def swap(words: list[str], old: str, new: str) -> None:
    """Replace one argument."""
    words[words.index(old)] = new


#: Rule, a part of its complaint, and how the jobs are broken.
BROKEN: list[tuple[Rule, str, Break]] = [
    (rules.pod_security, "as root", lambda o: pods(o, "driver")["spec"]["securityContext"].pop("runAsNonRoot")),
    (rules.pod_security, "no numbers", lambda o: pods(o, "executor")["spec"]["securityContext"].update(runAsUser=0)),
    (rules.pod_security, "seccomp", lambda o: pods(o, "executor")["spec"]["securityContext"].pop("seccompProfile")),
    (rules.pod_security, "hostNetwork", lambda o: pods(o, "driver")["spec"].update(hostNetwork=True)),
    (
        rules.pod_security,
        "hostPath",
        lambda o: pods(o, "driver")["spec"]["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    ),
    (rules.pod_security, "escalate", lambda o: driver(o)["securityContext"].update(allowPrivilegeEscalation=True)),
    (rules.pod_security, "changes", lambda o: driver(o)["securityContext"].update(privileged=True)),
    (rules.pod_security, "not dropped", lambda o: driver(o)["securityContext"].pop("capabilities")),
    (rules.pod_security, "can be written", lambda o: driver(o)["securityContext"].pop("readOnlyRootFilesystem")),
    (rules.pod_security, "outside", lambda o: archive(o)["driver"].update(env=[])),
    (rules.containers_of_spark, "add a container", lambda o: driver(o).update(name="driver")),
    (rules.runs, "at once", lambda o: job_of(o, "archive").update(concurrencyPolicy="Allow")),
    (rules.runs, "at once", lambda o: job_of(o, "register").pop("concurrencyPolicy")),
    (rules.runs, "no time of day", lambda o: job_of(o, "archive").update(schedule="@every 3m")),
    (rules.restarts, "has forgotten", lambda o: job_of(o, "archive").update(schedule="30 2 * * *")),
    (rules.runs, "same time", lambda o: job_of(o, "archive").update(schedule=job_of(o, "register")["schedule"])),
    (rules.runs, "failedRunHistoryLimit", lambda o: job_of(o, "archive").update(failedRunHistoryLimit=0)),
    (rules.runs, "kept", lambda o: archive(o).pop("timeToLiveSeconds")),
    (rules.restarts, "Always", lambda o: archive(o)["restartPolicy"].update(type="Always")),
    (rules.restarts, "None", lambda o: archive(o).pop("restartPolicy")),
    (
        rules.restarts,
        "OnFailure",
        lambda o: job_of(o, "register")["template"]["restartPolicy"].update(type="OnFailure"),
    ),
    (rules.restarts, "too many", lambda o: archive(o)["restartPolicy"].update(onFailureRetries=100)),
    (rules.restarts, "too soon", lambda o: archive(o)["restartPolicy"].pop("onFailureRetryInterval")),
    (rules.identity, "are used", lambda o: archive(o)["driver"].pop("serviceAccount")),
    (rules.identity, "are used", lambda o: pods(o, "executor")["spec"].pop("serviceAccountName")),
    (rules.identity, "mounts", lambda o: of_kind(o, "ServiceAccount")[0].pop("automountServiceAccountToken")),
    (rules.identity, "executor: token", lambda o: pods(o, "executor")["spec"].pop("automountServiceAccountToken")),
    (rules.identity, "driver: token", lambda o: pods(o, "driver")["spec"].pop("automountServiceAccountToken")),
    (rules.identity, "every Service", lambda o: pods(o, "driver")["spec"].pop("enableServiceLinks")),
    (rules.identity, "more than", lambda o: role_rule(o)["resources"].append("secrets")),
    (rules.identity, "more than", lambda o: role_rule(o).update(verbs=["*"])),
    (rules.identity, "may not make", lambda o: role_rule(o)["verbs"].remove("create")),
    (rules.identity, "is bound", lambda o: of_kind(o, "RoleBinding")[0]["subjects"][0].update(name="default")),
    (rules.identity, "is bound", lambda o: of_kind(o, "RoleBinding")[0]["subjects"][0].update(namespace="default")),
    (rules.image, ":latest", lambda o: archive(o).update(image="outbox-pipeline:latest")),
    (rules.image, "unset", lambda o: archive(o).update(image="outbox-pipeline:unset")),
    (rules.image, "image outbox-pipeline", lambda o: archive(o).update(image="outbox-pipeline")),
    (rules.image, "not the image's", lambda o: archive(o).update(sparkVersion="3.5.0")),
    (rules.image, "version 0.0.0", lambda o: archive(o).update(image="outbox-pipeline:1.2.3")),
    (rules.image, "is missing", lambda o: pods(o, "executor")["metadata"]["labels"].pop(TAGS[0])),
    (rules.resources, "memory is not set", lambda o: archive(o)["driver"].pop("memory")),
    (rules.resources, "memoryOverhead is not set", lambda o: archive(o)["executor"].pop("memoryOverhead")),
    (rules.resources, "cores is not set", lambda o: archive(o)["executor"].pop("cores")),
    (rules.resources, "CPU", lambda o: archive(o)["executor"].update(coreLimit="2")),
    (rules.resources, "no executor", lambda o: archive(o)["executor"].pop("instances")),
    (rules.resources, "has no limit", lambda o: pods(o, "driver")["spec"]["volumes"][0]["emptyDir"].clear()),
    (rules.resources, "cannot be written", lambda o: driver(o)["volumeMounts"][0].update(readOnly=True)),
    (rules.resources, "makes a volume", lambda o: driver(o)["volumeMounts"].pop(1)),
    (rules.configuration, "speculation", lambda o: archive(o)["sparkConf"].update({"spark.speculation": "true"})),
    (rules.configuration, "timeZone", lambda o: archive(o)["sparkConf"].pop("spark.sql.session.timeZone")),
    (rules.configuration, "python", lambda o: archive(o)["sparkConf"].pop("spark.pyspark.python")),
    (rules.configuration, "has its jobs", lambda o: archive(o).update(mainApplicationFile="local:///opt/spark/x.py")),
    (rules.arguments, "is no job", lambda o: swap(archive(o)["arguments"], "archive", "archives")),
    (rules.arguments, "--windows 1d", lambda o: swap(archive(o)["arguments"], "--window", "--windows")),
    (rules.arguments, "'1 day'", lambda o: swap(archive(o)["arguments"], "1d", "1 day")),
    (rules.arguments, "expected one argument", lambda o: archive(o)["arguments"].remove("1d")),
    (rules.arguments, "--archive is missing", lambda o: config(o).pop("OUTBOX_ARCHIVE")),
    (rules.arguments, "OUTBOX_DATABASE", lambda o: config(o).update(OUTBOX_DATABASE="Shop")),
    (rules.arguments, "OUTBOX_WINDOWS is no setting", lambda o: config(o).update(OUTBOX_WINDOWS="1d")),
    (rules.arguments, "executor: --", lambda o: pods(o, "executor")["spec"]["containers"][0].pop("envFrom")),
    (rules.metrics, "not the variables", lambda o: driver(o)["env"].pop(3)),
    (
        rules.metrics,
        "executor: not",
        lambda o: pods(o, "executor")["spec"]["containers"][0].update(env=driver(o)["env"]),
    ),
    (rules.metrics, "no source", lambda o: pods(o, "executor")["metadata"].pop("annotations")),
    (rules.namespaces, "namespaces", lambda o: o[0]["metadata"].update(namespace="default")),
]


@pytest.mark.parametrize(
    ("rule", "complaint", "damage"),
    BROKEN,
    ids=[f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(BROKEN)],
)
def test_what_is_broken_is_noticed(rule: Rule, complaint: str, damage: Break) -> None:
    """The rule is silent before, and names the damage after."""
    objects = rendered(SPARK)
    assert list(rule(objects)) == []
    damage(objects)
    assert [each for each in rule(objects) if complaint in each], list(rule(objects))


def test_every_rule_is_broken_at_least_once() -> None:
    """A rule that nothing breaks may be one that never complains."""
    assert {rule for rule, _, _ in BROKEN} == set(SPARK_RULES)


def test_the_jobs_are_set_in_one_place() -> None:
    """All that a user must set is between the two lines of kustomization.yaml, and in no other file of the folder."""
    text = (SPARK / "kustomization.yaml").read_text(encoding="utf-8")
    _, between, rest = re.split(r"^# -{100,}$", text, flags=re.MULTILINE)
    assert set(yaml.safe_load(between)) == {"images", "configMapGenerator", "labels"}
    others = [path.read_text(encoding="utf-8") for path in SPARK.iterdir() if path.name != "kustomization.yaml"]
    for placeholder in ("my-project", "my-bucket", "placeholder", "=main", "=shop"):
        assert placeholder in between
        assert not [each for each in [rest, *others] if placeholder in each]


def test_purge_may_be_added() -> None:
    """As the manifest's comment says: the switches are arguments of the archive and of nothing else."""
    variables = config(rendered(SPARK))
    assert list(refusals(["archive", "--purge", "--read-late"], variables)) == []
    [refusal] = refusals(["register", "--purge"], variables)
    assert "unrecognized arguments: --purge" in refusal

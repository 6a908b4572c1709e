"""What must hold for the jobs in k8s/spark: functions from rendered objects to complaints, as in `rules`."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from outbox.errors import SettingError
from outbox.settings import fields_of
from outbox_pipeline.cli import _parser
from outbox_pipeline.jobs.archive import READING
from outbox_pipeline.settings import ArchiveSettings, JobSettings, RegisterSettings
from outbox_pipeline.spanner import DEFAULT_RETENTION
from tests.manifests import rules
from tests.manifests.dockerfile import chain, read
from tests.manifests.rendering import OVERLAYS, ROOT, Object, Objects, containers, of_kind, pod, rendered, the
from tests.manifests.rules import Rule

#: What each job takes, and whether another attempt goes on where one stopped.
JOBS: dict[str, tuple[type[JobSettings], bool]] = {
    "archive": (ArchiveSettings, True),
    "register": (RegisterSettings, False),
}
#: What a driver does things to: https://github.com/kubeflow/spark-operator, templates/spark/rbac.yaml of its chart.
RESOURCES = {"pods", "configmaps", "persistentvolumeclaims", "services"}
PODS = ("driver", "executor")

#: Minutes: what Spanner keeps if nothing else is set, without what a window may take to read.
LAST_START = (DEFAULT_RETENTION - READING).total_seconds() / 60


def jobs(objects: Objects) -> Objects:
    """Return the scheduled jobs."""
    return of_kind(objects, "ScheduledSparkApplication")


def name_of(job: Object) -> str:
    """Return the name of a job."""
    return str(job["metadata"]["name"])


def part(job: Object, role: str) -> Object:
    """Return what a job says of its driver or its executors."""
    found: Object = job["spec"]["template"][role]
    return found


def deployments(objects: Objects) -> Iterator[Object]:
    """Yield the templates of drivers and executors in the form of Deployments, for rules that know those."""
    for job in jobs(objects):
        for role in PODS:
            named = {"name": f"{name_of(job)} {role}"}
            yield {"kind": "Deployment", "metadata": named, "spec": {"template": part(job, role)["template"]}}


def pod_security(objects: Objects) -> Iterator[str]:
    """Pod Security "restricted" of pods and containers, by the rules for the worker; nothing beside the template."""
    yield from rules.pod_security(list(deployments(objects)))
    yield from rules.container_security(list(deployments(objects)))
    for job in jobs(objects):
        for role in PODS:
            # The webhook, which would set these, passes over pods that have a template.
            left = {"env", "envFrom", "securityContext", "podSecurityContext", "volumeMounts"} & part(job, role).keys()
            yield from (f"{role}: {field} is outside of the template" for field in left)


def containers_of_spark(objects: Objects) -> Iterator[str]:
    """One container each, by the name at which Spark looks for it."""
    for deployment in deployments(objects):
        role = deployment["metadata"]["name"].split()[-1]
        if [each["name"] for each in containers(deployment)] != [f"spark-kubernetes-{role}"]:
            yield f"{deployment['metadata']['name']}: Spark would add a container"


def _minute_of_last_start(job: Object) -> float:
    """Return how many minutes after midnight the last attempt of a nightly job starts."""
    minute, hour = job["spec"]["schedule"].split()[:2]
    policy = job["spec"]["template"].get("restartPolicy", {})
    again = policy.get("onFailureRetries", 0) * policy.get("onFailureRetryInterval", 0) / 60
    return int(minute) + 60 * int(hour) + again


def runs(objects: Objects) -> Iterator[str]:
    """Never two at once; what is over is kept for a while, and not for ever."""
    for job in jobs(objects):
        spec = job["spec"]
        if spec.get("concurrencyPolicy") != "Forbid":
            yield f"{name_of(job)}: two may run at once"
        if not re.fullmatch(r"(\S+ ){4}\S+", spec["schedule"]):
            yield f"{name_of(job)}: {spec['schedule']} is no time of day"
        for limit in ("successfulRunHistoryLimit", "failedRunHistoryLimit"):
            if not 1 <= spec.get(limit, 1) <= 9:
                yield f"{name_of(job)}: {limit}"
        if not 86_400 <= spec["template"].get("timeToLiveSeconds", 0) <= 30 * 86_400:
            yield f"{name_of(job)}: kept too short or too long"
    if len({job["spec"]["schedule"] for job in jobs(objects)}) != len(jobs(objects)):
        yield "jobs start at the same time"


def restarts(objects: Objects) -> Iterator[str]:
    """A job that goes on where it stopped is started again, a few times and after a while; another is not."""
    for job in jobs(objects):
        template = job["spec"]["template"]
        policy = template.get("restartPolicy", {})
        if template["arguments"][0] == "archive" and _minute_of_last_start(job) > LAST_START:
            yield f"{name_of(job)}: Spanner has forgotten the end of the day when the last attempt starts"
        _, resumable = JOBS.get(template["arguments"][0], (None, False))
        if policy.get("type", "Never") != ("OnFailure" if resumable else "Never"):
            yield f"{name_of(job)}: restartPolicy {policy.get('type')}"
        elif resumable and not (
            1 <= policy.get("onFailureRetries", 0) <= 5 and policy.get("onFailureRetryInterval", 5) >= 60
        ):
            yield f"{name_of(job)}: too many attempts, or none, or too soon"


def identity(objects: Objects) -> Iterator[str]:
    """One account, bound to one role that is no more than a driver needs; only the driver has a token of Kubernetes."""
    accounts = {each["metadata"]["name"]: each for each in of_kind(objects, "ServiceAccount")}
    yield from (
        f"account {name} mounts a token"
        for name, account in accounts.items()
        if account.get("automountServiceAccountToken") is not False
    )
    used = {part(job, "driver").get("serviceAccount", "default") for job in jobs(objects)}
    used |= {
        pod({"spec": {"template": part(job, "executor")["template"]}}).get("serviceAccountName", "default")
        for job in jobs(objects)
    }
    if used != accounts.keys():
        yield f"accounts {sorted(used)} are used, {sorted(accounts)} are there"
    for deployment in deployments(objects):
        driver = deployment["metadata"]["name"].endswith(" driver")
        if pod(deployment).get("automountServiceAccountToken") is not driver:
            yield f"{deployment['metadata']['name']}: token of Kubernetes"
        if pod(deployment).get("enableServiceLinks") is not False:
            yield f"{deployment['metadata']['name']}: variables for every Service"
    for role in of_kind(objects, "Role"):
        for rule in role["rules"]:
            if rule["apiGroups"] != [""] or not set(rule["resources"]) <= RESOURCES or "*" in rule["verbs"]:
                yield f"role {role['metadata']['name']}: more than a driver needs"
    if not any("create" in rule["verbs"] for role in of_kind(objects, "Role") for rule in role["rules"]):
        yield "a driver may not make executors"
    bound = {
        subject["name"]
        for binding in of_kind(objects, "RoleBinding")
        for subject in binding["subjects"]
        if the(objects, "Role", binding["roleRef"]["name"]) and subject.get("namespace") == _namespace(objects)
    }
    if bound != accounts.keys():
        yield f"the role is bound to {sorted(bound)}"


def image(objects: Objects) -> Iterator[str]:
    """A tag that stays, which is also the version in Datadog; Spark's version is that of the package in the image."""
    pinned = re.search(r"^pyspark==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    for job in jobs(objects):
        template = job["spec"]["template"]
        name, _, tag = template["image"].partition(":")
        if not tag or tag in ("latest", "stable") or "unset" in tag or "/" in tag or "@" in name:
            yield f"{name_of(job)}: image {template['image']}"
        if pinned is None or template["sparkVersion"] != pinned[1]:
            yield f"{name_of(job)}: Spark {template['sparkVersion']} is not the image's"
        for role in PODS:
            labels = part(job, role)["template"]["metadata"].get("labels", {})
            yield from (f"{role}: label {label} is missing" for label in rules.TAGS if not labels.get(label))
            if labels.get(rules.TAGS[2]) != tag:
                yield f"{role}: version {labels.get(rules.TAGS[2])} of image {template['image']}"


def resources(objects: Objects) -> Iterator[str]:
    """Memory for Java and for Python, CPU requested and not limited, volumes bounded; Spark writes to those alone."""
    for job in jobs(objects):
        for role in PODS:
            missing = {"cores", "memory", "memoryOverhead"} - part(job, role).keys()
            yield from (f"{role}: {field} is not set" for field in missing)
            if "coreLimit" in part(job, role):
                yield f"{role}: CPU is limited"
        if not 1 <= part(job, "executor").get("instances", 0) <= 10:
            yield f"{name_of(job)}: no executor, or too many"
    for deployment in deployments(objects):
        name = deployment["metadata"]["name"]
        volumes = {volume["name"]: volume for volume in pod(deployment).get("volumes", [])}
        for volume in volumes.values():
            if "sizeLimit" not in volume.get("emptyDir", {}):
                yield f"{name}: volume {volume['name']} has no limit"
        [mounts] = [each.get("volumeMounts", []) for each in containers(deployment)]
        writable = {mount["mountPath"] for mount in mounts if mount["name"] in volumes and not mount.get("readOnly")}
        [folder] = [step.rest for step in chain(read(ROOT / "k8s/Dockerfile"), "pipeline") if step.word == "WORKDIR"]
        if folder not in writable:
            yield f"{name}: {folder}, where it runs, cannot be written"
        if not any(mount["name"].startswith("spark-local-dir-") for mount in mounts):
            yield f"{name}: Spark makes a volume without a limit"


def configuration(objects: Objects) -> Iterator[str]:
    """No second copies of tasks, times in UTC, and the Python and the file that the image has."""
    home = _settings_of_the_image()
    for job in jobs(objects):
        conf = job["spec"]["template"].get("sparkConf", {})
        wanted = {
            "spark.speculation": "false",
            "spark.sql.session.timeZone": "UTC",
            "spark.pyspark.python": home["PYSPARK_PYTHON"],
        }
        yield from (f"{name_of(job)}: {key} is {conf.get(key)}" for key in wanted if conf.get(key) != wanted[key])
        file = PurePosixPath(home["SPARK_HOME"]).parent / "outbox_pipeline" / "__main__.py"
        if job["spec"]["template"]["mainApplicationFile"] != f"local://{file}":
            yield f"{name_of(job)}: the image has its jobs in {file}"


def arguments(objects: Objects) -> Iterator[str]:
    """The jobs themselves take flags and variables; each variable is a setting of some job; executors have them too."""
    known = {field.twin for settings, _ in JOBS.values() for field in fields_of(settings)}
    for each in of_kind(objects, "ConfigMap"):
        yield from (f"{name} is no setting" for name in each["data"] if name not in known)
    for job in jobs(objects):
        words = job["spec"]["template"]["arguments"]
        if words[0] not in JOBS:
            yield f"{name_of(job)}: {words[0]} is no job"
            continue
        for role in PODS:
            values = _variables(objects, part(job, role)["template"]["spec"]["containers"][0])
            yield from (f"{name_of(job)} {role}: {refusal}" for refusal in refusals(words, values))


def refusals(words: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Yield what the command and the job's settings have against arguments in an environment."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = _parser().parse_args(words)
        options.settings.read(vars(options), environment)
    except SettingError as error:
        yield str(error)
    except SystemExit:
        yield said.getvalue()


def metrics(objects: Objects) -> Iterator[str]:
    """The driver finds the Agent of its node, and its tags are those of its labels; executors report nothing."""
    wanted: Objects = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in [
            ("DD_ENV", f"metadata.labels['{rules.TAGS[0]}']"),
            ("DD_SERVICE", f"metadata.labels['{rules.TAGS[1]}']"),
            ("DD_VERSION", f"metadata.labels['{rules.TAGS[2]}']"),
            ("DD_AGENT_HOST", "status.hostIP"),
            ("DD_ENTITY_ID", "metadata.uid"),
        ]
    ]
    for deployment in deployments(objects):
        [container] = containers(deployment)
        driver = container["name"] == "spark-kubernetes-driver"
        if container.get("env", []) != (wanted if driver else []):
            yield f"{deployment['metadata']['name']}: not the variables of Datadog"
        annotations = deployment["spec"]["template"]["metadata"].get("annotations", {})
        if f"ad.datadoghq.com/{container['name']}.logs" not in annotations:
            yield f"{deployment['metadata']['name']}: the log lines have no source"


def namespaces(objects: Objects) -> Iterator[str]:
    """All is in the namespace that production's overlay makes."""
    [production] = of_kind(rendered(OVERLAYS["production"]), "Namespace")
    names = {each["metadata"].get("namespace") for each in objects}
    if names != {production["metadata"]["name"]}:
        yield f"namespaces {names}"


def _namespace(objects: Objects) -> str:
    return str(jobs(objects)[0]["metadata"].get("namespace"))


def _variables(objects: Objects, container: Object) -> dict[str, str]:
    values: dict[str, str] = {}
    for source in container.get("envFrom", []):
        values |= the(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    return values


def _settings_of_the_image() -> dict[str, str]:
    steps = chain(read(ROOT / "k8s" / "Dockerfile"), "pipeline")
    return {
        key: value for step in steps if step.word == "ENV" for key, _, value in (w.partition("=") for w in step.values)
    }


SPARK_RULES: tuple[Rule, ...] = (
    pod_security,
    containers_of_spark,
    runs,
    restarts,
    identity,
    image,
    resources,
    configuration,
    arguments,
    metrics,
    namespaces,
)

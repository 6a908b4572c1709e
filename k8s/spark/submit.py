"""Submit a job of this folder without the Spark operator: run `spark-submit` with the operator's arguments.

    kubectl kustomize k8s/spark | python k8s/spark/submit.py outbox-archive --master k8s://https://HOST

Flags after the job's name belong to spark-submit. The account, the role and the settings must exist in the cluster.
Without the operator, there is no schedule and no retry. Needs PyYAML.
"""  # noqa: INP001 - a script

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def words(job: dict[str, Any], folder: Path, flags: list[str]) -> Iterator[str]:
    """Yield the words of the command, after writing the pod templates to `folder`."""
    template = job["spec"]["template"]
    driver, executor = template["driver"], template["executor"]
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    conf = {
        "spark.kubernetes.namespace": namespace,
        "spark.kubernetes.container.image": template["image"],
        "spark.kubernetes.container.image.pullPolicy": template["imagePullPolicy"],
        "spark.kubernetes.authenticate.driver.serviceAccountName": driver["serviceAccount"],
        "spark.executor.instances": executor["instances"],
    }
    for role, pods in (("driver", driver), ("executor", executor)):
        file = folder / f"{role}.yaml"
        file.write_text(yaml.safe_dump(pods["template"]), encoding="utf-8")
        conf[f"spark.kubernetes.{role}.podTemplateFile"] = str(file)
        conf[f"spark.kubernetes.{role}.podTemplateContainerName"] = f"spark-kubernetes-{role}"
        conf |= {f"spark.{role}.{field}": pods[field] for field in ("cores", "memory", "memoryOverhead")}
    conf |= template["sparkConf"]
    conf |= {f"spark.hadoop.{key}": value for key, value in template["hadoopConf"].items()}
    yield from ["spark-submit", "--deploy-mode", template["mode"], "--name", name]
    for key, value in conf.items():
        yield from ["--conf", f"{key}={value}"]
    yield from [*flags, template["mainApplicationFile"], *template["arguments"]]


def main() -> None:
    """Read the rendered objects and replace this process by spark-submit."""
    wanted, *flags = sys.argv[1:] or sys.exit(__doc__)
    jobs = {
        each["metadata"]["name"]: each for each in yaml.safe_load_all(sys.stdin) if "schedule" in each.get("spec", {})
    }
    if wanted not in jobs:
        sys.exit(f"no job {wanted}: {', '.join(jobs)}")
    # Not deleted, because spark-submit reads it after it has replaced this process.
    folder = Path(tempfile.mkdtemp(prefix="outbox-pipeline-"))
    command = list(words(jobs[wanted], folder, flags))
    os.execvp(command[0], command)  # noqa: S606 - the purpose of this script


if __name__ == "__main__":
    main()

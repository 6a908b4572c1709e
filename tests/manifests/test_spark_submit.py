"""pip's own Spark, with what k8s/spark says, against an API server that only takes notes: the pods that it would make.

Then those pods' programs are run as processes of this machine, by the image's entry point: a driver that asks for
executors, and the executors that it asked for, which register tasks on the emulator. No container, kubelet or operator.
"""

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pyarrow as pa
import pytest
from google.cloud.spanner_v1.database import Database
from pyarrow import parquet

from outbox.emulators import Emulators
from tests.manifests import rules
from tests.manifests.kubernetes_api import Api, api
from tests.manifests.rendering import K8S, KUBERNETES, ROOT, Object, containers, environment, kubectl, rendered
from tests.manifests.spark_rules import jobs

pytestmark = pytest.mark.xdist_group("spark-submit")  # one submission, which takes a minute, serves all

SPARK = K8S / "spark"
ENTRY = SPARK / "entrypoint.sh"
#: Rows of the file, each of which becomes a task.
ROWS = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    """What spark-submit made, and where."""

    server: Api
    folder: Path
    variables: dict[str, str]

    @property
    def driver(self) -> Object:
        """The driver's pod."""
        return self.server.made["Pod"][0]

    def mounted(self, key: str) -> str:
        """Return the text of a file that is mounted from one of the ConfigMaps."""
        [text] = {each["data"][key] for each in self.server.made["ConfigMap"] if key in each["data"]}
        return str(text)


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitted]:
    """The archive, submitted by k8s/spark/submit.py."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None or shutil.which("java") is None:
        if os.environ.get("CI"):
            pytest.fail("no PySpark or no Java")
        pytest.skip("no PySpark or no Java")
    folder = tmp_path_factory.mktemp("submit")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "tini").write_text('#!/bin/bash\nshift 2\nexec "$@"\n')
    (programs / "tini").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "HOME": str(folder), "KUBECONFIG": "/dev/null", "LANG": "C.UTF-8", "TMPDIR": str(folder)}
    variables |= {"SPARK_HOME": str(Path(found.origin).parent), "SPARK_LOCAL_IP": "127.0.0.1"}
    manifests = subprocess.run([kubectl(), "kustomize", SPARK], capture_output=True, text=True, check=True, timeout=60)
    with api() as server:
        flags = ["--master", f"k8s://{server.url}", "--conf", "spark.kubernetes.submission.waitAppCompletion=false"]
        done = subprocess.run(
            [sys.executable, SPARK / "submit.py", "outbox-archive", *flags],
            input=manifests.stdout,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        yield Submitted(server, folder, variables)


def keeps_the_rules(pod: Object) -> None:
    """Assert that Kubernetes takes a pod, that "restricted" admits it, and that it takes no more than it says."""
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    deployment = {"kind": "Deployment", "metadata": {}, "spec": {"template": pod}}
    assert list(rules.pod_security([deployment])) == []
    assert list(rules.container_security([deployment])) == []
    assert list(rules.images([deployment])) == []
    [found] = containers(deployment)
    assert found["resources"]["requests"]["memory"] == found["resources"]["limits"]["memory"]
    assert "cpu" not in found["resources"]["limits"]
    # Spark's own volumes are ConfigMaps; it made no emptyDir beside those of the template.
    assert [each["name"] for each in pod["spec"]["volumes"] if "emptyDir" in each] == ["tmp", "spark-local-dir-1"]
    assert {"name": "SPARK_LOCAL_DIRS", "value": "/var/data/spark"} in found["env"]
    labels = pod["metadata"]["labels"]
    assert labels[rules.TAGS[2]] == found["image"].partition(":")[2]


def test_the_drivers_pod_is_admitted_and_runs_the_job(submitted: Submitted) -> None:
    """What Spark makes of the template, and the words for the image's entry point."""
    keeps_the_rules(submitted.driver)
    [found] = submitted.driver["spec"]["containers"]
    *before, file, archive, window, length = found["args"]
    assert before[0] == "driver"
    assert file == "local:///opt/pipeline/lib/python3.11/site-packages/outbox_pipeline/__main__.py"
    assert [archive, window, length] == ["archive", "--window", "1d"]
    assert submitted.driver["spec"]["serviceAccountName"] == "outbox-pipeline"
    # 2g for Java and 1g for Python.
    assert found["resources"]["limits"] == {"memory": "3072Mi"}


def test_the_submitter_makes_what_the_page_says(submitted: Submitted) -> None:
    """Whoever submits needs the right to make these; since Spark 4.2 a NetworkPolicy is among them."""
    submitted_kinds = set(submitted.server.made)
    assert submitted_kinds == {"Pod", "Service", "ConfigMap", "NetworkPolicy"}
    page = (SPARK.parents[1] / "docs/operations/pipeline-deploy.md").read_text(encoding="utf-8")
    assert [kind for kind in submitted_kinds if f"`{kind}`" not in page] == []


@pytest.mark.timeout(400)
def test_the_driver_asks_for_executors_that_do_the_work(
    submitted: Submitted,
    database: Database,
    emulators: Emulators,
    long: bool,
) -> None:
    """With the properties that were submitted: executors' pods are admitted, and what they run registers tasks.

    The job is `register`, with the settings of its pods but for where the database and the files are.
    """
    if not long:
        pytest.skip("a driver and an executor as processes, a minute and a half: --long")
    server, folder = submitted.server, submitted.folder
    settings = settings_of_register(folder, database) | emulators.environment()
    words = ["--properties-file", str(properties_of(submitted)), "--class", "org.apache.spark.deploy.PythonRunner"]
    job = [f"local://{ROOT}/outbox_pipeline/__main__.py", *register_job()["arguments"]]
    variables = submitted.variables | settings
    before = len(server.made["Pod"])
    with (folder / "driver.log").open("w+") as log:
        driver = subprocess.Popen(
            [ENTRY, "driver", *words, *job],
            env=variables | {"SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1"},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        executors: list[subprocess.Popen[bytes]] = []
        try:
            deadline = time.monotonic() + 300
            while driver.poll() is None and time.monotonic() < deadline:
                new = server.made["Pod"][before + len(executors) :]
                executors.extend(started(pod, variables, folder) for pod in new)
                time.sleep(0.2)
            assert driver.poll() == 0, f"{driver.poll()}: {Path(log.name).read_text()}"
        finally:
            for process in [driver, *executors]:
                process.kill()
                process.wait()
    with database.snapshot() as snapshot:
        found = list(snapshot.execute_sql("SELECT COUNT(*), MIN(Topic) FROM AsynchronousTasks"))
    assert found == [[ROWS, "invoices"]]
    pods = server.made["Pod"][before:]
    assert len(pods) == 1
    keeps_the_rules(pods[0])
    assert pods[0]["spec"]["serviceAccountName"] == "outbox-pipeline"
    assert pods[0]["spec"]["automountServiceAccountToken"] is False


def properties_of(submitted: Submitted) -> Path:
    """Write the properties that were submitted, less what only a cluster has, and smaller."""
    (submitted.folder / "pods.yml").write_text(submitted.mounted("podspec-configmap-key"))
    here = {
        # In place of what only a cluster has: mounts, names, and an environment in /opt.
        "spark.kubernetes.executor.podTemplateFile": submitted.folder / "pods.yml",
        "spark.kubernetes.driver.master": submitted.server.url,
        "spark.kubernetes.executor.enableApiWatcher": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.port": 0,
        "spark.driver.blockManager.port": 0,
        "spark.pyspark.python": sys.executable,
        "spark.ui.enabled": "false",
        # And less of it.
        "spark.executor.instances": 1,
        "spark.executor.memory": "512m",
    }
    properties = submitted.folder / "spark.properties"
    lines = [f"{key}={value}" for key, value in here.items()]
    properties.write_text("\n".join([submitted.mounted("spark.properties"), *lines, ""]))
    return properties


def register_job() -> Object:
    """Return the template of the job `register`."""
    [register] = [job for job in jobs(rendered(SPARK)) if job["metadata"]["name"] == "outbox-register"]
    template: Object = register["spec"]["template"]
    return template


def settings_of_register(folder: Path, database: Database) -> dict[str, str]:
    """Return the settings of the pods of `register`, with a file of `ROWS` rows, written here, as its input."""
    (folder / "month").mkdir()
    rows = [{"id": number, "data": f"invoice {number}"} for number in range(ROWS)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "month" / "invoices.parquet")
    [container] = register_job()["driver"]["template"]["spec"]["containers"]
    return environment(rendered(SPARK), {}, container | {"env": []}) | {
        "OUTBOX_PROJECT": str(database._instance._client.project),
        "OUTBOX_INSTANCE": str(database._instance.instance_id),
        "OUTBOX_DATABASE": str(database.database_id),
        "OUTBOX_INPUT": str(folder / "month"),
        "OUTBOX_REJECTS": str(folder / "rejects"),
        "SPARK_CONF_DIR": str(folder),
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": str(ROOT),
    }


def started(pod: Object, variables: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start what an executor's pod runs, with the variables that the pod has."""
    [found] = pod["spec"]["containers"]
    fields = {"status.podIP": "127.0.0.1", "metadata.name": pod["metadata"]["name"]}
    values = environment(rendered(SPARK), pod, found | {"env": []})
    for each in found["env"]:
        values[each["name"]] = each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
    # What is mounted, or in the image, is elsewhere here.
    values |= {name: value for name, value in variables.items() if name.startswith(("OUTBOX_", "SPARK_CONF_DIR"))}
    values |= {"SPARK_LOCAL_DIRS": str(folder / "local")}
    with (folder / f"{pod['metadata']['name']}.log").open("wb") as log:
        return subprocess.Popen([ENTRY, *found["args"]], env=variables | values, cwd=folder, stdout=log, stderr=log)


def test_a_job_that_is_not_there_is_named(tmp_path: Path) -> None:
    """And nothing is submitted."""
    text = "\n---\n".join(path.read_text(encoding="utf-8") for path in sorted(SPARK.glob("*ive.yaml")))
    done = subprocess.run(
        [sys.executable, SPARK / "submit.py", "archive"],
        input=text,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 1
    assert re.fullmatch("no job archive: outbox-archive\n", done.stderr)

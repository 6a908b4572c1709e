"""The pods that pip's Spark makes of k8s/spark, against an API server that only keeps them; with --long they also run.

They run as processes, by the image's entry point. There is no container, no kubelet and no operator.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from google.cloud.spanner_v1.database import Database
from pyarrow import parquet

from outbox.devtools.emulators import Emulators
from tests.manifests.kubernetes_api import Api, api
from tests.manifests.rendering import ROOT, SPARK, Object, environment, programs, rendered, rendered_text, the, validate
from tests.manifests.test_spark_entrypoint import ENTRY, JAVA, TINI
from tests.support.spanner import INSTANCE, PROJECT, query

pytestmark = pytest.mark.xdist_group("spark-submit")  # one submission serves all

#: Rows of the file, each of which becomes a task.
ROWS = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    server: Api
    folder: Path
    variables: dict[str, str]

    def mounted(self, key: str) -> str:
        [text] = {each["data"][key] for each in self.server.created["ConfigMap"] if key in each["data"]}
        return str(text)


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitted]:
    programs("java")
    folder = tmp_path_factory.mktemp("submit")
    (folder / "tini").write_text(TINI)
    (folder / "tini").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "HOME": str(folder), "KUBECONFIG": "/dev/null", "LANG": "C.UTF-8", "TMPDIR": str(folder)}
    variables |= JAVA | {"SPARK_HOME": str(Path(pyspark.__file__).parent), "SPARK_LOCAL_IP": "127.0.0.1"}
    with api() as server:
        flags = ["--master", f"k8s://{server.url}", "--conf", "spark.kubernetes.submission.waitAppCompletion=false"]
        done = submit("outbox-archive", *flags, variables=variables)
        assert done.returncode == 0, done.stderr
        yield Submitted(server, folder, variables)


def submit(*arguments: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SPARK / "submit.py"), *arguments]
    text = rendered_text(SPARK)
    return subprocess.run(command, input=text, env=variables, capture_output=True, text=True, check=False, timeout=120)


def keeps_the_rules(pod: Object) -> None:
    """Assert that Kubernetes accepts a pod, "restricted" admits it, and its memory and volumes are bounded."""
    validate(pod)
    [found] = pod["spec"]["containers"]
    assert found["resources"]["requests"]["memory"] == found["resources"]["limits"]["memory"]
    # Spark's own volumes are ConfigMaps; it created no emptyDir, because the template has the one that it needs.
    assert [each["name"] for each in pod["spec"]["volumes"] if "emptyDir" in each] == ["tmp", "spark-local-dir-1"]
    assert {"name": "SPARK_LOCAL_DIRS", "value": "/var/data/spark"} in found["env"]
    assert pod["metadata"]["labels"]["tags.datadoghq.com/version"] == found["image"].partition(":")[2]
    assert pod["spec"]["serviceAccountName"] == "outbox-pipeline"


def test_spark_submit_creates_an_admitted_driver_that_runs_the_job(submitted: Submitted) -> None:
    """The template, the arguments for the image's entry point, and only objects that the page names."""
    created = submitted.server.created
    keeps_the_rules(created["Pod"][0])
    [found] = created["Pod"][0]["spec"]["containers"]
    assert found["args"][0] == "driver"
    file = "local:///opt/pipeline/lib/python3.11/site-packages/outbox_pipeline/__main__.py"
    assert found["args"][-4:] == [file, "archive", "--window", "1d"]
    # 2g for Java and 1g for Python.
    assert found["resources"]["limits"] == {"memory": "3072Mi"}
    # The submitter needs the right to make these; since Spark 4.2 a NetworkPolicy is among them.
    assert set(created) == {"Pod", "Service", "ConfigMap", "NetworkPolicy"}
    page = (ROOT / "docs/operations/pipeline-deploy.md").read_text(encoding="utf-8")
    assert [kind for kind in created if f"`{kind}`" not in page] == []


def test_a_job_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """The error lists the jobs, and nothing is submitted."""
    done = submit("archive", variables={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, "no job archive: outbox-archive, outbox-register\n")


@pytest.mark.long("a driver and an executor as processes, a minute and a half")
@pytest.mark.timeout(400)
def test_the_driver_asks_for_executors_that_do_the_work(
    submitted: Submitted, database: Database, emulators: Emulators
) -> None:
    """With the submitted properties and the job `register`, but for where the database and the files are."""
    server, folder = submitted.server, submitted.folder
    register = the(rendered(SPARK), "ScheduledSparkApplication", "outbox-register")["spec"]["template"]
    here = {
        "OUTBOX_PROJECT": PROJECT,
        "OUTBOX_INSTANCE": INSTANCE,
        "OUTBOX_DATABASE": database.database_id,
        "OUTBOX_INPUT": str(folder / "month"),
        "OUTBOX_REJECTS": str(folder / "rejects"),
        "SPARK_CONF_DIR": str(folder),
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": str(ROOT),
    }
    (folder / "month").mkdir()
    rows = [{"id": number, "data": f"invoice {number}"} for number in range(ROWS)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "month" / "invoices.parquet")
    variables = submitted.variables | the(rendered(SPARK), "ConfigMap")["data"] | here | emulators.environment()
    words = ["--properties-file", str(properties_of(submitted)), "--class", "org.apache.spark.deploy.PythonRunner"]
    job = [f"local://{ROOT}/outbox_pipeline/__main__.py", *register["arguments"]]
    before = len(server.created["Pod"])
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
                new = server.created["Pod"][before + len(executors) :]
                executors.extend(started(pod, variables, folder) for pod in new)
                time.sleep(0.2)
            assert driver.poll() == 0, f"{driver.poll()}: {Path(log.name).read_text()}"
        finally:
            for process in [driver, *executors]:
                process.kill()
                process.wait()
    assert query(database, "SELECT COUNT(*), MIN(Topic) FROM AsynchronousTasks") == [[ROWS, "invoices"]]
    [pod] = server.created["Pod"][before:]
    keeps_the_rules(pod)
    assert pod["spec"]["automountServiceAccountToken"] is False


def properties_of(submitted: Submitted) -> Path:
    (submitted.folder / "pods.yml").write_text(submitted.mounted("podspec-configmap-key"))
    here = {
        "spark.kubernetes.executor.podTemplateFile": submitted.folder / "pods.yml",
        "spark.kubernetes.driver.master": submitted.server.url,
        "spark.kubernetes.executor.enableApiWatcher": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.port": 0,
        "spark.driver.blockManager.port": 0,
        "spark.pyspark.python": sys.executable,
        "spark.ui.enabled": "false",
        "spark.executor.instances": 1,
        "spark.executor.memory": "512m",
    }
    properties = submitted.folder / "spark.properties"
    lines = [f"{key}={value}" for key, value in here.items()]
    properties.write_text("\n".join([submitted.mounted("spark.properties"), *lines, ""]))
    return properties


def started(pod: Object, variables: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start an executor's command with the variables of its pod, except those of the image or a mount."""
    [found] = pod["spec"]["containers"]
    values = environment(rendered(SPARK), pod, found)
    values |= {name: value for name, value in variables.items() if name.startswith(("OUTBOX_", "SPARK_CONF_DIR"))}
    values |= {"SPARK_LOCAL_DIRS": str(folder / "local")}
    with (folder / f"{pod['metadata']['name']}.log").open("wb") as log:
        return subprocess.Popen([ENTRY, *found["args"]], env=variables | values, cwd=folder, stdout=log, stderr=log)

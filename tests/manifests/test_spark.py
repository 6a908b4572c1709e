"""The jobs of k8s/spark: they agree with the pipeline's code and image, and pip's Spark runs what they name."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyspark
import pytest

from outbox.program.settings import fields_of
from outbox_pipeline.job_settings import ArchiveSettings, AuditSettings, RegisterSettings
from outbox_pipeline.spanner import DEFAULT_RETENTION, TIME_TO_READ
from tests.manifests.rendering import K8S, ROOT, Object, programs, rendered, validate
from tests.manifests.test_deploy_page import instructions, refusals, variables
from tests.support.cluster import QUICK_JAVA

ROLES = ("driver", "executor")

each_job = pytest.mark.parametrize("name", ["archive", "audit", "register"])


def spec(name: str) -> Object:
    return dict(rendered("spark").the("ScheduledSparkApplication", f"outbox-{name}")["spec"])


def settings() -> dict[str, str]:
    return dict(rendered("spark").the("ConfigMap")["data"])


@each_job
def test_a_job_takes_its_arguments_and_variables(name: str) -> None:
    """Driver and executors have the same variables, and each of these is a setting."""
    template = spec(name)["template"]
    assert template["arguments"][0] == name
    assert list(refusals(template["arguments"], settings())) == []
    # A setting of one job may mean something else for another one, such as the topic of `register` and `replay`.
    known = [
        {field.variable for field in fields_of(each)} for each in (ArchiveSettings, AuditSettings, RegisterSettings)
    ]
    assert settings().keys() <= set.intersection(*known)
    for role in ROLES:
        [container] = template[role]["template"]["spec"]["containers"]
        assert container["name"] == f"spark-kubernetes-{role}"  # Spark adds a container of this name otherwise
        assert container["envFrom"] == [{"configMapRef": {"name": "outbox-pipeline"}}]


@each_job
def test_a_job_fits_its_image(name: str) -> None:
    """Spark's version, Python, the main file, the user and the writable working directory are those of the image."""
    template, image = spec(name)["template"], variables("pipeline")
    pinned = re.search(r"^pyspark==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert template["sparkVersion"] == pinned[1]
    assert template["sparkConf"]["spark.pyspark.python"] == image["PYSPARK_PYTHON"]
    packages = image["SPARK_HOME"].removesuffix("/pyspark")
    assert template["mainApplicationFile"] == f"local://{packages}/outbox_pipeline/__main__.py"
    for role in ROLES:
        pods = template[role]["template"]
        assert pods["metadata"]["labels"]["tags.datadoghq.com/version"] == template["image"].partition(":")[2]
        context = pods["spec"]["securityContext"]
        assert instructions("pipeline", "USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
        [container] = pods["spec"]["containers"]
        writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        [folder] = instructions("pipeline", "WORKDIR")  # Spark writes to it
        assert folder in writable


def test_only_the_archive_is_restarted_and_always_in_time() -> None:
    """An archive continues after a failure while Spanner keeps the day; `register` would reject rows again."""
    archive, register = spec("archive"), spec("register")
    minute, hour = map(int, archive["schedule"].split()[:2])
    policy = archive["template"]["restartPolicy"]
    assert (policy["type"], register["template"]["restartPolicy"]["type"]) == ("OnFailure", "Never")
    last = minute * 60 + hour * 3600 + policy["onFailureRetries"] * policy["onFailureRetryInterval"]
    assert last <= (DEFAULT_RETENTION - TIME_TO_READ).total_seconds()
    assert archive["schedule"] != register["schedule"]
    assert archive["concurrencyPolicy"] == register["concurrencyPolicy"] == "Forbid"


ENTRY = K8S / "spark/entrypoint.sh"
JAVA = {"JAVA_TOOL_OPTIONS": QUICK_JAVA}
#: The variables of an executor; the names are those in org.apache.spark.deploy.k8s.Constants.
EXECUTOR = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@127.0.0.1:9",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "512m",
    "SPARK_APPLICATION_ID": "spark-application-1",
    "SPARK_EXECUTOR_POD_IP": "127.0.0.1",
    "SPARK_EXECUTOR_POD_NAME": "outbox-archive-exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
}
RECORDER = '#!/bin/bash\nprintf \'%s\\0\' "$0" "$@"\nexit 7\n'
#: Accepts the flags that our entry point gives to tini, and becomes the program.
TINI = '#!/bin/bash\n[ "$1 $2" = "-s --" ] || exit 64\nshift 2\nexec "$@"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in ("bin/tini", "bin/java", "home/bin/java", "spark/bin/spark-submit"):
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(TINI if program.name == "tini" else RECORDER)
        program.chmod(0o755)
    return tmp_path


def entry(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    variables = {"PATH": path, "SPARK_HOME": str(folder / "spark"), "HOME": str(folder), "LANG": "C.UTF-8"} | more
    command = [str(ENTRY), *arguments]
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def words(folder: Path, *arguments: str, **more: str) -> list[str]:
    done = entry(folder, *arguments, **more)
    assert done.returncode == 7, done.stderr  # the program's own
    program, *found = done.stdout.split("\0")[:-1]
    return [str(Path(program).relative_to(folder)), *found]


def test_a_driver_is_spark_submit_and_another_command_is_itself(folder: Path) -> None:
    """A driver runs in the pod, bound to its address; each argument of Spark or `docker run` stays one word."""
    given = ["--properties-file", "/opt/spark/conf/spark.properties", "local:///x/__main__.py", "archive", "two words"]
    assert words(folder, "driver", *given, SPARK_DRIVER_BIND_ADDRESS="10.0.0.7") == [
        "spark/bin/spark-submit", "--conf", "spark.driver.bindAddress=10.0.0.7", "--deploy-mode", "client", *given,
    ]  # fmt: skip
    assert words(folder, "java", "-m", "two words", "") == ["bin/java", "-m", "two words", ""]


def test_an_executor_is_java_with_all_that_the_driver_set(folder: Path) -> None:
    """More than ten options in their order, configuration before jars, and Java of JAVA_HOME before that of PATH."""
    options = {f"SPARK_JAVA_OPT_{number}": f"-Dx{number}=a b" for number in range(12)}
    more = {"SPARK_CONF_DIR": "/opt/spark/conf", "HADOOP_CONF_DIR": "/opt/hadoop/conf", "SPARK_CLASSPATH": "/more/*"}
    assert words(folder, "executor", **EXECUTOR, **options, **more, JAVA_HOME=str(folder / "home")) == [
        "home/bin/java", *options.values(), "-Xms512m", "-Xmx512m", "-cp",
        f"/opt/spark/conf:/opt/hadoop/conf:/more/*:{folder}/spark/jars/*",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        "--driver-url", EXECUTOR["SPARK_DRIVER_URL"],
        "--executor-id", "3",
        "--cores", "2",
        "--app-id", "spark-application-1",
        "--hostname", "127.0.0.1",
        "--resourceProfileId", "0",
        "--podName", "outbox-archive-exec-3",
    ]  # fmt: skip


def test_a_variable_that_is_missing_is_named(folder: Path) -> None:
    """A Spark that sets other variables fails at once, not by a driver that waits for executors."""
    for name in EXECUTOR:
        done = entry(folder, "executor", **{key: value for key, value in EXECUTOR.items() if key != name})
        assert (done.returncode, f"{name}: unbound variable" in done.stderr) == (1, True), name


@pytest.mark.long("only another version of Spark refuses what the tests above pin")
def test_pips_spark_has_the_executor_that_is_started(folder: Path) -> None:
    """It accepts these words and connects to its driver; nothing listens there."""
    programs("java")
    (folder / "bin" / "java").unlink()
    options = {"SPARK_JAVA_OPT_0": "-Dspark.rpc.askTimeout=5s", "SPARK_JAVA_OPT_1": "-Dspark.rpc.io.maxRetries=0"}
    done = entry(folder, "executor", **EXECUTOR | options | JAVA | {"SPARK_HOME": str(Path(pyspark.__file__).parent)})
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Failed to connect to /127.0.0.1:9" in output, output
    assert "Usage" not in output


@contextlib.contextmanager
def api() -> Iterator[tuple[str, dict[str, list[Object]]]]:
    """Serve the API of Kubernetes on this machine. Yield its address, and all objects that it receives, by kind."""
    created: dict[str, list[Object]] = defaultdict(list)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def keep(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            created[body["kind"]].append(body)
            given = {"uid": "1", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
            raw = json.dumps(body | {"metadata": body["metadata"] | given, "status": {"phase": "Running"}}).encode()
            self.send_response(201)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_PATCH = keep  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: object) -> None:
            """Write no access log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", created
        server.shutdown()


def submit(*arguments: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(K8S / "spark/submit.py"), *arguments]
    text = rendered("spark").text
    return subprocess.run(command, input=text, env=variables, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.extended
def test_spark_submit_creates_an_admitted_driver_that_runs_the_job(tmp_path: Path) -> None:
    """The template, the arguments for the image's entry point, and only objects that the page names.

    Kubernetes accepts the pod, "restricted" admits it, and its memory and volumes are bounded.
    """
    programs("java")
    (tmp_path / "tini").write_text(TINI)
    (tmp_path / "tini").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = JAVA | {"PATH": path, "HOME": str(tmp_path), "KUBECONFIG": "/dev/null", "LANG": "C.UTF-8"}
    variables |= {
        "TMPDIR": str(tmp_path),
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with api() as (address, created):
        flags = ["--master", f"k8s://{address}", "--conf", "spark.kubernetes.submission.waitAppCompletion=false"]
        done = submit("outbox-archive", *flags, variables=variables)
        assert done.returncode == 0, done.stderr
    [pod] = created["Pod"]
    validate(pod)
    [found] = pod["spec"]["containers"]
    # Spark's own volumes are ConfigMaps; it created no emptyDir, because the template has the one that it needs.
    assert [each["name"] for each in pod["spec"]["volumes"] if "emptyDir" in each] == ["tmp", "spark-local-dir-1"]
    assert {"name": "SPARK_LOCAL_DIRS", "value": "/var/data/spark"} in found["env"]
    assert pod["metadata"]["labels"]["tags.datadoghq.com/version"] == found["image"].partition(":")[2]
    assert pod["spec"]["serviceAccountName"] == "outbox-pipeline"
    file = "local:///opt/pipeline/lib/python3.13/site-packages/outbox_pipeline/__main__.py"
    assert found["args"][0] == "driver"
    assert found["args"][-6:] == [file, "archive", "--archive", "gs://my-bucket/archive", "--window", "1d"]
    # 2g for Java and 1g for Python.
    assert found["resources"]["limits"]["memory"] == found["resources"]["requests"]["memory"] == "3072Mi"
    # The submitter needs the right to make these; since Spark 4.2 a NetworkPolicy is among them.
    assert set(created) == {"Pod", "Service", "ConfigMap", "NetworkPolicy"}
    page = (ROOT / "docs/operations/pipeline-deploy.md").read_text(encoding="utf-8")
    assert [kind for kind in created if f"`{kind}`" not in page] == []


def test_a_job_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """The error lists the jobs, and nothing is submitted."""
    done = submit("archive", variables={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, "no job archive: outbox-archive, outbox-audit, outbox-register\n")

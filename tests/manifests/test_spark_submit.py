"""The driver's pod that pip's Spark makes of k8s/spark, against an API server that only keeps it: no pod runs."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyspark
import pytest

from tests.manifests.rendering import ROOT, SPARK, Object, Objects, programs, rendered_text, validate
from tests.manifests.test_spark_entrypoint import JAVA, TINI


@contextlib.contextmanager
def api() -> Iterator[tuple[str, dict[str, Objects]]]:
    """Serve the API of Kubernetes on this machine. Yield its address, and all objects that it receives, by kind."""
    created: dict[str, Objects] = defaultdict(list)

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


@pytest.fixture
def submitted(tmp_path: Path) -> dict[str, Objects]:
    programs("java")
    folder = tmp_path
    (folder / "tini").write_text(TINI)
    (folder / "tini").chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "HOME": str(folder), "KUBECONFIG": "/dev/null", "LANG": "C.UTF-8", "TMPDIR": str(folder)}
    variables |= JAVA | {"SPARK_HOME": str(Path(pyspark.__file__).parent), "SPARK_LOCAL_IP": "127.0.0.1"}
    with api() as (address, created):
        flags = ["--master", f"k8s://{address}", "--conf", "spark.kubernetes.submission.waitAppCompletion=false"]
        done = submit("outbox-archive", *flags, variables=variables)
        assert done.returncode == 0, done.stderr
    return created


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


@pytest.mark.extended
def test_spark_submit_creates_an_admitted_driver_that_runs_the_job(submitted: dict[str, Objects]) -> None:
    """The template, the arguments for the image's entry point, and only objects that the page names."""
    keeps_the_rules(submitted["Pod"][0])
    [found] = submitted["Pod"][0]["spec"]["containers"]
    assert found["args"][0] == "driver"
    file = "local:///opt/pipeline/lib/python3.11/site-packages/outbox_pipeline/__main__.py"
    assert found["args"][-6:] == [file, "archive", "--archive", "gs://my-bucket/archive", "--window", "1d"]
    # 2g for Java and 1g for Python.
    assert found["resources"]["limits"] == {"memory": "3072Mi"}
    # The submitter needs the right to make these; since Spark 4.2 a NetworkPolicy is among them.
    assert set(submitted) == {"Pod", "Service", "ConfigMap", "NetworkPolicy"}
    page = (ROOT / "docs/operations/pipeline-deploy.md").read_text(encoding="utf-8")
    assert [kind for kind in submitted if f"`{kind}`" not in page] == []


def test_a_job_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """The error lists the jobs, and nothing is submitted."""
    done = submit("archive", variables={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, "no job archive: outbox-archive, outbox-audit, outbox-register\n")

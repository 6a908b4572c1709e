"""The entry point of the pipeline's image, run: with stand-ins that write down their words, and with pip's Spark."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.manifests.rendering import ROOT

ENTRY = ROOT / "k8s" / "spark" / "entrypoint.sh"
#: What Spark sets for an executor; the names are those in org.apache.spark.deploy.k8s.Constants.
EXECUTOR = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "512m",
    "SPARK_APPLICATION_ID": "spark-application-1",
    "SPARK_EXECUTOR_POD_IP": "127.0.0.1",
    "SPARK_EXECUTOR_POD_NAME": "outbox-archive-exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
}
RECORDER = '#!/bin/bash\nprintf \'%s\\0\' "${0##*/}" "$@"\nexit 7\n'
#: Takes what tini takes here, and becomes what it is told to run.
TINI = '#!/bin/bash\n[ "$1 $2" = "-s --" ] || exit 64\nshift 2\nexec "$@"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of programs in front of the others, and a SPARK_HOME, of stand-ins."""
    for path, text in {"bin/tini": TINI, "bin/java": RECORDER, "spark/bin/spark-submit": RECORDER}.items():
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    return tmp_path


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the variables of the image."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "SPARK_HOME": str(folder / "spark"), "HOME": str(folder), "LANG": "C.UTF-8"} | more


def words(folder: Path, *arguments: str, **more: str) -> list[str]:
    """Run the entry point with stand-ins, and return the words of the program that it became."""
    done = subprocess.run(
        [ENTRY, *arguments], env=environment(folder, **more), capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 7, done.stderr  # the program's own
    return done.stdout.split("\0")[:-1]


def test_a_driver_is_spark_submit_in_client_mode(folder: Path) -> None:
    """In the pod itself, bound to the pod's address; what Spark passes stays one word each and comes last."""
    given = ["--properties-file", "/opt/spark/conf/spark.properties", "local:///x/__main__.py", "archive", "two words"]
    assert words(folder, "driver", *given, SPARK_DRIVER_BIND_ADDRESS="10.0.0.7") == [
        "spark-submit", "--conf", "spark.driver.bindAddress=10.0.0.7", "--deploy-mode", "client", *given,
    ]  # fmt: skip


def test_an_executor_is_java_with_all_that_the_driver_said(folder: Path) -> None:
    """Options in their order, more than ten and with spaces; memory; where the driver is and who this is."""
    options = {f"SPARK_JAVA_OPT_{number}": f"-Dx{number}=a b" for number in range(12)}
    program, *found = words(folder, "executor", **EXECUTOR, **options)
    assert program == "java"
    assert found[:12] == [f"-Dx{number}=a b" for number in range(12)]
    assert found[12:15] == ["-Xms512m", "-Xmx512m", "-cp"]
    assert found[15] == f"{folder}/spark/conf:{folder}/spark/jars/*"
    assert found[16:] == [
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        "--driver-url", EXECUTOR["SPARK_DRIVER_URL"],
        "--executor-id", "3",
        "--cores", "2",
        "--app-id", "spark-application-1",
        "--hostname", "127.0.0.1",
        "--resourceProfileId", "0",
        "--podName", "outbox-archive-exec-3",
    ]  # fmt: skip


def test_an_executor_without_options_of_java_starts(folder: Path) -> None:
    """None is not an empty one, which Java would take for a class."""
    assert words(folder, "executor", **EXECUTOR)[1] == "-Xms512m"


def test_the_classpath_begins_with_configuration(folder: Path) -> None:
    """What Spark mounts, Hadoop's, what spark.executor.extraClassPath names, and then Spark's own jars."""
    more = {"SPARK_CONF_DIR": "/opt/spark/conf", "HADOOP_CONF_DIR": "/opt/hadoop/conf", "SPARK_CLASSPATH": "/more/*"}
    found = words(folder, "executor", **EXECUTOR, **more)
    wanted = f"/opt/spark/conf:/opt/hadoop/conf:/more/*:{folder}/spark/jars/*"
    assert found[found.index("-cp") + 1] == wanted


def test_java_home_goes_before_the_path(folder: Path) -> None:
    """Where it is set; the image has Java in its PATH."""
    home = folder / "other"
    (home / "bin").mkdir(parents=True)
    shutil.copy(folder / "bin" / "java", home / "bin" / "java")
    (folder / "bin" / "java").unlink()
    assert words(folder, "executor", **EXECUTOR, JAVA_HOME=str(home))[0] == "java"


def test_anything_else_is_run_as_it_is(folder: Path) -> None:
    """`docker run IMAGE python -m outbox_pipeline ...`, with its words and its exit code."""
    assert words(folder, "java", "-m", "two words", "") == ["java", "-m", "two words", ""]


@pytest.mark.parametrize("name", EXECUTOR)
def test_a_variable_that_is_missing_is_named(folder: Path, name: str) -> None:
    """A Spark that sets other ones is noticed at once, not by a driver that waits for executors."""
    given = {key: value for key, value in EXECUTOR.items() if key != name}
    done = subprocess.run(
        [ENTRY, "executor"], env=environment(folder, **given), capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 1
    assert f"{name}: unbound variable" in done.stderr


@pytest.fixture
def spark(folder: Path) -> dict[str, str]:
    """The variables of the image with pip's Spark and a real Java."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None or shutil.which("java") is None:
        if os.environ.get("CI"):
            pytest.fail("no PySpark or no Java")
        pytest.skip("no PySpark or no Java")
    (folder / "bin" / "java").unlink()
    home = str(Path(found.origin).parent)
    return environment(folder, SPARK_HOME=home) | {"PYSPARK_PYTHON": sys.executable}


def test_pips_spark_submit_runs_what_a_driver_is_given(folder: Path, spark: dict[str, str]) -> None:
    """The words that Spark gives a driver, here with a local master: the job gets its arguments, its code is the pod's.

    PYTHONSAFEPATH, which the image sets, keeps the job's folder out of the search for modules.
    """
    job = folder / "job" / "__main__.py"
    job.parent.mkdir()
    (job.parent / "settings.py").write_text("")
    job.write_text(
        "import importlib.util, sys, pyspark\n"
        "print(sys.argv[1:], importlib.util.find_spec('settings'), pyspark.__version__)\n"
        "sys.exit(3)\n"
    )
    properties = folder / "spark.properties"
    properties.write_text("spark.master=local[1]\nspark.submit.deployMode=cluster\n")
    given = ["--properties-file", str(properties), "--class", "org.apache.spark.deploy.PythonRunner", f"local://{job}"]
    done = subprocess.run(
        [ENTRY, "driver", *given, "archive", "--window", "1d"],
        env=spark | {"SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1", "PYTHONSAFEPATH": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("pyspark=="))
    assert f"['archive', '--window', '1d'] None {pinned.removeprefix('pyspark==')}\n" in done.stdout, done.stderr
    assert done.returncode == 3, done.stderr


def test_pips_spark_has_the_executor_that_is_started(folder: Path, spark: dict[str, str]) -> None:
    """It takes these words and looks for its driver; nobody listens there."""
    url = "spark://CoarseGrainedScheduler@127.0.0.1:9"
    options = {"SPARK_JAVA_OPT_0": "-Dspark.rpc.askTimeout=5s", "SPARK_JAVA_OPT_1": "-Dspark.rpc.io.maxRetries=0"}
    done = subprocess.run(
        [ENTRY, "executor"],
        env=spark | EXECUTOR | options | {"SPARK_DRIVER_URL": url},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Failed to connect to /127.0.0.1:9" in said, said
    assert "Usage" not in said

"""The entry point of the pipeline's image, run with programs that record their arguments, and with pip's Spark."""

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.manifests.rendering import ROOT, SPARK, programs

ENTRY = SPARK / "entrypoint.sh"
#: Java starts with half of the CPU time without its second compiler and with one thread to collect garbage.
JAVA = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
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


@pytest.fixture
def spark(folder: Path) -> dict[str, str]:
    programs("java")
    (folder / "bin" / "java").unlink()
    return JAVA | {"SPARK_HOME": str(Path(pyspark.__file__).parent), "PYSPARK_PYTHON": sys.executable}


@pytest.mark.long("only another version of Spark refuses what the tests above pin")
def test_pips_spark_submit_runs_the_arguments_of_a_driver(folder: Path, spark: dict[str, str]) -> None:
    """PYTHONSAFEPATH, which the image sets, keeps the job's folder out of the search for modules."""
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
    here = {"SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1", "PYTHONSAFEPATH": "1"}
    done = entry(folder, "driver", *given, "archive", "--window", "1d", **spark, **here)
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("pyspark=="))
    assert f"['archive', '--window', '1d'] None {pinned.split()[0].removeprefix('pyspark==')}\n" in done.stdout, (
        done.stderr
    )
    assert done.returncode == 3, done.stderr


@pytest.mark.long("only another version of Spark refuses what the tests above pin")
def test_pips_spark_has_the_executor_that_is_started(folder: Path, spark: dict[str, str]) -> None:
    """It accepts these words and connects to its driver; nothing listens there."""
    options = {"SPARK_JAVA_OPT_0": "-Dspark.rpc.askTimeout=5s", "SPARK_JAVA_OPT_1": "-Dspark.rpc.io.maxRetries=0"}
    done = entry(folder, "executor", **EXECUTOR, **options, **spark)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Failed to connect to /127.0.0.1:9" in output, output
    assert "Usage" not in output

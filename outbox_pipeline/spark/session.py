"""Creates the Spark session, after checking that Spark can run here."""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.errors import NotReached

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOGGING = Path(__file__).with_name("log4j2.properties")
#: The lowest major version of Java that Spark 4 supports: https://spark.apache.org/docs/4.0.0/
JAVA = 17
#: The packages of the extra in pyproject.toml: name, lowest version, and the first version that is too new.
PACKAGES = (
    ("pyspark", (4,), (5,)),
    ("pandas", (2, 2), (3,)),
    ("pyarrow", (18,), None),
    ("matplotlib", (3, 10), None),
    ("jinja2", (3, 1), None),
    ("fastavro", (1, 9), None),
)
HOW_TO_GET_THEM = "pip install 'spanner-outbox[spark]'"

#: Options that every job needs. Speculation would run the writes of a Spark task twice. Times are in UTC.
_ALWAYS = {
    "spark.speculation": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionOverwriteMode": "static",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # the default, INT96, is deprecated in Parquet
    "spark.sql.ansi.enabled": "true",
    # A job reads its cached rows only a few times, so compressing them takes longer than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Sorted rows are grouped without a hash table.
    "spark.sql.execution.replaceHashWithSortAgg": "true",
    # Max rows and bytes in the memory of a Spark task. Spark 4.0 ignores the bytes.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16777216",
}
#: Spark inside this process. A Spark task has four attempts, as on a cluster.
EMBEDDED = "local[*,4]"
#: The JVM's slower, optimizing compiler starts only after ten times as many calls and loop iterations as by default. A
#: job of a few thousand rows ends before optimized code saves what its compilation costs. In a job of millions of rows,
#: the busy methods pass these numbers in the first seconds.
_COMPILE_LATER = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000 "
    "-XX:Tier4BackEdgeThreshold=400000"
)
#: Inside this process, Spark accepts connections from this machine only.
_EMBEDDED = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false"}


def session(name: str, master: str = EMBEDDED) -> "SparkSession":
    """Return the Spark session of a job: the session of `spark-submit`, or a new one with `master`.

    Raises NotReached if Java or a package of the extra is missing or has the wrong version, or if Java does not start.
    """
    check_packages()
    # spark-submit has already chosen a master and started the JVM.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted:
        check_java()
        # Otherwise Spark starts its Python workers with the `python3` in PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415 - it may be missing
    from pyspark.sql import SparkSession  # noqa: PLC0415 - the same

    builder = SparkSession.builder.appName(f"outbox {name}")
    embedded = {
        "spark.master": master,
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        # The default of 200 is for clusters.
        "spark.sql.shuffle.partitions": str(4 * (os.cpu_count() or 1)),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} {_COMPILE_LATER}",
        **_EMBEDDED,
    }
    for key, value in (({} if submitted else embedded) | _ALWAYS).items():
        builder = builder.config(key, value)
    try:
        created = builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise NotReached(
            "Java did not start Spark. Java's own messages are above. If this process used a client of Spanner or "
            "Pub/Sub before, gRPC may have ended the JVM: create the Spark session first, or set "
            "GRPC_ENABLE_FORK_SUPPORT=0 (https://github.com/grpc/grpc/issues/43055)"
        ) from error
    created.sparkContext.setLogLevel("ERROR")
    return created


def check_packages() -> None:
    """Check that the packages of the extra have supported versions. Raises NotReached."""
    for name, lowest, end in PACKAGES:
        found = _version(name)
        if found is None:
            raise NotReached(f"Package {name} is not installed. Run: {HOW_TO_GET_THEM}")
        number = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
        if number < lowest or (end and number >= end):
            below = f",<{'.'.join(map(str, end))}" if end else ""
            wanted = f"{name}>={'.'.join(map(str, lowest))}{below}"
            raise NotReached(f"{name} {found} is installed, but {wanted} is required. Run: {HOW_TO_GET_THEM}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        pass
    # A Spark that pip did not install, such as Dataproc's, has no package metadata.
    try:
        return str(import_module(name).__version__)
    except ImportError:
        return None


def check_java() -> None:
    """Check that Java is installed in a version that Spark supports. Raises NotReached."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    where = f"in JAVA_HOME, {home}" if home else "in PATH, and JAVA_HOME is not set"
    get_it = f"Install Java {JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME"
    if java is None:
        raise NotReached(f"Spark needs Java, but no java is {where}. {get_it}")
    answer = subprocess.run([java, "-version"], check=False, capture_output=True, text=True).stderr  # noqa: S603 - no shell
    # For example 'openjdk version "17.0.15"'. Java 8 prints "1.8.0_392".
    match = re.search(r'version "(?:1\.)?(\d+)', answer)
    if match is None:
        raise NotReached(f"{java} -version printed no version ({answer.strip()[:100]!r}). {get_it}")
    if int(match[1]) < JAVA:
        raise NotReached(f"{java} is Java {match[1]}, but Spark needs {JAVA} or newer. {get_it}")

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
#: The lowest major version of Java that Spark 4 takes: https://spark.apache.org/docs/4.0.0/
JAVA = 17
#: Package, lowest version, and the first that is too new: those of the extra in pyproject.toml.
PACKAGES = (
    ("pyspark", (4,), (5,)),
    ("pandas", (2, 2), (3,)),
    ("pyarrow", (18,), None),
    ("matplotlib", (3, 10), None),
)
HOW_TO_GET_THEM = "pip install 'spanner-outbox[spark]'"

#: What the jobs rely on everywhere. Speculation would run a task's writes twice. Times are in UTC.
_ALWAYS = {
    "spark.speculation": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionOverwriteMode": "static",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # the default is a type that other readers drop
    "spark.sql.ansi.enabled": "true",
    # A job reads its cached rows only a few times, so compressing them takes longer than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Sorted rows are grouped without a hash table.
    "spark.sql.execution.replaceHashWithSortAgg": "true",
    # Max rows and bytes in the memory of a Spark task. Spark 4.0 ignores the bytes.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
    "spark.sql.execution.arrow.maxBytesPerBatch": "16777216",
}
#: Spark inside this process: a task is tried four times, as on a cluster.
EMBEDDED = "local[*,4]"
#: There nothing listens beyond this machine, and only what is wrong is logged.
_EMBEDDED = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}


def session(name: str, master: str = EMBEDDED) -> "SparkSession":
    """Return the Spark session of a job: that of `spark-submit`, or one with `master`, by default in this process.

    Raises NotReached if Java or a package of the extra is missing or has the wrong version, or if Java does not start.
    """
    check_packages()
    # spark-submit has chosen a master, and started the JVM already.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted:
        check_java()
        # Workers of this interpreter, whatever `python3` is in PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415 - it may be missing
    from pyspark.sql import SparkSession  # noqa: PLC0415 - the same

    builder = SparkSession.builder.appName(f"outbox {name}")
    embedded = {
        "spark.master": master,
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        # The 200 of a cluster cost more than they gain where a few tasks run at once.
        "spark.sql.shuffle.partitions": str(4 * (os.cpu_count() or 1)),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
        **_EMBEDDED,
    }
    for key, value in (({} if submitted else embedded) | _ALWAYS).items():
        builder = builder.config(key, value)
    try:
        made = builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise NotReached(
            "Java did not start Spark; if it said why, that stands above. Where a client of Spanner or Pub/Sub was "
            "used before in this process, gRPC may have ended Java's: make the session first, or set "
            "GRPC_ENABLE_FORK_SUPPORT=0 (https://github.com/grpc/grpc/issues/43055)"
        ) from error
    made.sparkContext.setLogLevel("ERROR")
    return made


def check_packages() -> None:
    """Check that the packages of the extra have supported versions. Raises NotReached."""
    for name, least, end in PACKAGES:
        found = _version(name)
        if found is None:
            raise NotReached(f"the package {name} is missing: {HOW_TO_GET_THEM}")
        number = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
        if number < least or (end and number >= end):
            before = f", before {'.'.join(map(str, end))}" if end else ""
            wanted = f"{'.'.join(map(str, least))} or newer{before}"
            raise NotReached(f"{name} {found} is installed, {wanted} is needed: {HOW_TO_GET_THEM}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        pass
    # A Spark that pip did not install, as that of Dataproc and of Spark's own images, has no metadata.
    try:
        return str(import_module(name).__version__)
    except ImportError:
        return None


def check_java() -> None:
    """Check that there is a Java that Spark supports. Raises NotReached."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    where = f"below JAVA_HOME, {home}" if home else "in PATH, and JAVA_HOME is not set"
    get_it = f"install Java {JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME"
    if java is None:
        raise NotReached(f"Spark needs Java, and there is none {where}: {get_it}")
    said = subprocess.run([java, "-version"], check=False, capture_output=True, text=True).stderr  # noqa: S603 - no shell
    # 'openjdk version "17.0.15"', and of Java 8 "1.8.0_392".
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    if match is None:
        raise NotReached(f"{java} -version does not say which Java it is ({said.strip()[:100]!r}): {get_it}")
    if int(match[1]) < JAVA:
        raise NotReached(f"{java} is Java {match[1]}, Spark needs {JAVA} or newer: {get_it}")

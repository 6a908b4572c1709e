"""Creates the Spark session, after checking that Spark can run here."""

import atexit
import contextlib
import io
import logging
import os
import sys
from importlib.resources import as_file, files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from outbox.base.start import install
from outbox.errors import NotReached

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Closed at exit. Java reads the file, so it must be one also if this package is in a zip.
_FILES = contextlib.ExitStack()
atexit.register(_FILES.close)
_LOGGING = _FILES.enter_context(as_file(files("outbox_pipeline.spark") / "log4j2.properties"))
#: The packages of the extra that a cluster with its own Spark may lack.
_PACKAGES = ("pyspark", "pandas", "pyarrow", "jinja2", "fastavro", "deltalake")

#: Options that every job needs. Speculation would run the writes of a Spark task twice. Times are in UTC.
_ALWAYS: dict[str, Any] = {
    "spark.speculation": "false",
    # Spark merges and splits the partitions of a shuffle to this size, the usual row group of Parquet. So the archive
    # has few and large files, the memory of a Spark task does not grow with the rows, and the configured number of
    # partitions is only a max. Its default of 200 is enough for 25 GB, the shuffle of about 100 million tasks.
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "128m",
    # Also the partitions of cached rows. Otherwise each query of them would run as many Spark tasks as this max.
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # the default, INT96, is deprecated in Parquet
    "spark.sql.ansi.enabled": "true",
    # A cluster may skip damaged and missing files without an error.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    # Otherwise a part that two expressions of --select have in common fails outside of the attempts of both.
    "spark.sql.subexpressionElimination.enabled": "false",
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


def session(name: str, master: str = EMBEDDED) -> "SparkSession":
    """Return the Spark session of a job: the session of `spark-submit`, or a new one with `master`.

    Raises NotReached if Java is missing or does not start Spark.
    """
    submitted = is_submitted()
    if not submitted:
        # Otherwise Spark starts its Python workers with the `python3` in PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # In this locale, Python reads names of files as UTF-8, but Java finds no file whose name is not ASCII.
        if os.environ.get("LC_ALL") in ("C", "POSIX"):
            os.environ["LC_ALL"] = "C.UTF-8"

    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415 - it may be missing
    from pyspark.sql import SparkSession  # noqa: PLC0415 - the same

    embedded: dict[str, Any] = {
        "spark.master": master,
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        # The max for this machine. The default of 200 is for clusters.
        "spark.sql.shuffle.partitions": str(4 * (os.cpu_count() or 1)),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} {_COMPILE_LATER}",
        # Accept connections from this machine only.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    try:
        options = _ALWAYS if submitted else embedded | _ALWAYS
        created = SparkSession.builder.appName(f"outbox {name}").config(map=options).getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise NotReached(
            "Java did not start Spark. The messages above say why. Spark needs Java 17 or newer, in JAVA_HOME or PATH "
            "(Debian: apt-get install openjdk-17-jre-headless). If this process used a client of Spanner or "
            "Pub/Sub before, gRPC may have ended the JVM: create the Spark session first, or set "
            "GRPC_ENABLE_FORK_SUPPORT=0 (https://github.com/grpc/grpc/issues/43055)"
        ) from error
    # PySpark logs each error of a query with its stack trace, and Py4J each call that fails because Ctrl-C has closed
    # its connection. The job prints one sentence.
    for logger in ("SQLQueryContextLogger", "DataFrameQueryContextLogger", "py4j.clientserver"):
        logging.getLogger(logger).disabled = True
    # Py4J also logs other failed calls, on the root logger, although it raises their errors.
    logging.getLogger().addFilter(_is_not_of_py4j)
    if not submitted:  # a cluster has a log configuration of its own
        created.sparkContext.setLogLevel("ERROR")
    return created


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"


def is_submitted() -> bool:
    """Tell whether this is the application of spark-submit, which has chosen a master and started the JVM."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def check_packages() -> None:
    """Check that the packages of the extra are installed. Raises NotReached."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise NotReached(f"Package {missing[0]} is not installed. Run: {install('spark')}")
    # The Spark of a cluster can be another version, because pip did not install it.
    from pyspark import __version__ as found  # noqa: PLC0415 - it may be missing

    if not found.startswith("4."):
        raise NotReached(f"pyspark {found} is installed, but pyspark 4 is required. Run: {install('spark')}")


class _StderrOfSpark(io.TextIOBase):
    """The stderr of the JVM that spark-submit started. After the JVM has ended, the stderr of this process."""

    def __init__(self, before: Any) -> None:
        from py4j.protocol import Py4JError  # noqa: PLC0415 - it may be missing
        from pyspark import SparkContext  # noqa: PLC0415 - the same

        SparkContext._ensure_initialized()  # noqa: SLF001 - connects to this JVM
        jvm: Any = SparkContext._jvm  # noqa: SLF001 - no public API
        self._stream, self._before, self._ended = jvm.java.lang.System.err, before, (Py4JError, OSError)

    def write(self, text: str) -> int:
        try:
            self._stream.print(text)
        except self._ended:
            self._before.write(text)
        return len(text)


def redirect_stderr() -> None:
    """Write log lines and errors to the stderr of spark-submit, which writes this job's stderr to its own stdout."""
    sys.stderr = _StderrOfSpark(sys.stderr)

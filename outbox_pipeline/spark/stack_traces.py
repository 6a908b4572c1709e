"""Turns the stack traces of Spark errors into one sentence, which also names the cause and what to do."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import AnalysisException, PySparkException

from outbox import errors
from outbox.errors import NotReached, OutboxError, SettingError

#: The last line of a Python stack trace from an executor or the planner, which Spark passes on as text.
_OURS = re.compile(r"\boutbox\.errors\.(\w+): (.+)")
#: The first line of a Java stack trace, the causes below it, and the last line of a Python one.
_JAVA, _CAUSE = re.compile(r"^: [\w.$]+: .+", re.MULTILINE), re.compile(r"^Caused by: (?:[\w.$]+: )*(.+)", re.MULTILINE)
_PYTHON = re.compile(r"^Traceback.*^([\w.]*(?:Error|Exception): [^\n]+)", re.MULTILINE | re.DOTALL)
#: What Spark adds before and after an error, and the path of a Spark task below the folder that it writes.
_NOISE = re.compile(
    r"^.*?Lost task .*?\): (?:[\w.$]+: )?|^org\.apache\.spark\.\w+: |\.? *SQLSTATE: \w+|/_temporary/\S+"
)
_PACKED = (
    "Ship the packages as docs/operations/pipeline-deploy.md describes: --archives environment.tar.gz#environment "
    "--conf spark.executorEnv.PYTHONPATH=environment"
)
_ON_EXECUTOR = "This is on an executor. Pass it variables with --conf spark.executorEnv.NAME=VALUE"
#: What Python workers lack on an executor, and what to do.
_LACKING = {
    r"No module named '?([\w.]+)": f"Package {{0}} is missing on an executor. {_PACKED}",
    r"PACKAGE_NOT_INSTALLED\] (\S+)": f"Package {{0}} is missing or too old on an executor. {_PACKED}",
    r"Python in worker has different version: (\S+) than that in driver: (\d+\.\d+)": (
        "An executor has Python {0}, but the driver has Python {1}. Set PYSPARK_PYTHON to a Python {1} that all "
        "executors have"
    ),
    r'Cannot run program "([^"]+)"': (
        "Python {0} does not start on an executor. Set PYSPARK_PYTHON to the Python of the executors"
    ),
}
#: What to do about a cause. The first match counts.
_REMEDIES = {
    "No space left|quota": "Free space, and run the job again",
    "Mkdirs failed|[Pp]ermission|[Rr]ead-only|AccessControl|AccessDenied|403 Forbidden": (
        "Give the user of the Spark tasks the permission for this folder"
    ),
    "FileNotFoundException": "Check the path, and the permission for its folder",
    "No FileSystem for scheme|FileSystem not found": "Add the connector of this file system to Spark's jars",
    "Relative path in absolute URI": "Rename the file, because Spark cannot read a name with a colon",
    "FILE_NOT_EXIST": "The file was deleted or replaced during the job. Do not change the files, and run the job again",
    "DATA_TYPE_MISMATCH": "Write all files with the same types",
    "UNABLE_TO_INFER_SCHEMA": "Check the path",
    "Illegal Parquet type|UNSUPPORTED_TIME_TYPE": (
        "Drop the column or convert it. In pandas, localize times to UTC and pass coerce_timestamps='us' to to_parquet"
    ),
    "FAILED_READ_FILE|Checksum error": "The file is damaged or is no file of this format. Restore it or write it again",
}


@contextlib.contextmanager
def spark_errors() -> Iterator[None]:
    """Turn Spark's errors inside the block into OutboxErrors. An OutboxError of a Spark task keeps its class."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        if _is_interrupted(error):
            raise KeyboardInterrupt from error
        # Only the errors that PySpark knows have their Java stack trace apart.
        raise error_from(f"{error}\n{getattr(error, '_stackTrace', '')}") from error


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """Turn the refusal of a table or of SQL into a SettingError that begins with `what`."""
    try:
        yield
    except AnalysisException as error:
        raise SettingError(f"{what}: {next(line for line in str(error).splitlines() if line)}") from error


@contextlib.contextmanager
def without_stack_trace() -> Iterator[None]:
    """Let Spark pass on an OutboxError of one of its Python processes without the stack trace.

    Such a process, which alone imports this module of Spark, ends after an error. So the variable hides no other error.
    """
    try:
        yield
    except OutboxError:
        if "pyspark.worker_util" in sys.modules:
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def _is_interrupted(error: BaseException) -> bool:
    """Tell whether Ctrl-C has cancelled the job. PySpark then raises an error of Spark over the KeyboardInterrupt."""
    context: BaseException | None = error
    while context is not None and not isinstance(context, KeyboardInterrupt):
        context = context.__context__
    return context is not None


def error_from(text: str) -> OutboxError:
    """Return the OutboxError that Spark's error text contains, or a new one with the reason that the text names."""
    if found := _OURS.findall(text):
        name, sentence = found[-1]
        kind = getattr(errors, name, OutboxError)
        sentence = sentence.strip()
        context = SparkContext._active_spark_context  # noqa: SLF001 - the public way would create one
        on_cluster = context is not None and not str(context.master).startswith("local")
        if issubclass(kind, NotReached) and on_cluster:
            sentence = f"{sentence.rstrip('.')}. {_ON_EXECUTOR}"
        error: OutboxError = kind(sentence)
        return error
    for pattern, lacking in _LACKING.items():
        if match := re.search(pattern, text):
            return NotReached(lacking.format(*match.groups()))
    return OutboxError(f"Spark: {_reason(text)}")


def _reason(text: str) -> str:
    """Return the first error of a stack trace, its last cause, and what to do."""
    if python := _PYTHON.search(text):
        return python[1][:500]
    java = _JAVA.search(text)
    lines = [java[0][2:]] if java else [line.strip() for line in text.splitlines() if line.strip()]
    sentences = [_NOISE.sub("", lines[0] if lines else "no reason is given").strip()[:500]]
    causes = _CAUSE.findall(text)
    if causes and (cause := _NOISE.sub("", causes[-1]).strip()[:500]) not in sentences[0]:
        sentences.append(f"Cause: {cause}")
    whole = " ".join(sentences)
    sentences += [remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, whole)][:1]
    return ". ".join(sentence.rstrip(". ") for sentence in sentences)

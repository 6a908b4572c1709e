"""The stderr of a job under spark-submit, which writes stdout and stderr of the job to its own stdout."""

import io
import sys
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext


class _StderrOfSpark(io.TextIOBase):
    """The stderr of the JVM that spark-submit started."""

    def __init__(self, before: Any) -> None:
        SparkContext._ensure_initialized()  # noqa: SLF001 - connects to this JVM
        jvm: Any = SparkContext._jvm  # noqa: SLF001 - no public API
        self._stream, self._before = jvm.java.lang.System.err, before

    def write(self, text: str) -> int:
        try:
            self._stream.print(text)
        except (Py4JError, OSError):  # the JVM has ended
            self._before.write(text)
        return len(text)


def redirect_stderr() -> None:
    """Write log lines and errors to the stderr of spark-submit, so that stdout has the summary only."""
    sys.stderr = _StderrOfSpark(sys.stderr)

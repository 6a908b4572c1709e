"""A limit of rows per second for all Spark tasks of a job together."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession


def divided(spark: SparkSession, per_second: int) -> tuple[int, float]:
    """Divide a limit: return the number of Spark tasks and the rows per second of each, or 0 and 0 without a limit.

    The job must not run more Spark tasks than this at once.
    """
    parts = spark.sparkContext.defaultParallelism if per_second else 0
    return parts, per_second / parts if parts else 0.0


@dataclass
class Pace:
    """The rate of one Spark task in rows per second, averaged since its first row. 0 is no limit."""

    rate: float = 0.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _written: int = 0
    _start: float | None = None

    def wait(self, rows: int) -> None:
        """Sleep until `rows` more rows may be written."""
        if not self.rate:
            return
        now = self.clock()
        self._start = now if self._start is None else self._start
        if (ahead := self._written / self.rate - (now - self._start)) > 0:
            self.sleep(ahead)
        self._written += rows

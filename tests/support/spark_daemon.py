"""The daemon of Spark's Python workers for tests of few rows, whose workers start in a third of the CPU time.

Spark's own imports PySpark from a zip without compiled files, and its workers collect all garbage after each Spark
task, which costs 0.1 s with the packages of the jobs. It imports nothing that starts a thread, because it forks.
"""

import gc
import sys
from types import SimpleNamespace

sys.path[:] = [path for path in sys.path if not path.endswith(".zip")]

import pyspark.worker  # noqa: E402, F401 - before the fork, so each worker has it
from pyspark import daemon  # noqa: E402 - after the path has changed

if __name__ == "__main__":
    vars(daemon)["gc"] = SimpleNamespace(collect=lambda: gc.collect(0))  # of the youngest objects
    daemon.manager()

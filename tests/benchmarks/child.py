"""A process that does nothing but relay, so that its CPU and its memory are the relay's: prints one line of JSON.

    python -m tests.benchmarks.child --database ID --tasks N [--trace]

The environment has the hosts, as `outbox emulators` prints them. Time and CPU are measured once the worker is connected
and has sent its first tasks, memory from before that.
"""

import argparse
import json
import os
import resource
import sys
import tracemalloc

from outbox.emulators import Emulators
from tests.benchmarks.bench import stopwatch
from tests.benchmarks.relaying import drive, open_worker


def main() -> None:
    """Relay at least so many tasks, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--trace", action="store_true", help="measure what Python allocates; slow")
    options = parser.parse_args()
    hosts = Emulators(os.environ["SPANNER_EMULATOR_HOST"], os.environ["PUBSUB_EMULATOR_HOST"])
    worker = open_worker(hosts, options.database)
    if options.trace:
        tracemalloc.start()
    before = drive(worker, 1)
    with stopwatch() as watch:
        published = drive(worker, options.tasks - before)
    answer = {
        "published": published,
        "seconds": watch.seconds,
        "cpu_seconds": watch.cpu_seconds,
        "traced_bytes": tracemalloc.get_traced_memory()[1],
        # KiB on Linux, bytes on macOS.
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

"""A process that does nothing but relay, so that its CPU and its memory are the relay's: prints one line of JSON.

    python -m tools.benchmarks.child --database ID --tasks N [--trace] [--wait]

The environment has the hosts, as `outbox emulators` prints them. Time and CPU are measured once the worker is connected
and has sent its first tasks, memory from before that.
"""

import argparse
import json
import os
import signal
import tracemalloc
from pathlib import Path

from outbox.devtools.emulators import Emulators
from publishworker.turn import in_flight
from tools.benchmarks.bench import stopwatch
from tools.benchmarks.relaying import PATIENT_SECONDS, drive, open_worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--trace", action="store_true", help="measure what Python allocates; slow")
    parser.add_argument("--wait", action="store_true", help="print `connected`, and go on at SIGUSR1")
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    hosts = Emulators(os.environ["SPANNER_EMULATOR_HOST"], os.environ["PUBSUB_EMULATOR_HOST"])
    worker = open_worker(hosts, options.database)
    if options.trace:
        tracemalloc.start()
    before = drive(worker, 1)
    if options.wait:
        print("connected", flush=True)
        signal.sigwait([signal.SIGUSR1])
        before = 0
        in_flight.MAX_TURN_WAIT_SECONDS = PATIENT_SECONDS
    with stopwatch() as watch:
        published = drive(worker, options.tasks - before)
    answer = {
        "published": published,
        "cpu_seconds": watch.cpu_seconds,
        "traced_bytes": tracemalloc.get_traced_memory()[1],
        "rss_bytes": peak_rss(),
    }
    print(json.dumps(answer))


def peak_rss() -> int:
    """Return the largest size of this process in memory so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage begins with the size of the parent
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


if __name__ == "__main__":
    main()

"""A process that does nothing but relay, so that its CPU is the relay's: prints one line of JSON.

    python -m tools.benchmarks.child --database ID --tasks N

The environment has the hosts, as `outbox emulators` prints them. When the worker has sent its first task, the process
prints `connected`. It begins to measure at SIGUSR1.
"""

import argparse
import json
import os
import signal

from outbox.devtools.emulators import Emulators
from publishworker.turn import in_flight
from tools.benchmarks.bench import stopwatch
from tools.benchmarks.relaying import PATIENT_SECONDS, drive, open_worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--tasks", type=int, required=True)
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    hosts = Emulators(os.environ["SPANNER_EMULATOR_HOST"], os.environ["PUBSUB_EMULATOR_HOST"])
    worker = open_worker(hosts, options.database)
    drive(worker, 1)
    print("connected", flush=True)
    signal.sigwait([signal.SIGUSR1])
    in_flight.MAX_TURN_WAIT_SECONDS = PATIENT_SECONDS
    with stopwatch() as watch:
        published = drive(worker, options.tasks)
    print(json.dumps({"published": published, "cpu_seconds": watch.cpu_seconds}))


if __name__ == "__main__":
    main()

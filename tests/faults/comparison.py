"""Duplicates of this relay and of the article's protocol under the same faults: `python -m tests.faults.comparison`.

Prints a table, and writes it to `--output` as JSON.
"""

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from outbox.devtools import emulators
from tests.support import spanner
from tests.support.outages import lasting
from tests.support.processes import Process
from tests.support.pubsub import PubSub
from tests.support.rpc import Fault
from tests.support.trial import BATCH_SIZE, Trial

#: Runs the workers for the time of a block.
Relay = Callable[[Trial], AbstractContextManager[list[Process]]]
#: One worker each: two would abort each other on the emulator, which is no fault of a protocol.
RELAYS: dict[str, Relay] = {
    f"batches of {BATCH_SIZE}": lambda trial: trial.workers(1),
    "batches of 1": lambda trial: trial.workers(1, "--batch-size", "1"),
    "the article's protocol": lambda trial: trial.workers(1, module="tests.support.article"),
}
#: Of the calls that fail at random.
SHARE = 0.1
#: Workers are killed whenever so many parts of the tasks are sent; an outage begins in the middle.
KILLS = 9
OUTAGE_SECONDS = 5.0
#: Tasks that are not sent by then hang.
SECONDS = 600.0

#: Sends a trial's tasks with one of the relays, and returns how many faults there were.
Way = Callable[[Trial, Relay], int]


def undisturbed(trial: Trial, relay: Relay) -> int:
    with relay(trial):
        trial.settle(SECONDS)
    return 0


def killed(trial: Trial, relay: Relay) -> int:
    tasks = trial.backlog()
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(relay(trial))
        for kill in range(KILLS):
            trial.wait_for_backlog(tasks * (KILLS - kill) // (KILLS + 1), SECONDS)
            [worker] = workers
            worker.stop(signal.SIGKILL)
            worker.wait()
            workers = stack.enter_context(relay(trial))
        trial.settle(SECONDS)
    return KILLS


def at_random(service: str, fault: Fault, method: str) -> Way:
    def way(trial: Trial, relay: Relay) -> int:
        with trial.faulty(service) as faulty, relay(trial):
            with faulty.failing(trial.chance(SHARE, fault, method)):
                trial.settle(SECONDS)
            return faulty.seen[method, fault]

    return way


def away(service: str) -> Way:
    def way(trial: Trial, relay: Relay) -> int:
        half = trial.backlog() // 2
        with trial.proxy(service) as proxy, relay(trial):
            trial.wait_for_backlog(half, SECONDS)
            proxy.refuse()
            lasting(OUTAGE_SECONDS)
            proxy.forward()
            trial.settle(SECONDS)
        return 1

    return way


WAYS: dict[str, Way] = {
    "none": undisturbed,
    "SIGKILL of the worker": killed,
    "a Commit is aborted": at_random("spanner", Fault.ABORTED, "Commit"),
    "the connection is cut after a Commit was sent": at_random("spanner", Fault.LOST, "Commit"),
    "the connection is cut after a Publish was sent": at_random("pubsub", Fault.LOST, "Publish"),
    "the answer to a Publish alone is lost": at_random("pubsub", Fault.UNANSWERED, "Publish"),
    f"Spanner is away for {OUTAGE_SECONDS:g} s": away("spanner"),
    f"Pub/Sub is away for {OUTAGE_SECONDS:g} s": away("pubsub"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.comparison", description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    lines: list[dict[str, Any]] = []
    with emulators.running() as created:
        os.environ |= created.environment()
        for fault, way in WAYS.items():
            for name, relay in RELAYS.items():
                with spanner.outbox_database(spanner.instance(created.spanner_host)) as database:
                    trial = Trial(created, database, PubSub.on(created.pubsub_host), options.seed, ordered=False)
                    trial.register(options.tasks)
                    lines.append({"fault": fault, "relay": name} | _figures(trial, way(trial, relay)))
                print(json.dumps(lines[-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def _figures(trial: Trial, faults: int) -> dict[str, Any]:
    figures = trial.audit(duplicates=0)
    return {
        "tasks": figures.registered, "faults": faults, "lost": figures.lost, "duplicates": figures.duplicates,
        "per_thousand": round(1000 * figures.duplicates / figures.registered, 1),
    }  # fmt: skip


if __name__ == "__main__":
    main()

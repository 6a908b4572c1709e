"""Mixed load for a long time, with all faults at random: `make soak MINUTES=30`, `python -m tests.faults.soak`.

Writes `summary.json` to `--output`. Exit code 1 if a task is lost, sent though it was rolled back, out of order, or
repeated more often than is promised, or if the worker that lives all the time grows.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from outbox.devtools import emulators
from tests.faults.faults import BOTH, FAULTS, field_of
from tests.support import spanner
from tests.support.processes import Process
from tests.support.pubsub import PubSub
from tests.support.trial import Trial, in_background, rss_mb
from tests.support.waiting import eventually, lasting

WORKERS = 3
#: Transactions a second, of six tasks; one in five is rolled back.
PER_SECOND = 5
#: Seconds: how long a fault lasts, how long nothing happens, how long it may take until the backlog is small again.
FAULT_SECONDS, CALM_SECONDS, RECOVERY_SECONDS = (1.0, 15.0), (1.0, 5.0), 120.0
#: Fewer tasks than this are no backlog.
SMALL = 60
SAMPLE_SECONDS = 2.0
#: How much the resources of the worker that is never stopped may grow after a quarter of the time.
MAY_GROW = {"rss_mb": 1.2, "descriptors": 1.2, "threads": 1.2}


#: The resources of the first worker.
Sample = dict[str, float]


class Event(NamedTuple):
    """One fault: how many duplicates it may cost, seconds until the backlog was small."""

    name: str
    duplicates: int
    recovery: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/soak"))
    options = parser.parse_args(arguments)
    if not options.minutes >= 1:
        parser.error(f"--minutes {options.minutes:g} is not allowed: it must be 1 or more, because growth takes time")
    options.output.mkdir(parents=True, exist_ok=True)
    samples, events = list[Sample](), list[Event]()
    with emulators.running() as created:
        os.environ |= created.environment()
        with spanner.outbox_database(spanner.instance(created.spanner_host)) as database:
            trial = Trial(created, database, PubSub.on(created.pubsub_host), options.seed, options.output)
            _soak(trial, options.minutes * 60, samples, events)
            figures = trial.audit(duplicates=sum(each.duplicates for each in events))
    grown = {name: round(_growth([each[name] for each in samples]), 3) for name in MAY_GROW}
    summary = {
        "minutes": options.minutes, "seed": options.seed, **dataclasses.asdict(figures), "grown": grown,
        "faults": dict(Counter(each.name for each in events)),
        "recovery_median": statistics.median(each.recovery for each in events),
        "recovery_longest": max(each.recovery for each in events),
    }  # fmt: skip
    (options.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    return 0 if figures.kept() and all(grown[name] <= most for name, most in MAY_GROW.items()) else 1


def _sample(worker: Process) -> Sample:
    process = Path("/proc") / str(worker.pid)
    threads, descriptors = (len(list((process / name).iterdir())) for name in ("task", "fd"))
    return {"rss_mb": rss_mb(worker.pid), "threads": threads, "descriptors": descriptors}


def _growth(values: Sequence[float]) -> float:
    quarter = len(values) // 4
    return statistics.median(values[-quarter:]) / statistics.median(values[quarter : 2 * quarter])


def _soak(trial: Trial, seconds: float, samples: list[Sample], events: list[Event]) -> None:
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        field = stack.enter_context(field_of(trial, WORKERS, BOTH))
        workers = field.workers

        def sample() -> None:
            samples.append(_sample(workers[0]))
            trial.delete_sent()

        with in_background(sample, every=SAMPLE_SECONDS), trial.load(PER_SECOND):
            while (now := time.monotonic() - begin) < seconds:
                fault = trial.random.choice(FAULTS)
                duration = trial.random.uniform(*FAULT_SECONDS)
                print(f"{now:6.0f} s  {fault.__name__} for {duration:.0f} s", file=sys.stderr, flush=True)
                with fault(field, duration) as effect:
                    lasting(duration, effect.again)
                end = time.monotonic()
                eventually(
                    lambda: trial.backlog() <= SMALL, seconds=RECOVERY_SECONDS, message=f"calm after {fault.__name__}"
                )
                recovery = time.monotonic() - end
                events.append(Event(fault.__name__, effect.duplicates(), round(recovery, 1)))
                lasting(trial.random.uniform(*CALM_SECONDS))
        trial.settle(RECOVERY_SECONDS)
        for each in workers:
            each.end()


if __name__ == "__main__":
    sys.exit(main())

"""A backlog that is spread over four databases, and a worker for each: 20,000 tasks in the long form.

Promised: all of it is sent, nothing lost, nothing twice.
"""

import contextlib
import time

from google.cloud.spanner_v1.instance import Instance

from outbox.emulators import Emulators
from tests.support.pubsub import PubSub
from tests.support.spanner import outbox_database
from tests.support.trial import Trial, total

DATABASES = 4


def test_backlog_over_databases(
    trial: Trial, emulators: Emulators, spanner_instance: Instance, pubsub: PubSub, long: bool
) -> None:
    """All workers at once."""
    tasks = (20_000 if long else 240) // DATABASES
    with contextlib.ExitStack() as stack:
        trials = [trial]
        for number in range(1, DATABASES):
            database = stack.enter_context(outbox_database(spanner_instance))
            trials.append(Trial(emulators, database, pubsub, trial.seed + number))
        for each in trials:
            each.register(tasks)
        begin = time.monotonic()
        workers = [stack.enter_context(each.worker("--group-size", "100")) for each in trials]
        for each in trials:
            each.settle(900)
        seconds = time.monotonic() - begin
        for worker in workers:
            worker.stop()
        assert [worker.wait() for worker in workers] == [0] * DATABASES
        trial.figures = total([each.audit(duplicates=0) for each in trials])
    assert trial.figures.kept()
    tasks = trial.figures.registered
    trial.notes = {"tasks": tasks, "seconds": round(seconds, 1), "tasks_per_second": round(tasks / seconds)}
    print(trial.notes)

"""Routes that change under load, with ordering keys, while workers are killed."""

import contextlib
import signal

import pytest

from outbox.admin import topics
from outbox.admin.table import TaskTable
from tests.support.outages import lasting
from tests.support.trial import IN_FLIGHT, Trial


@pytest.mark.extended
def test_topics_routed(trial: Trial, long: bool, fault_seconds: float) -> None:
    """Both topics are routed to new ones and back while tasks are registered and workers are killed.

    Promised: No task is lost, and each ordering key keeps its order over both destinations together. At most the
    in-flight batches of the killed workers are published again, perhaps to the other destination.
    """
    table = TaskTable(trial.database)
    destinations = dict(zip((trial.topic, trial.ordered_topic), trial.subscribe_to_new_topics(), strict=True))
    rounds = 6 if long else 2
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(trial.workers(2))
        with trial.load():
            for number in range(rounds):
                for topic, to in destinations.items():
                    topics.change(table, "controls", [topic], {"publish_to": None if number % 2 else to})
                victim = trial.random.randrange(2)
                workers[victim].stop(signal.SIGKILL)
                workers[victim].wait()
                workers[victim] = stack.enter_context(trial.worker())
                workers[victim].wait_for_text("relaying")
                lasting(fault_seconds)
        trial.settle()
    assert trial.audit(duplicates=rounds * IN_FLIGHT).kept()
    assert trial.counts.keys() == {*destinations, *destinations.values()}
    assert min(trial.counts.values()) > 0

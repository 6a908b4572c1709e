"""A topic is deleted under load, and created again.

Promised: nothing lost, no task is dead, nothing twice; what was published to the old topic stays with its
subscribers.
"""

from tests.support.outages import count, dead, lasting
from tests.support.pubsub import CALL_SECONDS
from tests.support.trial import Trial
from tests.support.waiting import eventually


def test_topic_deleted(trial: Trial, fault_seconds: float) -> None:
    """Of both topics; while they are created, nobody can publish before there is a subscription."""
    with trial.pubsub_proxy() as proxy, trial.workers(2):
        trial.register(60)
        trial.settle()
        with trial.load():
            lasting(1)
        trial.settle()
        for topic in (trial.topic, trial.ordered_topic):
            trial.pubsub.publisher.delete_topic(topic=topic, timeout=CALL_SECONDS)
        with trial.load():
            lasting(fault_seconds)
            eventually(lambda: count(trial.database, "Attempts > 0") > 0, message="probes are charged")
            proxy.refuse()
            for topic in (trial.topic, trial.ordered_topic):
                trial.pubsub.publisher.create_topic(name=topic, timeout=CALL_SECONDS)
            trial.subscribe()
            proxy.forward()
        trial.settle()  # a topic rests longer the longer it is missing
    assert dead(trial.database) == 0
    assert trial.audit(duplicates=0).kept()

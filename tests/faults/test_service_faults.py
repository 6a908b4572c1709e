"""Spanner or Pub/Sub fails: calls are refused or aborted, answers are lost, a service is slow, hangs or goes away."""

from dataclasses import dataclass

import pytest

from tests.support.outages import count, dead, lasting
from tests.support.pubsub import CALL_SECONDS
from tests.support.rpc import Fault
from tests.support.trial import IN_FLIGHT, Trial
from tests.support.waiting import eventually

NOTHING = "No task is lost or published twice."
REMEMBERED = f"{NOTHING} The worker remembers published tasks across transaction attempts."
UNANSWERED = "No task is lost. At most the requests that Pub/Sub had not answered are published again."


@dataclass(frozen=True, slots=True)
class Calls:
    """A share of the calls of one method fails."""

    title: str
    promise: str
    method: str
    fault: Fault
    share: float


CALLS = {
    "commits_aborted_often": Calls("Spanner aborts half of the commits.", REMEMBERED, "Commit", Fault.ABORTED, 0.5),
    "commits_aborted_rarely": Calls("Spanner aborts 5 % of the commits.", REMEMBERED, "Commit", Fault.ABORTED, 0.05),
    "commits_refused": Calls(
        "Spanner answers 30 % of the commits with UNAVAILABLE and does nothing.",
        f"{NOTHING} The client commits again.",
        "Commit",
        Fault.REFUSED,
        0.3,
    ),
    "spanner_commits_lost": Calls(
        "The connection to Spanner is cut after 20 % of the commits arrived. Their outcome is unknown.",
        f"{NOTHING} The client commits again, or the next turn finds the mark.",
        "Commit",
        Fault.LOST,
        0.2,
    ),
    "pubsub_unavailable": Calls(
        "Pub/Sub answers 30 % of the requests with UNAVAILABLE and accepts nothing.",
        NOTHING,
        "Publish",
        Fault.REFUSED,
        0.3,
    ),
    "pubsub_answers_lost": Calls(
        "The connection to Pub/Sub is cut after 20 % of the requests arrived. Their outcome is unknown.",
        UNANSWERED,
        "Publish",
        Fault.LOST,
        0.2,
    ),
}
#: What happens to the connections of both services: the name of a method of `Proxy`.
CONNECTIONS = {
    "connections_cut": ("cut", "Connections are cut twice a second."),
    "connections_half_closed": ("half_close", "Requests no longer arrive, but answers still do, twice a second."),
    "connections_truncated": ("truncate", "Connections end in the middle of a message, twice a second."),
}
UNMARKED = "No task is lost. At most the tasks that were published but not marked at its start are published again."
#: A service is away: which one, how (a method of `Proxy`), and how many tasks each second of it may repeat.
OUTAGES = {
    "pubsub_refuses": ("pubsub", "refuse", 0, "Pub/Sub refuses connections and cuts the open ones.", UNANSWERED),
    "pubsub_hangs": (
        "pubsub",
        "hang",
        4,
        "Pub/Sub accepts connections and never answers.",
        f"{UNANSWERED} So are the probes: one per topic, worker and second.",
    ),
    "spanner_refuses": ("spanner", "refuse", 0, "Spanner refuses connections and cuts the open ones.", UNMARKED),
    "spanner_hangs": ("spanner", "hang", 0, "Spanner accepts connections and never answers.", UNMARKED),
}
SLOW = {
    "pubsub_slow": ("pubsub", 0.25, "Pub/Sub answers half a second late, within the limits.", NOTHING),
    "spanner_slow": ("spanner", 0.1, "Each call to Spanner takes 0.2 s longer.", NOTHING),
}


@pytest.mark.parametrize("scenario", CALLS)
def test_calls_fail(trial: Trial, fault_seconds: float, scenario: str) -> None:
    """The calls of heartbeats fail too. A lost answer cuts all connections of all workers."""
    calls = CALLS[scenario]
    faulty = trial.faulty_spanner() if calls.method == "Commit" else trial.faulty_pubsub()
    with faulty as service, trial.workers(2):
        with service.failing(trial.chance(calls.share, calls.fault, calls.method)), trial.load():
            lasting(fault_seconds)
        trial.settle()
    assert service.seen[calls.method, calls.fault] > 0
    assert trial.audit(duplicates=service.unanswered if calls.promise == UNANSWERED else 0).kept()


@pytest.mark.parametrize("scenario", CONNECTIONS)
def test_connections_break(trial: Trial, fault_seconds: float, scenario: str) -> None:
    """The disturbed network is that of Spanner or of Pub/Sub, at random."""
    harm, _ = CONNECTIONS[scenario]
    with trial.faulty_pubsub() as pubsub, trial.spanner_proxy() as spanner, trial.workers(2):

        def disturb() -> None:
            getattr(trial.random.choice([pubsub.network, spanner]), harm)()

        with trial.load():
            lasting(fault_seconds, disturb)
        trial.settle()
    assert trial.audit(duplicates=pubsub.unanswered).kept()


@pytest.mark.parametrize("scenario", OUTAGES)
def test_a_service_is_away(trial: Trial, fault_seconds: float, scenario: str) -> None:
    """It goes away under load. The backlog is sent when it is back."""
    service, harm, repeated, *_ = OUTAGES[scenario]
    with trial.pubsub_proxy() if service == "pubsub" else trial.spanner_proxy() as proxy, trial.workers(2):
        with trial.load():
            lasting(1)
            getattr(proxy, harm)()
            lasting(fault_seconds)
            proxy.forward()
        trial.settle()
    assert trial.audit(duplicates=2 * IN_FLIGHT + repeated * int(fault_seconds + 1)).kept()


@pytest.mark.parametrize("scenario", SLOW)
def test_a_service_is_slow(trial: Trial, fault_seconds: float, scenario: str) -> None:
    """It is slow under load and fast at the end."""
    service, delay, *_ = SLOW[scenario]
    with trial.pubsub_proxy() if service == "pubsub" else trial.spanner_proxy() as proxy, trial.workers(2):
        proxy.delay(delay)
        with trial.load():
            lasting(fault_seconds)
        proxy.delay(0)
        trial.settle()
    assert trial.audit(duplicates=0).kept()


def test_everything_away(trial: Trial, fault_seconds: float) -> None:
    """Spanner and Pub/Sub go away one after the other and come back in the same order.

    Promised: No task is lost. At most the tasks in flight at the start of each outage are published again.
    """
    with trial.pubsub_proxy() as pubsub, trial.spanner_proxy() as spanner, trial.workers(2):
        with trial.load():
            lasting(1)
            for change in (spanner.refuse, pubsub.refuse, spanner.forward):
                change()
                lasting(fault_seconds / 2)
            pubsub.forward()
        trial.settle()
    assert trial.audit(duplicates=4 * IN_FLIGHT).kept()


def test_topic_deleted(trial: Trial, fault_seconds: float) -> None:
    """Both topics are deleted under load and created again.

    Promised: No task is lost, dead or published twice. Messages of the old topic stay with its subscribers.
    """
    topics = (trial.topic, trial.ordered_topic)
    with trial.pubsub_proxy() as proxy, trial.workers(2):
        trial.register(60)
        trial.settle()
        with trial.load():
            lasting(1)
        trial.settle()
        for topic in topics:
            trial.pubsub.publisher.delete_topic(topic=topic, timeout=CALL_SECONDS)
        with trial.load():
            lasting(fault_seconds)
            eventually(lambda: count(trial.database, "Attempts > 0") > 0, message="probes record failed attempts")
            proxy.refuse()  # no message arrives before there is a subscription
            for topic in topics:
                trial.pubsub.publisher.create_topic(name=topic, timeout=CALL_SECONDS)
            trial.subscribe()
            proxy.forward()
        trial.settle()
    assert dead(trial.database) == 0
    assert trial.audit(duplicates=0).kept()

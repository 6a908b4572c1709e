"""Spanner or Pub/Sub fails: answers are lost, connections break, a service hangs or ends."""

from typing import NamedTuple

import pytest

from tests.faults.faults import Harm, away, broken, calls, field_of
from tests.support.rpc import Fault
from tests.support.trial import Trial, recorded
from tests.support.waiting import eventually, lasting

NOTHING = "No task is lost or published twice."
UNANSWERED = "No task is lost. At most the requests that Pub/Sub had not answered are published again."
UNMARKED = "No task is lost. At most the tasks that were published but not marked at its start are published again."


class Scenario(NamedTuple):
    title: str
    promise: str
    services: tuple[str, ...]
    harm: Harm


SPANNER, PUBSUB, BOTH = ("spanner",), ("pubsub",), ("pubsub", "spanner")
#: Those of `make test`, those of `make test-all`, and why only `make test-long` runs the others.
QUICK = {"spanner_commits_lost", "pubsub_answers_lost"}
EXTENDED = {"connections_cut", "pubsub_hangs", "spanner_refuses", "spanner_hangs"}
LONG = pytest.mark.long("others break connections, too")
SCENARIOS = {
    "spanner_commits_lost": Scenario(
        "Spanner gets the commit, and then the connection is cut, for 20 % of the commits. Their outcome is unknown.",
        f"{NOTHING} The client commits again, or the next turn finds the mark.",
        SPANNER, calls("spanner", "Commit", Fault.LOST, 0.2),
    ),
    "pubsub_answers_lost": Scenario(
        "Pub/Sub gets the request, and then the connection is cut, for 20 % of the requests. Their outcome is unknown.",
        UNANSWERED, PUBSUB, calls("pubsub", "Publish", Fault.LOST, 0.2),
    ),
    "connections_cut": Scenario("The workers' connections are cut twice a second.", UNANSWERED, BOTH, broken("cut")),
    "connections_half_closed": Scenario(
        "Twice a second, the workers' connections are half-closed: workers can send no more requests on them, but "
        "still receive answers.",
        UNANSWERED, BOTH, broken("half_close"),
    ),
    "pubsub_refuses": Scenario(
        "Pub/Sub refuses connections and cuts the open ones.", UNANSWERED, PUBSUB, away("refuse", "pubsub")
    ),
    "pubsub_hangs": Scenario(
        "Pub/Sub accepts connections and never answers.",
        f"{UNANSWERED} So are the probes: one per topic, worker and second.",
        PUBSUB, away("hang", "pubsub"),
    ),
    "spanner_refuses": Scenario(
        "Spanner refuses connections and cuts the open ones.", UNMARKED, SPANNER, away("refuse", "spanner")
    ),
    "spanner_hangs": Scenario(
        "Spanner accepts connections and never answers.", UNMARKED, SPANNER, away("hang", "spanner")
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.extended if name in EXTENDED else LONG)
        for name in SCENARIOS
    ],
)
def test_a_service_fails(trial: Trial, fault_seconds: float, scenario: str) -> None:
    """The fault comes under load and lasts until a worker has met it. The backlog is sent when it is over."""
    _, _, services, harm = SCENARIOS[scenario]
    with field_of(trial, 2, services) as field:
        with trial.load():
            trial.wait_for_first_task()
            with harm(field, fault_seconds) as effect:
                lasting(fault_seconds, effect.again)
                eventually(effect.met, seconds=40, message=f"a worker meets {scenario}")
                if scenario in {"pubsub_refuses", "pubsub_hangs"}:
                    assert recorded(trial.database) == 0
        trial.settle()
    assert trial.audit(duplicates=effect.duplicates()).kept()

"""An outage of Pub/Sub or Spanner costs time, and no task or attempt. Real workers on the emulators.

An outage lasts 10 s, and 60 s with `--long` (`make test-long`).
"""

import time
from collections.abc import Callable

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from publishworker.spanner.store import POLL_SECONDS
from publishworker.turn.breakers import LONGEST_OUTAGE_REST
from tests.support import outages
from tests.support.outages import charged, dead, lasting, log_lines, register_beside, seconds_until, told
from tests.support.proxy import Proxy
from tests.support.pubsub import PubSub, Subscription
from tests.support.relays import account, register, unsent, wait_until_all_sent, worker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

GROUP_SIZE, GROUPS = 10, 4
#: Tasks of each topic that wait when Pub/Sub goes away.
BACKLOG = 150
#: Seconds to publish a batch: short, because the emulator runs one transaction at a time and each waits for Pub/Sub.
PUBLISH_SECONDS = 2
OPTIONS = ("--group-size", f"{GROUP_SIZE}", "--concurrency", f"{GROUPS}", "--publish-timeout", f"{PUBLISH_SECONDS}")


def test_pubsub_that_goes_away_under_load_charges_no_task(
    emulators: Emulators, database: Database, pubsub: PubSub, outage_seconds: float
) -> None:
    """No task is lost or gets a failed attempt; a topic has one log line at the begin and one at the end.

    Requests arrive and get no answer, and every connection is cut again and again. Only the in-flight batches at its
    begin, and the probes, may come twice. tests/faults has a Pub/Sub that refuses connections, or hangs.
    """
    topics = [pubsub.new_topic(), pubsub.new_topic()]
    subscriptions = {topic: pubsub.new_subscription(topic) for topic in topics}
    ids: dict[str, list[str]] = {topic: register(database, topic, 5) for topic in topics}
    late: list[str] = []
    with (
        Proxy(emulators.pubsub_host) as proxy,
        worker(emulators, database, *OPTIONS, PUBSUB_EMULATOR_HOST=proxy.address) as process,
    ):
        wait_until_all_sent(database)
        for topic in topics:
            ids[topic] += register(database, topic, BACKLOG)
        eventually(lambda: len(unsent(database)) < 2 * BACKLOG - 20, message="it works on the backlog")
        proxy.mute()

        def look() -> None:
            if late:  # at first, requests are still on their way
                proxy.cut()
            for topic in topics:
                late.extend(one := register_beside(database, topic, 1))
                ids[topic] += one
            assert charged(database) == 0

        lasting(outage_seconds, look)
        waiting = unsent(database)
        assert set(late) <= set(waiting)
        proxy.forward()
        limit = LONGEST_OUTAGE_REST + PUBLISH_SECONDS + 5
        first = seconds_until(lambda: len(unsent(database)) < len(waiting), limit, "one task sent")
        rest = seconds_until(lambda: not unsent(database), 120, "all tasks sent")
        assert charged(database) == 0
        process.stop()
        assert process.wait() == 0
        for action in ("topic_rests", "topic_back"):
            assert [told(process, action, topic) for topic in topics] == [1, 1]
        lines = log_lines(process)
    assert not [line for line in lines if line["action"] in ("publish_failed", "dead") or "error.stack" in line]
    assert len(lines) < 20
    results = [account(ids[topic], subscriptions[topic]) for topic in topics]
    duplicates = sum(result.duplicates for result in results)
    print(
        f"{len(waiting)} of {sum(map(len, ids.values()))} tasks waited for {outage_seconds:g} s; "
        f"first sent after {first:.1f} s, the last {rest:.1f} s later, {duplicates} duplicates"
    )
    assert not any(result.lost or result.unexpected for result in results)
    assert duplicates <= GROUP_SIZE * GROUPS + outage_seconds  # a topic is probed less than once in two seconds


@pytest.mark.parametrize(
    "go_away",
    [
        pytest.param(Proxy.refuse, marks=pytest.mark.long("tests/faults/test_service_faults.py has spanner_refuses")),
        Proxy.hang,
    ],
)
def test_spanner_that_goes_away_under_load_is_waited_for(
    emulators: Emulators,
    database: Database,
    subscription: Subscription,
    outage_seconds: float,
    go_away: Callable[[Proxy], None],
) -> None:
    """One log line, below 5 % of a core, the first task sent within 10 s of its return, none lost or charged.

    Silence is taken for an outage when a poll got no answer within its limit of 30 s; before that nothing is logged.
    """
    with (
        Proxy(emulators.spanner_host) as proxy,
        worker(emulators, database, *OPTIONS, SPANNER_EMULATOR_HOST=proxy.address) as process,
    ):
        ids = register(database, subscription.topic, 5)
        wait_until_all_sent(database)
        ids += register(database, subscription.topic, BACKLOG)
        eventually(lambda: len(unsent(database)) < BACKLOG - 10, message="it works on the backlog")
        go_away(proxy)
        before, begin = outages.cpu_seconds(process.pid), time.monotonic()
        late = register_beside(database, subscription.topic, 20)
        lasting(outage_seconds - (time.monotonic() - begin))
        if go_away is Proxy.refuse:  # no thread polls while all batches wait for their commits
            eventually(lambda: told(process, "spanner_away"), seconds=30, message="the outage is logged")
        outage = time.monotonic() - begin
        share = (outages.cpu_seconds(process.pid) - before) / outage
        assert not outages.is_sent(database, late)
        waiting = len(unsent(database))
        proxy.forward()
        first = seconds_until(lambda: len(unsent(database)) < waiting, 10, "one task sent")
        rest = seconds_until(lambda: not unsent(database), 60, "all tasks sent")
        assert charged(database) == dead(database) == 0
        process.stop()
        assert process.wait() == 0
        away, back = told(process, "spanner_away"), told(process, "spanner_back")
        assert not [line for line in log_lines(process) if "error.stack" in line]
    result = account(ids + late, subscription)
    print(
        f"{go_away.__name__}: {waiting} tasks waited for {outage:.1f} s at {share:.1%} of a core; first sent "
        f"after {first:.1f} s, the last {rest:.1f} s later, {result.duplicates} duplicates"
    )
    assert away == back == (1 if go_away is Proxy.refuse or outage_seconds > POLL_SECONDS + 10 else 0)
    assert share < 0.05
    assert (result.lost, result.unexpected) == (frozenset(), frozenset())

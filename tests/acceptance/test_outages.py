"""An outage of Spanner costs time, and no task or attempt: 10 s, and 60 s with `--long` (`make test-long`)."""

import time

import pytest
from google.cloud.spanner_v1.database import Database

from outbox.emulators import Emulators
from publishworker.spanner.store import POLL_SECONDS
from tests.support import outages
from tests.support.outages import charged, dead, lasting, log_lines, register_beside, seconds_until, told
from tests.support.proxy import Proxy
from tests.support.pubsub import Subscription
from tests.support.relays import account, register, unsent, wait_until_all_sent, worker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

#: Tasks that wait when Spanner goes away.
BACKLOG = 150
OPTIONS = ("--group-size", "10", "--concurrency", "4", "--publish-timeout", "2")


def test_spanner_that_goes_away_under_load_is_waited_for(
    emulators: Emulators, database: Database, subscription: Subscription, outage_seconds: float
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
        proxy.hang()
        before, begin = outages.cpu_seconds(process.pid), time.monotonic()
        late = register_beside(database, subscription.topic, 20)
        lasting(outage_seconds - (time.monotonic() - begin))
        outage = time.monotonic() - begin
        share = (outages.cpu_seconds(process.pid) - before) / outage
        assert not outages.is_sent(database, late)
        waiting = len(unsent(database))
        proxy.forward()
        first = seconds_until(lambda: len(unsent(database)) < waiting, 10, "one task sent")
        rest = seconds_until(lambda: not unsent(database), 60, "all tasks sent")
        assert charged(database) == dead(database) == 0
        process.end()
        away, back = told(process, "spanner_away"), told(process, "spanner_back")
        assert not [line for line in log_lines(process) if "error.stack" in line]
    result = account(ids + late, subscription)
    print(
        f"{waiting} tasks waited for {outage:.1f} s at {share:.1%} of a core; first sent "
        f"after {first:.1f} s, the last {rest:.1f} s later, {result.duplicates} duplicates"
    )
    assert away == back == (outage_seconds > POLL_SECONDS + 10)
    assert share < 0.05
    assert (result.lost, result.unexpected) == (frozenset(), frozenset())

"""Each promise's own tests notice its own break: one-line changes of the product, each with the test that turns red.

An extended run plays a few of them, others with each commit, and `--long` all.
"""

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.unit.test_project import NAMED


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old` occurs once in the file, and becomes `new`. `test` is one that docs/guarantees.md names for the promise."""

    promise: str
    file: str
    old: str
    new: str
    test: str
    #: Whether the test needs emulators or Spark.
    slow: bool = False


PROMISES = "tests/simulation/test_promises.py::"
UNIT = "tests/unit/"
RPC = "tests/integration/test_rpc_sequence.py::test_a_batch_aborted_at_commit_is_published_and_marked_once"
SOON = f"{PROMISES}test_idle_workers_send_new_and_due_tasks_soon"
KEYS = f"{PROMISES}test_keys_keep_their_order"
STOPS = f"{PROMISES}test_a_worker_that_stops_finishes_its_batches"
TAKES_OVER = f"{PROMISES}test_idle_workers_take_over_the_shards_of_a_killed_one"
ALONE = f"{PROMISES}test_messages_that_cannot_be_sent_delay_no_others"
PRIORITY = f"{PROMISES}test_priorities_decide_and_lower_ones_keep_their_share"
PLACES = f"{PROMISES}test_a_slow_topic_leaves_places_to_another"
DOUBT = f"{UNIT}test_relay.py::test_an_old_or_changed_row_in_doubt_is_published_again"
LOCKED = f"{UNIT}test_relay.py::test_the_locked_row_decides"
CANCELLED = f"{UNIT}test_relay.py::test_a_cancelled_task_that_is_made_unsent_is_ended_and_not_published"
YOUNG = f"{UNIT}test_failures.py::test_a_missing_topic_makes_no_young_task_dead"
OUTAGE = f"{UNIT}test_failures.py::test_an_outage_records_no_attempt_and_affects_no_other_topic"
RETENTION = f"{UNIT}test_schema.py::test_the_retention_is_of_sent_tasks_only"
URGENT = f"{UNIT}test_batching.py::test_no_task_starts_while_a_more_urgent_one_waits"
SHARE = f"{UNIT}test_places.py::test_an_endless_stream_of_urgent_tasks_leaves_lower_ones_their_share"
SLOW = f"{UNIT}test_places.py::test_a_slow_batch_does_not_delay_the_others"
PAUSED = f"{UNIT}test_places.py::test_a_paused_topic_delays_no_other_and_is_not_polled"

RULES, TYPES = "publishworker/delivery/rules.py", "publishworker/types.py"
DELIVERY, IN_FLIGHT = "publishworker/delivery/delivery.py", "publishworker/turn/in_flight.py"
SELECTION, POLLER = "publishworker/turn/selection.py", "publishworker/turn/poller.py"
MEMBERSHIP, AVAILABILITY = "publishworker/turn/membership.py", "publishworker/topics/availability.py"
STORE, PUBLISHER = "publishworker/spanner/store.py", "publishworker/pubsub/publisher.py"
DDL = "outbox/table/ddl.py"
MUTATIONS = [
    Mutation("OUT-LOSS-2", POLLER, "due=self.known.may_be_due,", "due=False,", SOON),
    Mutation("OUT-LOSS-2", MEMBERSHIP, "_ids(layouts))[self._worker]", "_ids(layouts))[self._worker][1:]", SOON),
    Mutation("OUT-LOSS-3", TYPES, "return self.message == Version.of(row).message", "return True", DOUBT),
    Mutation("OUT-LOSS-3", TYPES, "row.created_at, row.times_sent,", "row.created_at, 0,", DOUBT),
    Mutation("OUT-LOSS-4", RULES, "may_die = kind", "may_die = True or kind", YOUNG),
    Mutation("OUT-LOSS-4", RULES, "return id in claim.suspects and", "return True or", OUTAGE),
    Mutation("OUT-LOSS-5", "publishworker/turn/relay.py", "while len(self.in_flight):", "while False:", STOPS),
    Mutation("OUT-LOSS-5", "publishworker/turn/worker.py", "        self._relay.finish()\n", "", STOPS),
    Mutation("OUT-LOSS-6", STORE, "TIMEOUT_SECONDS = 14", "TIMEOUT_SECONDS = 40", TAKES_OVER),
    Mutation("OUT-LOSS-6", MEMBERSHIP, "LIVENESS_TIMEOUT_SECONDS = 29", "LIVENESS_TIMEOUT_SECONDS = 60", TAKES_OVER),
    Mutation("OUT-LOSS-7", DDL, 'rf"\\g<1>{days}"', 'rf"(CreatedAt, INTERVAL {days}"', RETENTION),
    Mutation("OUT-LOSS-7", DDL, "    if days is None:\n", "    if True:\n", RETENTION),
    Mutation(
        "OUT-CANCEL-1", RULES, 'return None if row.cancelled_by is None else Skipped("cancelled")', "return None",
        CANCELLED,
    ),
    Mutation("OUT-CANCEL-1", RULES, "return {row.id: EndedAgain()", "return {} and {row.id: EndedAgain()", CANCELLED),
    Mutation("OUT-TWICE-2", DELIVERY, "if answer is None and row.ordering_key", "if row.ordering_key", RPC),
    Mutation(
        "OUT-TWICE-2", DELIVERY, "        self._publish(self._results.rows_to_publish(self.claim, eligible, now))",
        "        self._publish(eligible)", RPC,
    ),
    Mutation("OUT-ORDER-1", IN_FLIGHT, "key for claim in claims for key in claim.keys", "", KEYS),
    Mutation("OUT-ORDER-1", DELIVERY, "stopped.add(row.ordering_key)", "pass", KEYS),
    Mutation("OUT-ORDER-2", RULES, "if not (row.is_due(now) or", "if not (True or", LOCKED),
    Mutation(
        "OUT-ORDER-2", TYPES, "return self.available_at is None or self.available_at <= now", "return True", LOCKED
    ),
    Mutation("OUT-ORDER-3", SELECTION, "for key in sorted(order, key=lambda key: key[0])", "for key in order", URGENT),
    Mutation("OUT-ORDER-3", SELECTION, "earned = self._share * batches", "earned = 0.0", SHARE),
    Mutation("OUT-ORDER-3", SELECTION, "earned = self._share * batches", "earned = 0.0", PRIORITY),
    Mutation("OUT-ORDER-3", POLLER, "below_priority=below_priority,", "below_priority=None,", PRIORITY),
    Mutation("OUT-DELAY-1", DELIVERY, "if row.attempts or row.id in self.claim.suspects}", "if row.attempts}", ALONE),
    Mutation("OUT-DELAY-1", PUBLISHER, "MAX_SEND_ALONE = 10_000", "MAX_SEND_ALONE = 0", ALONE),
    Mutation("OUT-DELAY-2", IN_FLIGHT, "        thread.start()", "        self._run(entry)", SLOW),
    Mutation("OUT-DELAY-2", SELECTION, "of_topic[batch.topic] > half", "False", PLACES),
    Mutation("OUT-DELAY-3", POLLER, "polled.difference(unavailable),", "polled,", PAUSED),
    Mutation("OUT-DELAY-3", AVAILABILITY, "return self.paused | self._circuits", "return self._circuits", PAUSED),
]  # fmt: skip
#: Mutations that an extended run plays.
SAMPLE = 4


def _sample() -> list[Mutation]:
    """Return some mutations whose tests are quick, by the commit."""
    quick = [each for each in MUTATIONS if not each.slow]
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    first = int(found[:8] or "0", 16) % len(quick)
    return [*itertools.islice(itertools.cycle(quick), first, first + SAMPLE)]


def _case(mutation: Mutation) -> object:
    slower = pytest.mark.extended if mutation in _SAMPLED else pytest.mark.long("each mutation takes seconds")
    return pytest.param(mutation, id=f"{mutation.promise}-{MUTATIONS.index(mutation)}", marks=slower)


_SAMPLED = _sample()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", [_case(each) for each in MUTATIONS])
def test_the_test_of_a_promise_notices_that_it_is_broken(mutation: Mutation, tmp_path: Path) -> None:
    package = Path(mutation.file).parts[0]
    shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / mutation.file
    file.write_text(file.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={tmp_path}",
    ]
    ended = subprocess.run(
        [*command, "-m", "not extended", mutation.test], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout[-2000:]


def test_each_promise_of_the_relay_has_mutations_and_they_fit() -> None:
    """The others are those of registrations and Spark jobs, whose tests take minutes."""
    counts = {promise: sum(each.promise == promise for each in MUTATIONS) for promise in NAMED}
    assert {promise for promise, count in counts.items() if count < 2} == {
        "OUT-LOSS-1", "OUT-TWICE-1", "OUT-SPARK-1", "OUT-SPARK-2", "OUT-SPARK-3"
    }  # fmt: skip
    for each in MUTATIONS:
        assert (ROOT / each.file).read_text(encoding="utf-8").count(each.old) == 1, each
        assert tuple(each.test.split("::")) in NAMED[each.promise], each

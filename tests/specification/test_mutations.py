"""Each promise's own tests notice its own break: one-line changes of the product, each with the test that turns red.

An extended run plays a few of them, others with each commit, and `--long` all.
"""

import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.unit.test_project import NAMED


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old` occurs once in the file, and becomes `new`. `test` is one that docs/guarantees.md names for the promise."""

    promise: str
    test: str
    file: str
    old: str
    new: str


PROMISES = "tests/simulation/test_promises.py::"
UNIT = "tests/unit/"
BUSINESS = "tests/integration/test_register_spanner.py::test_business_row_and_task_have_one_commit"
AGAIN = "tests/integration/test_relay_spanner.py::test_a_task_is_sent_again_by_plain_dml"
RPC = "tests/integration/test_rpc_sequence.py::test_a_batch_aborted_at_commit_is_published_and_marked_once"
SOON = f"{PROMISES}test_idle_workers_send_new_and_due_tasks_soon"
KEYS = f"{PROMISES}test_keys_keep_their_order"
STOPS = f"{PROMISES}test_a_worker_that_stops_finishes_its_batches"
TAKES_OVER = f"{PROMISES}test_idle_workers_take_over_the_shards_of_a_killed_one"
ALONE = f"{PROMISES}test_messages_that_cannot_be_sent_delay_no_others"
PRIORITY = f"{PROMISES}test_priorities_decide_and_lower_ones_keep_their_share"
PLACES = f"{PROMISES}test_a_slow_topic_leaves_places_to_another"
DOUBT = f"{UNIT}test_relay.py::test_an_old_or_changed_row_in_doubt_is_published_again"
HOLDS = f"{UNIT}test_failures.py::test_a_failing_head_holds_its_key_after_an_abort"
LOCKED = f"{UNIT}test_relay.py::test_the_locked_row_decides"
CANCELLED = f"{UNIT}test_relay.py::test_a_cancelled_task_that_is_made_unsent_is_ended_and_not_published"
YOUNG = f"{UNIT}test_failures.py::test_a_missing_topic_makes_no_young_task_dead"
OUTAGE = f"{UNIT}test_failures.py::test_an_outage_records_no_attempt_and_affects_no_other_topic"
RETENTION = f"{UNIT}test_schema.py::test_the_retention_is_of_sent_tasks_only"
URGENT = f"{UNIT}test_batching.py::test_no_task_starts_while_a_more_urgent_one_waits"
SLOW = f"{UNIT}test_places.py::test_a_slow_batch_does_not_delay_the_others"
PAUSED = f"{UNIT}test_places.py::test_a_paused_topic_delays_no_other_and_is_not_polled"
DRAINED = "tests/pipeline/test_drain.py::test_every_sendable_task_is_sent_and_the_others_are_counted"
ADJOIN = "tests/pipeline/test_stream.py::test_batches_adjoin_without_a_gap"
SAME = "tests/pipeline/test_stream.py::test_reading_a_batch_again_gives_the_same_tasks"
SINK = "tests/pipeline/test_source.py::test_a_repeated_micro_batch_registers_nothing_twice"

RULES, TYPES = "publishworker/delivery/rules.py", "publishworker/types.py"
DELIVERY, IN_FLIGHT = "publishworker/delivery/delivery.py", "publishworker/turn/in_flight.py"
SELECTION, POLLER = "publishworker/turn/selection.py", "publishworker/turn/poller.py"
MEMBERSHIP, AVAILABILITY = "publishworker/turn/membership.py", "publishworker/topics/availability.py"
STORE, PUBLISHER = "publishworker/spanner/store.py", "publishworker/pubsub/publisher.py"
DDL, REGISTRATION = "outbox/table/ddl.py", "outbox/registration.py"
DRAIN, SOURCE = "outbox_pipeline/jobs/drain.py", "outbox_pipeline/source/datasource.py"
ROWS = "outbox_pipeline/rows/register_rows.py"
CHANGES: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("OUT-LOSS-1", BUSINESS): [
        (
            REGISTRATION, "    transactions.insert(transaction, TASKS_TABLE, columns, [row], keys=[row[:1]])\n",
            "    with transaction._session._database.batch() as own: own.insert(TASKS_TABLE, columns, [row])\n",
        ),
        (REGISTRATION, "        COMMIT_TIMESTAMP,\n", "        datetime.now().astimezone(),\n"),
    ],
    ("OUT-LOSS-2", SOON): [
        (POLLER, "due=self.known.may_be_due,", "due=False,"),
        (MEMBERSHIP, "_ids(layouts))[self._worker]", "_ids(layouts))[self._worker][1:]"),
    ],
    ("OUT-LOSS-3", DOUBT): [
        (TYPES, "return self.message == Version.of(row).message", "return True"),
        (TYPES, "row.created_at, row.times_sent,", "row.created_at, 0,"),
    ],
    ("OUT-LOSS-4", YOUNG): [(RULES, "may_die = kind", "may_die = True or kind")],
    ("OUT-LOSS-4", OUTAGE): [(RULES, "return id in claim.suspects and", "return True or")],
    ("OUT-LOSS-5", STOPS): [
        ("publishworker/turn/relay.py", "while len(self.in_flight):", "while False:"),
        ("publishworker/turn/worker.py", "        self._relay.finish()\n", ""),
    ],
    ("OUT-LOSS-6", TAKES_OVER): [
        (STORE, "TIMEOUT_SECONDS = 14", "TIMEOUT_SECONDS = 40"),
        (MEMBERSHIP, "LIVENESS_TIMEOUT_SECONDS = 29", "LIVENESS_TIMEOUT_SECONDS = 60"),
    ],
    ("OUT-LOSS-7", RETENTION): [
        (DDL, 'rf"\\g<1>{days}"', 'rf"(CreatedAt, INTERVAL {days}"'),
        (DDL, "    if days is None:\n", "    if True:\n"),
    ],
    ("OUT-CANCEL-1", CANCELLED): [
        (RULES, 'return None if row.cancelled_by is None else Skipped("cancelled")', "return None"),
        (RULES, "return {**{row.id: EndedAgain()", "return {} and {**{row.id: EndedAgain()"),
    ],
    ("OUT-TWICE-1", AGAIN): [
        (PUBLISHER, "[TASK_ID_ATTRIBUTE] = row.id ", "[TASK_ID_ATTRIBUTE] = f'{row.id} {row.times_sent}' "),
        (PUBLISHER, 'message.ClearField("publish_time")', "message.data += bytes(row.times_sent)"),
    ],
    ("OUT-TWICE-2", RPC): [
        (DELIVERY, "if answer is None and row.ordering_key", "if row.ordering_key"),
        (DELIVERY, "self._results.rows_to_publish(self.claim, eligible, now)", "eligible"),
    ],
    ("OUT-ORDER-1", KEYS): [(IN_FLIGHT, "key for claim in claims for key in claim.keys", "")],
    ("OUT-ORDER-1", HOLDS): [(DELIVERY, "stopped.add(row.ordering_key)", "pass")],
    ("OUT-ORDER-2", LOCKED): [
        (RULES, "if not (row.is_due(now) or", "if not (True or"),
        (TYPES, "return self.available_at is None or self.available_at <= now", "return True"),
    ],
    ("OUT-ORDER-3", URGENT): [(SELECTION, "for key in sorted(order, key=lambda key: key[0])", "for key in order")],
    ("OUT-ORDER-3", PRIORITY): [
        (SELECTION, "earned = self._share * batches", "earned = batches"),
        (POLLER, "below_priority=below_priority,", "below_priority=None,"),
    ],
    ("OUT-DELAY-1", ALONE): [
        (AVAILABILITY, "self._suspects |= dict.fromkeys(failed)", "pass"),
        (PUBLISHER, "MAX_SEND_ALONE = 10_000", "MAX_SEND_ALONE = 0"),
    ],
    ("OUT-DELAY-2", SLOW): [(IN_FLIGHT, "        thread.start()", "        self._run(entry)")],
    ("OUT-DELAY-2", PLACES): [(SELECTION, "of_topic[batch.topic] > half", "False")],
    ("OUT-DELAY-3", PAUSED): [
        (POLLER, "polled.difference(unavailable),", "polled,"),
        (AVAILABILITY, "return self.paused | self.circuits", "return self.circuits"),
    ],
    ("OUT-SPARK-1", DRAINED): [
        (DRAIN, "while (work_left := any_to_send(store)) and", "while (work_left := False) and"),
        (DRAIN, "lambda: worker.membership.shards,", "lambda: (),"),
    ],
    ("OUT-SPARK-2", ADJOIN): [
        (SOURCE, "since + MICROSECOND, until + MICROSECOND, self._count)", "since, until + MICROSECOND, self._count)"),
    ],
    ("OUT-SPARK-2", SAME): [(SOURCE, '_time(end), _time(end, "read_at")', "_time(end), self._table.now()")],
    ("OUT-SPARK-3", SINK): [
        (ROWS, "= whole_row_id({name: row[name] for name in _OF_TASK})", '= __import__("uuid").uuid4().hex'),
        (ROWS, "        if _same(task, known):", "        if outcome != 'existing' and _same(task, known):"),
    ],
}  # fmt: skip
MUTATIONS = [Mutation(*key, *change) for key, changes in CHANGES.items() for change in changes]
#: Mutations that an extended run plays. Other tests need emulators or Spark.
SAMPLE, QUICK = 4, (PROMISES, UNIT, RPC)


def _sample() -> list[Mutation]:
    """Return some mutations whose tests are quick, by the commit."""
    quick = [each for each in MUTATIONS if each.test.startswith(QUICK)]
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
    (tmp_path / "schema").symlink_to(ROOT / "schema")
    file = tmp_path / mutation.file
    file.write_text(file.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", f"pythonpath={tmp_path}", "-m", "not extended"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, mutation.test], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout[-2000:]


def test_each_promise_has_mutations_and_they_fit() -> None:
    counts = Counter(each.promise for each in MUTATIONS)
    assert {promise for promise in NAMED if counts[promise] < 2} == set()
    for each in MUTATIONS:
        assert (ROOT / each.file).read_text(encoding="utf-8").count(each.old) == 1, each
        assert tuple(each.test.split("::")) in NAMED[each.promise], each

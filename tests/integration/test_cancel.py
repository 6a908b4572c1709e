"""`cancel` takes an unsent task out in the caller's transaction, and releases the next task of its key."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from random import Random
from typing import Any

import pytest
from google.api_core.exceptions import Aborted
from google.cloud.spanner_v1.database import Database
from google.pubsub_v1.types import PubsubMessage

import outbox
from outbox import inbox
from outbox.errors import OutboxError
from outbox.rows import task_table as admin_table
from outbox.rows.task_table import TaskTable
from outbox.table.ddl import Layout
from outbox.table.states import NEVER
from outbox_admin.change_kinds import ANY_UNSENT
from outbox_admin.changes import execution
from outbox_admin.schema.reshard import Resharding
from outbox_admin.tasks.selections import TaskSelection
from publishworker.telemetry import metrics as m
from tests.support import real
from tests.support.clients import aio
from tests.support.drivers import STACKS
from tests.support.fakes import Counted, FakePublisher
from tests.support.operations import FUTURE, OF_STATES, PAST, changed, insert, line, opened, row, rows_of
from tests.support.parts import relay_of
from tests.support.relays import unsent
from tests.support.trial import in_background
from tests.support.waiting import eventually

DEAD, DEFERRED = {"AvailableAt": NEVER}, {"AvailableAt": FUTURE, "BlockedBy": "head", "Attempts": 2}
#: Cancels each task in a transaction of its own, and returns the answers.
Cancel = Callable[..., list[bool]]


@pytest.fixture(params=["spanner", "aio", "operator", *STACKS])
def cancel(request: pytest.FixtureRequest, database: Database, run_async: Callable[..., Any]) -> Iterator[Cancel]:
    """The function of one client or driver, or that of operators, which cancels all tasks in one transaction."""
    if request.param == "spanner":
        yield lambda *ids: [database.run_in_transaction(outbox.cancel, id) for id in ids]
    elif request.param == "aio":

        async def work(ours: Any, *ids: str) -> list[bool]:
            return [await ours.run_in_transaction(aio.cancel, id) for id in ids]

        yield lambda *ids: run_async(lambda ours: work(ours, *ids))
    elif request.param == "operator":

        def cancelled(*ids: str) -> list[bool]:
            selection = TaskSelection(state=ANY_UNSENT, ids=ids)
            [outcome] = execution.change(TaskTable(database), "cancel", selection)
            return [id in outcome.changed for id in ids]

        yield cancelled
    else:
        with closing(STACKS[request.param](database)) as stack:

            def one(id: str) -> bool:
                with stack.transaction() as handle:
                    answer: bool = stack.call("cancel", handle, id)
                    return answer

            yield lambda *ids: [one(id) for id in ids]


def is_ended(id: str) -> bool:
    return id.startswith(("sent", "cancelled"))


def test_unsent_tasks_of_every_state_are_cancelled_and_no_others(cancel: Cancel, database: Database) -> None:
    """Only SentAt and CancelledBy change."""
    tasks = [row(f"{state} {n}", **each) for state, many in OF_STATES.items() for n, each in enumerate(many)]
    insert(database, [*tasks, row("other"), row("other dead", **DEAD)])
    before = rows_of(database)
    ids = [each["Id"] for each in tasks]
    assert dict(zip(ids, cancel(*ids), strict=True)) == {id: not is_ended(id) for id in ids}
    after = rows_of(database)
    for id, each in after.items():
        if id in ids and not is_ended(id):
            assert None not in (each["SentAt"], each["CancelledBy"])
            each |= {"SentAt": None, "CancelledBy": None}
    for each in (after, before):  # an earlier cancel may have released them
        each["blocked 0"] |= (released := {"AvailableAt": None, "BlockedBy": None})
        each["blocked 1"] |= released
    assert after == before
    assert cancel("pending 0", "missing") == [False, False]


def test_the_next_task_of_the_key_is_released(cancel: Cancel, database: Database) -> None:
    """A dead task does not hide it. A task that is not deferred, or behind another head, is left as it is.

    A deferred head is blocked by no task any more.
    """
    insert(
        database,
        [
            *line("a", {"SentAt": PAST}, {"AvailableAt": FUTURE}, DEFERRED, DEFERRED),
            *line("b'", DEAD, DEAD, DEFERRED, DEFERRED),
            *line("waits", {}, {"AvailableAt": FUTURE}, DEFERRED),
            *line("behind", {"AvailableAt": FUTURE}, DEFERRED, DEFERRED),
            *line("two", DEAD, DEAD, DEFERRED, DEFERRED),
            *line("head", DEFERRED, DEAD, DEFERRED),
            *line("alone", {}),
            *line("a", DEFERRED, topic="invoices"),
            row("no key", **DEAD),
            row("no key deferred", **DEFERRED),
        ],
    )
    before = rows_of(database)
    ids = ("a 1", "b' 0", "waits 0", "behind 1", "two 0", "two 1", "head 1", "alone 0", "no key")
    assert cancel(*ids) == [True] * len(ids)
    after = {id: each for id, each in rows_of(database).items() if id not in ids}
    released = {"a 2", "b' 2", "two 2", "head 0"}
    assert {id for id in after if after[id] != before[id]} == released
    for id in released:
        assert after[id] == before[id] | {"AvailableAt": None, "BlockedBy": None}


def test_a_transaction_knows_what_it_has_cancelled(database: Database) -> None:
    """Reads do not see its mutations: the second answer, and the next task of the key. The ID stays in use."""
    insert(database, line("a", {"AvailableAt": FUTURE}, DEFERRED, DEFERRED))

    def work(transaction: Any) -> list[bool]:
        answers = [outbox.cancel(transaction, id) for id in ("a 0", "a 0", "a 1")]
        return [*answers, outbox.register_once(transaction, "orders", b"", task_id="a 0")]

    assert database.run_in_transaction(work) == [True, False, True, False]
    after = rows_of(database)
    assert {id: (each["CancelledBy"], each["BlockedBy"]) for id, each in after.items()} == {
        "a 0": ("application", None), "a 1": ("application", None), "a 2": (None, None),
    }  # fmt: skip


def test_a_processed_task_stays_processed_when_it_is_cancelled(database: Database) -> None:
    """A subscriber may have received a task whose mark is not committed, and share the outbox's database."""
    insert(database, [row("id")])
    message = PubsubMessage(attributes={"asynchronous_task_id": "id"})

    def process(transaction: Any) -> bool:
        return inbox.process_once(transaction, message, consumer="billing")

    assert database.run_in_transaction(process)
    assert database.run_in_transaction(lambda both: (outbox.cancel(both, "id"), process(both))) == (True, False)


def test_concurrent_cancels_of_a_key_release_its_next_task(database: Database, run_async: Callable[..., Any]) -> None:
    """In one transaction, as its first requests. A task of this transaction is refused here, too."""
    insert(database, line("a", {"AvailableAt": FUTURE}, *[DEFERRED] * 4))

    async def both(transaction: Any) -> list[bool]:
        answers = await asyncio.gather(*(aio.cancel(transaction, id) for id in ("a 0", "a 1", "a 2", "a 0")))
        with pytest.raises(outbox.InvalidTransaction, match="was registered by the same transaction"):
            await asyncio.gather(aio.cancel(transaction, "new"), register(transaction))
        return answers

    async def register(transaction: Any) -> None:
        """While the cancel waits for its read."""
        outbox.register(transaction, "orders", b"", task_id="new")

    first, *others, again = run_async(lambda ours: ours.run_in_transaction(both))
    assert (others, sorted([first, again])) == ([True, True], [False, True])
    after = rows_of(database)
    unsent_of_key = {id: each["BlockedBy"] for id, each in after.items() if each["OrderingKey"] and not each["SentAt"]}
    assert unsent_of_key == {"a 3": None, "a 4": "head"}


def test_after_a_reshard_the_new_index_is_read(own_database: Database) -> None:
    """The first one is gone."""
    insert(own_database, line("a", {"AvailableAt": FUTURE}, DEFERRED))
    table = TaskTable(opened(own_database))
    list(Resharding(table).run(Layout.added(3)))
    assert own_database.run_in_transaction(outbox.cancel, "a 0")
    after = rows_of(own_database)["a 1"]
    assert (after["AvailableAt"], after["BlockedBy"]) == (None, None)


def test_wrong_transactions_are_refused(database: Database) -> None:
    with database.batch() as batch, pytest.raises(TypeError, match="cancel reads before it writes"):
        outbox.cancel(batch, "id")  # type: ignore[arg-type]  # the wrong type
    for id in ("", ["id"]):
        with pytest.raises(outbox.InvalidMessage, match="task_id"):
            database.run_in_transaction(outbox.cancel, id)


def cancelled_by_application(database: Database, ids: list[str], seed: int) -> list[str]:
    """Cancel half of the tasks, some of them in a transaction that has read rows before."""
    random, again = Random(seed), {"timeout_secs": 200, "default_retry_delay": 0.01}

    def cancel(transaction: Any, id: str) -> bool:
        age = random.choice((0, 0, 0.005))
        if age:
            list(transaction.execute_sql("SELECT 1 FROM AsynchronousTaskTopics"))
            time.sleep(age)
        return outbox.cancel(transaction, id)

    some = random.sample(ids, len(ids) // 2)
    return [id for id in some if database.run_in_transaction(cancel, id, **again)]


def cancelled_by_operator(database: Database, ids: list[str]) -> list[str]:
    """Cancel a quarter of the tasks, ten at a time."""
    table, some = TaskTable(opened(database)), Random(9).sample(ids, len(ids) // 4)
    selections = (TaskSelection(state="unsent", ids=tuple(some[at : at + 10])) for at in range(0, len(some), 10))
    return [id for each in selections for id in changed(execution.change(table, "cancel", each))]


MORE = [pytest.mark.long("more tasks"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("tasks", [60, pytest.param(300, marks=MORE)])
def test_a_task_is_cancelled_or_received_or_named(
    database: Database, tasks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two workers, two applications and an operator at once. Half of the tasks have a key.

    A transaction of an application that has read rows before can be older than a worker's claim, and abort it after the
    publish. Then a task is both. A worker names each of these in its log, and no other, and its row is sent.
    """
    ids = [str(uuid.UUID(int=Random(n).getrandbits(128))) for n in range(tasks)]
    insert(database, [row(id, OrderingKey=f"k{n % 20}" if n % 2 else None) for n, id in enumerate(ids)])
    publisher, counted = FakePublisher("orders"), Counted()
    relays = [relay_of(real.Store(database, Layout(10)), publisher, counted, size=5) for _ in range(2)]
    first, second = (in_background(each.turn, every=0.0) for each in relays)
    with ThreadPoolExecutor(3) as threads, first, second:
        applications = [threads.submit(cancelled_by_application, database, ids, seed) for seed in (1, 2)]
        by_operator = threads.submit(cancelled_by_operator, database, ids).result(timeout=250)
        cancelled = by_operator + [id for each in applications for id in each.result(timeout=250)]
        eventually(lambda: not unsent(database), seconds=60, message="all other tasks sent")
    for each in relays:
        each.finish()
    received = set(publisher.ids())
    assert len(cancelled) == len(set(cancelled)), "a task is cancelled twice"
    assert received | set(cancelled) == set(ids)
    assert 0 < len(cancelled) < tasks
    # Both workers can have published the same task.
    logged = [each.getMessage() for each in caplog.records if vars(each).get("action") == "cancelled_after_publish"]
    named = [id for id in ids for line in logged if id in line]
    assert received & set(cancelled) == set(named)
    assert counted.counts[m.CANCELLED.name] == len(named)
    assert {id for id, each in rows_of(database).items() if each["CancelledBy"]} == set(cancelled) - set(named)


def test_a_lock_that_outlasts_the_limit_is_one_sentence(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spanner aborts the transaction until the limit. The emulator aborts the holder of a lock, so this is played."""
    insert(database, [row("held")])
    options: dict[str, Any] = {}

    def aborted(*_: object, **given: object) -> None:
        options.update(given)
        raise Aborted("the lock is held")

    table = TaskTable(opened(database))
    monkeypatch.setattr(admin_table, "transact", aborted)
    with pytest.raises(OutboxError, match=r"others write the same rows.*Try again"):
        list(execution.change(table, "cancel", TaskSelection(state="unsent", ids=("held",))))
    assert options["timeout_secs"] == admin_table.OPERATOR_ABORTED_SECONDS
    assert rows_of(database)["held"]["CancelledBy"] is None

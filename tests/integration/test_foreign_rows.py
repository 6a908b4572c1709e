"""Commands and workers if Spanner is unavailable, or if tables have shapes and rows that no program here writes."""

import functools
import itertools
import json
import math
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, JsonObject
from google.cloud.spanner_v1.database import Database

from outbox.base.values import MAX_JSON
from outbox.devtools.emulators import Emulators
from outbox.errors import NotReached, OutboxError
from outbox.reading import Position, SentTasks
from outbox.rows import backlog
from outbox.rows.counts_sql import MAX_TEXT
from outbox.rows.task_table import TaskTable
from outbox.rows.workers import MAX_CIRCUITS, MAX_INFOS, MAX_ITEMS
from outbox.table.connection import UNARY_SECONDS
from outbox.table.ddl import MAX_SHARDS, Layout
from outbox.table.shared_sql import FORGET_WORKER_SECONDS
from outbox.table.states import NEVER
from outbox.table.timeouts import retry_and_timeout
from outbox_admin import operations
from outbox_admin.changes import execution
from outbox_admin.schema import reshard
from outbox_admin.status import last_hour, live_workers
from outbox_admin.tasks import lookup, selected
from outbox_admin.tasks.selections import TaskSelection
from outbox_admin.topics import editing
from publishworker.spanner.store import SpannerStore
from publishworker.telemetry import metrics as m
from publishworker.topics.availability import RateLimits, split_valid
from publishworker.types import Failed
from tests.support import real
from tests.support.commands import Commands
from tests.support.fakes import Counted, FakePublisher
from tests.support.operations import FUTURE, PAST, Watch, insert, opened, row, rows_of, update
from tests.support.parts import relay_of
from tests.support.proxy import Proxy
from tests.support.spanner import query
from tests.support.store_harness import SpannerHarness

QUERY, READ, COMMIT = "execute_streaming_sql", "streaming_read", "commit"
#: Seconds for a call to an unavailable Spanner, in place of its own limit.
SHORT = 0.3


def fill(database: Database) -> None:
    every: list[dict[str, Any]] = [{"SentAt": PAST}, {"AvailableAt": NEVER}, {"AvailableAt": FUTURE, "Attempts": 1}, {}]
    insert(database, [row(str(n), **each) for n, each in enumerate(every)])


def of_state(state: str) -> TaskSelection:
    return TaskSelection(state=state, until=FUTURE)


WORK: dict[str, Callable[[TaskTable], Any]] = {
    "status": backlog.read,
    "status --exact": lambda table: backlog.read(table, exact=True),
    "list": lookup.find,
    "show": lambda table: lookup.task(table, "0"),
    "tail": lambda table: SentTasks(table, Position(PAST), None).page(),
    "count": lambda table: selected.count(table, of_state("dead"), exact=True),
    "retry": lambda table: list(execution.change(table, "retry", of_state("dead"))),
    "retry ids": lambda table: list(execution.change(table, "retry", TaskSelection(ids=("1",)))),
    "purge": lambda table: list(execution.change(table, "purge", of_state("sent"))),
    "cancel": lambda table: list(execution.change(table, "cancel", TaskSelection(state="unsent", ids=("1",)))),
    "waiting topics": lambda table: editing.waiting(table, ["orders"]),
    "pause": lambda table: editing.change(table, "pause", ["orders"], {"paused": True}),
}


@pytest.mark.parametrize(
    ("work", "call", "number", "fault"),
    [
        ("status", QUERY, 4, Proxy.hang),
        ("tail", QUERY, 1, Proxy.hang),
        ("retry", QUERY, 5, Proxy.hang),
        ("retry ids", COMMIT, 2, Proxy.refuse),
        ("cancel", COMMIT, 2, Proxy.mute),
        ("pause", READ, 1, Proxy.refuse),
        ("pause", COMMIT, 1, Proxy.hang),
    ],
)
def test_no_command_hangs_when_spanner_becomes_unavailable(  # noqa: PLR0917 - pytest names them
    emulators: Emulators,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    work: str,
    call: str,
    number: int,
    fault: Callable[[Proxy], None],
):
    """In the middle of the work: every call has a limit, after which it fails. A task is either changed or not."""
    fill(database)
    before = rows_of(database)
    with Proxy(emulators.spanner_host) as proxy:
        monkeypatch.setenv("SPANNER_EMULATOR_HOST", proxy.address)
        ours = opened(database)
        table = TaskTable(ours)
        WORK[work](table) if work == "tail" else table.now()
        seen: list[str] = []

        def limited(name: str, original: Any, *arguments: Any, **keywords: Any) -> Any:
            if name == call:
                seen.append(name)
                if len(seen) == number:
                    fault(proxy)
            assert name in UNARY_SECONDS or keywords["timeout"] == keywords["retry"]._timeout <= 600
            away = len(seen) >= number
            return original(*arguments, **(keywords | retry_and_timeout(SHORT) if away else keywords))

        for name in (QUERY, READ, *UNARY_SECONDS):
            original = getattr(ours.spanner_api, name)
            monkeypatch.setattr(ours.spanner_api, name, functools.partial(limited, name, original))
        begun = time.monotonic()
        with pytest.raises(NotReached, match="Spanner did not answer"):
            WORK[work](table)
        assert time.monotonic() - begun < 8
        assert len(seen) >= number
    after = rows_of(database)
    if fault is not Proxy.mute:  # then the commit came through, and only its answer did not
        assert after == before
    else:
        assert [id for id, each in after.items() if each["CancelledBy"]] == ["1"]


@pytest.mark.extended
def test_a_missing_index_is_named(own_database: Database):
    """A missing column as well; a transaction that meets it holds no locks and has changed nothing."""
    fill(own_database)
    table = TaskTable(opened(own_database))
    own_database.update_ddl(["ALTER TABLE AsynchronousTasks DROP COLUMN ExpiresAt"]).result()
    for work in ("show", "retry ids", "list"):
        with pytest.raises(NotReached, match=r"ExpiresAt.*See `outbox schema apply`"):
            WORK[work](table)
    update(own_database, "1", Attempts=5)
    column = "ALTER TABLE AsynchronousTasks ADD COLUMN ExpiresAt TIMESTAMP"
    own_database.update_ddl([column, "DROP INDEX AsynchronousTasksToSend"]).result()
    for work in ("status --exact", "list", "tail", "count", "retry", "purge"):
        with pytest.raises(NotReached, match=r"index AsynchronousTasksToSend is missing.*See `outbox schema apply`"):
            WORK[work](table)
    assert all(WORK[work](table) for work in ("show", "retry ids"))  # by the primary key
    own_database.update_ddl(["DROP TABLE AsynchronousTaskOperations"]).result()
    update(own_database, "1", AvailableAt=NEVER)
    before = rows_of(own_database)
    for work in ("pause", "cancel"):  # nothing is changed without its record
        with pytest.raises(NotReached, match=r"AsynchronousTaskOperations is missing.*See `outbox schema apply`"):
            WORK[work](table)
    assert (rows_of(own_database), table.controls()) == (before, {})


def test_a_refusal_unrelated_to_the_schema_is_reported_as_it_is(database: Database):
    """The table is as it should be, so `outbox schema apply` is not recommended."""
    table = TaskTable(opened(database))
    for refused in (
        lambda: table.query("SELECT FROM", "outbox-test"),
        lambda: table.transact("outbox-test", lambda transaction: transaction.query("SELECT no", {})),
    ):
        with pytest.raises(OutboxError, match="Spanner refused") as raised:
            refused()
        assert "schema apply" not in str(raised.value)
    assert table.now()


def test_every_request_has_low_priority_and_a_tag(database: Database, watch: Watch):
    """Spanner's statistics show which requests are the commands'. `watch` sees each."""
    fill(database)
    for work in WORK.values():
        work(watch.table)
    assert watch.tags() >= {"outbox-status", "outbox-topics", "outbox-list", "outbox-show", "outbox-reader"}
    tags = {request.request_options.transaction_tag for name, request in watch.requests if name == "commit"}
    assert tags == {"outbox-retry", "outbox-purge", "outbox-cancel", "outbox-topics"}


HIGHEST, LOWEST = 2**63 - 1, -(2**63)
FIRST, LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
#: The ends of each column that another writer can set. The values of ID are the ends of Id.
ENDS: dict[str, tuple[Any, ...]] = {
    "times_sent": (HIGHEST, HIGHEST - 1, LOWEST, -1),
    "attempts": (HIGHEST, LOWEST, -1),
    "priority": (HIGHEST, LOWEST),
    "sequence": (HIGHEST, LOWEST),
    "available_at": (FIRST, LAST),
    "expires_at": (FIRST, LAST),
    "created_at": (FIRST,),
    "last_error": ("", "\0\U0010ffff" * 1000),
    "blocked_by": ("", "\U0010ffff" * 64),
    "ordering_key": ("\U0010ffff" * 256, "\0"),
    "topic": ("", "\U0010ffff" * 400),
}
GOOD = tuple(f"good {number}" for number in range(20))


@pytest.mark.parametrize(
    ("failing", "once"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.extended),
        pytest.param(False, True, marks=pytest.mark.extended),
        pytest.param(True, True, marks=pytest.mark.long("both")),
    ],
)
def test_no_value_of_a_row_makes_spanner_refuse_a_batch(
    database: Database, caplog: pytest.LogCaptureFixture, *, once: bool, failing: bool
) -> None:
    """The end of each column, and all pairs of ends: the commits that mark, record failures and undo marks succeed."""
    harness, counted, publisher, seconds = SpannerHarness(database), Counted(), FakePublisher("orders"), 0.0
    store = real.Store(opened(database), Layout(10))
    relay = relay_of(store, publisher, counted, size=50, clock=lambda: seconds)
    harness.insert("", at_most_once=once)
    values = [(name, value) for name, ends in ENDS.items() for value in ends]
    rows = [dict([each]) for each in values]
    rows += [dict(pair) for pair in itertools.combinations(values[::2], 2) if len(dict(pair)) == 2]
    for number, columns in enumerate(rows):
        harness.insert(f"{number}", **{"at_most_once": once, **columns})
    if failing:
        failure = Failed("data_loss" if not once else "invalid_argument", "no")
        publisher.failing = dict.fromkeys(map(str, range(len(rows))), failure)
    for id in GOOD:
        harness.insert(id, at_most_once=once)
    for _ in range(60):
        relay.turn()
        seconds += 0.5
    relay.finish()
    assert not re.search("ommit failed|cannot be changed", caplog.text)
    assert counted.counts[m.UNCOMMITTED.name] == counted.counts[m.UNCONFIRMED.name] == 0
    assert len(publisher.ids()) == len(set(publisher.ids()))
    states = query(database, "SELECT Id, SentAt, AvailableAt FROM AsynchronousTasks WHERE Topic = 'orders'")
    assert {id for id, sent_at, _ in states if sent_at} >= {*GOOD}
    assert not [id for id, sent_at, available_at in states if sent_at is None and available_at is None]


INTEGERS = (LOWEST, -1, 0, 1, 2**62, HIGHEST)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e308)
STRUCTURES = (
    "", "{", "[" * 100_000, "9" * 5_000, "NaN", '{"from": 1e999}', "7", '"x"', "null", '{"from": "a", "to": 3}'
)  # fmt: skip


def add(database: Database, table: str, columns: str, *rows: tuple[Any, ...]) -> None:
    with database.batch() as batch:
        batch.insert(f"AsynchronousTask{table}", columns.split(), rows)


@pytest.fixture
def store(database: Database) -> SpannerStore:
    return SpannerStore(opened(database), Layout(10))


def test_no_heartbeat_stops_the_commands_or_lives_for_ever(
    database: Database, store: SpannerStore, outbox: Commands
) -> None:
    """The longest liveness timeout is the age at which the row is deleted."""
    rows = [
        (f"{age} {seconds}", FIRST, seen, seconds)
        for seconds in INTEGERS
        for age, seen in (("new", COMMIT_TIMESTAMP), ("old", FIRST))
    ]
    add(database, "Workers", "WorkerId StartedAt SeenAt LivenessTimeoutSeconds", *rows)
    table = TaskTable(database)
    [status] = outbox.objects("status", "--json")
    assert status["workers"] in (2, 3)  # the timeout of one second may have passed
    assert {*reshard.Resharding(table).snapshot().polled_by} >= {"new 4611686018427387904", f"new {HIGHEST}"}
    workers = store.discover((), ()).workers
    assert {*workers.live} >= {"new 4611686018427387904", f"new {HIGHEST}"}
    assert max(workers.live.values()) <= FORGET_WORKER_SECONDS
    assert workers.gone == {f"old {seconds}" for seconds in INTEGERS}


def test_no_limit_of_a_topic_stops_the_commands_or_the_workers(
    outbox: Commands, database: Database, store: SpannerStore
) -> None:
    rows = [
        *((f"rate {rate}", False, rate, 1, None) for rate in FLOATS),
        *((f"burst {number}", False, 10.0, number, None) for number in INTEGERS),
        *((f"in flight {number}", False, None, None, number) for number in INTEGERS),
    ]
    add(database, "Topics", "Topic Paused RatePerSecond Burst MaxInFlight", *rows)
    limits = RateLimits(time.monotonic)
    limits.apply(split_valid(store.discover(range(10), ()).controls)[0], 3)
    assert set(limits.allowances({})) == {"rate 1e+308", "burst 1", "in flight 1"}
    limits.seconds_to_next()
    for words in (["topics"], ["pause", "--yes", *(topic for topic, *_ in rows)]):
        assert outbox.here(*words).code == 0
    listed = outbox.here("topics", "--json").stdout
    found = json.loads(listed, parse_constant=pytest.fail)["topics"]
    assert {each["topic"]: each["paused"] for each in found} == {topic: True for topic, *_ in rows}
    assert TaskTable(database).controls()["rate inf"].rate_per_second == math.inf


def test_no_recorded_layout_stops_the_commands_or_the_workers(database: Database, store: SpannerStore) -> None:
    """A row that names no layout is ignored."""
    names = ("", "Sharp", "shard", "ShardX", "Shard-1", "Shard32", "Shard 3", "Shard\0", "Shard٣", "Shard03")
    rows = [*((name, 3) for name in names), *((f"Shard{number}"[:16], number) for number in (0, 1_001, HIGHEST))]
    add(database, "Shards", "ColumnName Shards State", *((*row, "polled") for row in rows))
    assert store.discover((), ()).workers.layouts == ()
    assert reshard.Resharding(TaskTable(database)).snapshot().recorded == {}
    add(database, "Shards", "ColumnName Shards State", ("Shard", 10, "polled"))
    assert store.discover((), ()).workers.layouts == (Layout(10),)


def test_no_recorded_operation_stops_the_commands(outbox: Commands, database: Database) -> None:
    """Those that are no selection are shown as they are, and the last valid change of the shards counts."""
    columns = "OperationId Operation StartedAt FinishedAt Selection Tasks"
    rows = [
        (str(number), "reshard", FIRST, FIRST, text, (LOWEST, HIGHEST)[number % 2])
        for number, text in enumerate(STRUCTURES)
    ]
    add(database, "Operations", columns, *rows)
    add(database, "Operations", columns, ("x", "reshard", COMMIT_TIMESTAMP, None, "[", None))
    add(database, "Shards", "ColumnName Shards State", ("Shard", 10, "polled"), ("Shard32", 32, "building"))
    table = TaskTable(database)
    [status] = outbox.objects("status", "--json")
    assert (status["reshard"], len(list(reshard.Resharding(table).report()))) == (None, 2)
    assert outbox.here("operations").code == 0
    lines = outbox.here("operations", "--json").stdout.splitlines()
    listed = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert {each["id"]: each["selection"] for each in listed if each["id"] in "0169"} == {
        "0": "", "1": "{", "6": 7, "9": {"from": "a", "to": 3},
    }  # fmt: skip
    assert len(operations.latest(table, 100)) == len(listed) == len(STRUCTURES) + 1


LARGE = 500_000
#: Infos that are as large as they can be: runs, circuits, settings, topics, levels, and characters.
LARGE_INFOS: tuple[Any, ...] = (
    {"shards": [[n, n + 999] for n in range(0, 450_000, 1_000)]},
    {"shards": [[n * 1_000_000, n * 1_000_000 + 999] for n in range(300)]},
    {"circuits": [{} for _ in range(2_000)]},
    {"circuits": [{"topic": str(n)} for n in range(450)]},
    {"settings": {str(n): n for n in range(500)}, "version": "v" * 1_000},
    {"history": {"minute": 1, "topics": {str(n): {} for n in range(700)}}},
    {"settings": functools.reduce(lambda inner, _: [inner], range(70), 1)},
    {"host": "\U0001f600" * LARGE},
)  # fmt: skip


def test_no_column_is_read_further_than_its_bound(database: Database, outbox: Commands) -> None:
    """Whatever a program has written there, and however many such rows there are."""
    emoji, levels = "\U0001f600" * LARGE, "[" * LARGE
    infos = [
        (f"{n:03} {m}", PAST, COMMIT_TIMESTAMP, 3_600, JsonObject(info))
        for m, info in enumerate(LARGE_INFOS) for n in range(20 if m < len(LARGE_INFOS) - 1 else 2)
    ]  # fmt: skip
    add(database, "Workers", "WorkerId StartedAt SeenAt LivenessTimeoutSeconds Info", *infos)
    columns = "OperationId Operation StartedAt SeenAt Principal Selection Reason Tasks Position"
    for n, selection in enumerate((emoji, levels, json.dumps({"ids": ["x" * 64] * 20_000}), '{"topics": 1}')):
        values = (COMMIT_TIMESTAMP, COMMIT_TIMESTAMP, emoji, selection, emoji, 0, levels)
        add(database, "Operations", columns, (f"{n}", "retry", *values))
    for n in range(5):
        insert(database, [row(f"{n}", AvailableAt=NEVER, LastError=emoji)])
    table = TaskTable(database)
    counted = backlog.read(table)
    found = [*operations.latest(table, 100), *(operations.operation(table, str(n)) for n in range(4))]
    assert {len(each.selection) <= MAX_JSON and len(each.principal) <= MAX_TEXT for each in found} == {True}
    errors = [*lookup.errors(table, counted), lookup.task(table, "0"), *lookup.find(table).tasks]
    assert max(len(getattr(each, "error", None) or each.columns["LastError"]) for each in errors) == MAX_TEXT
    for n in range(4):
        with pytest.raises(OutboxError, match="Start a new operation"):
            execution.continued(table, str(n))
    assert max(len(each.shards) for each in counted.workers) == 2 * MAX_SHARDS
    assert max(len(each.circuits) for each in counted.workers) == MAX_CIRCUITS
    assert len(json.dumps([each.info for each in counted.workers], separators=(",", ":"))) < 2 * MAX_INFOS
    assert len(live_workers.open_circuits(counted.workers)) <= MAX_ITEMS
    assert len(live_workers.differing(counted.workers)) <= MAX_ITEMS
    hour = last_hour.read(table, counted)
    assert len(hour.topics) <= last_hour.MAX_TOPICS
    for words in ("status", "workers", "operations"):
        for flags in ([], ["--json"]):
            assert outbox.here(words, *flags).code == 0

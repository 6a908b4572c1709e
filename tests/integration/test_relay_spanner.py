"""The relay in this process on the real emulators: polls, publishes, marks, traces, and hosted by applications."""

import base64
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from google.cloud.pubsub_v1.subscriber.message import Message
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, KeyRange, KeySet
from google.cloud.spanner_v1.database import Database
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import outbox
from outbox.devtools.emulators import Emulators
from outbox.program.channels import open_pubsub
from outbox.table.connection import open_database
from outbox.table.controls import TopicControls
from outbox.table.ddl import Layout
from outbox.table.states import NEVER
from publishworker.hosted import HostedRelay
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import SpannerStore, any_to_send, topics_to_send
from publishworker.spanner.write_errors import DatabaseMissing
from publishworker.telemetry import metrics as m
from publishworker.turn.relay import Relay
from publishworker.types import Answer, Failed, LockedRow, Published
from tests.support import real
from tests.support.fakes import Counted, FakePublisher, serialized
from tests.support.operations import FUTURE, OF_STATES, PAST, insert, row, update
from tests.support.parts import poll_request, relay_of
from tests.support.processes import ROOT
from tests.support.pubsub import PubSub, Subscription, pulling
from tests.support.relays import EACH_ONCE, account, execute, register, unsent
from tests.support.spanner import PROJECT, place, query, variables
from tests.support.store_harness import SpannerHarness
from tests.support.waiting import eventually


def make_relay(
    database: Database | SpannerStore,
    publisher: PubSubPublisher | None = None,
    counted: Counted | None = None,
    *,
    size: int = 50,
    emulator: bool = True,
    **options: Any,
) -> Relay:
    kind = real.Store if emulator else SpannerStore
    store = kind(database, Layout(10)) if isinstance(database, Database) else database
    return relay_of(store, publisher or PubSubPublisher(open_pubsub(place()), PROJECT), counted, size=size, **options)


def turn_until_all_sent(relay: Relay, database: Database, max_turns: int = 60) -> int:
    """Turn until nothing is unsent; return how many tasks were published."""
    published = 0
    for _ in range(max_turns):
        turn = relay.turn()
        published += turn.published
        if not (unsent(database) or turn.in_flight):
            return published
    pytest.fail(f"{len(unsent(database))} unsent after {max_turns} turns")


def test_a_dropped_table_counts_as_a_missing_database(own_database: Database) -> None:
    """Spanner answers a query of a missing table with INVALID_ARGUMENT, and not with NOT_FOUND."""
    own_database.update_ddl(["DROP TABLE AsynchronousTaskTopics"]).result(30)
    with pytest.raises(DatabaseMissing, match="Table not found: AsynchronousTaskTopics"):
        make_relay(own_database).turn()


def test_a_worker_starts_beside_the_open_transaction_of_a_killed_client(database: Database) -> None:
    """The emulator aborts the writes of the check at the start several times before it ends that transaction."""
    session = database.session()
    session.create()
    abandoned = session.transaction()
    abandoned.begin()
    abandoned.execute_update("DELETE FROM AsynchronousTasks WHERE Id = 'none'")
    verify_grants(open_database(place(database.database_id)))


def test_the_subscriber_receives_the_registered_messages(
    database: Database, topic: str, subscription: Subscription, set_metrics: Callable[[Any], None]
) -> None:
    """Byte for byte (A05, A06); nothing of a rolled back transaction (A02). Another service may write rows itself."""

    def roll_back(transaction: Any) -> None:
        outbox.register(transaction, topic, b"rolled back")
        raise LookupError

    counted = Counted()
    set_metrics(counted)
    with pytest.raises(LookupError):
        database.run_in_transaction(roll_back)
    set_metrics(None)
    assert counted.counts == {m.REGISTERED.name: 1}  # of calls, so it may exceed the rows (A11)
    data = bytes(range(256)) + b"hell"
    with database.batch() as batch:
        ours = outbox.register(batch, topic, data, {"kind": "\u0000\u00fc"}, ordering_key="customer 1")
        columns = ("Id", "Topic", "Data", "Priority", "CreatedAt")
        hello = base64.b64encode(b"\x0a\x05hello")
        batch.insert("AsynchronousTasks", columns, [("theirs", topic, hello, 1, COMMIT_TIMESTAMP)])
    turn_until_all_sent(make_relay(database), database)
    received = [(each.data, dict(each.attributes), each.ordering_key) for each in subscription.drain()]
    assert sorted(received, key=lambda each: len(each[0])) == [
        (b"hello", {outbox.TASK_ID_ATTRIBUTE: "theirs"}, ""),
        (data, {"kind": "\u0000\u00fc", outbox.TASK_ID_ATTRIBUTE: ours}, "customer 1"),
    ]


def test_everything_registered_is_received_once(database: Database, pubsub: PubSub) -> None:
    """On its topic, by name or ID (A08), in ten shards or one (A17), also of eight batches that abort each other.

    SentAt is Spanner's time, and the row is kept (A34, A35).
    """
    first, second = pubsub.new_topic(), pubsub.new_topic()
    subscriptions = [pubsub.new_subscription(first), pubsub.new_subscription(second)]
    ids: list[list[str]] = [[], []]
    for size, options in ((1, {}), (7, {}), (100, {}), (5, {"batches": 8, "emulator": False})):
        ids[0] += register(database, first, 10)
        ids[1] += register(database, second.rpartition("/")[2], 10, ordering_key="of one shard")
        published = turn_until_all_sent(make_relay(database, size=size, **{"batches": 4, **options}), database)
        assert published == 20 or "emulator" in options
    rows = query(database, "SELECT CreatedAt, SentAt FROM AsynchronousTasks")
    assert len(rows) == 80
    assert all(created_at < sent_at for created_at, sent_at in rows)
    assert [account(*each) for each in zip(ids, subscriptions, strict=True)] == [EACH_ONCE] * 2


@pytest.mark.parametrize("alone", [(), ("a", "c", "not there")])
def test_pubsub_accepts_each_request_of_a_batch(topic: str, subscription: Subscription, alone: Sequence[str]) -> None:
    """It refuses one that mixes ordering keys. However the tasks are divided, a missing topic fails each."""
    publisher = PubSubPublisher(open_pubsub(place()), PROJECT)
    keys = {"a": "x", "b": "y", "c": None, "d": "x", "e": None}
    rows = [LockedRow(id, topic, serialized(), key, datetime.now(UTC), None, None) for id, key in keys.items()]
    rows.append(rows[2]._replace(id="empty", data=b""))
    outcomes = publisher.publish(topic, rows, 5, alone)
    assert len({each.message_id for each in outcomes.values() if isinstance(each, Published)}) == len(rows)
    arrived = {each.attributes[outbox.TASK_ID_ATTRIBUTE]: each.ordering_key for each in subscription.pull_until(6)}
    assert arrived == {row.id: row.ordering_key or "" for row in rows}
    missing = publisher.publish(f"projects/{PROJECT}/topics/missing", rows[:3], 5, alone)
    assert {id: each.reason for id, each in missing.items() if isinstance(each, Failed)} == dict.fromkeys(
        "abc", "not_found"
    )


def test_a_task_is_sent_again_by_plain_dml(
    database: Database, topic: str, subscription: Subscription
) -> None:  # OUT-TWICE-1
    """`SentAt = NULL` alone, with the count of rows as its answer (A41, by hand), also for one that had failed."""
    ids = register(database, topic, 3, data=b"\x00\xffbody")
    update(database, ids[0], Attempts=3, LastError="once")
    relay = make_relay(database)
    turn_until_all_sent(relay, database)
    again = f"UPDATE AsynchronousTasks SET SentAt = NULL WHERE Topic = '{topic}' AND SentAt > '2020-01-01'"
    assert execute(database, again) == 3
    turn_until_all_sent(relay, database)
    received = subscription.pull_until(6)
    assert {each.data for each in received} == {b"\x00\xffbody"}
    assert sorted(each.attributes[outbox.TASK_ID_ATTRIBUTE] for each in received) == sorted(ids * 2)
    assert all(len(each.attributes) == 1 for each in received)
    assert len({each.message_id for each in received}) == 6


def test_the_poll_returns_the_same_tasks_as_a_scan_of_the_table(database: Database, topic: str) -> None:
    """The same ids as plain SQL over the table, in the same order within each shard and topic (A21).

    The ranges of the index that it reads have no sent, scheduled or dead task (A22).
    """
    now, random, other = datetime.now(UTC), Random(5), f"{topic}-other"
    times = [None, None, now - timedelta(hours=1), now - timedelta(days=1), now + timedelta(days=1), NEVER]
    columns = ("Id", "Topic", "Data", "Priority", "CreatedAt", "AvailableAt", "SentAt")
    rows = [
        (
            str(uuid.UUID(int=random.getrandbits(128))),
            random.choice([topic, other]),
            b"",
            random.randrange(3),
            now - timedelta(seconds=random.randrange(10**6)),
            random.choice(times),
            random.choice([None, None, None, now]),
        )
        for _ in range(150)
    ]
    with database.batch() as batch:
        batch.insert("AsynchronousTasks", columns, rows)
    scanned = query(
        database,
        """
        SELECT Id, Topic, Shard, AvailableAt IS NULL FROM AsynchronousTasks@{FORCE_INDEX=_BASE_TABLE}
        WHERE SentAt IS NULL AND (AvailableAt IS NULL OR AvailableAt <= CURRENT_TIMESTAMP())
        ORDER BY Shard, Topic, AvailableAt, Priority DESC, CreatedAt""",
    )
    polled = SpannerStore(database, Layout(10)).poll(poll_request(topic, other, per_range=150, due=True))
    first = datetime.min.replace(tzinfo=UTC)
    found = sorted(
        polled, key=lambda each: (each.shard, each.topic, each.available_at or first, -each.priority, each.created_at)
    )
    assert [[each.id, each.topic, each.shard, each.available_at is None] for each in found] == scanned

    def in_range(name: str, start: datetime | None, end: datetime | None) -> set[str]:
        keys = [[[shard, None, name, each] for each in (start, end)] for shard in range(10)]
        ranges = KeySet(ranges=[KeyRange(start_closed=first, end_closed=last) for first, last in keys])
        with database.snapshot() as snapshot:
            return {id for [id] in snapshot.read("AsynchronousTasks", ["Id"], ranges, index="AsynchronousTasksToSend")}

    ranges = [(name, *each) for name in (topic, other) for each in ((None, None), (first, now))]
    assert set().union(*(in_range(*each) for each in ranges)) == {id for id, *_ in scanned}


def test_two_relays_publish_a_task_once(database: Database, topic: str, subscription: Subscription) -> None:
    """Both have polled it; the first sends it, the other counts that it came too late (A30, A44)."""
    counted = Counted()
    [id] = register(database, topic, 1)
    first = make_relay(database, counted=counted)

    class Overtaken(SpannerStore):
        def claim(self, *arguments: Any, **options: Any) -> None:
            turn_until_all_sent(first, database)
            super().claim(*arguments, **options)

    second = make_relay(Overtaken(database, Layout(10)), counted=counted)
    assert eventually(lambda: second.turn().already_sent) == 1
    assert [message.attributes[outbox.TASK_ID_ATTRIBUTE] for message in subscription.drain()] == [id]
    published, already = counted.counts[m.PUBLISHED.name], counted.counts[m.ALREADY_PUBLISHED.name]
    assert (published, already, already / (already + published)) == (1, 1, 0.5)


def test_sent_at_is_written_only_after_pubsub_has_answered(database: Database, topic: str) -> None:  # OUT-LOSS-3
    """While Pub/Sub has not answered the row is unsent; with another answer, or none, it stays so (A31, A32)."""
    answered, refused, untried = ids = register(database, topic, 3)
    seen = []

    class Observed(FakePublisher):
        def publish(
            self, topic: str, rows: Sequence[LockedRow], seconds: float, alone: Collection[str] = frozenset()
        ) -> dict[str, Answer]:
            seen.append(set(unsent(database)))
            return {answered: Published("1"), refused: Failed("unavailable", "later")}

    relay = make_relay(database, Observed())
    while not relay.turn().published:
        assert not seen
    assert seen == [set(ids)]
    assert set(unsent(database)) == {refused, untried}


LATE = NEVER - timedelta(microseconds=1)
ALL = range(10)


@pytest.fixture
def harness(database: Database) -> SpannerHarness:
    return SpannerHarness(database)


def test_pending_and_retrying_tasks_are_work(database: Database, harness: SpannerHarness) -> None:
    """Scheduled, blocked, dead and paused tasks are not: `drain` must not wait for them."""
    key = {"ordering_key": "same-shard"}
    for n in range(5):
        harness.insert(f"dead {n}", topic="dead", available_at=NEVER, **key)
        harness.insert(f"paused {n}", topic="paused", **key)
        same = {"available_at": LATE - timedelta(days=n // 4), "created_at": PAST - timedelta(days=n % 2)}
        harness.insert(f"scheduled {n}", priority=50 + n % 3, **same, **key)
        harness.insert(f"scheduled at once {n}", available_at=LATE, created_at=PAST, **key)
    harness.control("paused", TopicControls(paused=True))
    assert not any_to_send(harness.store)
    harness.insert("misrouted", topic="misrouted", **key)
    harness.control("misrouted", TopicControls(publish_to="no topic"))
    assert (any_to_send(harness.store), any_to_send(harness.store, misrouted=True)) == (False, True)
    harness.control("misrouted", TopicControls(paused=True, publish_to="no topic"))
    assert not any_to_send(harness.store, misrouted=True)
    harness.delete("misrouted")
    for state, columns in ((state, columns) for state, of in OF_STATES.items() for columns in of):
        insert(database, [row("a", **columns | {"OrderingKey": "same-shard"})])
        assert any_to_send(harness.store) == (state in ("pending", "retrying")), columns
        assert topics_to_send(harness.store).keys() - {"orders"} == {"paused"}
        harness.delete("a")


def test_the_topics_to_send_and_whether_their_tasks_have_keys(harness: SpannerHarness) -> None:
    """`check` asks Pub/Sub for these topics, and warns of ordering keys without an endpoint of one region."""
    harness.insert("ready", topic="ready")
    harness.insert("retrying", topic="retrying", available_at=FUTURE, attempts=1, ordering_key="key")
    harness.insert("scheduled", topic="scheduled", available_at=FUTURE, ordering_key="key")
    harness.insert("dead", topic="dead", available_at=NEVER)
    harness.insert("sent", topic="sent", sent_at=PAST, ordering_key="key")
    assert topics_to_send(harness.store) == {"ready": False, "retrying": True}


def test_only_the_requested_shards_are_read(harness: SpannerHarness) -> None:
    for n in range(5):
        harness.insert(str(n))
    used = {each.shard for each in harness.store.poll(poll_request("orders"))}
    assert {shard for shard in ALL if any_to_send(harness.store, [shard])} == used
    assert not any_to_send(harness.store, set(ALL) - used)
    assert any_to_send(harness.store, ALL)


def test_each_layout_has_all_tasks(own_database: Database) -> None:
    harness, new = SpannerHarness(own_database), Layout.added(32)
    harness.insert("a")
    harness.insert("scheduled", available_at=FUTURE)
    harness.reshard(new)
    for layouts in ((Layout(10),), (new,), (new, Layout(10))):
        harness.store.layouts = layouts
        assert any_to_send(harness.store, [shard for layout in layouts for shard in layout.ids])


def span_of(spans: InMemorySpanExporter, end: str) -> ReadableSpan:
    """Return the first span whose name ends like this, when it is exported."""

    def found() -> ReadableSpan | None:
        return next((each for each in spans.get_finished_spans() if each.name.endswith(end)), None)

    return eventually(found, seconds=30, message=f"a span {end}")


def is_within(context: trace.SpanContext | None, span: ReadableSpan, spans: InMemorySpanExporter) -> bool:
    """Return whether a context is a span's or a descendant's: the Spanner client creates spans for its calls."""
    parents = {each.context.span_id: each.parent for each in spans.get_finished_spans()}
    while context is not None and context.span_id != span.context.span_id:
        context = parents.get(context.span_id)
    return context is not None


def test_one_trace_leads_from_the_transaction_to_googles_subscriber(
    database: Database, subscription: Subscription, spans: InMemorySpanExporter
) -> None:
    """Its span is a child of the application's; the relay's own span is linked to it."""
    received: list[Message] = []

    def receive(message: Message) -> None:
        received.append(message)
        message.ack()

    with pulling(subscription.name, receive, enable_open_telemetry_tracing=True):
        with trace.get_tracer("shop").start_as_current_span("place order") as order:
            database.run_in_transaction(lambda each: outbox.register(each, subscription.topic, b"order-1"))
        turn_until_all_sent(make_relay(database), database)
        subscribe = span_of(spans, " subscribe")
    # By this attribute any other subscriber can continue the trace, too.
    trace_id = received[0].attributes["googclient_traceparent"].split("-")[1]
    assert trace_id == f"{order.context.trace_id:032x}" == f"{subscribe.context.trace_id:032x}"
    assert is_within(subscribe.parent, order, spans)
    sent = span_of(spans, f"send {subscription.topic.rpartition('/')[2]}")
    [link] = sent.links
    assert is_within(link.context, order, spans)
    assert sent.context.trace_id != order.context.trace_id


PAGE = ROOT / "docs/operations/worker.md"


@pytest.fixture
def _environment(emulators: Emulators, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (variables(database.database_id, emulators) | {"OUTBOX_POLL_INTERVAL": "30"}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_environment")
def test_a_hosted_relay_sends_a_task_when_it_is_woken(database: Database, pubsub: PubSub) -> None:
    """Long before its poll interval is over. The page's example is run, with a long pause when the task comes."""
    topic = pubsub.new_topic()
    subscription = pubsub.new_subscription(topic)
    [example] = re.findall(r"^```python\n(from publishworker.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    start, commit = "with HostedRelay() as relay:", "    database.run_in_transaction"
    assert example.count(start) == example.count(commit) == 1

    def wait_for_a_long_pause(relay: HostedRelay) -> None:
        woken = relay._app.relay._woken  # type: ignore[union-attr]  # it runs
        for _ in range(10):  # each wake-up in vain doubles the pause between polls
            relay.wake()
            eventually(lambda: not woken.is_set(), seconds=10, message="a turn")
            time.sleep(0.1)

    def place_order(transaction: Any) -> None:
        outbox.register(transaction, topic, b"order")

    names = {"database": database, "place_order": place_order, "before": wait_for_a_long_pause}
    names["after"] = lambda: subscription.pull_until(1, seconds=10)
    exec(example.replace(commit, f"    before(relay)\n{commit}") + "    after()\n", names)
    relay: Any = names["relay"]
    assert not relay._thread.is_alive()
    relay.start()
    with pytest.raises(RuntimeError, match="runs already"):
        relay.start()
    relay.stop()
    relay.stop()  # a second call, and one in a process without a relay, do nothing
    assert not relay._thread.is_alive()


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize(
    ("program", "code", "stopped"),
    [
        ("with HostedRelay(): raise LookupError('of the application')", 1, True),
        *(
            pytest.param(*each, False, marks=pytest.mark.extended)
            for each in (
                ("HostedRelay().start(); raise LookupError('of the application')", 1),
                ("relay = HostedRelay().start()\nif os.fork() == 0: relay.stop()", 0),
            )
        ),
    ],
)
def test_a_process_ends_although_its_main_program_has_not_stopped_the_relay(
    program: str, code: int, stopped: bool, database: Database
) -> None:
    """At the end of its block, a relay stops as a worker does. Otherwise its thread ends with the process."""
    start = "import logging, os, sys\nfrom publishworker.hosted import HostedRelay\nlogging.basicConfig(level=20)\n"
    done = subprocess.run(
        [sys.executable, "-c", start + program], cwd=ROOT, timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert ("INFO:publishworker:stopped" in done.stderr) == stopped
    with database.snapshot() as snapshot:
        left = list(snapshot.execute_sql("SELECT COUNT(*) FROM AsynchronousTaskWorkers"))
    assert left == [[0]] or not stopped

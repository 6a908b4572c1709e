"""The checks of a verification. Each returns a verdict, a sentence and its figures."""

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

from google.api_core.exceptions import GoogleAPIError, PermissionDenied
from google.cloud.spanner_v1 import ExecuteSqlRequest, TransactionOptions, TransactionSelector
from google.pubsub_v1 import PubsubMessage

import outbox
from outbox.admin import backlog, changes, tasks
from outbox.admin import topics as topic_controls
from outbox.admin.changes import TaskSelection
from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.message import MAX_ATTRIBUTES, MAX_REQUEST_BYTES
from outbox.storage import ddl, schema
from outbox.storage.connection import open_database
from outbox.testing import RecordingTransaction
from publishworker.batching import Limits
from publishworker.delivery import Delivery
from publishworker.membership import Membership
from publishworker.pubsub.messages import MAX_REQUEST_MESSAGES
from publishworker.relay import Relay
from publishworker.retry_policy import RetryPolicy
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import SpannerStore
from publishworker.telemetry.metrics import Metrics
from publishworker.types import Failed, Key, LockedRow, Mark, Outcome, PollRequest, Sent
from publishworker.verify import plans
from publishworker.verify.scratch import TOPICS, Scratch

PASSED, FAILED, NOT_AVAILABLE = "passed", "failed", "not available"
#: Batch sizes of the sweep, and tasks that are sent with each.
BATCH_SIZES, SWEPT_TASKS = (10, 25, 50, 100, 200, 500), 1_000
#: Numbers of topics of an idle poll, and max milliseconds with 100 of them.
POLLED_TOPICS, MAX_POLL_MS = (1, 10, 100, 500), 100.0
#: Registrations that are timed with and without a relay.
TIMED = 100
#: Seconds for which the first of two claims holds its locks.
HELD_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: what was found and what to do, figures by name, and plans by statement."""

    verdict: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    plans: Mapping[str, Sequence[str]] = field(default_factory=dict)


def run_all(scratch: Scratch, progress: Callable[[str], None]) -> Iterator[tuple[str, Finding]]:
    """Run all checks in their order. An unexpected answer of a service fails only its check."""
    for name, check in CHECKS.items():
        progress(name)
        try:
            yield name, check(scratch)
        except (GoogleAPIError, OutboxError) as error:
            yield name, Finding(FAILED, f"{type(error).__name__}: {error}")


def _schema(scratch: Scratch) -> Finding:
    wanted = schema.statements()
    schema.apply(scratch.database, wanted)
    again = {state for _, state in schema.apply(scratch.database, wanted)}
    wrong = schema.differences(scratch.database, wanted, free=())
    verdict = PASSED if again == {"exists"} and not wrong else FAILED
    return Finding(verdict, "; ".join(wrong) or "applied twice without changes, and matches schema.sql")


def _roles(scratch: Scratch) -> Finding:
    if scratch.is_emulator:
        return Finding(NOT_AVAILABLE, "the emulator has no roles")
    database: Any = scratch.database
    installed = files("outbox") / "ddl" / "roles.sql"
    source = installed if installed.is_file() else Path(__file__).parents[2] / "schema" / "roles.sql"
    database.update_ddl(ddl.cut(source.read_text(encoding="utf-8"))).result(timeout=300)
    verify_grants(open_database(replace(scratch.settings, database_role="publishworker")))
    application: Any = open_database(replace(scratch.settings, database_role="outbox_application"))
    with application.batch() as batch:
        outbox.register(batch, TOPICS[0], b"")
    try:
        with application.snapshot() as snapshot:
            list(snapshot.execute_sql("SELECT Data FROM AsynchronousTasks LIMIT 1"))
    except PermissionDenied:
        return Finding(PASSED, "worker and application have the grants that they need, and no others were found")
    return Finding(FAILED, "outbox_application may read Data. Compare the grants with schema/roles.sql")


def _load(scratch: Scratch) -> Finding:
    began = time.monotonic()
    scratch.load()
    seconds = time.monotonic() - began
    return Finding(PASSED, f"{scratch.rows:,} tasks", {"rows": scratch.rows, "seconds": round(seconds, 1)})


def _plans(scratch: Scratch) -> Finding:
    """Profile every statement that the relay and the operators' commands send. Changes are planned, not executed."""
    found: dict[str, Sequence[str]] = {}
    wrong: list[str] = []
    figures: dict[str, int] = {}
    for request in _sent(scratch):
        sql, tag = " ".join(request.sql.split()), request.request_options.request_tag
        root, stats = _profiled(scratch, request)
        if root is None or not any(root.scans()):
            continue
        found[sql] = list(root.lines())
        wrong += [f"{tag}: {each}" for each in plans.problems(root, sql)]
        name = f"rows scanned by {tag}"
        figures[name] = max(figures.get(name, 0), int(stats.get("rows_scanned", 0)))
    if not found:
        return Finding(NOT_AVAILABLE, "this engine shows no query plans")
    text = "; ".join(dict.fromkeys(wrong)) or f"{len(found)} statements seek in the index or the table that they force"
    return Finding(FAILED if wrong else PASSED, text, dict(sorted(figures.items())), found)


def _sent(scratch: Scratch) -> list[ExecuteSqlRequest]:
    """Return the queries that the relay and the commands send, each once."""
    database = open_database(scratch.settings)
    api: Any = database.spanner_api
    original = api.execute_streaming_sql
    requests: dict[str, ExecuteSqlRequest] = {}

    def record(request: ExecuteSqlRequest, **more: Any) -> Any:
        if "INFORMATION_SCHEMA" not in request.sql.upper():
            requests.setdefault(request.sql, request)
        return original(request=request, **more)

    api.execute_streaming_sql = record
    store, table = SpannerStore(database, schema.layout(database)), TaskTable(database)
    shards, topics = tuple(store.layouts[0].ids), frozenset(TOPICS)
    for due in (False, True):
        for below in (None, 50):
            found = store.poll(PollRequest(shards=shards, topics=topics, per_range=80, due=due, below=below))
    store.discover(shards, TOPICS[:2])
    ids = [each.id for each in found][:100]
    keyed = {Key(each.topic, each.ordering_key): each.shard for each in found if each.ordering_key}
    store.key_heads(dict(list(keyed.items())[:20]), 100, skip_dead=False)
    store.claim(ids, lambda _rows, _now: {})
    backlog.read(table), backlog.oldest_age(table)
    for state in ("pending", "retrying", "dead", "sent"):
        tasks.listed(table, TaskSelection(state=state), 100)
        changes.count(table, TaskSelection(state=state), exact=False)
    list(changes.retry(table, TaskSelection(state="dead")))
    tasks.task(table, ids[0] if ids else "none"), tasks.beginning_with(table, ["a"], 3)
    return list(requests.values())


def _profiled(scratch: Scratch, request: ExecuteSqlRequest) -> tuple[plans.Node | None, Mapping[str, Any]]:
    """Return the plan and the statistics of a query. A locking query runs in a transaction that is rolled back."""
    api: Any = scratch.database.spanner_api
    session = api.create_session(database=scratch.database.name)
    locks = "LOCK_SCANNED_RANGES" in request.sql
    write = TransactionOptions(read_write=TransactionOptions.ReadWrite())
    read = TransactionOptions(read_only=TransactionOptions.ReadOnly(strong=True))
    profiled = ExecuteSqlRequest(
        session=session.name,
        sql=request.sql,
        params=request.params,
        param_types=request.param_types,
        query_mode=ExecuteSqlRequest.QueryMode.PROFILE,
        transaction=TransactionSelector(begin=write) if locks else TransactionSelector(single_use=read),
    )
    try:
        answer = api.execute_sql(request=profiled, timeout=120)
        if locks:
            api.rollback(session=session.name, transaction_id=answer.metadata.transaction.id)
        return plans.tree(answer.stats.query_plan), dict(answer.stats.query_stats or {})
    finally:
        api.delete_session(name=session.name)


def _topics(scratch: Scratch) -> Finding:
    """Time an idle poll, which must not cost much more with many topics."""
    store, figures = scratch.store(), {}
    for count in POLLED_TOPICS[: 2 if scratch.is_emulator else None]:
        names = frozenset(f"idle-{number}" for number in range(count))
        request = PollRequest(shards=tuple(store.layouts[0].ids), topics=names, per_range=80, due=True)
        figures[f"{count} topics, ms"] = round(statistics.median(_times_ms(partial(store.poll, request), 5)), 1)
    if scratch.is_emulator:
        return Finding(NOT_AVAILABLE, "the emulator scans the table for each range", figures)
    slow = figures["100 topics, ms"] > MAX_POLL_MS
    text = f"an idle poll of 100 topics takes {figures['100 topics, ms']} ms, the limit is {MAX_POLL_MS:g} ms"
    return Finding(FAILED if slow else PASSED, text, figures)


def _locks(scratch: Scratch) -> Finding:
    """Claim the same tasks twice. The second claim must wait for the first, and find its marks."""
    store, ids = scratch.store(), scratch.register(TOPICS[0], 100)
    held, marks = threading.Event(), dict.fromkeys(ids, Sent("verify"))
    attempts: list[Sequence[LockedRow]] = []

    def first(_rows: Sequence[LockedRow], _now: object) -> Mapping[str, Mark]:
        if not held.is_set():
            held.set()
            time.sleep(HELD_SECONDS)
        return marks

    def second(rows: Sequence[LockedRow], _now: object) -> Mapping[str, Mark]:
        attempts.append(rows)
        return {}

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(store.claim, ids, first)
        held.wait(30)
        began = time.monotonic()
        store.claim(ids, second)
        waited = time.monotonic() - began
        holder.result(60)
    unsent = sum(row.sent_at is None for row in attempts[-1])
    good = not unsent and waited > HELD_SECONDS / 2
    text = f"the second claim waited {waited:.1f} s and found {unsent} unsent tasks"
    return Finding(PASSED if good else FAILED, text, {"waited, s": round(waited, 2), "attempts": len(attempts)})


def _registrations(scratch: Scratch) -> Finding:
    """Time registrations alone, and beside a relay that sends a backlog. Registrations must not wait for its locks."""

    def register() -> object:
        return scratch.register(TOPICS[1], 1)

    alone = _times_ms(register, TIMED)
    scratch.register(scratch.settings.database, SWEPT_TASKS)
    relay, stop = _relay(scratch, 100), threading.Event()

    def turns() -> None:
        while not stop.is_set():
            relay.turn(stop.is_set)

    thread = threading.Thread(target=turns, daemon=True)
    thread.start()
    try:
        beside = _times_ms(register, TIMED)
    finally:
        stop.set()
        thread.join(60)
    relay.finish()
    figures = {
        f"{name}, {part} ms": round(value, 1)
        for name, times in (("alone", alone), ("beside a relay", beside))
        for part, value in (("median", statistics.median(times)), ("99th percentile", times[int(0.99 * len(times))]))
    }
    if scratch.is_emulator:
        return Finding(NOT_AVAILABLE, "the emulator runs one transaction at a time", figures)
    text = "compare the 99th percentiles: a registration inserts other rows, so it waits for no lock of the relay"
    return Finding(PASSED, text, figures)


def _batch_sizes(scratch: Scratch) -> Finding:
    """Send tasks with each batch size, with a publisher that answers at once, so that only Spanner counts."""
    others = [*TOPICS, scratch.settings.database]  # unsent tasks of earlier checks
    topic_controls.change(TaskTable(scratch.database), "pause", others, {"Paused": True})
    speeds = {}
    for size in BATCH_SIZES:
        topic = f"{scratch.settings.database}-{size}"
        count = min(SWEPT_TASKS, max(size, scratch.rows // 10))
        scratch.register(topic, count)
        relay, sent, began = _relay(scratch, size), 0, time.monotonic()
        while sent < count and time.monotonic() - began < 120:
            sent += relay.turn().published
        sent += relay.finish().published
        speeds[size] = sent / (time.monotonic() - began)
    best = max(speeds, key=speeds.__getitem__)
    enough = next(size for size in BATCH_SIZES if speeds[size] >= 0.9 * speeds[best])
    text = f"--batch-size {enough} reaches 90 % of the fastest ({best}). The default is 200"
    return Finding(PASSED, text, {f"{size} tasks, tasks/s": round(speed) for size, speed in speeds.items()})


class _InstantPublisher:
    """Answers each publish at once."""

    def publish(self, _topic: str, rows: Sequence[LockedRow], *_more: Any) -> dict[str, Outcome]:
        return {row.id: Sent("verify") for row in rows}

    def refusals(self, _topic: str, _rows: Sequence[LockedRow]) -> dict[str, Failed]:
        return {}


def _relay(scratch: Scratch, batch_size: int) -> Relay:
    """Return a relay that publishes nowhere."""
    store, random = scratch.store(), Random()  # noqa: S311 - it spreads load, and protects nothing
    retries = RetryPolicy(initial=1, longest=3600, max_attempts=10, dead_after=86_400, random=random)
    return Relay(
        store,
        Delivery(store, _InstantPublisher(), retries, 5.0, skip_dead=False),
        Metrics(None),
        Membership(store, f"verify-{uuid.uuid4().hex}"),
        limits=Limits(batch_size, 8_000_000, 8),
        discovery_seconds=0.5,
        random=random,
    )


def _pubsub_limits(scratch: Scratch) -> Finding:
    """Publish at and beyond each limit, and compare the answers with what the library allows."""
    refused, accepted = [], []
    for name, messages, allowed in _limit_cases(scratch.topic):
        try:
            scratch.topics.publish(topic=scratch.topic, messages=messages, timeout=60, retry=None)
        except GoogleAPIError:
            if allowed:
                refused.append(f"{name} is refused, and `register` or the relay allows it")
        else:
            if not allowed:
                accepted.append(f"{name} is accepted, and `register` or the relay refuses it")
    if accepted and not refused and scratch.is_emulator:
        return Finding(NOT_AVAILABLE, f"the emulator does not enforce all limits: {'; '.join(accepted)}")
    wrong = "; ".join(refused + accepted)
    return Finding(FAILED if wrong else PASSED, wrong or "the library and Pub/Sub agree")


def _limit_cases(topic: str) -> Iterator[tuple[str, list[PubsubMessage], bool]]:
    """Yield requests by name, each with whether `register` and the relay would send it."""
    for count in (MAX_REQUEST_MESSAGES, MAX_REQUEST_MESSAGES + 1):
        yield f"a request of {count:,} messages", [PubsubMessage(data=b"x")] * count, count <= MAX_REQUEST_MESSAGES
    for size in (MAX_REQUEST_BYTES - 200, MAX_REQUEST_BYTES + 1):
        message = PubsubMessage(data=b"x" * size)
        yield f"a message of {size:,} bytes", [message], _is_registered(topic, message)
    for count in (MAX_ATTRIBUTES - 1, MAX_ATTRIBUTES + 1):  # `register` adds one
        message = PubsubMessage(data=b"x", attributes={f"a{number}": "" for number in range(count)})
        yield f"a message with {count} attributes", [message], _is_registered(topic, message)
    reserved = PubsubMessage(data=b"x", attributes={"goog-reserved": ""})
    yield "an attribute that begins with goog", [reserved], _is_registered(topic, reserved)


def _is_registered(topic: str, message: PubsubMessage) -> bool:
    try:
        outbox.register(RecordingTransaction(), topic, message)
    except outbox.InvalidMessage:
        return False
    return True


def _times_ms(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.monotonic()
        call()
        times.append((time.monotonic() - began) * 1000)
    return sorted(times)


CHECKS: dict[str, Callable[[Scratch], Finding]] = {
    "schema": _schema,
    "roles": _roles,
    "load": _load,
    "plans": _plans,
    "topics": _topics,
    "locks": _locks,
    "registrations": _registrations,
    "batch sizes": _batch_sizes,
    "Pub/Sub limits": _pubsub_limits,
}

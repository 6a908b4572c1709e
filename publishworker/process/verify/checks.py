"""The checks of a verification. Each returns a verdict, a sentence and its figures."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from google.api_core.exceptions import GoogleAPIError, PermissionDenied
from google.cloud.spanner_v1 import ExecuteSqlRequest
from google.cloud.spanner_v1.types import ResultSetStats

import outbox
from outbox.admin import backlog, changes, tasks
from outbox.admin import topics as topic_controls
from outbox.admin.changes import TaskSelection
from outbox.admin.table import TaskTable
from outbox.errors import OutboxError
from outbox.table import ddl, schema
from outbox.table.connection import open_database, uses_emulator
from publishworker.host import Host
from publishworker.process.app import open_store, relay_of
from publishworker.process.verify import plans
from publishworker.process.verify.scratch import TOPICS, Scratch
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import SpannerStore
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics
from publishworker.turn.membership import Membership
from publishworker.types import COMMIT, Answer, Failed, LockedRow, PollRequest, Published, RowChange, TopicKey

PASSED, FAILED, NOT_AVAILABLE = "passed", "failed", "not available"
#: Batch sizes of the sweep, and tasks that are sent with each.
BATCH_SIZES, SWEPT_TASKS = (10, 25, 50, 100, 200, 500), 1_000
#: Commit delays that are compared, in seconds, and the row writes of a mark: the row and two index entries.
COMMIT_DELAYS, MARK_ROW_WRITES = (0.0, 0.05, 0.1), 3
#: Seconds for which the first of two claims holds its locks.
HELD_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: what was found and what to do, figures by name, and plans by statement."""

    verdict: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    plans: Mapping[str, Sequence[str]] = field(default_factory=dict)


def run(check: Callable[[Scratch], Finding], scratch: Scratch) -> Finding:
    """Run one check. An unexpected answer of a service is a failed check."""
    try:
        return check(scratch)
    except (GoogleAPIError, OutboxError) as error:
        return Finding(FAILED, f"{type(error).__name__}: {error}")


def _schema(scratch: Scratch) -> Finding:
    wanted = ddl.statements()
    schema.apply(scratch.database, wanted)
    again = {state for _, state in schema.apply(scratch.database, wanted)}
    wrong = schema.differences(scratch.database, wanted, free=())
    verdict = PASSED if again == {"exists"} and not wrong else FAILED
    return Finding(verdict, "; ".join(wrong) or "applied twice without changes, and matches schema.sql")


def _roles(scratch: Scratch) -> Finding:
    if uses_emulator(scratch.settings):
        return Finding(NOT_AVAILABLE, "the emulator has no roles")
    database: Any = scratch.database
    database.update_ddl(ddl.cut(ddl.text("roles.sql"))).result(timeout=300)
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
    """Profile every query that the relay and the operators' commands send."""
    found: dict[str, Sequence[str]] = {}
    wrong: list[str] = []
    figures: dict[str, int] = {}
    for request, stats in _profiled(scratch):
        if not plans.scans(stats.query_plan):
            continue
        sql, tag = " ".join(request.sql.split()), request.request_options.request_tag
        found[sql] = list(plans.lines(stats.query_plan))
        wrong += [f"{tag}: {each}" for each in plans.problems(stats.query_plan, sql)]
        name = f"rows scanned by {tag}"
        scanned: Any = dict(stats.query_stats or {}).get("rows_scanned", 0)
        figures[name] = max(figures.get(name, 0), int(scanned))
    if not found:
        return Finding(NOT_AVAILABLE, "this engine shows no query plans")
    text = "; ".join(dict.fromkeys(wrong)) or f"{len(found)} statements seek in the index or the table that they force"
    return Finding(FAILED if wrong else PASSED, text, dict(sorted(figures.items())), found)


def _profiled(scratch: Scratch) -> list[tuple[ExecuteSqlRequest, ResultSetStats]]:
    """Execute the queries of the relay and the commands; return one execution for each text and tag, with its plan."""
    database = open_database(scratch.settings)
    api: Any = database.spanner_api
    send = api.execute_streaming_sql
    profiled: dict[tuple[str, str], tuple[ExecuteSqlRequest, ResultSetStats]] = {}

    def profile(request: ExecuteSqlRequest, **more: Any) -> Iterator[Any]:
        request.query_mode = ExecuteSqlRequest.QueryMode.PROFILE
        for part in send(request=request, **more):
            if part.stats.query_plan.plan_nodes and "INFORMATION_SCHEMA" not in request.sql.upper():
                # The first execution of a statement reads most.
                profiled.setdefault((request.sql, request.request_options.request_tag), (request, part.stats))
            yield part

    api.execute_streaming_sql = profile
    store, table = SpannerStore(database, schema.layout(database)), TaskTable(database)
    shards, topics = tuple(store.layouts[0].ids), frozenset(TOPICS)
    for due in (False, True):
        for below_priority in (None, 50):
            found = store.poll(
                PollRequest(shards=shards, topics=topics, per_range=80, due=due, below_priority=below_priority)
            )
    store.discover(shards, TOPICS[:2])
    ids = [each.id for each in found][:100]
    keyed = {TopicKey(each.topic, each.ordering_key): each.shard for each in found if each.ordering_key}
    store.key_heads(dict(list(keyed.items())[:20]), 100, skip_dead=False)
    store.claim(ids, lambda _rows, _now: {})
    backlog.read(table), backlog.oldest_ages(table)
    for state in ("pending", "retrying", "dead", "sent"):
        tasks.find(table, [state])
        changes.count(table, TaskSelection(state=state), exact=False)
    list(changes.change(table, "retry", TaskSelection(state="dead")))
    tasks.task(table, ids[0] if ids else "none"), tasks.beginning_with(table, ["a"], 3)
    return list(profiled.values())


def _locks(scratch: Scratch) -> Finding:
    """Claim the same tasks twice. The second claim must wait for the first, and find its marks."""
    store, ids = open_store(scratch.settings), scratch.register(TOPICS[0], 100)
    held, marks = threading.Event(), dict.fromkeys(ids, Published("verify"))
    attempts: list[Sequence[LockedRow]] = []

    def first(_rows: Sequence[LockedRow], _now: object) -> Mapping[str, RowChange]:
        if not held.is_set():
            held.set()
            time.sleep(HELD_SECONDS)
        return marks

    def second(rows: Sequence[LockedRow], _now: object) -> Mapping[str, RowChange]:
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


def _batch_sizes(scratch: Scratch) -> Finding:
    """Send tasks with each batch size, with a publisher that answers at once, so that only Spanner counts."""
    earlier = list(TOPICS)  # they have unsent tasks
    topic_controls.change(TaskTable(scratch.database), "pause", earlier, {"paused": True})
    speeds = {size: _tasks_per_second(scratch, _Commits(), batch_size=size) for size in BATCH_SIZES}
    best = max(speeds, key=speeds.__getitem__)
    enough = next(size for size in BATCH_SIZES if speeds[size] >= 0.9 * speeds[best])
    text = f"--batch-size {enough} reaches 90 % of the fastest ({best}). The default is 200"
    return Finding(PASSED, text, {f"{size} tasks, tasks/s": round(speed) for size, speed in speeds.items()})


def _commit_delays(scratch: Scratch) -> Finding:
    """Send tasks with each commit delay. Where commits of several places meet, a delay writes them together."""
    figures: dict[str, Any] = {}
    for delay in COMMIT_DELAYS:
        commits, name = _Commits(), f"{delay * 1000:.0f} ms"
        speed = _tasks_per_second(scratch, commits, commit_delay=delay)
        figures[f"{name}, row writes/s"] = round(speed * MARK_ROW_WRITES)
        figures[f"{name}, median commit, ms"] = round(1000 * median(commits.seconds or [0.0]), 1)
    if uses_emulator(scratch.settings):
        return Finding(NOT_AVAILABLE, "the emulator ignores --commit-delay", figures)
    return Finding(PASSED, "compare row writes/s at the same CPU. The default of --commit-delay is 0.05", figures)


class _Commits:
    """A metrics client that keeps the seconds of commits."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def distribution(self, metric: str, value: float, tags: list[str], sample_rate: float = 1) -> None:
        if metric == m.PHASE_DURATION.name and f"phase:{COMMIT}" in tags:
            self.seconds.append(value)

    def increment(self, *_arguments: object, **_more: object) -> None: ...

    gauge = stop = increment


def _tasks_per_second(scratch: Scratch, commits: _Commits, **changed: Any) -> float:
    """Send tasks of a new topic, with changed settings."""
    settings, topic = replace(scratch.settings, **changed), f"verify-{uuid.uuid4().hex[:8]}"
    count = min(SWEPT_TASKS, max(settings.batch_size, scratch.rows // 10))
    scratch.register(topic, count)
    store = open_store(settings)
    membership, metrics = Membership(store, "verify"), Metrics(commits)
    publisher: Any = _InstantPublisher()
    relay = relay_of(settings, store, publisher, membership, metrics=metrics, host=Host())
    sent, began = 0, time.monotonic()
    while sent < count and time.monotonic() - began < 120:
        sent += relay.turn().published
    return (sent + relay.finish().published) / (time.monotonic() - began)


class _InstantPublisher:
    def publish(self, _topic: str, rows: Sequence[LockedRow], *_more: Any) -> dict[str, Answer]:
        return {row.id: Published("verify") for row in rows}

    def refusals(self, _topic: str, _rows: Sequence[LockedRow]) -> dict[str, Failed]:
        return {}


CHECKS: dict[str, Callable[[Scratch], Finding]] = {
    "schema": _schema,
    "roles": _roles,
    "load": _load,
    "plans": _plans,
    "locks": _locks,
    "batch sizes": _batch_sizes,
    "commit delays": _commit_delays,
}

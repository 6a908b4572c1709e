"""`outbox verify`: proves on a scratch database what the emulator cannot show.

The database is created, filled and dropped. Each check returns a verdict, a sentence and its figures.
"""

import argparse
import base64
import contextlib
import dataclasses
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from operator import methodcaller
from typing import Any, TypeVar

from google.api_core import exceptions as google
from google.cloud.spanner_v1 import COMMIT_TIMESTAMP, ExecuteSqlRequest
from google.cloud.spanner_v1.types import ResultSetStats
from google.pubsub_v1 import PubsubMessage

import outbox
from outbox.base.schedules import CALL
from outbox.base.start import handled
from outbox.errors import OutboxError
from outbox.program.terminal import Escaped, as_json, complain, confirm, say, table
from outbox.rows import backlog
from outbox.rows.task_table import TaskTable
from outbox.table import applying, ddl, schema
from outbox.table.connection import LimitedDatabase, open_database, uses_emulator
from outbox_admin.changes import execution
from outbox_admin.schema.query_plans import lines, problems, scans
from outbox_admin.tasks import lookup, selected
from outbox_admin.tasks.selections import TaskSelection
from publishworker.process.app import open_store
from publishworker.process.worker_settings import RelaySettings
from publishworker.spanner.grants import verify_grants
from publishworker.spanner.store import SpannerStore
from publishworker.types import LockedRow, PollRequest, Published, RowChange, TopicKey

T = TypeVar("T")
#: Topics of the loaded tasks, which are not published.
TOPICS = ("verify-a", "verify-b", "verify-c", "verify-d")
#: Tasks of one commit while loading. An instance of 100 processing units takes so many in time.
LOAD_ROWS = 100
#: Errors of a commit that is late, and perhaps executed, and how often it is repeated.
LATE = (google.DeadlineExceeded, google.ServiceUnavailable, google.RetryError)
REPEATS = 5
#: Of the loaded tasks, one in this many is pending. The others are sent.
PENDING_EACH = 10
CREATE_SECONDS = 300.0
PASSED, FAILED, NOT_AVAILABLE, NOT_RUN = "passed", "failed", "not available", "not run"
#: Seconds for which the first of two claims holds its locks.
HELD_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: what was found and what to do, figures by name, and plans by statement."""

    verdict: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    plans: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scratch:
    """The database, into which a check can load `rows` tasks."""

    settings: RelaySettings
    database: LimitedDatabase
    rows: int

    def register(self, topic: str, count: int) -> list[str]:
        """Register tasks, and return their IDs. After a late commit, there may be more."""
        return self._committed(lambda batch: outbox.register_many(batch, [outbox.Task(topic, b"x" * 300)] * count))

    def load(self) -> None:
        """Insert `rows` tasks: one in PENDING_EACH is pending, the others were sent within the last hour."""
        now = TaskTable(self.database).now()  # Spanner refuses a SentAt in the future
        data = base64.b64encode(PubsubMessage.serialize(PubsubMessage(data=b"x" * 300)))
        columns = ("Id", "Topic", "Data", "Priority", "CreatedAt", "OrderingKey", "SentAt")
        for start in range(0, self.rows, LOAD_ROWS):
            rows = [
                (
                    str(uuid.uuid4()), TOPICS[number % len(TOPICS)], data, 50, COMMIT_TIMESTAMP,
                    f"key-{number % 1000}" if number % 5 == 0 else None,
                    None if number % PENDING_EACH == 0 else now - timedelta(seconds=number % 3600),
                )
                for number in range(start, min(start + LOAD_ROWS, self.rows))
            ]  # fmt: skip
            # Not an insert, because a late commit is repeated with the same IDs.
            self._committed(methodcaller("insert_or_update", "AsynchronousTasks", columns, rows))

    def _committed(self, write: Callable[[Any], T]) -> T:
        """Commit what a function buffers, again while commits are late, and return its result."""
        database: Any = self.database  # its methods carry no types
        for _ in range(REPEATS):
            with contextlib.suppress(*LATE):
                return _in_batch(database, write)
            time.sleep(CALL.most)
        return _in_batch(database, write)


def _in_batch(database: Any, write: Callable[[Any], T]) -> T:
    with database.batch(request_options={"transaction_tag": "outbox-verify"}) as batch:
        return write(batch)


def verify(options: argparse.Namespace) -> int:
    """Run all checks on a scratch database. Return 1 if one of them fails."""
    # Not OUTBOX_DATABASE, which names the database of the application.
    name = vars(options).get("database") or f"outbox-verify-{uuid.uuid4().hex[:8]}"
    settings = RelaySettings.read(vars(options) | {"database": name})
    confirm(
        f"This creates database {settings.database} in instance {settings.instance}, loads {options.rows:,} tasks, and "
        f"takes minutes. The database is {'kept (--keep)' if options.keep else 'deleted at the end'}. No other one is "
        "changed. Continue?",
        yes=options.yes,
    )
    found: dict[str, Finding] = {}
    # At SIGTERM, as at Ctrl-C, the database is dropped. `__main__` would end the process at once.
    stopping = handled((signal.SIGTERM,), lambda number, _frame: sys.exit(128 + number))
    with stopping, _created(settings, keep=options.keep) as database:
        scratch = Scratch(settings, database, options.rows)
        for number, (name, check) in enumerate(CHECKS.items(), 1):
            complain("outbox", f"{name} ({number} of {len(CHECKS)})")
            if wrong := [each for each in NEEDS.get(name, ()) if found[each].verdict in {FAILED, NOT_RUN}]:
                found[name] = Finding(NOT_RUN, f"it needs {wrong[0]}, which is {found[wrong[0]].verdict}")
                continue
            try:
                found[name] = check(scratch)
            except (google.GoogleAPIError, OutboxError) as error:
                found[name] = Finding(FAILED, f"{type(error).__name__}: {error}")
    checks = [{"name": name} | dataclasses.asdict(each) for name, each in found.items()]
    say(as_json({"checks": checks}) if options.json else _as_table(found))
    return 1 if any(each.verdict == FAILED for each in found.values()) else 0


@contextlib.contextmanager
def _created(settings: RelaySettings, *, keep: bool) -> Iterator[LimitedDatabase]:
    """Create the database, never one that exists, and drop it unless `keep`. Raises OutboxError, NotReached."""
    database: Any = open_database(settings)  # its methods carry no types
    with schema.service_errors(f"instance {settings.instance}"):
        if database.exists():
            raise OutboxError(f"database {settings.database} exists. `verify` creates a new one: omit --database")
        creation = database.create()  # if it is refused, there is no database of ours to drop
    try:
        with schema.service_errors(f"instance {settings.instance}"):
            creation.result(timeout=CREATE_SECONDS)
        yield database
    finally:
        if keep:
            complain("outbox", f"database {settings.database} was kept")
        else:
            try:
                database.drop()
            except Exception as error:  # whatever happens, the user must know what is left
                text = f"database {settings.database} could not be dropped. Drop it yourself: {error}"
                complain("outbox", text)


def _as_table(found: Mapping[str, Finding]) -> Escaped:
    rows = [(name, each.verdict, each.text) for name, each in found.items()]
    tables = [table(("CHECK", "VERDICT", "FINDING"), rows)]
    tables += [
        table((name.upper(), "FIGURE"), list(each.figures.items())) for name, each in found.items() if each.figures
    ]
    verdicts = Counter(each.verdict for each in found.values())
    return Escaped("\n\n".join([*tables, ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())]))


def _schema(scratch: Scratch) -> Finding:
    wanted = ddl.statements()
    applying.apply(scratch.database, wanted)
    again = {state for _, state in applying.apply(scratch.database, wanted)}
    wrong = schema.differences(scratch.database, wanted, free=())
    verdict = PASSED if again == {"exists"} and not wrong else FAILED
    return Finding(verdict, "; ".join(wrong) or "applied twice without changes, and matches schema.sql")


def _roles(scratch: Scratch) -> Finding:
    if uses_emulator(scratch.settings):
        return Finding(NOT_AVAILABLE, "the emulator has no roles")
    database: Any = scratch.database
    applying.apply_roles(database)
    if {state for _, state in applying.apply_roles(database)} != {"exists"}:
        return Finding(FAILED, "the roles of schema/roles.sql were created twice")
    verify_grants(open_database(replace(scratch.settings, database_role="publishworker")))
    application: Any = open_database(replace(scratch.settings, database_role="outbox_application"))
    with application.batch() as batch:
        outbox.register(batch, TOPICS[0], b"")
    try:
        with application.snapshot() as snapshot:
            list(snapshot.execute_sql("SELECT Data FROM AsynchronousTasks LIMIT 1"))
    except google.PermissionDenied:
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
        if not scans(stats.query_plan):
            continue
        sql, tag = " ".join(request.sql.split()), request.request_options.request_tag
        found[sql] = list(lines(stats.query_plan))
        wrong += [f"{tag}: {each}" for each in problems(stats.query_plan, sql)]
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
        lookup.find(table, [state])
        selected.count(table, TaskSelection(state=state), exact=False)
    list(execution.change(table, "retry", TaskSelection(state="dead")))
    lookup.task(table, ids[0] if ids else "none"), lookup.beginning_with(table, ["a"], 3)
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


CHECKS: dict[str, Callable[[Scratch], Finding]] = {
    "schema": _schema,
    "roles": _roles,
    "load": _load,
    "plans": _plans,
    "locks": _locks,
}
#: The checks that a check needs: without the tables it shows nothing, and with half of the rows something else.
NEEDS = {"roles": ("schema",), "load": ("schema",), "plans": ("load",), "locks": ("schema",)}

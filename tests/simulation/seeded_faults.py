"""Defects that are put into the product, one at a time, to find out whether histories notice them."""

import pkgutil
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import repeat
from types import SimpleNamespace
from typing import Any
from unittest import mock

from grpc import StatusCode

from outbox.table.shared_sql import EXCLUSIVE
from outbox_admin.schema.reshard import LayoutStates
from publishworker.delivery import marking, rules
from publishworker.delivery.delivery import Delivery, Results
from publishworker.delivery.rules import RetryPolicy
from publishworker.pubsub import publisher
from publishworker.pubsub.publisher import Lane
from publishworker.spanner import relay_sql
from publishworker.telemetry.reporter import Reporter
from publishworker.topics import availability
from publishworker.topics.availability import CircuitBreakers, Topics
from publishworker.turn import membership, poller, selection
from publishworker.turn.in_flight import InFlight
from publishworker.turn.membership import Membership
from publishworker.turn.ordering import Ordering, ResolvedKeys
from publishworker.turn.poller import KEEP_POLLING_SECONDS, Poller
from publishworker.turn.worker import Worker
from publishworker.types import Deferred, LockedRow, NotSent, PollRequest, Published, Skipped, Version


def always(value: object) -> Callable[[Any], Any]:
    return lambda _real: lambda *_arguments, **_options: value


def without(reason: str) -> Callable[[Any], Any]:
    """Return a maker of `skip_reasons` that never skip a row for this reason."""

    def make(real: Any) -> Any:
        def ours(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            return {id: each for id, each in found.items() if each != Skipped(reason)}  # type: ignore[arg-type]  # any text

        return ours

    return make


def one_shard_less(real: Any) -> Any:
    def ours(self: Any, workers: Any) -> None:
        real(self, workers)
        self.shards = self.shards[1:] or self.shards

    return ours


def fails_as_a_whole(real: Any) -> Any:
    """Return `_record_answer` after which all messages of a refused request have failed."""

    def ours(lane: Lane, future: Any, call: Any) -> list[Lane]:
        ids, _ = lane.requests[0]
        error = future.exception()
        if error is None or error.code() is not StatusCode.INVALID_ARGUMENT:
            found: list[Lane] = real(lane, future, call)
            return found
        lane.requests.popleft()
        call.answers.update(dict.fromkeys(ids, publisher.failure_of(error, call.name, call.create_command)))
        return []

    return ours


def never_closes(_real: Any) -> Any:
    """Return `suspended` with every topic whose circuit has ever opened."""

    def ours(self: Any) -> frozenset[str]:
        self.ever = getattr(self, "ever", frozenset()) | self._circuits.keys()
        return self.ever

    return ours


def first_drawn(real: Any) -> Any:
    """Return `admit` that draws the first candidate."""

    def ours(self: CircuitBreakers, candidates: Any) -> Any:
        with mock.patch.object(self, "_random", SimpleNamespace(choice=lambda tasks: tasks[0])):
            return real(self, candidates)

    return ours


def late_mark(real: Any) -> Any:
    """Return `deliver` that marks tasks whose publish failed."""

    def ours(self: Any, eligible: Any, now: Any) -> Any:
        marks = real(self, eligible, now)
        return marks | {row.id: Published("") for row in eligible if row.id not in marks}

    return ours


def first_found_only(real: Any) -> Any:
    """Return `_part` that misses the topics that a discovery has found again, whose time of polling is doubled.

    It names others instead: with fewer ranges, the poll would seem a part of what there is to read.
    """

    def ours(self: Poller, request: PollRequest) -> Any:
        known = self.known._topics
        again = {name for name in request.topics if known[name].keep_polling_seconds > KEEP_POLLING_SECONDS}
        return real(self, replace(request, topics=request.topics - again | {f"not {name}" for name in again}))

    return ours


def only_grows(real: Any) -> Any:
    """Return `adapt` that takes no poll for too large."""

    def ours(self: poller.PollSize, *arguments: Any) -> None:
        with mock.patch.object(self, "per_range", self.per_range):
            real(self, *arguments)
            found = self.per_range
        self.per_range = max(self.per_range, found)

    return ours


def waits_for_one(real: Any) -> Any:
    """Return `wait` that ends with the first report."""

    def ours(self: InFlight) -> Any:
        self._started.clear()
        return real(self)

    return ours


def never_waits(real: Any) -> Any:
    """Return `_pause` that an insert ends at once."""

    def ours(self: Worker, stop: Any, *arguments: float) -> None:
        real(self, SimpleNamespace(is_set=stop.is_set, wait=lambda _seconds: None), *arguments)

    return ours


def goes_on_without_controls(real: Any) -> Any:
    """Return `discover_if_due` that discovers after a failure as after a success."""

    def ours(self: poller.Discoverer, **options: bool) -> Any:
        self._failed = False
        return real(self, **options)

    return ours


def releases_behind_blocked(real: Any) -> Any:
    """Return the changes with a cancel that releases the next task of a key, whatever it deletes."""

    def cancel(transaction: Any, rows: Any, operation: str) -> None:
        real["cancel"](transaction, [row._replace(state="dead") for row in rows], operation)

    return {**real, "cancel": cancel}


def publishes_cancelled(real: Any) -> Any:
    """Return `_settled` that takes a cancelled task that was made unsent for an unsent one."""
    return lambda row, published: real(row._replace(cancelled_by=None) if row.sent_at is None else row, published)


def ends_later(real: Any) -> Any:
    """Return `_read` that says it has read later than it has."""

    def ours(self: Any, limit: int) -> Any:
        rows, read_at = real(self, limit)
        return rows, read_at + timedelta(seconds=0.5)

    return ours


#: What the product no longer does, the attribute that does it, and how the attribute is replaced.
DEFECTS: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "a claim locks rows exclusively": (relay_sql, "LOCK", lambda real: real.replace(EXCLUSIVE, "")),
    "SentAt is read again under the lock": (rules, "skip_reasons", without("sent")),
    "a task that is not due is skipped under the lock": (rules, "skip_reasons", without("not_due")),
    "a task behind a blocked one is skipped under the lock": (rules, "skip_reasons", without("blocked")),
    "a transaction attempt remembers outcomes": (
        Results, "rows_to_publish", lambda _: lambda _self, _claim, rows, _now: rows
    ),
    "a later attempt marks what an earlier one published": (Results, "published", always({})),
    "only published tasks are marked": (Delivery, "_row_changes", late_mark),
    "a failed commit is remembered": (Delivery, "_begin_marking", always(None)),
    "tasks in doubt are marked": (Results, "remaining_changes", always({})),
    "tasks in doubt are not claimed": (InFlight, "ids", always(frozenset())),
    "tasks in doubt are remembered for 15 minutes": (marking, "MAX_MARKING_SECONDS", lambda _: 1.0),
    "a reset row is told from a lost mark": (
        Version, "of", lambda real: classmethod(lambda _class, row: real(row._replace(times_sent=0)))
    ),
    "a key is sent from its head on": (
        Ordering, "resolve", lambda _: lambda _self, candidates, *_: ResolvedKeys(candidates)
    ),
    "a key in flight waits": (InFlight, "busy_keys", always(frozenset())),
    "each request of a key waits for the answer to the last": (
        publisher, "lanes",
        lambda real: lambda *a: [Lane(deque([each]), lane.ordered) for lane in real(*a) for each in lane.requests],
    ),
    "a failed request stops its key": (
        publisher, "_record_answer", lambda real: lambda lane, *a: real(lane, *a) or [lane][: len(lane.requests)]
    ),
    "no answer is no success": (publisher, "failure_of", always(Published(""))),
    "deferred tasks are released": (rules, "release_changes", always({})),
    "a failed task keeps its age": (
        RetryPolicy, "failed_attempt", lambda real: lambda *a: replace(real(*a), due_at=None)
    ),
    "a deferral ends": (
        RetryPolicy, "deferrals",
        lambda real: lambda self, *a: (
            replace(each, available_at=a[2].replace(year=a[2].year + 5)) for each in real(self, *a)
        )
    ),
    "a circuit closes again": (CircuitBreakers, "suspended", never_closes),
    "at-most-once tasks are marked first": (rules, "_skip_reason", always(None)),
    "only a probe fails for its topic": (
        CircuitBreakers, "begin_batch",
        lambda real: lambda self, claim: replace(real(self, claim), probe=True, suspects=frozenset())
    ),
    "the first outage costs no attempt": (
        CircuitBreakers, "begin_batch",
        lambda real: lambda self, claim: replace(
            real(self, claim), suspects=frozenset(claim.ids)
        )
    ),
    "deferred tasks cost no attempt": (
        RetryPolicy, "deferrals",
        lambda _: lambda _self, head, at, _now: repeat(NotSent(head.attempts + 1, at, None, "")),
    ),
    "a deferral is short": (
        RetryPolicy, "deferrals", lambda _: lambda _self, head, at, _now: repeat(Deferred(at, head.id))
    ),
    "the first deferred task of a key returns soon": (rules, "KEY_CHECK_SECONDS", lambda _: 3600.0),
    "a refused request is split": (publisher, "_record_answer", fails_as_a_whole),
    "an expired task is not sent": (LockedRow, "is_expired", always(False)),
    "an outage records no attempt": (rules, "should_record", always(True)),
    "a worker that cannot write takes over no shards": (Membership, "_kept", always(frozenset())),
    "every shard is polled": (Membership, "assign", one_shard_less),
    "a topic without candidates is found again": (Poller, "_part", first_found_only),
    "a topic with only dead tasks is discovered less and less often": (
        poller, "FORGET_TOPIC_SECONDS", lambda _: KEEP_POLLING_SECONDS
    ),
    "idle workers send few heartbeats": (membership, "IDLE_HEARTBEAT_INTERVAL_SECONDS", lambda _: 7.5),
    "a probe in an outage is drawn at random": (CircuitBreakers, "admit", first_drawn),
    "a task that met an outage shares no request": (CircuitBreakers, "_update_suspects", always(None)),
    "a refused request that there was no time to split is remembered": (publisher, "MAX_SEND_ALONE", lambda _: 0),
    "due tasks are polled": (
        Poller, "_part", lambda real: lambda self, request: real(self, replace(request, due=False))
    ),
    "a worker goes on after an outage": (
        Worker, "_note_outage", lambda _: lambda self, _error: self._relay.stopped_by_a_defect()
    ),
    "workers that do not poll the new layout are waited for": (
        LayoutStates, "workers",
        lambda real: lambda self, layout, *, polling: real(self, layout, polling=True) if polling else (),
    ),
    "messages follow the route of their topic": (Topics, "_with_controls", lambda _: lambda _self, claim: claim),
    "a topic with an invalid route waits": (
        availability, "problems", lambda real: lambda row: {} if row.publish_to else real(row)
    ),
    "workers poll the recorded layouts": (
        Membership, "assign", lambda real: lambda self, workers: real(self, replace(workers, layouts=()))
    ),
    "a topic gets at most half of the places while another waits": (
        selection, "_share_places",
        lambda real: lambda batches, places, in_flight, **options: real(
            batches, 3 * places, in_flight + Counter({"": 2 * places}), **options
        )
    ),
    "a topic leaves a place to another of a lower priority": (
        selection, "_share_places", lambda real: lambda *a, **_: real(*a, keeps_place=False)
    ),
    "urgent tasks go first": (selection, "_most_urgent_first", lambda _: lambda candidates, _random: candidates),
    "lower priorities have a share": (selection.FairShare, "count", always(None)),
    "a poll reads lower priorities when owed": (
        Poller, "poll", lambda real: lambda self, _below_priority: real(self)
    ),
    "the size of a poll follows the backlog": (poller.PollSize, "adapt", always(None)),
    "a poll that was too large is halved": (poller.PollSize, "adapt", only_grows),
    "a turn waits for all batches that it has started": (InFlight, "wait", waits_for_one),
    "turns that inserts start have a pause between them": (Worker, "_pause", never_waits),
    "deferrals leave places to other tasks": (
        InFlight, "free_to_defer", lambda _: lambda self, **_: self.free
    ),
    "tasks of a limited topic start together": (availability, "MIN_REFILL_SECONDS", lambda _: 0.0),
    "a task that is retried keeps its age": (
        rules, "first_due", lambda _: lambda row: row.available_at or row.created_at
    ),
    "a cancelled task that was published is named": (Reporter, "_log_cancelled", always(None)),
    "failed tasks share no request": (
        publisher, "lanes", lambda real: lambda topic, messages, _alone: real(topic, messages, ())
    ),
}  # fmt: skip

#: Those that need dense plans, each with the plan whose histories notice it. The owner is a name, because PySpark is
#: slow to import.
DENSE_DEFECTS: dict[str, tuple[str, str, str, Callable[[Any], Any]]] = {
    "a worker that stops finishes its batches": (
        "stops", "publishworker.turn.worker.Worker", "_shut_down", always(None)
    ),
    "a row that a replay inserts has a start of its age of its own": (
        "replays", "outbox_pipeline.jobs.replay", "_inserted",
        lambda real: lambda row, now: real(row, now) | {"DueAt": None, "AvailableAt": None}
    ),
    "a cancel of blocked tasks releases none of them": (
        "blocked keys", "outbox_admin.changes.execution", "WRITES", releases_behind_blocked
    ),
    "each worker gets a part of a rate limit": (
        "limits", "publishworker.topics.availability.RateLimits", "apply",
        lambda real: lambda self, controls, _workers: real(self, controls, 1)
    ),
    "tasks use tokens of a rate limit": (
        "limits", "publishworker.topics.availability.RateLimits", "use", always(None)
    ),
    "an at-most-once task whose publish is refused is not lost": (
        "refused rows", "publishworker.delivery.kinds.MarkFirst", "_undo_marks", always({})
    ),
    "a page of a reader ends where it was read": (
        "readers", "outbox.reading.SentTasks", "_read", ends_later
    ),
    "a position is after one task of a batch": (
        "readers", "outbox.reading.Position", "of",
        lambda real: classmethod(lambda _class, row: replace(real(row), id="", sequence=0))
    ),
    "a published task that is cancelled is marked as sent": (
        "restores", "publishworker.types.LockedRow", "is_sent",
        lambda _: property(lambda row: row.sent_at is not None)
    ),
    "a cancelled task is not published": ("restores", "publishworker.delivery.rules", "_settled", publishes_cancelled),
    "a cancelled task that was made unsent is ended again": (
        "restores", "publishworker.delivery.rules", "ended_again", always({})
    ),
    "a cancel releases the next task": ("blocked keys", "tests.simulation.table.Table", "next_of_keys", always([])),
    "a change of many tasks compares their states": (
        "blocked keys", "outbox_admin.changes.execution", "_examined",
        lambda _: lambda _name, row, *_: row._replace(matches=True)
    ),
    "a worker whose discovery fails reads the layouts first": (
        "suspensions", "publishworker.turn.poller.Discoverer", "discover_if_due", goes_on_without_controls
    ),
    "a chunk of an operation is executed once": (
        "operations", "outbox_admin.operations.Progress", "check", always(None)
    ),
    "a commit of an operation without an answer counts": (
        "operations", "outbox_admin.changes.execution", "_committing", lambda _: lambda work: work
    ),
}  # fmt: skip


def seeded(defect: str | None) -> AbstractContextManager[object]:
    """Put a defect into the product for the time of the block, or nothing."""
    if defect is None:
        return nullcontext()
    *_, owner, name, make = DEFECTS.get(defect) or DENSE_DEFECTS[defect]
    owner = pkgutil.resolve_name(owner) if isinstance(owner, str) else owner
    return mock.patch.object(owner, name, make(getattr(owner, name)))

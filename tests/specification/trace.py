"""The steps of a relay: route, poll, claim, lock, publish, answer, mark, commit, fail, give up.

A traced relay gets another store, and each of its batches another store and another publisher. A trace has IDs and
states of tasks, but no message.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias, cast

from outbox.table.states import is_dead
from publishworker.delivery.delivery import Delivery
from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.spanner.store import Decide, Discovery, SpannerStore
from publishworker.spanner.write_errors import NotWritten, StoreError, WriteRefused
from publishworker.turn.relay import Relay
from publishworker.types import (
    Answer,
    Cancelled,
    Claim,
    Deferred,
    KeyHeads,
    LockedRow,
    NotSent,
    Published,
    QueuedTask,
    RowChange,
    TopicKey,
    Unmarked,
    Version,
)
from tests.specification.state import DEAD, DEFERRED, READY, RETRYING, SCHEDULED, SENT


class Trace:
    """The trace of one worker."""

    def __init__(self, write: Callable[[dict[str, Any]], object], worker: str) -> None:
        """Pass each step to `write`."""
        self._write, self._worker = write, worker
        self._lock, self._batches = threading.Lock(), itertools.count(1)

    def step(self, name: str, **values: Any) -> None:
        """Note a step. Any thread may call this. Steps are written in order, so a kill loses only the last ones."""
        with self._lock:
            self._write({"step": name, "worker": self._worker, **values})

    def store(self, store: SpannerStore) -> SpannerStore:
        """Return a store for turns, which notes the routes and the key heads that it returns."""
        return cast(SpannerStore, _Reading(store, self.step))

    def batches_of(self, relay: Relay) -> Relay:
        """Let a relay with such a store note the steps of its batches, too, and return it."""
        in_flight, reporter = relay.in_flight, relay._reporter
        in_flight._delivery_of = partial(self._delivery_of, in_flight._delivery_of)  # type: ignore[assignment]  # as the real one
        report_later = reporter.report_later

        def noted(report: Unmarked | Cancelled) -> None:
            if isinstance(report, Unmarked) and report.given_up:
                self.step("give up", ids=report.claim.ids)  # they are published again, or stay marked
            report_later(report)

        reporter.report_later = noted  # type: ignore[method-assign]  # for the trace only
        return relay

    def _delivery_of(self, real: partial[Delivery], claim: Claim) -> Delivery:
        tools, step = real.keywords["tools"], partial(self.step, batch=next(self._batches))
        kind = claim.kind.name.lower().replace("_", " ")
        tasks, releases = ([[task.id, task.ordering_key] for task in each] for each in (claim.tasks, claim.releases))
        skips_dead = tools.policy.skip_dead
        step("claim", kind=kind, topic=claim.topic, tasks=tasks, releases=releases, skips_dead=skips_dead)
        store, publisher = cast(SpannerStore, _Store(tools.store.untraced, step)), _Publisher(tools.publisher, step)
        return real(claim, tools=replace(tools, store=store, publisher=publisher))


Step: TypeAlias = Callable[..., None]


class _Reading:
    def __init__(self, store: SpannerStore, step: Step) -> None:
        self.untraced, self._step = store, step
        self._routes: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.untraced, name)

    def discover(self, shards: Sequence[int], known: Collection[str], *, workers: bool = True) -> Discovery:
        found = self.untraced.discover(shards, known, workers=workers)
        routes = {topic: row.publish_to for topic, row in found.controls.items() if row.publish_to}
        if routes != self._routes:
            self._routes = routes
            self._step("route", routes=self._routes)
        return found

    def key_heads(self, keys: Mapping[TopicKey, int], per_key: int, *, skip_dead: bool) -> KeyHeads:
        found = self.untraced.key_heads(keys, per_key, skip_dead=skip_dead)
        for key, tasks in found.items():
            queue = [[each.id, _queued(each)] for each in tasks if not each.expired_before_due]
            self._step("poll", topic=key.topic, key=key.ordering_key, queue=queue)
        return found


class _Store(_Reading):
    def claim(self, ids: Sequence[str], decide: Decide, *, may_delay: bool = False) -> datetime:
        def traced(rows: Sequence[LockedRow], now: datetime) -> Mapping[str, RowChange]:
            # A cancelled task is gone for the specification, also if the row gets the mark of an earlier publish.
            kept = {row.id: row for row in rows if row.cancelled_by is None}
            self._step("lock", now=now.isoformat(), ids=ids, rows=[_row(row, now) for row in kept.values()])
            marks = decide(rows, now)
            self._step("mark", states={id: _marked(mark) for id, mark in marks.items() if id in kept})
            return marks

        try:
            committed = self.untraced.claim(ids, traced, may_delay=may_delay)
        except StoreError as error:
            written = (
                "refused" if isinstance(error, WriteRefused) else "no" if isinstance(error, NotWritten) else "unknown"
            )
            self._step("fail", written=written)
            raise
        self._step("commit", at=committed.isoformat())
        return committed


class _Publisher:
    def __init__(self, publisher: PubSubPublisher, step: Step) -> None:
        self._publisher, self._step = publisher, step
        self.refusals = publisher.refusals

    def publish(
        self, topic: str, rows: Sequence[LockedRow], seconds: float, alone: Collection[str] = frozenset()
    ) -> dict[str, Answer]:
        self._step("publish", ids=[row.id for row in rows], to=topic)
        answers = self._publisher.publish(topic, rows, seconds, alone)
        results = {id: "published" if isinstance(each, Published) else each.reason for id, each in answers.items()}
        self._step("answer", results=results)
        return answers


def _queued(task: QueuedTask) -> str:
    return DEFERRED if task.deferred else READY if task.sendable else RETRYING


def _row(row: LockedRow, now: datetime) -> dict[str, Any]:
    version = Version.of(row)
    return {
        "id": row.id,
        "state": _state(row, now),
        "times_sent": row.times_sent,
        "created": row.created_at.isoformat(),
        # What was published, and when to try it. Both may be any values, which are equal for equal rows.
        "version": [hash(version.message), hash(version)],
        "is_specified": row.expires_at is None and not row.at_most_once,
    }


def _state(row: LockedRow, now: datetime) -> str:
    if row.sent_at is not None:
        return SENT
    if row.deferred:  # even if the deferral has ended, because the task may be sent in both states
        return DEFERRED
    if row.is_due(now):
        return READY
    return DEAD if is_dead(row.available_at) else RETRYING if row.attempts else SCHEDULED


def _marked(mark: RowChange) -> str:
    if isinstance(mark, Published):
        return SENT
    if isinstance(mark, Deferred):
        return DEFERRED
    assert isinstance(mark, NotSent)
    return DEAD if mark.dead else READY if mark.available_at is None else RETRYING

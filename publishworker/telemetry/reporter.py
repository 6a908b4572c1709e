"""Metrics and log lines about finished batches. Nothing else in the relay counts or logs them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from outbox.shared.throttled_log import ThrottledLog
from publishworker.pubsub.errors import FailureKind, kind_of
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics
from publishworker.topics.circuit_breaker import FORGET_SECONDS, MAX_TARGET_PROBE_SECONDS, CircuitChange
from publishworker.types import BatchResult, Turn

_log = logging.getLogger("publishworker")

#: Seconds between two summaries.
SUMMARY_SECONDS = 60.0
#: Latency samples of one batch, roughly. More would crowd the counts out of the agent's socket. Each sample stands for
#: several tasks.
LATENCY_SAMPLES = 20
#: Max lines a minute about failed tasks of one topic and reason. The others are counted.
FAILURE_LINES = 100


class Reporter:
    """Counts and logs. A failure that repeats is logged once a minute."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        """Count in `metrics`."""
        self._metrics = metrics
        self._throttled_log = ThrottledLog(clock)
        self._clock = clock
        self._work: Counter[str] = Counter()
        self._work_since = 0.0
        self._open: dict[str, float] = {}  # topics whose open circuit was logged, and when a probe last failed

    def batch(self, result: BatchResult) -> None:
        """Count the outcomes of a batch, and log what went wrong."""
        topic = result.batch.topic
        published = result.published()
        self._metrics.count(m.PUBLISHED, len(published), topic=topic)
        self._metrics.count(m.ALREADY_PUBLISHED, len(result.already_sent()), topic=topic)
        self._metrics.count(m.ABORTED, max(0, result.attempts - 1), topic=topic)
        if not result.batch.defers:
            self._metrics.sample(m.BATCH_SIZE, len(result.batch.ids), topic=topic)
            for phase, seconds in result.phases.items():
                self._metrics.sample(m.PHASE_DURATION, seconds, phase=phase)
            for seconds in result.waited.values():
                self._metrics.sample(m.LATENCY, seconds, rate=LATENCY_SAMPLES / len(result.waited), topic=topic)
        for reason, count in Counter(failure.reason for failure in result.failed().values()).items():
            self._metrics.count(m.FAILED, count, topic=topic, reason=reason)
        self._failures(result)
        if result.error is None:
            self._metrics.count(m.DEFERRED, len(result.deferred), topic=topic)
        else:
            self._metrics.count(m.UNCOMMITTED, len(published), topic=topic)
            self._throttled_log.log(
                "commit_failed",
                topic,
                f"Commit failed for {_tasks(result.batch.ids)} of topic {topic}: {result.error}. {len(published)} of "
                "them are published and in doubt. The worker marks them without publishing them again.",
            )
        if result.unconfirmed:
            self._metrics.count(m.UNCONFIRMED, len(result.unconfirmed), topic=topic)
            self._throttled_log.log(
                "unconfirmed",
                topic,
                f"{_tasks(result.unconfirmed)} with at_most_once of topic {topic} may be lost: they may be marked as "
                f"sent but not published. They are not retried. IDs: {_some(result.unconfirmed)}",
            )

    def circuit(self, change: CircuitChange) -> None:
        """Log that a circuit has opened or closed: at most one pair of lines a minute, even if the topic flaps."""
        topic, failure, now = change.topic, change.failure, self._clock()
        if failure is None:
            if self._open.pop(topic, None) is not None:
                _log.info(
                    "Circuit closed for topic %s after %.1f s: publishing resumes.", topic, change.seconds,
                    extra={"action": "circuit_closed"},
                )  # fmt: skip
            return
        # A circuit is forgotten without a change if no task is left to probe the topic with.
        oldest = now - FORGET_SECONDS - MAX_TARGET_PROBE_SECONDS
        self._open = {each: at for each, at in self._open.items() if at > oldest}
        if not change.seconds:
            self._open.pop(topic, None)
        tasks = "up to 10 tasks" if kind_of(failure.reason) is FailureKind.TARGET else "one task"
        if topic in self._open or self._throttled_log.log(
            "circuit_open",
            topic,
            f"Circuit open for topic {topic}: probing with {tasks}, holding the rest. "
            f"{failure.reason}: {failure.error}",
        ):
            self._open[topic] = now

    def poll(self, seconds: float) -> None:
        """Record how long a poll took."""
        self._metrics.sample(m.PHASE_DURATION, seconds, phase=m.POLL)

    def turn(self, turn: Turn, *, worked: bool) -> None:
        """Log a turn: in full at DEBUG if it reports batches, and once a minute as a summary."""
        if worked:
            _log.debug("one turn: %s", turn, extra={"action": "turn", "fields": _numbers(turn)})
        done = {name: number for name, number in _numbers(turn).items() if number}
        if done and not self._work:
            self._work_since = self._clock()
        self._work.update(done)
        if self._work and self._clock() - self._work_since >= SUMMARY_SECONDS:
            self.end()

    def end(self) -> None:
        """Log the summary since the last one."""
        if self._work:
            seconds = self._clock() - self._work_since
            what = ", ".join(f"{number} {name}" for name, number in self._work.items())
            fields = {**self._work, "seconds": round(seconds, 1)}
            _log.info("tasks in %.0f s: %s", seconds, what, extra={"action": "summary", "fields": fields})
            self._work.clear()

    def _failures(self, result: BatchResult) -> None:
        """Log each failed attempt that was recorded. The others are covered by the line about the open circuit."""
        topic, written = result.batch.topic, result.recorded if result.error is None else {}
        dead: Counter[str] = Counter()
        for id, failure in result.failed().items():
            recorded = written.get(id)
            about = {"task_id": id, "topic": topic, "reason": failure.reason, "trace_id": result.traces.get(id)}
            fields = {name: value for name, value in about.items() if value is not None}
            if recorded is None:
                _log.debug("Task %s of topic %s was not sent: %s", id, topic, failure.error, extra={"fields": fields})
                continue
            what = f"Task {id} of topic {topic} failed in attempt {recorded.attempts}: {recorded.error}"
            if recorded.dead:
                dead[failure.reason] += 1
                action = "dead"
                what += ". The task is dead. Fix the cause, then run `outbox retry` or `outbox discard`"
            else:
                action = "publish_failed"
                if recorded.available_at is not None:
                    what += f". It will be retried after {recorded.available_at:%Y-%m-%dT%H:%M:%SZ}"
            self._throttled_log.log(
                action,
                f"{topic} {failure.reason}",
                what,
                max_lines=FAILURE_LINES,
                fields={**fields, "attempt": recorded.attempts},
            )
        for reason, count in dead.items():
            self._metrics.count(m.DEAD, count, topic=topic, reason=reason)


def _numbers(turn: Turn) -> dict[str, int]:
    return {
        "published": turn.published,
        "failed": turn.failed,
        "sent by others": turn.already_sent,
        "deferred": turn.deferred,
        "not committed": turn.uncommitted,
    }


def _tasks(ids: Sequence[str]) -> str:
    return "1 task" if len(ids) == 1 else f"{len(ids)} tasks"


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")

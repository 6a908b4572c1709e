"""What is told of a batch: counts for the metrics, lines for the log. After its commit, and nowhere else."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from outbox.shared.throttled_log import ThrottledLog
from publishworker.pubsub.errors import FailureKind, kind_of
from publishworker.telemetry import metrics as m
from publishworker.telemetry.metrics import Metrics
from publishworker.topics.circuit_breaker import FORGET_SECONDS, MAX_TARGET_PROBE_SECONDS, Change
from publishworker.types import BatchResult, Turn

_log = logging.getLogger("publishworker")

#: Seconds between two lines that say what was done.
SUMMARY_SECONDS = 60.0
#: Samples of latency that a batch sends, about: more would crowd the counts out of the agent's socket. Each stands for
#: as many tasks as were left out.
LATENCY_SAMPLES = 20
#: Lines a minute about tasks of one topic that failed for one reason, each with its task; the others are counted.
FAILURE_LINES = 100


class Reporter:
    """Counts and tells; what goes wrong again and again is told once a minute."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        """Count in `metrics`."""
        self._metrics = metrics
        self._throttled_log = ThrottledLog(clock)
        self._clock = clock
        self._work: Counter[str] = Counter()
        self._work_since = 0.0
        self._resting: dict[str, float] = {}  # topics of which it was told, and when a failing probe was last seen

    def batch(self, result: BatchResult) -> None:
        """Count what became of a batch, and tell what went wrong."""
        topic = result.batch.topic
        published = result.published()
        self._metrics.count(m.PUBLISHED, len(published), topic=topic)
        self._metrics.count(m.ALREADY_PUBLISHED, len(result.taken_by_others()), topic=topic)
        self._metrics.count(m.ABORTED, max(0, result.runs - 1), topic=topic)
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
            self._throttled_log.say(
                "commit_failed",
                topic,
                f"a batch of {_tasks(result.batch.ids)} of {topic} was not committed "
                f"({len(published)} were published): {result.error}",
            )
        if result.unconfirmed:
            self._metrics.count(m.UNCONFIRMED, len(result.unconfirmed), topic=topic)
            self._throttled_log.say(
                "unconfirmed",
                topic,
                f"{_tasks(result.unconfirmed)} of {topic}, to be sent at most once, marked as sent or perhaps so, and "
                f"perhaps not published; what is marked nobody tries again ({_some(result.unconfirmed)})",
            )

    def change(self, change: Change) -> None:
        """Tell of a topic that rests, and of its return: a pair of lines a minute at most, also if it flaps."""
        topic, failure, now = change.topic, change.failure, self._clock()
        if failure is None:
            if self._resting.pop(topic, None) is not None:
                _log.info("%s works again, after %.1f s", topic, change.seconds, extra={"action": "circuit_closed"})
            return
        # A rest ends unseen where no task is left to probe the topic with.
        self._resting = {
            each: at for each, at in self._resting.items() if now - at < FORGET_SECONDS + MAX_TARGET_PROBE_SECONDS
        }
        if not change.seconds:
            self._resting.pop(topic, None)
        few = "ten tasks" if kind_of(failure.reason) is FailureKind.TARGET else "one task"
        if topic in self._resting or self._throttled_log.say(
            "circuit_open",
            topic,
            f"{topic} rests, and is tried with {few} now and then until it works again; the others wait: "
            f"{failure.reason}: {failure.error}",
        ):
            self._resting[topic] = now

    def poll(self, seconds: float) -> None:
        """Note how long a poll took."""
        self._metrics.sample(m.PHASE_DURATION, seconds, phase=m.POLL)

    def turn(self, turn: Turn, *, worked: bool) -> None:
        """Tell of a turn: in full at DEBUG if it reports batches, and once a minute with all that was done since."""
        if worked:
            _log.debug("one turn: %s", turn, extra={"action": "turn", "fields": _numbers(turn)})
        done = {name: number for name, number in _numbers(turn).items() if number}
        if done and not self._work:
            self._work_since = self._clock()
        self._work.update(done)
        if self._work and self._clock() - self._work_since >= SUMMARY_SECONDS:
            self.end()

    def end(self) -> None:
        """Tell what was done since it was last told."""
        if self._work:
            seconds = self._clock() - self._work_since
            what = ", ".join(f"{number} {name}" for name, number in self._work.items())
            fields = {**self._work, "seconds": round(seconds, 1)}
            _log.info("tasks in %.0f s: %s", seconds, what, extra={"action": "summary", "fields": fields})
            self._work.clear()

    def _failures(self, result: BatchResult) -> None:
        """Tell of each failure that was written down; of the others the topic's rest tells."""
        topic, written = result.batch.topic, result.recorded if result.error is None else {}
        dead: Counter[str] = Counter()
        for id, failure in result.failed().items():
            recorded = written.get(id)
            about = {"task_id": id, "topic": topic, "reason": failure.reason, "trace_id": result.traces.get(id)}
            fields = {name: value for name, value in about.items() if value is not None}
            if recorded is None:
                _log.debug("task %s of %s was not sent: %s", id, topic, failure.error, extra={"fields": fields})
                continue
            attempt = f"attempt {recorded.attempts}"
            if recorded.dead:
                dead[failure.reason] += 1
                action, what = "dead", f"task {id} of {topic} is dead ({attempt}), an operator has to act"
            else:
                action, what = "publish_failed", f"task {id} of {topic} was not sent ({attempt}) and is tried again"
                if recorded.available_at is not None:
                    what += f" from {recorded.available_at:%Y-%m-%dT%H:%M:%SZ} on"
            self._throttled_log.say(
                action,
                f"{topic} {failure.reason}",
                f"{what}: {recorded.error}",
                most=FAILURE_LINES,
                fields={**fields, "attempt": recorded.attempts},
            )
        for reason, count in dead.items():
            self._metrics.count(m.DEAD, count, topic=topic, reason=reason)


def _numbers(turn: Turn) -> dict[str, int]:
    return {
        "published": turn.published,
        "failed": turn.failed,
        "sent by others": turn.taken,
        "deferred": turn.deferred,
        "not committed": turn.uncommitted,
    }


def _tasks(ids: Sequence[str]) -> str:
    return "1 task" if len(ids) == 1 else f"{len(ids)} tasks"


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")

"""Metrics and log lines about finished batches. Nothing else in the relay counts or logs them."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outbox.base.values import counted, listed
from outbox.program.terminal import escaped
from publishworker.log import LINE_SECONDS, ThrottledLog, log
from publishworker.pubsub.failures import FailureKind, failure_kind
from publishworker.telemetry import metrics as m
from publishworker.telemetry.history import LATENCY_SAMPLES, WorkerHistory
from publishworker.telemetry.metrics import Metrics
from publishworker.topics.availability import CircuitChange
from publishworker.types import (
    CLAIM,
    POLL,
    PUBLISH,
    Cancelled,
    CancelledTask,
    Delivered,
    Failed,
    Kind,
    NotSent,
    Published,
    TransactionError,
    Turn,
    Unmarked,
)

#: Max lines a minute about failed tasks of one topic and reason. The others are counted.
FAILURE_LINES = 100
#: The counts of a turn in the summary, each with its noun and the words after it.
_SUMMARY = {
    "published": ("task", "published"),
    "failed": ("attempt", "failed"),
    "already_sent": ("task", "sent by others"),
    "deferred": ("task", "deferred"),
    "uncommitted": ("task", "published without a commit"),
    "cancelled": ("task", "cancelled after the publish"),
}


def turn_counts(batches: Sequence[Delivered]) -> Turn:
    return Turn(
        published=sum(len(each.published()) for each in batches),
        already_sent=sum(len(each.already_sent()) for each in batches),
        failed=sum(len(each.failed()) for each in batches),
        recorded=sum(len(each.recorded) for each in batches),
        deferred=sum(len(each.deferred) for each in batches),
        uncommitted=sum(len(each.uncommitted()) for each in batches),
        cancelled=sum(len(each.cancelled) for each in batches),
    )


class Reporter:
    """Counts and logs.

    Warnings are throttled, except about tasks that may be lost: one line a minute for each problem of a topic, or
    FAILURE_LINES about single tasks.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float], history: WorkerHistory | None = None) -> None:
        self._metrics = metrics
        self._history = history or WorkerHistory()
        self._throttled_log = ThrottledLog(clock)
        self._clock = clock
        self._work: Counter[str] = Counter()
        self._work_since = 0.0
        self._logged_open: set[str] = set()  # topics whose open circuit was logged

    def report_batch(self, delivered: Delivered, change: CircuitChange | None = None) -> None:
        """Count the outcomes of a batch, and log what went wrong, and the change of the circuit of its topic."""
        topic, counts = delivered.claim.topic, turn_counts([delivered])
        self._count_work(counts)
        self._history.add(topic, counts, delivered.latencies)
        self._metrics.count(m.PUBLISHED, counts.published, topic=topic)
        self._metrics.count(m.ALREADY_PUBLISHED, counts.already_sent, topic=topic)
        self._metrics.count(m.ABORTED, delivered.aborted, topic=topic)
        if delivered.claim.kind is not Kind.DEFER:
            for phase, seconds in delivered.phases.items():
                of_topic = {"topic": topic} if phase == PUBLISH else {}
                self._metrics.sample(m.PHASE_DURATION, seconds, 1, phase=phase, **of_topic)
            for seconds in delivered.latencies.values() if self._metrics.wanted else ():
                self._metrics.sample(m.LATENCY, seconds, rate=LATENCY_SAMPLES / len(delivered.latencies), topic=topic)
        _log_message_ids(delivered)
        self._failures(delivered)
        self._metrics.count(m.DEFERRED, counts.deferred, topic=topic)
        self._metrics.count(m.UNCOMMITTED, counts.uncommitted, topic=topic)
        if delivered.error is not None:
            self._log_error(delivered.error, counts.uncommitted)
        self._unconfirmed(topic, delivered.unconfirmed)
        self._log_cancelled(topic, delivered.cancelled)
        if change is not None:
            self.report_circuit(change)

    def _log_error(self, error: TransactionError, uncommitted: int) -> None:
        tasks, topic = f"{_tasks(error.claim.ids)} of topic {error.claim.topic}", error.claim.topic
        if error.phase == CLAIM:
            text = f"The rows of {tasks} were not locked, so nothing was published: {error.text}"
            self._throttled_log.log("lock_failed", topic, text)
            return
        text = f"Commit failed for {tasks}: {error.text}"
        if uncommitted:
            in_doubt = counted(uncommitted, "task")
            text += f". {in_doubt} in doubt: published, and will be marked without another publish"
        self._throttled_log.log("commit_failed", topic, text)

    def report_later(self, report: Unmarked | Cancelled) -> None:
        """Count and log what a batch reports after its Delivered.

        These are cancelled tasks, and tasks that it cannot mark now or has given up.
        """
        topic = report.claim.topic
        if isinstance(report, Cancelled):
            self._count_work(Turn(cancelled=len(report.tasks)))
            self._log_cancelled(topic, report.tasks)
            return
        ids = report.claim.ids
        if not report.given_up:
            what = {"published": "published but not marked as sent", "marked": "marked as sent but not published"}
            one = len(ids) == 1
            rows = f"The row of task {ids[0]}" if one else f"The rows of {_tasks(ids)} ({listed(ids)})"
            of = "The task is" if one else "The tasks are"
            self._log_failed(
                "refused",
                topic,
                f"{rows} of topic {topic} cannot be changed: {report.error}. {of} "
                f"{what.get(report.state, 'not published')}. The worker tries again after growing pauses. Repair or "
                f"delete {'the row' if one else 'the rows'}",
                **_ids(ids),
            )
        elif report.state == "marked":
            self._unconfirmed(topic, ids)
        elif report.state == "published":
            # All IDs, and not throttled, for the same reason as in _unconfirmed: a task may be cancelled now.
            log.warning(
                "%s of topic %s cannot be marked as sent: %s. The worker no longer tries, so they will be "
                "published again, unless they are cancelled. IDs: %s",
                _tasks(ids), topic, report.error, ", ".join(ids), extra=_failed("given_up", topic),
            )  # fmt: skip

    def report_circuit(self, change: CircuitChange) -> None:
        """Log that a circuit has opened or closed: at most one pair of lines a minute, even if the topic flaps."""
        topic, failure = change.topic, change.failure
        if failure is None:
            if topic in self._logged_open:
                self._logged_open.remove(topic)
                log.info(
                    "Circuit closed for topic %s after %.1f s: publishing resumes.", topic, change.seconds,
                    extra={"action": "circuit_closed"},
                )  # fmt: skip
            return
        if not change.seconds:  # a new circuit: an earlier one may have been forgotten without a line
            self._logged_open.discard(topic)
        if topic not in self._logged_open and self._throttled_log.log(
            "circuit_open",
            topic,
            f"Circuit open for topic {topic}: probing with one task, holding the rest. "
            f"{failure.reason}: {failure.error}",
        ):
            self._logged_open.add(topic)

    def report_turn(self, turn: Turn) -> None:
        """Log the turn at DEBUG if it reports tasks, and a summary once a minute. Record how long the poll took."""
        if turn.poll_seconds is not None:
            self._metrics.sample(m.PHASE_DURATION, turn.poll_seconds, phase=POLL)
        if numbers := _numbers(turn):
            log.debug("Turn: %s", turn, extra={"action": "turn", "fields": numbers})
        if self._clock() - self._work_since >= LINE_SECONDS:
            self.log_summary()

    def log_summary(self) -> None:
        if self._work:
            seconds = self._clock() - self._work_since
            counts = ", ".join(
                f"{counted(number, _SUMMARY[name][0])} {_SUMMARY[name][1]}" for name, number in self._work.items()
            )
            fields = {**self._work, "seconds": round(seconds, 1)}
            log.info("In the last %.0f s: %s", seconds, counts, extra={"action": "summary", "fields": fields})
            self._work.clear()

    def _count_work(self, turn: Turn) -> None:
        if not self._work:
            self._work_since = self._clock()
        self._work += _numbers(turn)

    def _log_cancelled(self, topic: str, tasks: Mapping[str, CancelledTask]) -> None:
        """Log the tasks that subscribers receive although a cancel has taken them out, with their message IDs."""
        if tasks:
            self._metrics.count(m.CANCELLED, len(tasks), topic=topic)
            # All IDs, and not throttled: the message IDs are nowhere else.
            log.warning(
                "%s of topic %s cancelled after the worker had published them, so subscribers receive them. Their rows "
                "are marked as sent, if they exist: %s",
                _tasks([*tasks]), topic, ", ".join(f"{id} ({_how_cancelled(task)})" for id, task in tasks.items()),
                extra={"action": "cancelled_after_publish", "fields": {
                    "topic": topic,
                    "message_ids": {id: task.message_id for id, task in tasks.items()},
                    "cancelled_by": {id: task.by for id, task in tasks.items()},
                }},
            )  # fmt: skip

    def _unconfirmed(self, topic: str, ids: Sequence[str]) -> None:
        if ids:
            self._metrics.count(m.UNCONFIRMED, len(ids), topic=topic)
            # All IDs, and not throttled: they are nowhere else.
            log.warning(
                "At-most-once delivery to topic %s: %s may be lost, because they may be marked as sent without being "
                "published. They are not retried. IDs: %s", topic, _tasks(ids), ", ".join(ids),
                extra=_failed("unconfirmed", topic),
            )  # fmt: skip

    def _failures(self, delivered: Delivered) -> None:
        """Count all failures. Log recorded attempts as warnings, and the others at DEBUG."""
        topic, failed, recorded = delivered.claim.topic, delivered.failed(), delivered.recorded
        self._count(m.FAILED, topic, failed.values())
        for reason in {failed[id].reason for id in recorded if id in failed}:
            self._metrics.zero(m.DEAD, topic=topic, reason=reason)  # so that a later death is an increase
        self._count(m.DEAD, topic, [failed[id] for id, attempt in recorded.items() if attempt.dead])
        same = defaultdict[tuple[object, ...], list[str]](list)
        for id, failure in failed.items():
            if attempt := recorded.get(id):
                same[attempt.attempts, attempt.dead, attempt.error, failure.reason].append(id)
                continue
            fields = {"task_id": id, "topic": topic, "reason": failure.reason}
            log.debug("Task %s of topic %s was not sent: %s", id, topic, failure.error, extra={"fields": fields})
        for ids in same.values():  # one error of a request is that of each of its tasks
            self._log_recorded(topic, failed[ids[0]].reason, {id: recorded[id] for id in ids})

    def _log_recorded(self, topic: str, reason: str, recorded: Mapping[str, NotSent]) -> None:
        """Log the recorded attempts of tasks that failed with the same error, in the same attempt."""
        ids, attempt = list(recorded), next(iter(recorded.values()))
        one, trace_ids = len(ids) == 1, {each.trace_id for each in recorded.values()} - {None}
        times = [each.available_at for each in recorded.values() if each.available_at is not None]
        fields = {**_ids(ids), "reason": reason, "attempt": attempt.attempts}
        if len(trace_ids) == 1:
            fields["trace_id"] = trace_ids.pop()
        next_step = ""
        if attempt.dead:
            next_step = f". {'The task is' if one else 'They are'} dead. Fix the cause, then run `outbox retry` or "
            next_step += "`outbox cancel`"
        elif times:
            next_step = f". {'It' if one else 'The first'} is due at {min(times):%Y-%m-%dT%H:%M:%SZ}"
            if failure_kind(reason) is FailureKind.TARGET:
                next_step += ". Until the circuit of the topic closes, only probes are published"
        tasks = f"Task {ids[0]} of topic {topic}" if one else f"{_tasks(ids)} of topic {topic} ({listed(ids)})"
        text = f"{tasks} failed in attempt {attempt.attempts}: {attempt.error}{next_step}"
        self._log_failed("dead" if attempt.dead else "retrying", topic, text, **fields)

    def _log_failed(self, outcome: str, topic: str, text: str, **fields: object) -> None:
        """Log tasks whose delivery failed: up to FAILURE_LINES a minute for each outcome, topic and reason."""
        extra = _failed(outcome, topic, **fields)
        about = f"{outcome} {topic} {fields.get('reason', '')}"
        self._throttled_log.log(extra["action"], about, text, max_lines=FAILURE_LINES, fields=extra["fields"])

    def _count(self, metric: m.Metric, topic: str, failures: Iterable[Failed]) -> None:
        for reason, count in Counter(failure.reason for failure in failures).items():
            self._metrics.count(metric, count, topic=topic, reason=reason)


def _how_cancelled(task: CancelledTask) -> str:
    how = "its row was deleted" if task.by is None else f"cancelled by {escaped(task.by)}"
    return f"message {task.message_id}, {how}"


def _failed(outcome: str, topic: str, **fields: object) -> dict[str, Any]:
    """Return what a line about tasks has besides its sentence."""
    return {"action": "delivery_failed", "fields": {"outcome": outcome, "topic": topic, **fields}}


def _log_message_ids(delivered: Delivered) -> None:
    """Log each published task at DEBUG. Pub/Sub's message IDs are nowhere else, because rows do not store them."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    for id, answer in delivered.answers.items():
        if isinstance(answer, Published):
            fields = {"task_id": id, "topic": delivered.claim.topic, "message_id": answer.message_id}
            log.debug(
                "Task %s was published to %s as message %s", id, delivered.claim.destination, answer.message_id,
                extra={"action": "published", "fields": fields},
            )  # fmt: skip


def _numbers(turn: Turn) -> Counter[str]:
    return +Counter({name: getattr(turn, name) for name in _SUMMARY})


def _ids(ids: Sequence[str]) -> dict[str, object]:
    return {"task_id": ids[0]} if len(ids) == 1 else {"task_ids": ids}


def _tasks(ids: Sequence[str]) -> str:
    return counted(len(ids), "task")

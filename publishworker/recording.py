"""What is told of a group: counts for the metrics, lines for the log. After its commit, and nowhere else."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from publishworker import metrics as m
from publishworker.breakers import FORGET_SECONDS, LONGEST_TARGET_REST, Change
from publishworker.complaints import Complaints
from publishworker.failures import Kind, kind_of
from publishworker.metrics import Metrics
from publishworker.task import GroupResult

_log = logging.getLogger("publishworker")


class Recorder:
    """Counts and tells; what goes wrong again and again is told once a minute."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        """Count in `metrics`."""
        self._metrics = metrics
        self._complaints = Complaints(clock)
        self._clock = clock
        self._resting: dict[str, float] = {}  # topics of which it was told, and when a failing probe was last seen

    def group(self, result: GroupResult) -> None:
        """Count what became of a group, and tell what went wrong."""
        topic = result.group.topic
        published = result.published()
        self._metrics.count(m.PUBLISHED, len(published), topic=topic)
        self._metrics.count(m.ALREADY_PUBLISHED, len(result.taken_by_others()), topic=topic)
        self._metrics.count(m.ABORTED, max(0, result.runs - 1), topic=topic)
        for reason, count in Counter(failure.reason for failure in result.failed().values()).items():
            self._metrics.count(m.FAILED, count, topic=topic, reason=reason)
        self._failures(result)
        if result.error is None:
            self._metrics.count(m.PARKED, len(result.parked), topic=topic)
        else:
            self._metrics.count(m.UNCOMMITTED, len(published), topic=topic)
            self._complaints.say(
                "commit_failed",
                topic,
                f"a group of {_tasks(result.group.ids)} of {topic} was not committed "
                f"({len(published)} were published): {result.error}",
            )
        if result.in_doubt:
            self._metrics.count(m.IN_DOUBT, len(result.in_doubt), topic=topic)
            self._complaints.say(
                "in_doubt",
                topic,
                f"{_tasks(result.in_doubt)} of {topic}, to be sent at most once, marked as sent or perhaps so, and "
                f"perhaps not published; what is marked nobody tries again ({_some(result.in_doubt)})",
            )

    def change(self, change: Change) -> None:
        """Tell of a topic that rests, and of its return: a pair of lines a minute at most, also if it flaps."""
        topic, failure, now = change.topic, change.failure, self._clock()
        if failure is None:
            if self._resting.pop(topic, None) is not None:
                _log.info("%s works again, after %.1f s", topic, change.seconds, extra={"action": "topic_back"})
            return
        # A rest ends unseen where no task is left to probe the topic with.
        self._resting = {
            each: at for each, at in self._resting.items() if now - at < FORGET_SECONDS + LONGEST_TARGET_REST
        }
        if not change.seconds:
            self._resting.pop(topic, None)
        few = "ten tasks" if kind_of(failure.reason) is Kind.TARGET else "one task"
        if topic in self._resting or self._complaints.say(
            "topic_rests",
            topic,
            f"{topic} rests, and is tried with {few} now and then until it works again; the others wait: "
            f"{failure.reason}: {failure.error}",
        ):
            self._resting[topic] = now

    def _failures(self, result: GroupResult) -> None:
        """Tell of the failures that were written down; of the others the topic's rest tells."""
        topic = result.group.topic
        dead: dict[str, list[str]] = defaultdict(list)
        retried: dict[str, list[str]] = defaultdict(list)
        failed = result.failed()
        for id, charged in result.charged.items() if result.error is None else ():
            (dead if charged.dead else retried)[failed[id].reason].append(id)
        for reason, ids in dead.items():
            self._metrics.count(m.DEAD, len(ids), topic=topic, reason=reason)
            self._complaints.say(
                "dead",
                f"{topic} {reason}",
                f"{_tasks(ids)} of {topic} dead, an operator has to act: {result.charged[ids[0]].error} ({_some(ids)})",
            )
        for reason, ids in retried.items():
            most = max(result.charged[id].attempts for id in ids)
            self._complaints.say(
                "publish_failed",
                f"{topic} {reason}",
                f"{_tasks(ids)} of {topic} not sent, tried again later (attempts so far: {most} at most): "
                f"{result.charged[ids[0]].error} ({_some(ids)})",
            )


def _tasks(ids: Sequence[str]) -> str:
    return "1 task" if len(ids) == 1 else f"{len(ids)} tasks"


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")

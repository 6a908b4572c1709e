"""One turn of the relay: poll, sample, claim, publish, mark, record."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from random import Random

from publishworker import metrics as m
from publishworker.complaints import Complaints
from publishworker.doubts import Doubts
from publishworker.metrics import Metrics
from publishworker.publisher import Publisher
from publishworker.sampling import Limits, sample
from publishworker.store import Decide, Store, StoreError
from publishworker.task import Group, GroupResult, Outcome, Poll, Row, Sent, Taken, Turn
from publishworker.threads import in_threads
from publishworker.window import Window

_log = logging.getLogger("publishworker")

#: Seconds after which a topic without unsent tasks is no longer asked for; a probe finds it again.
FORGET_TOPIC_SECONDS = 600.0


class Relay:
    """Moves tasks from a store to a publisher. Not thread-safe: one turn at a time."""

    def __init__(
        self,
        store: Store,
        publisher: Publisher,
        metrics: Metrics,
        *,
        limits: Limits,
        publish_seconds: float,
        look_further_seconds: float,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Take groups within `limits`; read due tasks, new topics and pauses every `look_further_seconds`.

        `beat` is called before everything that may take long: a turn can be slow and healthy.
        """
        self._store = store
        self._publisher = publisher
        self._metrics = metrics
        self._limits = limits
        self._publish_seconds = publish_seconds
        self._look_further_seconds = look_further_seconds
        self._random = random
        self._clock = clock
        self._beat = beat
        self._window = Window(target=limits.groups * limits.group_size, shards=len(store.shards))
        self._topics: dict[str, float] = {}  # when each was last seen with an unsent task
        self._paused: frozenset[str] = frozenset()
        self._looked_further_at = float("-inf")
        self._doubts = Doubts(clock)
        self._complaints = Complaints(clock)

    def turn(self, stopping: Callable[[], bool] = lambda: False) -> Turn:
        """Do one turn and return its numbers; once `stopping` says so, take nothing more.

        Raises StoreError if the poll got no answer, or if tasks that were published before cannot be marked: nothing
        was published then.
        """
        self._beat()
        poll = self._poll()
        self._beat()
        doubtful = self._mark_doubtful()
        self._beat()
        candidates = [each for each in poll.candidates if each.id not in doubtful and each.topic not in self._paused]
        groups = [] if stopping() else sample(candidates, self._limits, self._random)
        results = in_threads(self._relay, groups)
        return self._record(poll, results)

    def _poll(self) -> Poll:
        now = self._clock()
        look_further = now - self._looked_further_at >= self._look_further_seconds
        topics = self._topics.keys() - self._paused
        poll = self._store.poll(topics, self._topics, self._window.per_range, look_further=look_further)
        self._window.adapt(Counter((each.topic, each.shard, each.available_at is None) for each in poll.candidates))
        self._topics |= dict.fromkeys(poll.new_topics | {each.topic for each in poll.candidates}, now)
        if poll.paused is not None:
            self._paused = poll.paused
        if look_further and not poll.new_topics:  # else look again at once: a probe finds one topic in each gap
            self._looked_further_at = now
            self._topics = {topic: seen for topic, seen in self._topics.items() if seen > now - FORGET_TOPIC_SECONDS}
        return poll

    def _relay(self, group: Group) -> GroupResult:
        """Claim a group, publish what is still to be sent, mark it: one transaction, run again if it is aborted."""
        result = GroupResult(group)

        def publish(rows: Sequence[Row], now: datetime) -> Mapping[str, Outcome]:
            result.outcomes = taken(group, rows, now)
            ours = [row for row in rows if row.id not in result.outcomes]
            result.created |= {row.id: row.created_at for row in ours}
            untried = [row for row in ours if row.id not in result.tried]
            if untried:
                result.tried |= self._publisher.publish(group.topic, untried, self._publish_seconds)
            result.outcomes |= {row.id: result.tried[row.id] for row in ours if row.id in result.tried}
            return result.outcomes

        self._claim(result, publish)
        return result

    def _mark_doubtful(self) -> frozenset[str]:
        """Mark what was published while its commit failed; return those ids, which are no candidates in this turn.

        Raises StoreError if that fails again: where commits are refused, publishing more would only make duplicates.
        """
        doubtful = self._doubts.ids()

        def mark(group: Group) -> GroupResult:
            def published(rows: Sequence[Row], _now: datetime) -> Mapping[str, Outcome]:
                return {row.id: Sent("") for row in rows if row.sent_at is None and self._doubts.is_about(row)}

            result = GroupResult(group)
            self._claim(result, published)
            return result

        for result in in_threads(mark, self._doubts.groups(self._limits)):
            if result.error is not None:
                raise StoreError(f"published tasks could not be marked: {result.error}")
            self._doubts.forget(result.group.ids)
        return doubtful

    def _claim(self, result: GroupResult, decide: Decide) -> None:
        try:
            self._store.claim(result.group.ids, decide)
        except StoreError as error:
            result.error = str(error)

    def _record(self, poll: Poll, results: Sequence[GroupResult]) -> Turn:
        """Count and log what happened: the only place, and after every commit has returned."""
        for result in results:
            topic = result.group.topic
            published = result.published()
            self._metrics.count(m.PUBLISHED, len(published), topic=topic)
            self._metrics.count(m.ALREADY_PUBLISHED, len(result.taken_by_others()), topic=topic)
            for reason, count in Counter(failure.reason for failure in result.failed().values()).items():
                self._metrics.count(m.FAILED, count, topic=topic, reason=reason)
            if result.error is not None:
                self._metrics.count(m.UNCOMMITTED, len(published), topic=topic)
                self._doubts.remember(topic, {id: result.created[id] for id in published})
            self._complain(result)
        turn = Turn(
            polled=len(poll.candidates),
            published=sum(len(result.published()) for result in results),
            taken=sum(len(result.taken_by_others()) for result in results),
            failed=sum(len(result.failed()) for result in results),
            uncommitted=sum(len(result.published()) for result in results if result.error is not None),
            new_topics=len(poll.new_topics),
        )
        if results:
            _log.debug("one turn: %s", turn, extra={"action": "turn"})
        return turn

    def _complain(self, result: GroupResult) -> None:
        topic = result.group.topic
        if result.error is not None:
            self._complaints.say(
                "commit_failed",
                topic,
                f"a group of {len(result.group.ids)} tasks of {topic} was not committed "
                f"({len(result.published())} were published): {result.error}",
            )
        by_reason: dict[str, list[str]] = {}
        for id, failure in result.failed().items():
            by_reason.setdefault(failure.reason, []).append(id)
        for reason, ids in by_reason.items():
            which = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
            error = result.failed()[ids[0]].error
            self._complaints.say(
                "publish_failed",
                f"{topic} {reason}",
                f"{len(ids)} tasks of {topic} were not sent and stay pending: {reason}: {error} ({which})",
            )


def taken(group: Group, rows: Sequence[Row], now: datetime) -> dict[str, Outcome]:
    """Return those of the group's tasks that are not ours to send: gone, sent by another worker, not due, moved."""
    outcomes: dict[str, Outcome] = dict.fromkeys(group.ids, Taken("gone"))
    for row in rows:
        if row.sent_at is not None:
            outcomes[row.id] = Taken("sent")
        elif not row.is_due(now):
            outcomes[row.id] = Taken("not_due")
        elif row.topic != group.topic:
            outcomes[row.id] = Taken("moved")
        else:
            del outcomes[row.id]
    return outcomes

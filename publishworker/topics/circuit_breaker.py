"""A circuit breaker for each topic: while the topic does not work, few tasks try it and the others wait.

Closed, the topic's tasks go out. Open, the topic rests: it is not asked for, so its tasks cost nothing, however many.
Half-open, one small batch probes it: up to ten tasks where the topic is missing or closed, a single one, drawn at
random, in an outage. What was published closes it; a probe that fails makes the next rest twice as long.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from publishworker.pubsub.errors import FailureKind, kind_of
from publishworker.types import Batch, BatchResult, Candidate, Failed, Sent

#: Seconds of the first rest; each further one is twice as long.
FIRST_PROBE_SECONDS = 1.0
#: Seconds of the longest rest: a missing topic has to be made by somebody, an outage ends by itself.
MAX_TARGET_PROBE_SECONDS = 300.0
MAX_OUTAGE_PROBE_SECONDS = 10.0
#: Tasks of one probe.
TARGET_PROBE_TASKS = 10
OUTAGE_PROBE_TASKS = 1
#: Ids that are remembered for having met an outage.
MAX_SUSPECTS = 1_000
#: Ids of an outage's probes that are remembered; then all are drawn again.
MAX_PROBED = 100
#: Seconds after which a topic that nobody could probe, for want of a task, is no longer remembered.
FORGET_SECONDS = 600.0
#: Rows that a poll looks deep, at most, where all that it saw of a topic have been probes.
MAX_DEPTH = 5_000
#: At-most-once tasks that an outage's probe draws and spares, in the hope of another one, before it risks one.
SPARED_PROBES = 3


@dataclass(slots=True)
class Rest:
    """A topic that does not work: why, since when, and when it may be probed."""

    failure: Failed
    since: float
    seconds: float = FIRST_PROBE_SECONDS
    until: float = 0.0
    probing: bool = False
    #: Ids of single probes: others go first.
    probed: set[str] = field(default_factory=set)
    #: How many rows the poll has to look deep, as it saw nobody else.
    deep: int = 0
    #: How many of them had to be sent at most once, and were not.
    spared: int = 0

    @property
    def kind(self) -> FailureKind:
        """Return what the failure is about."""
        return kind_of(self.failure.reason)


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be told of a topic: it has rested for so many seconds, for that failure, or works again after them."""

    topic: str
    failure: Failed | None
    seconds: float = 0.0


class CircuitBreakers:
    """The breakers of all topics, by what this worker has seen. They belong to the thread of the relay."""

    def __init__(self, random: Random, clock: Callable[[], float] = time.monotonic, *, places: int = 8) -> None:
        """Begin with all closed; probes of outages, which may hang, have a quarter of the `places` of batches."""
        self._random = random
        self._clock = clock
        self._most_probes = max(1, places // 4)
        self._rests: dict[str, Rest] = {}
        self._failing: set[str] = set()  # topics that met an outage and have published nothing since
        self._outages: Counter[str] = Counter()  # by topic, how many there have been
        self._suspects: dict[str, tuple[str, int]] = {}  # id to topic, and which of its outages; the oldest first

    def resting(self) -> frozenset[str]:
        """Return the topics that are not to be asked for now: they rest, are being probed, or wait for a probe."""
        now = self._clock()
        for topic in [topic for topic, rest in self._rests.items() if now > rest.until + FORGET_SECONDS]:
            self._forget(topic)
        held = {topic for topic, rest in self._rests.items() if rest.probing or now < rest.until}
        outages = {topic: rest for topic, rest in self._rests.items() if rest.kind is FailureKind.OUTAGE}
        free = self._most_probes - sum(rest.probing for rest in outages.values())
        due = sorted(outages.keys() - held, key=lambda topic: outages[topic].until)
        return frozenset(held).union(due[max(0, free) :])

    def states(self) -> dict[str, bool]:
        """Return the topics that do not work, and whether each rests now; else it is probed, or waits for a probe."""
        now = self._clock()
        return {topic: now < rest.until for topic, rest in self._rests.items()}

    def depth(self) -> int:
        """Return how many rows of each range the poll has to read, so that it meets a task that was no probe yet."""
        now = self._clock()
        due = (rest for rest in self._rests.values() if rest.kind is FailureKind.OUTAGE and rest.until <= now)
        return max((max(len(rest.probed) + 1, rest.deep) for rest in due), default=0)

    def seconds_to_probe(self) -> float | None:
        """Return after how many seconds the next topic may be probed, or None if none rests."""
        now = self._clock()
        left = [rest.until - now for rest in self._rests.values() if not rest.probing and rest.until > now]
        return min(left, default=None)

    def probes(
        self, candidates: Sequence[Candidate], cut_off: Collection[str] = frozenset()
    ) -> tuple[list[Candidate], dict[str, int]]:
        """Return the candidates that may be taken, and how many of which topics: a topic that does not work is probed.

        In an outage the one task is drawn at random among those that have not failed as a probe, ready ones first, as
        due ones may have failed before: messages that always time out must not hold their topic for long. If there are
        none, and the topic is `cut_off`, the next poll looks deeper: a long ordering key is one candidate only.
        """
        if not self._rests:
            return list(candidates), {}
        kept: list[Candidate] = []
        of_outage: dict[str, list[Candidate]] = {}
        for each in candidates:
            rest = self._rests.get(each.topic)
            if rest is not None and rest.kind is FailureKind.OUTAGE:
                of_outage.setdefault(each.topic, []).append(each)
            else:
                kept.append(each)
        for topic, its in of_outage.items():
            fresh = [each for each in its if each.id not in self._rests[topic].probed]
            if not fresh and topic in cut_off:
                rest = self._rests[topic]
                rest.deep = min(max(2 * rest.deep, 10 * len(rest.probed), 100), MAX_DEPTH)
            ready = [each for each in fresh if each.available_at is None]
            kept.append(self._random.choice(ready or fresh or its))
        return kept, {
            topic: TARGET_PROBE_TASKS if rest.kind is FailureKind.TARGET else OUTAGE_PROBE_TASKS
            for topic, rest in self._rests.items()
        }

    def start(self, batch: Batch) -> Batch:
        """Return the batch as it is to be sent: as a probe, or with its suspects.

        Suspect is who met the topic's last outage. Where others have met one since, as when a quota is used up, it was
        nobody's fault.
        """
        if (rest := self._rests.get(batch.topic)) is not None:
            rest.probing = True
            return replace(batch, probe=True)
        last = (batch.topic, self._outages[batch.topic])
        suspects = frozenset(id for id in batch.ids if self._suspects.get(id) == last)
        return replace(batch, suspects=suspects, works=batch.topic not in self._failing)

    def may_be_risked(self, result: BatchResult) -> bool:
        """Tell whether the at-most-once tasks that a batch came upon may be sent now.

        In an outage they would be lost: they wait until the topic works, and are the probe only where it is hard to
        find another task.
        """
        rest = self._rests.get(result.batch.topic)
        if rest is None or not result.batch.probe:
            return rest is None
        if rest.kind is FailureKind.OUTAGE and rest.spared < SPARED_PROBES:
            rest.spared += 1
            return False
        rest.spared = 0
        return True

    def learn(self, result: BatchResult) -> Change | None:
        """Take in what became of a batch; return what is new about its topic."""
        topic = result.batch.topic
        rest = self._rests.get(topic)
        if rest is not None and result.batch.probe:
            rest.probing = False
            rest.probed.update(result.batch.ids)
        failed = {id: kind_of(failure.reason) for id, failure in result.failed().items()}
        sent = [id for id, outcome in result.tried.items() if isinstance(outcome, Sent)]
        for id in sent:
            self._suspects.pop(id, None)
        if sent:
            self._failing.discard(topic)
        elif FailureKind.OUTAGE in failed.values():
            self._failing.add(topic)
        of_topic = [id for id, kind in failed.items() if _is_about_topic(kind, recorded=id in result.recorded)]
        change = self._change(result, of_topic, rest, works=bool(sent))
        if not result.batch.probe:
            self._suspect(topic, [id for id in of_topic if failed[id] is FailureKind.OUTAGE], new=rest is None)
        return change

    def _change(self, result: BatchResult, of_topic: Sequence[str], rest: Rest | None, *, works: bool) -> Change | None:
        topic = result.batch.topic
        if works:
            self._rests.pop(topic, None)
            return None if rest is None else Change(topic, None, self._clock() - rest.since)
        if not of_topic:
            return None
        failure = result.failed()[of_topic[0]]
        if rest is None:
            self._rests[topic] = self._lie_down(Rest(failure, self._clock()))
            return Change(topic, failure)
        if result.batch.probe and self._clock() >= rest.until:  # the first to tell, if several batches are the probe
            rest.failure = failure
            rest.seconds *= 2
            self._lie_down(rest)
            return Change(topic, failure, self._clock() - rest.since)
        return None

    def _lie_down(self, rest: Rest) -> Rest:
        longest = MAX_TARGET_PROBE_SECONDS if rest.kind is FailureKind.TARGET else MAX_OUTAGE_PROBE_SECONDS
        rest.seconds = min(rest.seconds, longest)
        rest.until = self._clock() + rest.seconds * self._random.uniform(0.85, 1)
        if len(rest.probed) > MAX_PROBED:
            rest.probed.clear()
        return rest

    def _suspect(self, topic: str, ids: Collection[str], *, new: bool) -> None:
        if not ids:
            return
        self._outages[topic] += new  # batches that fail while their topic rests met the same one
        for id in ids:
            self._suspects.pop(id, None)  # it goes to the end
            self._suspects[id] = (topic, self._outages[topic])
        for id in list(self._suspects)[: max(0, len(self._suspects) - MAX_SUSPECTS)]:
            del self._suspects[id]

    def _forget(self, topic: str) -> None:
        # Nothing was published in between, so who met the outage is under no suspicion.
        del self._rests[topic]
        self._suspects = {id: its for id, its in self._suspects.items() if its[0] != topic}
        self._outages.pop(topic, None)
        self._failing.discard(topic)


def _is_about_topic(kind: FailureKind, *, recorded: bool) -> bool:
    """Tell whether a failure is the topic's: also one that was recorded to a task which probed it."""
    return kind is FailureKind.TARGET or (kind is FailureKind.OUTAGE and not recorded)

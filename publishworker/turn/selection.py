"""Choose which batches start now: deferrals, then a fair share for lower priorities, then the most urgent tasks.

Priorities are compared over all topics. Candidates of the same priority, topic and shard that are all ready, or all
due, form a slice, so neither the ready nor the due tasks wait until all of the others are sent. Slices of equal
priority are shuffled, so that workers that read the same backlog rarely choose the same tasks. A batch holds one topic.
It is filled from several slices, because a small batch takes as many requests as a full one. The sendable prefix of an
ordering key is not split, unless a limit of its topic allows only a part.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from publishworker.topics.availability import Topics
from publishworker.turn.in_flight import MAX_IN_FLIGHT_BYTES, InFlight, Limits
from publishworker.turn.ordering import ResolvedKeys
from publishworker.types import Candidate, Claim, ClaimedTask


class FairShare:
    """Counts the batches owed to lower priorities.

    The first owed batch goes to the second highest priority, and the next one to the priority below that.
    """

    def __init__(self, share: float) -> None:
        self._share = share  # 0 to 0.5: the part of the batches for lower priorities
        self._owed = 0.0
        self._highest: int | None = None
        self._last_chosen: int | None = None

    @property
    def owed_batches(self) -> int:
        return int(self._owed)

    @property
    def below_priority(self) -> int | None:
        """Return N if the next poll must also read ready tasks with a priority below N, or None if no batch is owed."""
        if not self.owed_batches or self._highest is None:
            return None
        return self._highest if self._last_chosen is None else self._last_chosen

    def choose(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the tasks of the priority that is next, or none if nothing is owed.

        If no candidate is below the last chosen priority, the share is kept for the next turn.
        """
        below_priority = self.below_priority
        if below_priority is None:
            return []
        lower = [each for each in candidates if each.priority < below_priority]  # OUT-ORDER-3
        if not lower:
            if self._last_chosen is None:
                self._owed = 0.0  # no task of lower priority waits; try again when a batch is owed again
            self._last_chosen = None
            return []
        self._last_chosen = max(each.priority for each in lower)
        return [each for each in lower if each.priority == self._last_chosen]

    def count(self, batches: int, given: int, highest: int | None) -> None:
        """Count the `batches` that start, `given` of them for lower priorities.

        `highest` is the highest priority of all candidates. The owed batches have a max, because they would grow for as
        long as no task of lower priority waits.
        """
        earned = self._share * batches
        self._owed = min(self._owed + earned - given, 1 + 3 * earned)
        self._highest = highest


class Selector:
    """Chooses batches from the candidates of a poll. It belongs to the relay's thread."""

    def __init__(self, in_flight: InFlight, topics: Topics, random: Random) -> None:
        self._in_flight = in_flight
        self._limits = in_flight.limits
        self._topics = topics
        self._random = random
        self.fair_share = FairShare(self._limits.fair_share)

    def select(self, resolved: ResolvedKeys) -> tuple[Sequence[Claim], bool]:
        """Return the batches to start, and whether the turn should wait for a report, because more may then start.

        Some batches only defer blocked tasks. Without them, each poll would return the same blocked tasks.
        """
        in_flight = self._in_flight
        if not in_flight.room:
            return (), True
        deferrals = list(resolved.deferrals[: in_flight.free_to_defer(nothing_else=not resolved.candidates)])
        candidates, allowed = self._topics.admit(resolved.candidates)
        lower = self.fair_share.choose(candidates)
        for_lower = self._batches(lower, deferrals, allowed)[: self.fair_share.owed_batches]
        for claim in for_lower:
            if claim.topic in allowed:
                allowed[claim.topic] -= len(claim.tasks)
        chosen = {id for claim in for_lower for id in claim.ids}
        others = [each for each in candidates if each.id not in chosen]
        batches = for_lower + self._batches(others, deferrals + for_lower, allowed)
        bytes_used = in_flight.bytes_in_flight()
        claims = fitting(batches, MAX_IN_FLIGHT_BYTES - bytes_used, alone=not bytes_used)
        given = sum(any(claim is each for each in claims) for claim in for_lower)
        self.fair_share.count(len(claims), given, max((each.priority for each in candidates), default=None))
        return deferrals + claims, bool(deferrals or batches or resolved.left_out)

    def _batches(
        self, candidates: Sequence[Candidate], chosen: Sequence[Claim], allowed: Mapping[str, int]
    ) -> list[Claim]:
        places = self._in_flight.places_by_topic() + Counter(claim.topic for claim in chosen)
        return choose_batches(candidates, self._limits, self._random, places, allowed)


def choose_batches(
    candidates: Sequence[Candidate],
    limits: Limits,
    random: Random,
    in_flight: Mapping[str, int] | None = None,
    allowed: Mapping[str, int] | None = None,
) -> list[Claim]:
    """Return the batches to start in addition to those `in_flight` (by topic), the most urgent first.

    `limits.places` is the number of places, and `in_flight` counts those that are taken. Batches get places by
    priority. Among equal priorities, one topic gets at most half of the places (rounded up) while another topic waits.
    `allowed` maps a topic to the max tasks that it may start. With a fair share and several places, one topic never
    gets all of them while another topic waits, even if the other topic has a lower priority. OUT-DELAY-2: otherwise a
    slow topic would delay the others.
    """
    packed = _pack(_most_urgent_first(candidates, random), limits, dict(allowed or {}))
    return _share_places(packed, limits.places, Counter(in_flight or {}), keeps_place=limits.fair_share > 0)


def fitting(batches: Sequence[Claim], free: int, *, alone: bool) -> list[Claim]:
    """Return the batches that fit into `free` bytes together. If nothing is in flight (`alone`), one always fits."""
    started: list[Claim] = []
    for batch in batches:
        if batch.bytes <= free or (alone and not started):
            started.append(batch)
            free -= batch.bytes
    return started


def _most_urgent_first(candidates: Sequence[Candidate], random: Random) -> Iterator[Candidate]:
    """Yield candidates by priority. Within a priority, slices are shuffled, and sorted by age or by due time."""
    slices: dict[tuple[int, str, int, bool], list[Candidate]] = defaultdict(list)
    for each in candidates:
        slices[-each.priority, each.topic, each.shard, each.available_at is None].append(each)
    order = [*slices]
    random.shuffle(order)
    for key in sorted(order, key=lambda key: key[0]):  # OUT-ORDER-3
        yield from sorted(slices[key], key=lambda each: (each.available_at or each.created_at, each.id))


@dataclass(slots=True)
class _Packing:
    """A batch while it is filled. It is as urgent as its first task; later ones may be less urgent."""

    topic: str
    priority: int
    tasks: list[ClaimedTask] = field(default_factory=list)
    releases: list[ClaimedTask] = field(default_factory=list)
    bytes: int = 0

    def has_room(self, task: Candidate, limits: Limits) -> bool:
        return len(self.tasks) + task.task_count <= limits.batch_size and self.bytes + task.bytes <= limits.batch_bytes

    def add(self, task: Candidate) -> None:
        self.tasks += (ClaimedTask(id, task.ordering_key, task.shard) for id in (task.id, *task.behind))
        if task.releases is not None:
            self.releases.append(ClaimedTask(task.releases, task.ordering_key, task.shard))
        self.bytes += task.bytes


def _pack(candidates: Iterable[Candidate], limits: Limits, allowed: dict[str, int]) -> list[_Packing]:
    """Fill batches of one topic each, in the order of the candidates, with at most the `allowed` tasks of a topic."""
    packed: list[_Packing] = []
    last_of_topic: dict[str, _Packing] = {}
    for candidate in candidates:
        left = allowed.get(candidate.topic, candidate.task_count)
        if not left:
            continue
        task = candidate
        if task.task_count > left:  # only the first tasks of the prefix; their commit releases the task behind them
            task = task._replace(behind=task.behind[: left - 1], releases=task.behind[left - 1])
        batch = last_of_topic.get(task.topic)
        if batch is None or not batch.has_room(task, limits):
            batch = last_of_topic[task.topic] = _Packing(task.topic, task.priority)
            packed.append(batch)
        batch.add(task)
        if task.topic in allowed:
            allowed[task.topic] -= task.task_count
    return packed


def _share_places(batches: list[_Packing], places: int, in_flight: Counter[str], *, keeps_place: bool) -> list[Claim]:
    """Return the batches that get the free places. `batches` are sorted by priority."""
    free = max(0, places - in_flight.total())
    of_topic = Counter(in_flight)
    half = -(-places // 2)
    order: list[tuple[int, bool]] = []
    for batch in batches:
        of_topic[batch.topic] += 1
        order.append((-batch.priority, of_topic[batch.topic] > half))
    # Within a priority, a topic's batches that exceed half of the places come last. Otherwise the order stays.
    ranked = [batches[number] for number in sorted(range(len(batches)), key=order.__getitem__)]
    chosen = ranked[:free]
    topics = {topic for topic, number in in_flight.items() if number} or {batch.topic for batch in chosen}
    if keeps_place and places > 1 and len(topics) == 1:
        other = next((batch for batch in ranked if batch.topic not in topics), None)
        if other is not None:  # first, so that `fitting` leaves bytes for it
            chosen = [other, *(batch for batch in chosen if batch is not other)][:free]
    return [Claim(each.topic, tuple(each.tasks), releases=tuple(each.releases), bytes=each.bytes) for each in chosen]

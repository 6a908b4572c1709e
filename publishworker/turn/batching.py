"""Choose batches from candidates. Pure functions, with an injected source of randomness.

Priority comes first, over all candidates. Candidates are cut into slices by topic, shard and priority, and slices into
pieces of at most a batch. Pieces of equal priority are shuffled, so that workers that read the same backlog rarely
choose the same tasks. A batch holds one topic. It is filled with whole pieces and with the beginning of the next one,
because a small batch takes as many requests as a full one. The sendable prefix of an ordering key is not split, unless
a limit of its topic allows only a part.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from publishworker.delivery.claim import Claim, ClaimedTask
from publishworker.types import Candidate

#: The bytes in flight are limited to this many full batches, but never to less than MIN_BYTES. In memory a message
#: takes several times its size, because Spanner's response, the decoded value, the message, the publish request and its
#: serialized form each hold a copy.
BATCHES_OF_BYTES, MIN_BYTES = 4, 32_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Max tasks and bytes of one batch, and max batches in flight."""

    batch_size: int
    batch_bytes: int
    batches: int

    @property
    def bytes(self) -> int:
        """Return the max bytes of messages in flight. A single message may exceed it."""
        return max(MIN_BYTES, BATCHES_OF_BYTES * self.batch_bytes)


def choose_batches(
    candidates: Sequence[Candidate],
    limits: Limits,
    random: Random,
    in_flight: Mapping[str, int] | None = None,
    allowed: Mapping[str, int] | None = None,
    *,
    leaves_place: bool = False,
) -> list[Claim]:
    """Return the batches to start in addition to those `in_flight` (counted by topic), the most urgent first.

    `limits.batches` is the number of places, and each batch in flight has one. Batches get places by priority. Among
    equal priorities, one topic gets at most half of the places (rounded up) while another topic waits. Ready and due
    tasks get half of the places each while both wait. A topic in `allowed` gets at most that many tasks. With
    `leaves_place` and several places, one topic never gets all of them while another topic waits, even if the other
    topic has a lower priority. Otherwise a slow topic would delay the others.
    """
    packed = _pack(_most_urgent_first(candidates, limits, random), limits, dict(allowed or {}))
    return _share_places(packed, limits.batches, Counter(in_flight or {}), leaves_place=leaves_place)


def fitting(batches: Sequence[Claim], free: int, *, alone: bool) -> list[Claim]:
    """Return the batches that fit into `free` bytes together. If nothing is in flight (`alone`), one always fits."""
    started: list[Claim] = []
    for batch in batches:
        if batch.bytes <= free or (alone and not started):
            started.append(batch)
            free -= batch.bytes
    return started


def _most_urgent_first(candidates: Sequence[Candidate], limits: Limits, random: Random) -> Iterator[list[Candidate]]:
    """Yield pieces of slices by priority. Within a priority, pieces are shuffled, and ready and due ones alternate."""
    by_priority: dict[int, tuple[list[Candidate], list[Candidate]]] = defaultdict(lambda: ([], []))
    for each in candidates:
        by_priority[each.priority][each.available_at is not None].append(each)
    for priority in sorted(by_priority, reverse=True):  # OUT-ORDER-3
        ready, due = by_priority[priority]
        max_tasks = -(-limits.batch_size // 2) if ready and due else limits.batch_size
        piles = [[piece for slice in _slices(pile) for piece in _pieces(slice, max_tasks)] for pile in (ready, due)]
        for pile in piles:
            random.shuffle(pile)
        yield from _in_halves([deque(pile) for pile in piles], random)


def _slices(candidates: Sequence[Candidate]) -> Iterable[list[Candidate]]:
    """Cut by topic and shard. A slice is sorted by age, or by how long its tasks have been due."""
    slices: dict[tuple[str, int], list[Candidate]] = defaultdict(list)
    for each in candidates:
        slices[each.topic, each.shard].append(each)
    for slice in slices.values():
        slice.sort(key=lambda each: (each.available_at or each.created_at, each.id))
    return slices.values()


def _pieces(slice: Sequence[Candidate], max_tasks: int) -> Iterator[list[Candidate]]:
    """Cut a slice into pieces of at most `max_tasks` tasks. A longer prefix makes a piece of its own."""
    piece: list[Candidate] = []
    tasks = 0
    for each in slice:
        if piece and tasks + each.task_count > max_tasks:
            yield piece
            piece, tasks = [], 0
        piece.append(each)
        tasks += each.task_count
    yield piece


def _in_halves(piles: list[deque[list[Candidate]]], random: Random) -> Iterator[list[Candidate]]:
    """Merge two piles so that each gives about the same number of tasks while both have some."""
    random.shuffle(piles)  # if there is only one place, each gets it half of the time
    given = [0, 0]
    while piles[0] or piles[1]:
        which = 0 if piles[0] and (not piles[1] or given[0] <= given[1]) else 1
        piece = piles[which].popleft()
        given[which] += sum(each.task_count for each in piece)
        yield piece


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
        self.tasks += (ClaimedTask(id, task.ordering_key) for id in (task.id, *task.behind))
        if task.releases is not None:
            self.releases.append(ClaimedTask(task.releases, task.ordering_key))
        self.bytes += task.bytes


def _pack(pieces: Iterable[list[Candidate]], limits: Limits, allowed: dict[str, int]) -> list[_Packing]:
    """Fill batches of one topic each, in the order of the pieces, with at most the `allowed` tasks of each topic."""
    packed: list[_Packing] = []
    last_of_topic: dict[str, _Packing] = {}
    for candidate in (each for piece in pieces for each in piece):
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


def _share_places(batches: list[_Packing], places: int, in_flight: Counter[str], *, leaves_place: bool) -> list[Claim]:
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
    chosen, rest = ranked[:free], ranked[free:]
    topics = {*(topic for topic, number in in_flight.items() if number), *(batch.topic for batch in chosen)}
    if leaves_place and chosen and places > 1 and len(topics) == 1:
        other = next((batch for batch in rest if batch.topic not in topics), None)
        chosen[-1:] = [other or chosen[-1]]
    return [Claim(each.topic, tuple(each.tasks), releases=tuple(each.releases), bytes=each.bytes) for each in chosen]

"""From candidates to groups: pure, with an injected source of randomness.

Candidates are cut into slices by topic, shard and priority. Slices go by their priority; equal ones in a shuffled
order, so that workers that see the same backlog rarely take the same tasks. A group holds one topic, whole slices as
far as they fit, and is filled up with the beginning of the next one: a group that is full costs Spanner no more than
one that is not. The run of an ordering key stays whole, unless fewer of its topic may go.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random

from publishworker.types import Candidate, Group

#: Full groups whose bytes may be in flight at once, and bytes that may be in any case. In memory a message is several
#: times its size: as Spanner sends it, decoded, as a message, in the request, and on the wire.
GROUPS_OF_BYTES, LEAST_BYTES = 4, 32_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """How much goes into one group, and how many groups are in flight at once."""

    group_size: int
    group_bytes: int
    groups: int

    @property
    def bytes(self) -> int:
        """Return how many bytes of messages may be in flight at once; one message always may."""
        return max(LEAST_BYTES, GROUPS_OF_BYTES * self.group_bytes)


def sample(
    candidates: Sequence[Candidate],
    limits: Limits,
    random: Random,
    flying: Mapping[str, int] | None = None,
    allowed: Mapping[str, int] | None = None,
) -> list[Group]:
    """Return the groups to start beside those in flight (`flying`: how many of each topic), the most urgent first.

    One topic has at most half of the groups (rounded up) while another topic waits. While ready tasks and due ones
    wait, each get half of the places. A topic in `allowed` gets that many tasks at most.
    """
    ready = [each for each in candidates if each.available_at is None]
    due = [each for each in candidates if each.available_at is not None]
    most = -(-limits.group_size // 2) if ready and due else limits.group_size
    piles = [deque(_urgent_first(_slices(pile), most, random)) for pile in (ready, due)]
    packed = _pack(_in_halves(piles, random), limits, dict(allowed or {}))
    return _share(packed, limits.groups, Counter(flying or {}))


def fitting(groups: Sequence[Group], free: int, *, alone: bool) -> list[Group]:
    """Return the first of `groups` that have room in `free` bytes together; where they are `alone`, one has anyway."""
    sizes = list(accumulate(group.bytes for group in groups))
    return [group for place, group in enumerate(groups) if sizes[place] <= free or (alone and place == 0)]


def _slices(candidates: Sequence[Candidate]) -> Iterable[list[Candidate]]:
    """Cut by topic, shard and priority; inside a slice by age (of a due task: how long it has been due)."""
    slices: dict[tuple[str, int, int], list[Candidate]] = defaultdict(list)
    for each in candidates:
        slices[each.topic, each.shard, each.priority].append(each)
    for slice in slices.values():
        slice.sort(key=lambda each: (each.available_at or each.created_at, each.id))
    return slices.values()


def _urgent_first(slices: Iterable[list[Candidate]], most: int, random: Random) -> list[list[Candidate]]:
    """Cut slices into pieces of about `most` tasks and shuffle those of equal priority."""
    pieces = [piece for slice in slices for piece in _pieces(slice, most)]
    random.shuffle(pieces)
    pieces.sort(key=lambda piece: -piece[0].priority)  # stable: equal priorities stay shuffled
    return pieces


def _pieces(slice: Sequence[Candidate], most: int) -> Iterator[list[Candidate]]:
    """Cut a slice into pieces of at most `most` tasks, but for runs that are longer."""
    piece: list[Candidate] = []
    tasks = 0
    for each in slice:
        if piece and tasks + each.tasks > most:
            yield piece
            piece, tasks = [], 0
        piece.append(each)
        tasks += each.tasks
    yield piece


def _in_halves(piles: list[deque[list[Candidate]]], random: Random) -> Iterator[list[Candidate]]:
    """Merge two piles so that each gives about as many tasks as the other, as long as it has any."""
    random.shuffle(piles)  # where there is one place only, each gets it half of the time
    given = [0, 0]
    while piles[0] or piles[1]:
        which = 0 if piles[0] and (not piles[1] or given[0] <= given[1]) else 1
        piece = piles[which].popleft()
        given[which] += sum(each.tasks for each in piece)
        yield piece


@dataclass(slots=True)
class _Packing:
    """A group that is being filled."""

    topic: str
    ids: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    wakes: list[str] = field(default_factory=list)
    bytes: int = 0

    def has_room(self, task: Candidate, limits: Limits) -> bool:
        return len(self.ids) + task.tasks <= limits.group_size and self.bytes + task.bytes <= limits.group_bytes

    def add(self, task: Candidate) -> None:
        self.ids += (task.id, *task.behind)
        self.keys += [task.ordering_key] * task.tasks
        if task.wakes is not None:
            self.wakes.append(task.wakes)
        self.bytes += task.bytes

    def closed(self) -> Group:
        keys = tuple(self.keys) if any(self.keys) else ()
        return Group(self.topic, tuple(self.ids), keys=keys, wakes=tuple(self.wakes), bytes=self.bytes)


def _pack(pieces: Iterable[list[Candidate]], limits: Limits, allowed: dict[str, int]) -> list[_Packing]:
    """Fill groups of one topic each, in the order of the pieces, with no more of a topic than is `allowed`."""
    packed: list[_Packing] = []
    open_group: dict[str, _Packing] = {}
    for whole in (task for piece in pieces for task in piece):
        left = allowed.get(whole.topic, whole.tasks)
        if not left:
            continue
        task = whole if whole.tasks <= left else _beginning(whole, left)
        group = open_group.get(task.topic)
        if group is None or not group.has_room(task, limits):
            group = open_group[task.topic] = _Packing(task.topic)
            packed.append(group)
        group.add(task)
        if task.topic in allowed:
            allowed[task.topic] -= task.tasks
    return packed


def _beginning(run: Candidate, tasks: int) -> Candidate:
    """Return the first tasks of a run, which are a run."""
    return replace(run, behind=run.behind[: tasks - 1], wakes=run.behind[tasks - 1])


def _share(groups: list[_Packing], most: int, flying: Counter[str]) -> list[Group]:
    """Take groups into the free places, but for no topic more than half of all places while another waits."""
    half = -(-most // 2)
    taken: list[_Packing] = []
    waiting: list[_Packing] = []
    for group in groups:
        flying[group.topic] += 1
        (waiting if flying[group.topic] > half else taken).append(group)
    free = most - (flying.total() - len(groups))
    return [each.closed() for each in (taken + waiting)[: max(0, free)]]

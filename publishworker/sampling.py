"""From candidates to groups: pure, with an injected source of randomness.

Candidates are cut into slices by topic and shard. Slices go by their highest priority; equal ones in a shuffled
order, so that workers that see the same backlog rarely take the same tasks. A group holds one topic and whole slices
as far as they fit, so two workers either share a slice or do not meet.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from publishworker.task import Candidate, Group


@dataclass(frozen=True, slots=True)
class Limits:
    """How much goes into one group, and how many groups into one turn."""

    group_size: int
    group_bytes: int
    groups: int


def sample(candidates: Sequence[Candidate], limits: Limits, random: Random) -> list[Group]:
    """Return at most `limits.groups` groups, the most urgent first.

    One topic gets at most half of the groups (rounded up) while another topic waits.
    """
    slices = [piece for slice in _slices(candidates) for piece in _pieces(slice, limits)]
    random.shuffle(slices)
    slices.sort(key=lambda piece: -piece[0].priority)  # stable: equal priorities stay shuffled
    return _share(_pack(slices, limits), limits.groups)


def _slices(candidates: Sequence[Candidate]) -> Iterable[list[Candidate]]:
    """Cut by topic and shard; inside a slice by priority, then by age (of a due task: how long it has been due)."""
    slices: dict[tuple[str, int], list[Candidate]] = defaultdict(list)
    for each in candidates:
        slices[each.topic, each.shard].append(each)
    for slice in slices.values():
        slice.sort(key=lambda each: (-each.priority, each.available_at or each.created_at, each.id))
    return slices.values()


def _pieces(slice: list[Candidate], limits: Limits) -> Iterator[list[Candidate]]:
    """Cut a slice that does not fit into one group."""
    piece: list[Candidate] = []
    size = 0
    for each in slice:
        if piece and (len(piece) == limits.group_size or size + each.bytes > limits.group_bytes):
            yield piece
            piece, size = [], 0
        piece.append(each)
        size += each.bytes
    if piece:
        yield piece


def _pack(pieces: Iterable[list[Candidate]], limits: Limits) -> list[list[Candidate]]:
    """Put pieces of one topic together, in their order, as far as whole ones fit."""
    packed: list[list[Candidate]] = []
    open_group: dict[str, list[Candidate]] = {}
    for piece in pieces:
        group = open_group.get(piece[0].topic)
        if group is None or not _fits(group, piece, limits):
            group = open_group[piece[0].topic] = []
            packed.append(group)
        group.extend(piece)
    return packed


def _fits(group: list[Candidate], piece: list[Candidate], limits: Limits) -> bool:
    size = sum(each.bytes for each in group) + sum(each.bytes for each in piece)
    return len(group) + len(piece) <= limits.group_size and size <= limits.group_bytes


def _share(groups: list[list[Candidate]], most: int) -> list[Group]:
    """Take the first `most` groups, but no topic more than half of them while another waits."""
    half = -(-most // 2)
    of_topic: Counter[str] = Counter()
    taken: list[list[Candidate]] = []
    waiting: list[list[Candidate]] = []
    for group in groups:
        topic = group[0].topic
        of_topic[topic] += 1
        (waiting if of_topic[topic] > half else taken).append(group)
    chosen = (taken[:most] + waiting)[:most]
    return [Group(group[0].topic, tuple(each.id for each in group)) for group in chosen]

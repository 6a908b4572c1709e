"""A model of the commit delay: what writing groups of commits together saves. It explains Google's figures, no more.

Writes to the same split whose commits wait together form a group. A group costs something once (a round of the
replicas), and something for each row. Both follow from the row writes per second that Google names without a delay,
where each row is alone, and with 100 ms, where a group has so many rows that the cost of the group is nothing. A group
closes with the shortest delay of its commits.
https://docs.cloud.google.com/spanner/docs/throughput-optimized-writes
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from random import Random

#: Row writes per second of 1,000 processing units without a delay and with 100 ms, and row reads.
#: https://cloud.google.com/spanner/docs/performance
ROW_WRITES, GATHERED_WRITES, ROW_READS = 3_500, 22_500, 22_500
#: Row writes that a row of a large group costs, and what its group costs once.
OF_ROW = ROW_WRITES / GATHERED_WRITES
OF_GROUP = 1 - OF_ROW


@dataclass(frozen=True, slots=True)
class Traffic:
    """Tasks per second, registered one by one, in marks of `batch` tasks of one shard, and the splits of the table."""

    rate: float
    batch: int
    shards: int
    splits: int


#: A commit at one split: when, where, how many rows, and the seconds for which it may wait.
Write = tuple[float, int, int, float]


def writes(traffic: Traffic, marks: float, registrations: float, seconds: float = 1.0) -> Iterator[Write]:
    """Yield the writes of registrations and marks with these delays, by time.

    A row is in a random split of the table. Entries of unsent and of sent tasks have a split for each shard.
    """
    random, rate, splits = Random(1), traffic.rate, traffic.splits
    commits = [(random.uniform(0, seconds), 1, registrations) for _ in range(round(rate * seconds))]
    batches = round(rate * seconds / traffic.batch)
    commits += [(random.uniform(0, seconds), traffic.batch, marks) for _ in range(batches)]
    for at, tasks, delay in sorted(commits):
        rows: dict[int, int] = {}
        shard = splits + 2 * random.randrange(traffic.shards)
        for split in (random.randrange(splits) for _ in range(tasks)):
            rows[split] = rows.get(split, 0) + 1
        rows |= {shard: tasks} if tasks == 1 else {shard: tasks, shard + 1: tasks}
        yield from ((at, split, count, delay) for split, count in rows.items())


def cost(found: Iterable[Write]) -> float:
    """Return the row writes that these writes cost together."""
    closes_at: dict[int, float] = {}
    total = 0.0
    for at, split, rows, delay in found:
        joins = at < closes_at.get(split, 0.0)
        total += rows * OF_ROW + (0.0 if joins else OF_GROUP)
        closes_at[split] = min(closes_at[split], at + delay) if joins else at + delay
    return total


def units(row_writes: float, recommended: float) -> int:
    """Return the processing units that carry so many row writes per second at the recommended CPU: whole nodes."""
    return 1000 * ceil(row_writes / (ROW_WRITES * recommended))

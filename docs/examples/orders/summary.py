"""What the demo saw, in numbers, and whether it is what a transactional outbox promises. Pure."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime

from orders.subscriber import Delivery


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The truth at the end of a run. A task is named by its id."""

    #: Tasks of the orders that stand in the table `Orders`, and when each was committed.
    committed: Mapping[str, datetime]
    #: Tasks that were registered in transactions which then rolled back.
    rolled_back: Collection[str]
    #: Tasks that the relay has marked as sent.
    marked: Collection[str]
    #: What the subscriber received, in any order.
    deliveries: Sequence[Delivery]
    #: How many orders were placed and refused.
    orders: int
    refused: int
    #: What else went wrong: sentences.
    faults: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """The numbers."""

    registered: int
    rolled_back: int
    published: int
    received: int
    lost: int
    unexpected: int
    published_again: int
    redelivered: int
    #: Seconds from commit to first receipt: the median, and what 95 % and 99 % stay below; None without any receipt.
    latency: tuple[float, float, float] | None
    #: Seconds from the first commit to the last receipt.
    seconds: float

    @property
    def per_second(self) -> float:
        """Return the tasks received in a second."""
        return self.received / self.seconds if self.seconds > 0 else 0.0


def summarize(run: Run) -> Summary:
    """Count."""
    arrivals = Counter(delivery.task_id for delivery in run.deliveries)
    # A task that is published twice comes under two message ids; a message that is delivered twice keeps its id.
    messages = Counter(task_id for task_id, _ in {(each.task_id, each.message_id) for each in run.deliveries})
    expected = run.committed.keys() & arrivals.keys()
    first = _first_receipts(run.deliveries)
    return Summary(
        registered=len(run.committed),
        rolled_back=len(run.rolled_back),
        published=len(run.committed.keys() & set(run.marked)),
        received=len(expected),
        lost=len(run.committed.keys() - arrivals.keys()),
        unexpected=len(arrivals.keys() - run.committed.keys()),
        published_again=sum(messages[id] - 1 for id in expected),
        redelivered=sum(arrivals[id] - messages[id] for id in expected),
        latency=_percentiles([(first[id] - run.committed[id]).total_seconds() for id in expected]),
        seconds=_seconds([run.committed[id] for id in expected], [first[id] for id in expected]),
    )


def verdict(summary: Summary, faults: Sequence[str]) -> list[str]:
    """Return what is wrong with the run, a sentence each; an empty list means that the outbox kept its promise."""
    wrong = []
    if summary.lost:
        wrong.append(f"tasks that were committed and never received: {summary.lost:,}")
    if summary.unexpected:
        wrong.append(f"tasks that were received although no transaction committed them: {summary.unexpected:,}")
    return [*wrong, *faults]


def exit_code(wrong: Sequence[str]) -> int:
    """Return 0 for a run without anything wrong, else 1."""
    return 1 if wrong else 0


def text(summary: Summary, run: Run) -> str:
    """Return the summary for a person, one number a line. Duplicates are allowed: the relay delivers at least once."""
    again = f"{summary.published_again:,} published again, {summary.redelivered:,} delivered again by Pub/Sub"
    lines = [
        ("registered", f"{summary.registered:,}", f"tasks of {run.orders:,} orders, in the orders' own transactions"),
        ("rolled back", f"{summary.rolled_back:,}", f"tasks of {run.refused:,} orders that were refused in the end"),
        ("published", f"{summary.published:,}", "of those registered: sent to Pub/Sub and marked so"),
        ("received", f"{summary.received:,}", "of those registered: different ones that reached the subscriber"),
        ("lost", f"{summary.lost:,}", "registered, not received"),
        ("unexpected", f"{summary.unexpected:,}", "received, but rolled back"),
        ("duplicates", f"{summary.published_again + summary.redelivered:,}", again),
        *_latency_lines(summary.latency),
        (
            "tasks per second",
            f"{summary.per_second:,.0f}",
            f"{summary.seconds:.1f} s from first commit to last receipt",
        ),
    ]
    return "\n".join(f"  {name:<18}{value:>8}  {meaning}" for name, value, meaning in lines)


def _first_receipts(deliveries: Sequence[Delivery]) -> dict[str, datetime]:
    first: dict[str, datetime] = {}
    for each in deliveries:
        first[each.task_id] = min(each.received_at, first.get(each.task_id, each.received_at))
    return first


def _seconds(commits: list[datetime], receipts: list[datetime]) -> float:
    return (max(receipts) - min(commits)).total_seconds() if receipts else 0.0


def _percentiles(values: list[float]) -> tuple[float, float, float] | None:
    if len(values) < 2:
        return (values[0], values[0], values[0]) if values else None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[94], cuts[98]


def _latency_lines(latency: tuple[float, float, float] | None) -> Iterator[tuple[str, str, str]]:
    for name, seconds in zip(("p50", "p95", "p99"), latency or (), strict=False):
        yield f"latency {name}", f"{seconds:.2f} s", "from commit to receipt"

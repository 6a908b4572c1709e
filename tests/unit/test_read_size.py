"""Reads are bounded before they are sent, and a read that timed out is not repeated unchanged; on the fakes."""

from collections.abc import Callable
from typing import Any

import pytest

from publishworker.spanner.write_errors import StoreError, TimedOut
from tests.support.relay_bench import Bench


class SlowSpanner(Bench):
    """Each index range of a read takes `seconds`; a read that takes more than 30 s fails after 30 s."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds_of_range = seconds
        self.longest = 0.0
        self.asked: list[int] = []
        self.timeouts = 0
        store = self.store
        store.poll = self.reading(store.poll, lambda request: request.ranges)  # type: ignore[method-assign]  # slow
        store.discover = self.reading(  # type: ignore[method-assign]  # slow
            store.discover, lambda shards, known, **_: len(shards) * (len(known) + 1)
        )
        store.seconds_until_due = self.reading(  # type: ignore[method-assign]  # slow
            store.seconds_until_due, lambda shards, topics: len(shards) * len(topics)
        )
        store.key_heads = self.reading(  # type: ignore[method-assign]  # slow
            store.key_heads, lambda keys, *_, **__: len(keys)
        )

    def reading(self, read: Callable[..., Any], ranges: Callable[..., int]) -> Callable[..., Any]:
        def slow(*arguments: Any, **keywords: Any) -> Any:
            self.asked.append(ranges(*arguments, **keywords))
            seconds = self.asked[-1] * self.seconds_of_range
            self.wait(min(seconds, 30.0))
            if seconds > 30.0:
                self.timeouts += 1
                raise TimedOut("DEADLINE_EXCEEDED")
            return read(*arguments, **keywords)

        return slow

    def settled_turn(self) -> None:
        self.relay.turn()
        self.relay.finish()
        self.wait(0.1)

    def send_all(self, turns: int) -> int:
        """Run turns until everything is sent; return how many."""
        for number in range(turns):
            if not self.unsent():
                return number
            try:
                self.settled_turn()
                self.relay._poller.find_next_due()
            except StoreError:
                self.wait(1)
        return turns


@pytest.mark.parametrize(("topics", "keys"), [(16, 0), (1, 0), (1, 400), (40, 400)])
def test_reads_that_time_out_become_smaller_until_all_is_sent(topics: int, keys: int) -> None:
    """As on a large table in the emulator, which scans it for each range: polls, discoveries, key heads, due times."""
    bench = SlowSpanner(0.6, size=20, batches=4)
    for number in range(400):
        bench.insert(f"id{number}", topic="orders" if number % 2 else f"t{number % topics}",
                     ordering_key=f"k{number}" if keys else None)  # fmt: skip
    bench.publisher.topics |= {f"projects/test-project/topics/t{number}" for number in range(topics)}
    assert bench.send_all(800) < 800
    assert bench.timeouts <= 20
    assert min(bench.asked) * bench.seconds_of_range <= 30

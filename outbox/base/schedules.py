"""When something is tried again: the schedules of all packages. Standard library only."""

from random import Random
from typing import NamedTuple


class Schedule(NamedTuple):
    """Waits in seconds: the first, then each `growth` times as long as the one before, up to `most`."""

    first: float
    most: float
    growth: float = 2.0

    def nth(self, number: int) -> float:
        """Return the wait after `number` earlier ones."""
        return min(self.first * self.growth ** min(number, 60), self.most)  # a larger exponent could overflow

    def after(self, wait: float) -> float:
        """Return the wait after one of this length."""
        return min(wait * self.growth, self.most)


class Backoff:
    """The waits of a schedule with jitter, so that processes do not act in step."""

    def __init__(self, schedule: Schedule, random: Random) -> None:
        self._schedule = schedule
        self._random = random
        self._next = schedule.first

    def reset(self) -> None:
        """Begin again with the shortest wait."""
        self._next = self._schedule.first

    def next(self, most: float | None = None) -> float:
        """Return the current wait less a random part: at most 15 % of it, and at most 0.5 s. Then let it grow.

        `most` replaces that of the schedule.
        """
        wait = min(self._next, self._schedule.most if most is None else most)
        self._next = wait * self._schedule.growth
        return wait - self._random.uniform(0, min(0.15 * wait, 0.5))


#: The next turn of a worker without work: soon after progress, and seldom while it is idle. Without a change stream
#: the poll interval limits it. The stream does not report a task that an operator retries, so it may wait this long.
TURN = Schedule(0.05, 15.0)
#: The next turn while Spanner is unavailable: few requests, and no long wait after a short outage.
OUTAGE = Schedule(0.2, 5.0)
#: The next attempt to mark a batch: published tasks are in doubt until then.
MARKING = Schedule(0.05, 5.0)
#: The same if its rows are refused while others are written: an operator must act first.
MARKING_ASIDE = Schedule(0.05, 30.0)
#: The same while the worker exits: little time is left.
MARKING_AT_EXIT = Schedule(0.05, 0.25)
#: The next probe in an outage of Pub/Sub, which ends by itself.
OUTAGE_PROBE = Schedule(1.0, 10.0)
#: The next probe of a topic that is missing or refuses messages: an operator must act first.
TOPIC_PROBE = Schedule(1.0, 300.0)
#: The next attempt to read the change stream, and the next round of the Spark job `drain`: both cost many requests.
ROUND = Schedule(1.0, 30.0)
#: The next count of the backlog: first when workers know which one counts, then 4 times as long as the count took. So
#: counting takes a fifth of the time. An autoscaler treats a value that is five minutes old as unknown.
COUNT = Schedule(5.0, 120.0, 4.0)
#: The same call of Spanner after UNAVAILABLE or RESOURCE_EXHAUSTED, and a broken stream: most of them end at once.
#: Also the transaction of a driver whose replay has failed: the other transaction has committed.
CALL = Schedule(0.1, 1.0)
#: A transaction after ABORTED without a delay of Spanner's own: it had a lock conflict. The client would wait 2 s.
ABORTED = Schedule(0.02, 0.02)
#: A connection that was lost, or a heartbeat that failed: a worker must write a heartbeat before its liveness timeout.
RECONNECT = Schedule(2.0, 2.0)
#: The next read for more rows, or for the end of a change of the schema, while a person or a reader waits.
FOLLOW = Schedule(1.0, 1.0)
#: An operation of the console while Spanner cannot be reached.
OPERATION = Schedule(10.0, 10.0)

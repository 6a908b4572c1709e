"""What the protocol is about: rows, batches and workers, as plain values. `protocol.py` says what happens to them."""

from collections.abc import Iterator
from typing import NamedTuple

# The states of a row.
ABSENT, SCHEDULED, READY, RETRYING, DEFERRED, DEAD, SENT, GONE = (
    "absent", "scheduled", "ready", "retrying", "deferred", "dead", "sent", "gone"
)  # fmt: skip
NOT_UNSENT, NOT_DUE, SENDABLE = {ABSENT, SENT, GONE}, {SCHEDULED, RETRYING, DEAD}, {READY, DEFERRED}
#: The answers to a publish request besides a failed attempt, which makes the task retrying or dead.
PUBLISHED, NO_ANSWER = "published", "no answer"
#: After each of these a task may be published twice.
FAULTS = ("crash", "lost lock", "abort", "unknown commit", NO_ANSWER, "give up")
#: What operators do to a row, and what happens only as often as the fleet allows.
OPERATOR = ("retry", "cancel")
EVENTS = (*FAULTS, RETRYING, DEAD, "route", *OPERATOR)


class Row(NamedTuple):
    """A task. All fields but the first two are known only to the specification."""

    state: str
    times_sent: int = 0
    messages: int = 0  # that Pub/Sub has received
    resets: int = 0
    fresh: bool = False  # received since the last reset
    excused: bool = False  # later tasks of its key may be received first
    route: int = 0  # that all workers had read when the task was registered


class Seen(NamedTuple):
    """A row as it was under the lock, and what Pub/Sub has answered since."""

    id: int
    state: str
    times_sent: int
    answer: str = ""

    @property
    def message(self) -> tuple[int, int]:
        """Return the task and its TimesSent. After a retry by an operator, the row asks for another message."""
        return self.id, self.times_sent


class Batch(NamedTuple):
    """A claim of an unordered task, or of tasks of one ordering key in their order."""

    ids: tuple[int, ...]
    defers: bool = False  # the first task is a key head that is not due, and the others are deferred behind it
    release: tuple[int, ...] = ()  # the deferred task behind the prefix
    next: str = "claim"  # then publish, commit; mark_again if the commit had no answer; read_again
    holds: bool = False  # the locks of its rows
    takes: tuple[Seen, ...] = ()  # the rows to publish or to mark
    answered: tuple[Seen, ...] = ()  # over all transaction attempts
    had_lost: bool = False  # the locks, after a task was published
    left: tuple[int, ...] = ()  # of what operators do, at the snapshot
    route: int = 0  # that its worker had read when the batch began: it says where the messages go


class Worker(NamedTuple):
    """A process. Its batches are only in memory, as is what it knows to be published."""

    batches: tuple[Batch, ...] = ()
    knows: tuple[tuple[int, int], ...] = ()  # messages
    lives: bool = True
    route: int = 0  # that it has read


class State(NamedTuple):
    """Everything."""

    rows: tuple[Row, ...]
    workers: tuple[Worker, ...]
    left: tuple[int, ...]  # of each of EVENTS
    late: tuple[tuple[int, ...], ...] = ()  # requests without an answer, which Pub/Sub may execute later
    route: int = 0  # the number of the present one, which leads to another Pub/Sub topic than those before it
    broken: str = ""

    @property
    def locked(self) -> set[int]:
        """Return the rows that batches have locked."""
        batches = (batch for worker in self.workers for batch in worker.batches if batch.holds)
        return {i for batch in batches for i in (*batch.ids, *batch.release)}

    def spend(self, event: str) -> Iterator["State"]:
        """Yield the state after an event, if it may still happen."""
        n = EVENTS.index(event)
        if self.left[n]:
            yield self._replace(left=put(self.left, n, self.left[n] - 1))

    def see(self, i: int) -> Seen:
        """Return a row as it is now."""
        return Seen(i, self.rows[i].state, self.rows[i].times_sent)

    def row(self, i: int, **columns: object) -> "State":
        """Return the state with a changed row."""
        return self._replace(rows=put(self.rows, i, self.rows[i]._replace(**columns)))  # type: ignore[arg-type]  # fields by name

    def worker(self, w: int, **values: object) -> "State":
        """Return the state with a changed worker."""
        return self._replace(workers=put(self.workers, w, self.workers[w]._replace(**values)))  # type: ignore[arg-type]  # fields by name

    def batch(self, w: int, old: Batch, *new: Batch) -> "State":
        """Replace a batch."""
        return self.worker(w, batches=tuple(each for each in self.workers[w].batches if each != old)).start(w, *new)

    def start(self, w: int, *batches: Batch) -> "State":
        """Add batches."""
        return self.worker(w, batches=tuple(sorted((*self.workers[w].batches, *batches))))

    def breaks(self, promise: str, is_broken: bool) -> "State":
        """Note the first promise that is broken."""
        return self._replace(broken=self.broken or promise) if is_broken else self


def put(values: tuple, i: int, value: object) -> tuple:  # type: ignore[type-arg]  # of rows or of workers
    """Replace one value."""
    return (*values[:i], value, *values[i + 1 :])

"""How live workers divide the shards, while the number of shards changes, as a state machine of its own.

The other machine, `protocol.py`, needs none of it: there, every worker may claim every task at any moment.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TAKE_OVER = "Other workers take over the shards of a worker that has crashed."  # OUT-LOSS-6
COMMON = "All live workers poll a common layout, and none polls a layout that does not exist."
#: The layouts that the database tells workers to poll, and those that exist, in each phase of the change.
TOLD = (("old",), ("old", "new"), ("new",), ("new",))
EXISTING = (("old", "new"), ("old", "new"), ("old", "new"), ("new",))


class Worker(NamedTuple):
    """A process and its heartbeat, which stays for a while after a crash."""

    lives: bool = True
    has_heartbeat: bool = True
    sees: tuple[int, ...] = ()  # the workers with which it divides the shards
    read: int = 0  # the phase that it has read last
    named: int = 0  # the phase whose layouts its heartbeat names


class State(NamedTuple):
    """Everything."""

    workers: tuple[Worker, ...]
    phase: int = 0
    crashes: int = 0
    broken: str = ""


@dataclass(frozen=True)
class Shards:
    """A fleet, and optionally a rule that is taken out."""

    workers: int = 3
    shards: int = 3  # of each layout
    crashes: int = 2
    previous: int = 0  # the first workers are of a version that knows only the old layout
    without: str = ""
    lost: str = TAKE_OVER
    healthy: frozenset[str] = frozenset({"assign", "heartbeat", "timeout", "advance"})

    def begin(self) -> State:
        return State((Worker(sees=tuple(range(self.workers))),) * self.workers, crashes=self.crashes)

    def keeps(self, rule: str) -> bool:
        return rule != self.without

    def steps(self, s: State) -> Iterator[tuple[tuple[object, ...], State]]:
        for w, worker in enumerate(s.workers):
            seen = tuple(o for o, other in enumerate(s.workers) if o == w or other.has_heartbeat)
            phase = 0 if w < self.previous else s.phase
            if worker.lives:
                yield ("assign", w), self._with(s, w, sees=seen, read=phase)
                by_itself = not self.keeps("a layout is polled before the heartbeat names it")
                yield ("heartbeat", w), self._with(s, w, named=phase if by_itself else worker.read)
                if s.crashes:
                    yield ("crash", w), self._with(s._replace(crashes=s.crashes - 1), w, lives=False)
            elif worker.has_heartbeat and self.keeps("heartbeats of dead workers time out"):
                yield ("timeout", w), self._with(s, w, has_heartbeat=False)
            elif not worker.has_heartbeat and (w >= self.previous or s.phase < 2):
                yield ("start", w), self._with(s, w, lives=True, has_heartbeat=True, sees=seen, read=phase, named=phase)
        if s.phase + 1 < len(TOLD) and self._may_advance(s):
            yield ("advance", s.phase + 1), self._checked(s._replace(phase=s.phase + 1))

    def is_done(self, s: State) -> bool:
        """Whether each task is polled, and the change has ended. A worker of the previous version does not let it end.

        Task n is in shard n of the old layout and in the next one of the new layout.
        """
        live = {w for w, worker in enumerate(s.workers) if worker.lives}
        polled = {
            n
            for w in live
            for layout in self._polls(s.workers[w])
            for n in range(self.shards)
            if s.workers[w].sees[(n + (layout == "new")) % len(s.workers[w].sees)] == w
        }
        return not live or (len(polled) == self.shards and (s.phase == len(TOLD) - 1 or self.previous > 0))

    def canonical(self, s: State) -> State:
        return s

    def _may_advance(self, s: State) -> bool:
        named = [TOLD[worker.named] for worker in s.workers if worker.has_heartbeat]
        if s.phase == 1 and self.keeps("all workers poll the new layout before one stops polling the old one"):
            return all("new" in layouts for layouts in named)
        if s.phase == 2 and self.keeps("no worker polls the old layout when it is dropped"):
            return all("old" not in layouts for layouts in named)
        return True

    def _polls(self, worker: Worker) -> set[str]:
        return {*TOLD[worker.read], *(TOLD[worker.named] if worker.named < worker.read else ())}

    def _with(self, s: State, w: int, **values: object) -> State:
        worker = s.workers[w]._replace(**values)  # type: ignore[arg-type]  # fields by name
        return self._checked(s._replace(workers=(*s.workers[:w], worker, *s.workers[w + 1 :])))

    def _checked(self, s: State) -> State:
        polls = [self._polls(worker) for worker in s.workers if worker.lives]
        exist = all(layouts <= {*EXISTING[s.phase]} for layouts in polls)
        if polls and not (exist and set.intersection(*polls)):
            return s._replace(broken=COMMON)
        return s

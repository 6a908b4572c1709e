"""All states of a machine, breadth first. States that differ only in the order of equal workers are one."""

from array import array
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol


class Machine(Protocol):
    """A state machine. The first element of a step's name says what happens."""

    @property
    def lost(self) -> str:
        """The promise that is broken if the healthy steps do not lead to the end."""

    @property
    def healthy(self) -> Collection[str]:
        """The steps that always happen in the end."""

    def begin(self) -> Any: ...
    def steps(self, s: Any) -> Iterator[tuple[tuple[object, ...], Any]]: ...
    def canonical(self, s: Any) -> Any: ...
    def is_done(self, s: Any) -> bool: ...


@dataclass(frozen=True)
class Explored:
    """The number of states and steps, and the promise that is broken, with the shortest history that breaks it."""

    states: int
    steps: int
    broken: str = ""
    trace: tuple[object, ...] = ()


class Explorer:
    """Keeps a few numbers of each state, not the state."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._parts: dict[Hashable, int] = {}
        self._found: dict[tuple[int, ...], int] = {}
        self._parents, self._ends = array("I"), array("I")
        self._from, self._to = array("I"), array("I")
        self.steps = 0

    def run(self) -> Explored:
        """Explore until a promise is broken, or to the end."""
        level = [self._add(self._machine.canonical(self._machine.begin()), 0)]
        while level:
            following = []
            for number, state in level:
                for name, after in self._machine.steps(state):
                    self.steps += 1
                    n, new = self._add(self._machine.canonical(after), number)
                    if after.broken:
                        return self._explored(after.broken, n)
                    if name[0] in self._machine.healthy:
                        self._from.append(number)
                        self._to.append(n)
                    if new is not None:
                        following.append((n, new))
            level = following
        stuck = self._stuck()
        return self._explored("" if stuck is None else self._machine.lost, stuck or 0)

    def _add(self, s: Any, parent: int) -> tuple[int, Any]:
        """Return the number of a state, and the state if it is new."""
        parts = self._parts
        split = chain.from_iterable(
            part if name == "workers" else (part,) for name, part in zip(s._fields, s, strict=True)
        )
        key = tuple(parts.setdefault(part, len(parts)) for part in split)
        n = self._found.setdefault(key, len(self._found))
        if n < len(self._parents):
            return n, None
        self._parents.append(parent)
        if self._machine.is_done(s):
            self._ends.append(n)
        return n, s

    def _stuck(self) -> int | None:
        """Return a state from which a healthy system does not send everything, or None."""
        good = bytearray(len(self._parents))
        before: dict[int, list[int]] = {}
        for a, b in zip(self._from, self._to, strict=True):
            before.setdefault(b, []).append(a)
        unvisited = [*self._ends]
        for n in unvisited:
            good[n] = 1
        while unvisited:
            for n in before.get(unvisited.pop(), ()):
                if not good[n]:
                    good[n] = 1
                    unvisited.append(n)
        found = good.find(0)
        return None if found < 0 else found

    def _explored(self, broken: str, n: int) -> Explored:
        return Explored(len(self._parents), self.steps, broken, tuple(self._trace(n)) if broken else ())

    def _trace(self, n: int) -> Iterator[object]:
        """Yield the steps to a state, and the state."""
        way = [n]
        while way[-1]:
            way.append(self._parents[way[-1]])
        state = self._machine.canonical(self._machine.begin())
        for wanted in way[-2::-1]:
            for name, after in self._machine.steps(state):
                if self._add(self._machine.canonical(after), 0)[0] == wanted:
                    state = self._machine.canonical(after)
                    yield name
                    break
        yield state

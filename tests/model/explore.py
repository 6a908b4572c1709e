"""All reachable states of a protocol: a broken or hanging one, with the way there."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tests.model.protocol import Config, State, is_done, start, steps


@dataclass(frozen=True, slots=True)
class Found:
    """What an exploration found: how many states, and the first thing that is broken, with the way there."""

    states: int
    broken: str = ""
    way: tuple[str, ...] = ()


def explore(config: Config) -> Found:
    """Go through all states, the nearest first; stop at the first one in which something is broken.

    Hanging is: a state from which no way without further faults leads to the end.
    """
    begin = _canonical(start(config))
    came: dict[State, tuple[State, str] | None] = {begin: None}
    calm: dict[State, list[State]] = {}  # by steps without faults, backwards
    layer = deque([begin])
    while layer:
        state = layer.popleft()
        for is_fault, name, found in steps(config, state):
            after = _canonical(found)
            if not is_fault:
                calm.setdefault(after, []).append(state)
            if after not in came:
                came[after] = (state, name)
                layer.append(after)
                if after.broken:
                    return Found(len(came), after.broken, _way(came, after))
    ending = _ending(calm, [state for state in came if is_done(config, state)])
    hanging = next((state for state in came if state not in ending), None)
    if hanging is not None:
        return Found(len(came), "it hangs", _way(came, hanging))
    return Found(len(came))


def _ending(calm: Mapping[State, list[State]], ends: list[State]) -> set[State]:
    reached, new = set(ends), list(ends)
    while new:
        for before in calm.get(new.pop(), ()):
            if before not in reached:
                reached.add(before)
                new.append(before)
    return reached


def _canonical(state: State) -> State:
    return state._replace(workers=tuple(sorted(state.workers)), late=tuple(sorted(state.late)))


def _way(came: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    names: list[str] = []
    while (step := came[state]) is not None:
        state, name = step
        names.append(name)
    return tuple(reversed(names))

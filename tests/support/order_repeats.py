"""Why a task may be published again: each cause is used up by one repeat."""

from collections.abc import Iterable
from dataclasses import dataclass

#: Seconds for which a worker remembers what it has published and could not mark (publishworker/turn/doubts.py).
REMEMBERED = 60.0


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason for one repeat: by anybody, or by a process other than `but`, which has forgotten it at `forgotten`."""

    but: object = None
    forgotten: float = float("inf")


ANYBODY = Cause()


class Repeats:
    """The causes of each task that are not used up."""

    def __init__(self) -> None:
        """Begin without causes: nothing may be repeated."""
        self._causes: dict[str, list[Cause]] = {}

    def allow(self, ids: Iterable[str], cause: Cause = ANYBODY) -> None:
        """Note a cause for each of the tasks."""
        for id in ids:
            self._causes.setdefault(id, []).append(cause)

    def may(self, id: str, by: object, clock: float) -> bool:
        """Tell whether a repeat has a cause, and use that up: one that is good for the fewest first."""
        causes = self._causes.get(id, [])
        good = [each for each in causes if each.but is not by or clock >= each.forgotten]
        if good:
            causes.remove(next((each for each in good if each is not ANYBODY), ANYBODY))
        return bool(good)

"""Why a task may be published again: each cause is used up by one repeat."""

from collections.abc import Iterable
from dataclasses import dataclass

#: Seconds for which a worker remembers what it has published and could not mark (publishworker/in_doubt.py).
REMEMBERED = 60.0


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason for one repeat: by anybody, or not by one process until it has forgotten, or by one only."""

    but: object = None
    only: object = None
    forgotten: float = float("inf")

    def is_good_for(self, process: object, clock: float) -> bool:
        """Tell whether a process may repeat a task for it."""
        if self.only is not None:
            return self.only is process
        return self.but is not process or clock >= self.forgotten


ANYBODY = Cause()


class Repeats:
    """The causes of each task that are not used up."""

    def __init__(self) -> None:
        self._causes: dict[str, list[Cause]] = {}

    def allow(self, ids: Iterable[str], cause: Cause = ANYBODY) -> None:
        """Note a cause for each of the tasks."""
        for id in ids:
            self._causes.setdefault(id, []).append(cause)

    def may(self, id: str, process: object, clock: float) -> bool:
        """Tell whether a repeat has a cause, and use that up: one that is good for the fewest first."""
        causes = self._causes.get(id, [])
        good = [each for each in causes if each.is_good_for(process, clock)]
        if good:
            causes.remove(next((each for each in good if each != ANYBODY), ANYBODY))
        return bool(good)

    def marked(self, ids: Iterable[str]) -> None:
        """Forget what others might have done: the tasks are marked as sent."""
        for id in ids:
            self._causes[id] = [each for each in self._causes.get(id, []) if each.but is None]

    def over(self, ids: Iterable[str], process: object) -> None:
        """Forget what a process might have done that did not know that it had lost its locks."""
        for id in ids:
            self._causes[id] = [each for each in self._causes.get(id, []) if each.only is not process]

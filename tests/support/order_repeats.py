"""Why a task may be published again: each cause is used up by one repeat."""

from collections.abc import Iterable
from dataclasses import dataclass

#: Seconds for which a worker remembers tasks in doubt (publishworker/in_doubt.py).
REMEMBERED = 900.0


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason for one repeat: by anybody, or not by one process until it has forgotten, or by one only."""

    but: object = None
    only: object = None
    forgotten: float = float("inf")

    def is_good_for(self, process: object, clock: float) -> bool:
        if self.only is not None:
            return self.only is process
        return self.but is not process or clock >= self.forgotten


ANYBODY = Cause()


class Repeats:
    def __init__(self) -> None:
        self._causes: dict[str, list[Cause]] = {}

    def allow(self, ids: Iterable[str], cause: Cause = ANYBODY) -> None:
        for id in ids:
            self._causes.setdefault(id, []).append(cause)

    def may(self, id: str, process: object, clock: float) -> bool:
        causes = self._causes.get(id, [])
        good = [each for each in causes if each.is_good_for(process, clock)]
        if good:
            causes.remove(next((each for each in good if each != ANYBODY), ANYBODY))
        return bool(good)

    def marked(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._causes[id] = [each for each in self._causes.get(id, []) if each.but is None]

    def over(self, ids: Iterable[str], process: object) -> None:
        for id in ids:
            self._causes[id] = [each for each in self._causes.get(id, []) if each.only is not process]

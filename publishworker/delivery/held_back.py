"""Unsent tasks whose rows Spanner refuses to change: they wait, so that they cannot keep the worker busy."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from publishworker.types import BatchResult, Key

#: The first pause of a task. Each further refusal doubles it, up to the max.
FIRST_SECONDS, MAX_SECONDS = 1.0, 300.0
#: Max tasks that are remembered. The oldest are forgotten.
MAX_TASKS = 10_000


@dataclass(frozen=True, slots=True)
class _Pause:
    seconds: float
    until: float
    keys: frozenset[Key]


class HeldBack:
    """A bounded memory of refused tasks that are not published. It belongs to the relay's thread.

    A published one is in doubt instead.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure pauses by `clock`."""
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}

    def learn(self, result: BatchResult) -> None:
        """Begin or lengthen the pause of a refused task. Forget tasks whose rows were changed."""
        batch = result.batch
        if result.error is None:
            for id in (*result.published(), *result.recorded, *result.deferred):
                self._pauses.pop(id, None)
        elif result.refused and not result.published():
            [id] = batch.ids
            before = self._pauses.pop(id, None)
            seconds = min(MAX_SECONDS, 2 * before.seconds) if before else FIRST_SECONDS
            # A task that cannot be deferred does not hold back the head of its key.
            keys = frozenset(Key(batch.topic, key) for key in batch.keys if key is not None and not batch.defers)
            self._pauses[id] = _Pause(seconds, self._clock() + seconds, keys)
            if len(self._pauses) > MAX_TASKS:
                del self._pauses[next(iter(self._pauses))]

    def ids(self) -> frozenset[str]:
        """Return the IDs of the tasks that must not be claimed now."""
        now = self._clock()
        return frozenset(id for id, pause in self._pauses.items() if now < pause.until)

    def keys(self) -> frozenset[Key]:
        """Return the ordering keys of these tasks. Later tasks of these keys wait."""
        now = self._clock()
        return frozenset(key for pause in self._pauses.values() if now < pause.until for key in pause.keys)

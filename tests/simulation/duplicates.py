"""Which messages explain a duplicate: those that a fault has found published and not yet marked, and no others."""

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from tests.simulation.clockwork import Process


@dataclass(eq=False, slots=True)
class Message:
    """A message that a worker has sent to Pub/Sub. `life` counts the resets and registrations of its task."""

    id: str
    life: int
    touched: bool
    arrived: bool = False


class Messages:
    """The messages of all workers. A fault touches those of the batches that it meets.

    In one life of a task, at most one message is untouched: the one that a mark is about. Each other one needs a fault
    of its own between its request and its mark.
    """

    def __init__(self) -> None:
        self._lives: Counter[str] = Counter()
        self._untouched: Counter[tuple[str, int]] = Counter()
        #: The messages of each worker without a mark, by task.
        self._open: dict[Process, dict[str, list[Message]]] = defaultdict(lambda: defaultdict(list))
        #: The lives of the at-most-once tasks, as of the mark by each worker.
        self._marked_first: dict[tuple[Process, str], int] = {}
        #: The tasks whose locks a worker has lost since it claimed them.
        self._lost: dict[Process, set[str]] = defaultdict(set)

    def begin_life(self, id: str) -> None:
        """The task is registered, inserted again or reset, so it is published once more."""
        self._lives[id] += 1

    def claims(self, process: Process, ids: Collection[str]) -> None:
        """A worker begins a transaction. It may lose its locks before it knows that it has them."""
        self._lost[process].difference_update(ids)

    def requested(self, process: Process, ids: Collection[str]) -> list[Message]:
        lost = self._lost[process]
        lives = {id: self._marked_first.get((process, id), self._lives[id]) for id in ids}
        messages = [Message(id, lives[id], touched=id in lost) for id in ids]
        for each in messages:
            self._open[process][each.id].append(each)
        return messages

    def touch(self, process: Process, ids: Collection[str] | None = None) -> None:
        """A fault meets the batch of these tasks, or all batches of a worker."""
        found = self._open[process]
        for id in [*found] if ids is None else ids:
            self.touch_all(found.get(id, ()))
        self._lost[process].update(ids or ())

    def touch_all(self, messages: Collection[Message]) -> None:
        for each in messages:
            if not each.touched:
                each.touched = True
                self._untouched[each.id, each.life] -= each.arrived

    def arrived(self, message: Message) -> bool:
        """Pub/Sub has accepted it. Return False if it is a duplicate that no fault explains."""
        message.arrived = True
        return self._counted(message)

    def marked(self, process: Process, id: str) -> bool:
        """A mark accounts for the last message of this worker, whatever has touched it. Return False as `arrived`."""
        messages = [each for each in self._open[process].pop(id, ()) if each.arrived]
        if not messages or not messages[-1].touched:
            return True
        messages[-1].touched = False
        return self._counted(messages[-1])

    def marked_first(self, process: Process, id: str) -> None:
        """An at-most-once task is marked before its request. An operator may reset it between the two."""
        self._marked_first[process, id] = self._lives[id]

    def _counted(self, message: Message) -> bool:
        self._untouched[message.id, message.life] += not message.touched
        return message.touched or self._untouched[message.id, message.life] == 1

"""Histories of the simulation as lines for `checker.py`: python -m tests.specification.histories FILE SEED..."""

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

from tests.simulation.audit import Audit, Known
from tests.simulation.plan import Plan
from tests.simulation.world import World
from tests.specification import checker
from tests.support.fakes import StoredTask

#: What the auditor records of operators and cancellations, and the event that it is.
ACTIONS = {
    "reset": "retry", "retried": "ready", "deleted": "delete", "cancelled": "delete", "restored": "restore",
    "put_back": "restore",
}  # fmt: skip


class Recorder:
    """Notes the events of a world, with a subscriber that stores the ID of each task with its effect."""

    def __init__(self, world: World) -> None:
        self._world, self._inbox = world, set[str]()
        self.events: list[dict[str, Any]] = []

    def note(self, event: str, task: str, **more: Any) -> None:
        at = round(self._world.clockwork.now, 4)
        self.events.append({"event": event, "task": task, **{name: it for name, it in more.items() if it}, "at": at})

    def receive(self, _found: object, _process: object, _topic: object, messages: Any, _sent: object) -> None:
        for id, *_ in messages:
            self.note("receive", id, message=str(len(self.events)))
            if id not in self._inbox:
                self._inbox.add(id)
                self.note("effect", id)

    def answered(self, _found: object, _process: object, ids: Any, reason: str) -> None:
        for id in ids if reason == "ok" else ():
            self.note("publish", id)

    def committed(self, _found: object, task: str, known: Known) -> None:
        if "+" in task:  # a task instead of a cancelled one
            self.register((task, known))
        self.note("commit", task, due=known.available_at)

    def register(self, drawn: tuple[str, Known], *_: object) -> None:
        id, task = drawn
        self.note("register", id, key=_key(self._world.plan, task), may_be_lost=task.once)

    def end(self) -> None:
        for row in self._world.spanner.table.rows.values():
            self.note("row", row.id, state=_state(row))


def record(plan: Plan, limit: float = 3600.0) -> tuple[list[dict[str, Any]], Audit]:
    """Play a history; return its events."""
    world = World(plan)
    recorder = Recorder(world)
    with ExitStack() as stack:
        hooks: dict[str, Callable[..., None]] = {
            "received": recorder.receive, "answered": recorder.answered, "committed": recorder.committed
        }  # fmt: skip
        for name, event in ACTIONS.items():
            hooks[name] = lambda _found, task, *_, each=event, **__: recorder.note(each, task)
        for name, hook in hooks.items():
            stack.enter_context(_noting(Audit, name, hook))
        # Whether or not they commit.
        stack.enter_context(_noting(World, "_drawn", recorder.register))
        audit = world.play(limit)
    recorder.end()
    return recorder.events, audit


def _state(row: StoredTask) -> str:
    return "unsent" if row.sent_at is None else "cancelled" if row.cancelled_by else "sent"


def _key(plan: Plan, task: Known) -> str:
    """Return the key for the checker, which does not know that dead and expired tasks may be overtaken."""
    return f"{task.topic}/{task.key}" if task.key and task.expires_at == inf and not plan.skip_dead else ""


def judged_twice(plan: Plan) -> list[str]:
    """Play a history; return what each of the two judges finds, and about which number they disagree."""
    events, audit = record(plan)
    found = checker.check(events)
    pairs = {
        "duplicates": (audit.duplicates, found["duplicate_messages"]),
        "tasks": (len(audit.tasks), found["acknowledged"]),
    }
    differ = [f"the judges count {pair} {name}" for name, pair in pairs.items() if len({*pair}) > 1]
    return [*audit.problems, *(f"the checker finds {each}" for each in found["problems"].items()), *differ]


@contextmanager
def _noting(owner: type, name: str, note: Callable[..., None]) -> Iterator[None]:
    """Note the result and the arguments of each call of a method."""
    real = getattr(owner, name)

    def ours(self: Any, *arguments: Any, **options: Any) -> Any:
        found = real(self, *arguments, **options)
        note(found, *arguments, **options)
        return found

    with mock.patch.object(owner, name, ours):
        yield


def lines(events: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in events).encode()


if __name__ == "__main__":
    for seed in sys.argv[2:]:
        file = Path(sys.argv[1]) / f"simulation-{seed}.jsonl.gz"
        file.write_bytes(gzip.compress(lines(record(Plan.of(int(seed)))[0]), mtime=0))

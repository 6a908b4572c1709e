"""Histories of the simulation as lines for `checker.py`: python -m tests.specification.histories FILE SEED..."""

import dataclasses
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.simulation.audit import Audit, Known
from tests.simulation.world import Plan, World

#: A task that is dead or expired may be overtaken, which the checker does not know.
WITHOUT = {"skip_dead": False, "lifetimes": (None,)}


def plan_of(seed: int) -> Plan:
    return dataclasses.replace(Plan.of(seed), **WITHOUT)  # type: ignore[arg-type]  # fields by name


def record(plan: Plan, limit: float = 3600.0) -> tuple[list[dict[str, Any]], Audit]:
    """Play a history; return its events, with a subscriber that stores the ID of each task with its effect."""
    world, events = World(plan), list[dict[str, Any]]()

    def note(event: str, task: str, **more: Any) -> None:
        at = round(world.clockwork.now, 4)
        events.append({"event": event, "task": task, **{name: it for name, it in more.items() if it}, "at": at})

    inbox: set[str] = set()

    def receive(_found: object, _process: object, _topic: object, messages: Any, _sent: object) -> None:
        for id, *_ in messages:
            note("receive", id, message=str(len(events)))
            if id not in inbox:
                inbox.add(id)
                note("effect", id)

    def answered(_found: object, _process: object, ids: Any, reason: str) -> None:
        for id in ids if reason == "ok" else ():
            note("publish", id)

    def committed(_found: object, task: str, known: Known) -> None:
        if "+" in task:  # a task instead of a cancelled one
            _register(note, task, known)
        note("commit", task)

    with ExitStack() as stack:
        hooks: dict[str, Callable[..., None]] = {
            "received": receive,
            "answered": answered,
            "committed": committed,
            "reset": lambda _found, task, _due=None: note("retry", task),
            "deleted": lambda _found, task: note("delete", task),
            "cancelled": lambda _found, task, *_, **__: note("delete", task),
        }
        for name, hook in hooks.items():
            stack.enter_context(_noting(Audit, name, hook))
        # Whether or not they commit.
        stack.enter_context(_noting(World, "_drawn", lambda found, _random: _register(note, *found)))
        audit = world.play(limit)
    return events, audit


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


def _register(note: Callable[..., None], id: str, task: Known) -> None:
    note("register", id, key=task.key and f"{task.topic}/{task.key}", may_be_lost=task.once)


def lines(events: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in events).encode()


if __name__ == "__main__":
    for seed in sys.argv[2:]:
        file = Path(sys.argv[1]) / f"simulation-{seed}.jsonl.gz"
        file.write_bytes(gzip.compress(lines(record(plan_of(int(seed)))[0]), mtime=0))

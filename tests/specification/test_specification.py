"""All states of some fleets break no promise, and without any of its rules the protocol breaks one.

docs/architecture/specification.md has the numbers of states, and says what is not in the specification.
"""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.specification.explore import Explored, Explorer
from tests.specification.protocol import AGAIN, CANCELLED, CAUSE, EARLY, LOST, MARK, ORDER, RELEASED, ROUTED, Protocol
from tests.specification.shards import COMMON, TAKE_OVER, Shards
from tests.specification.state import DEAD, NO_ANSWER, RETRYING

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs/architecture/specification.md"
MACHINES = (FOLDER / "protocol.py", FOLDER / "shards.py")
UNKNOWN, LOST_LOCK, ABORT, GIVE_UP = "unknown commit", "lost lock", "abort", "give up"
Fleet = Protocol | Shards


def fleet(*keys: str | None, events: tuple[str, ...] = (), crashes: int = 0, **more: object) -> Protocol:
    """Return a fleet of two workers, in which each of these events may happen once."""
    return Protocol(keys, events=dict.fromkeys(events, 1) | {"crash": crashes}, **more)  # type: ignore[arg-type]  # mixed


SMALL: dict[str, Fleet] = {
    "a retry, a cancel": fleet("a", None, events=(UNKNOWN, RETRYING, "retry", "cancel")),
    "a new task": fleet("a", "a", "a", registered=2, events=(UNKNOWN, RETRYING), crashes=1),
    "a dead head blocks": fleet("a", "a", batch_size=1, events=(RETRYING, DEAD, "retry", "cancel")),
    "a dead head is skipped": fleet("a", "a", skip_dead=True, events=(NO_ANSWER, DEAD, "cancel")),
    "a lost lock": fleet("a", "a", scheduled=(1,), events=(UNKNOWN, LOST_LOCK, GIVE_UP)),
    "a route": fleet("a", "a", registered=1, events=(UNKNOWN, "route"), crashes=1),
    "live workers and shards": Shards(),
    "a worker of the previous version": Shards(previous=1),
}
LARGE: dict[str, Fleet] = {
    "3 workers, 3 tasks, 2 crashes": fleet(
        "a", "a", None, workers=3, events=(UNKNOWN, RETRYING, "retry", "cancel"), crashes=2
    ),
    "3 tasks of a key": fleet("a", "a", "a", registered=2, events=(UNKNOWN, RETRYING, LOST_LOCK, "cancel"), crashes=1),
    "many faults, a dead head is skipped": fleet(
        "a", "a", batch_size=1, skip_dead=True, events=(UNKNOWN, NO_ANSWER, ABORT, LOST_LOCK, DEAD, "retry")
    ),
    "many faults, a route": fleet(
        "a", "a", registered=1, events=(UNKNOWN, NO_ANSWER, LOST_LOCK, "retry", "route"), crashes=1
    ),
    "two keys": fleet("a", "b", scheduled=(0,), events=(UNKNOWN, NO_ANSWER, RETRYING, "retry", "cancel")),
}
FAILURE = fleet("a", "a", events=(RETRYING,))
ALONE, RESHARD = Shards(workers=2, crashes=1), Shards(workers=2, crashes=0)
#: The rules, each with a fleet in which its lack breaks a promise.
RULES: dict[str, tuple[Fleet, str]] = {
    "a claim waits for the locks of others": (fleet("a", None), CAUSE),
    "a sent row is skipped": (fleet("a", None), CAUSE),
    "a row that is not due is skipped": (fleet("a", "a", batch_size=1, events=(RETRYING,)), EARLY),
    "a row that is not due blocks those behind it": (FAILURE, ORDER),
    "a prefix begins at the key head": (fleet("a", "a"), ORDER),
    "a failure stops the key": (FAILURE, ORDER),
    "answers outlive a transaction attempt": (fleet("a", events=(ABORT,), workers=1), AGAIN),
    "only published tasks are marked": (FAILURE, MARK),
    "doubt is remembered": (fleet("a", events=(UNKNOWN,), workers=1), AGAIN),
    "tasks in doubt are no candidates": (fleet("a", events=(UNKNOWN,), workers=1), AGAIN),
    "a mark is for one version": (fleet("a", events=(UNKNOWN, "retry")), MARK),
    "a route does not end the doubt": (fleet("a", events=(UNKNOWN, "route"), workers=1), AGAIN),
    "a deferral does not end the doubt": (fleet("a", "a", events=(UNKNOWN, RETRYING)), AGAIN),
    "a deferral reads the head again": (fleet("a", "a", batch_size=1, events=(RETRYING,)), RELEASED),
    "a worker reads a key again": (fleet("a", "a", registered=1, events=(UNKNOWN, RETRYING)), RELEASED),
    "a commit releases the next task": (fleet("a", "a", batch_size=1, events=(DEAD, "retry")), RELEASED),
    "a deferral ends": (fleet("a", "a", registered=1, events=(UNKNOWN, RETRYING), crashes=1), LOST),
    "an operator waits for the lock": (fleet("a", events=("cancel",)), CANCELLED),
    "a cancel releases the next task": (fleet("a", "a", events=(RETRYING, "cancel")), RELEASED),
    "a batch follows the route that its worker has read": (fleet("a", registered=0, events=("route",)), ROUTED),
    "heartbeats of dead workers time out": (ALONE, TAKE_OVER),
    "a layout is polled before the heartbeat names it": (RESHARD, COMMON),
    "all workers poll the new layout before one stops polling the old one": (RESHARD, COMMON),
    "no worker polls the old layout when it is dropped": (RESHARD, COMMON),
}


def explored(machine: Fleet) -> Explored:
    """Explore, and print the numbers for the page."""
    began = time.process_time()
    found = Explorer(machine).run()
    print(f"{machine}: {found.states:,} states, {found.steps:,} steps, {time.process_time() - began:.1f} s")
    return found


@pytest.mark.parametrize("name", SMALL)
def test_a_small_fleet_keeps_every_promise_in_all_states(name: str) -> None:
    """The page has the number of states, so a changed specification needs a new number there."""
    found = explored(SMALL[name])
    assert not found.broken, found
    assert f"| {name} | {found.states:,} | {found.steps:,} |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.long("the small fleets have fewer events")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LARGE)
def test_a_large_fleet_keeps_every_promise_in_all_states(name: str) -> None:
    found = explored(LARGE[name])
    assert not found.broken, found
    assert f"| {name} | {found.states:,} | {found.steps:,} |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", RULES)
def test_a_promise_is_broken_without_a_rule(rule: str) -> None:
    machine, promise = RULES[rule]
    assert explored(machine).broken == ""
    found = explored(replace(machine, without=rule))
    assert found.broken == promise, found
    assert len(found.trace) > 1 or promise == LOST


def test_each_rule_is_taken_out() -> None:
    sources = [file.read_text(encoding="utf-8") for file in MACHINES]
    assert {*RULES} == {rule for source in sources for rule in re.findall(r'keeps\("([^"]+)"\)', source)}


def test_the_specification_imports_nothing_of_the_product() -> None:
    for file in (*MACHINES, MACHINES[0].with_name("state.py"), FOLDER / "explore.py", FOLDER / "checker.py"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"(?:from|import) (?:outbox|publishworker|tests(?!\.specification))", text)
        assert len(text.splitlines()) <= (150 if file.name == "checker.py" else 300)

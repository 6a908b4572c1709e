"""Histories by seed: whatever happens, no task is lost, no key leaves its order, and each duplicate has a cause.

docs/architecture/specification.md says what is modeled, and what is not.
"""

import dataclasses
import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.simulation.plan import DENSE, Plan
from tests.simulation.seeded_faults import DEFECTS, DENSE_DEFECTS, seeded
from tests.simulation.world import World, shortest
from tests.specification.histories import judged_twice
from tests.support.processes import ROOT

#: CPU seconds of histories.
QUICK, EXTENDED, LONG = 6.0, 15.0, 3600.0
ENDED = "a worker ended with"
#: Max histories in this time, except in the long run. A faster machine then plays no seeds that are not yet examined.
MOST = 500
#: Defects that few histories notice.
SLOW = (
    "an expired task is not sent",
    "the first deferred task of a key returns soon",
    "a topic without candidates is found again",
)
#: The first seed that notices a defect, where it is late, or where other histories last long. The search
#: begins there, and goes on with other seeds. Before it, three histories of failing keys are played, which see much.
FIRST_SEEDS = {
    "a task that is not due is skipped under the lock": 5,
    "a task behind a blocked one is skipped under the lock": 92,
    "a transaction attempt remembers outcomes": 11,
    "a deferral is short": 15,
    "at-most-once tasks are marked first": 5,
    "workers that do not poll the new layout are waited for": 10,
    "messages follow the route of their topic": 5,
    "a topic with an invalid route waits": 8,
    "deferred tasks are released": 39,
    "a reset row is told from a lost mark": 128,
}
#: Defects of mechanisms that have too little to do in drawn plans, with tests of their own.
APART = (
    "a topic gets at most half of the places while another waits",
    "a topic leaves a place to another of a lower priority",
    "urgent tasks go first",
    "lower priorities have a share",
    "a poll reads lower priorities when owed",
    "the size of a poll follows the backlog",
    "a poll that was too large is halved",
    "a turn waits for all batches that it has started",
    "tasks of a limited topic start together",
    "turns that inserts start have a pause between them",
    "deferrals leave places to other tasks",
    "a topic with only dead tasks is discovered less and less often",
    "idle workers send few heartbeats",
    "a worker that cannot write takes over no shards",
    "a probe in an outage is drawn at random",
    "a task that met an outage shares no request",
    "a refused request that there was no time to split is remembered",
)


@pytest.fixture(autouse=True, scope="module")
def rare_garbage_collection() -> Iterator[None]:
    """Histories have many objects that live long, so collecting often takes a tenth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    yield
    gc.set_threshold(*before)


def problems(plan: Plan) -> list[str]:
    """Play a history; return the broken promises, and the error that ended a worker."""
    world = World(plan)
    try:
        world.play()
    except Exception as error:
        return [*world.audit.problems, f"{ENDED} {error!r}"]
    return world.audit.problems


def is_judged(plan: Plan) -> bool:
    """Play a history; tell whether the audit sees a broken promise. An error of a worker is none."""
    return any(not each.startswith(ENDED) for each in problems(plan))


def seeds(first: int, seconds: float) -> Iterator[int]:
    end = time.process_time() + seconds
    numbers = itertools.count(first) if seconds == LONG else range(first, first + MOST)
    yield from itertools.takewhile(lambda _seed: time.process_time() < end, numbers)


def report(plan: Plan) -> str:
    """Return the failing history as the shortest plan found, which plays it again."""
    short = shortest(plan)
    return "\n".join([f"seed {plan.seed} breaks a promise; so does World({short}).play():", *problems(short)])


@pytest.mark.parametrize(
    ("first", "seconds"),
    [
        (0, QUICK),
        pytest.param(1_000, EXTENDED, marks=[pytest.mark.extended, pytest.mark.timeout(1800)]),
        pytest.param(10_000, EXTENDED, marks=[pytest.mark.extended, pytest.mark.timeout(1800)]),
        pytest.param(200_000, LONG, marks=[pytest.mark.long("an hour of histories"), pytest.mark.timeout(20_000)]),
    ],
)
def test_a_history_breaks_no_promise(first: int, seconds: float) -> None:
    """Also with faults: nothing is lost, keys keep their order, duplicates have a cause, and all is sent afterwards.

    The auditor says so, and the independent checker.
    """
    played = 0
    for seed in seeds(first, seconds):
        plan = Plan.of(seed)
        if found := judged_twice(plan):
            pytest.fail(f"{found}\n{report(plan)}")
        played += 1
    print(f"{played} histories, {played / seconds:.1f} for each CPU second")


@pytest.mark.extended
def test_a_seed_gives_the_same_history_in_every_process() -> None:
    """Event for event: otherwise a failing seed would be worth nothing."""
    code = "from tests.simulation.world import *; print([World(Plan.of(s)).play().digest() for s in range(3)])"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}, text=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


QUICKLY_FOUND_DENSE = ("a change of many tasks compares their states",)
#: Defects that end a worker, which is all that they do.
ENDING = ("a worker goes on after an outage",)
QUICKLY_FOUND = ("SentAt is read again under the lock", "a key is sent from its head on")


@pytest.mark.parametrize(
    ("defect", "limit"),
    [
        *((name, 40) for name in QUICKLY_FOUND),
        *(
            pytest.param(name, 100, marks=[pytest.mark.extended, pytest.mark.timeout(600)])
            for name in DEFECTS
            if name not in (*QUICKLY_FOUND, *SLOW, *APART)
        ),
        *(
            pytest.param(name, 2_000, marks=[pytest.mark.long("many seeds"), pytest.mark.timeout(3600)])
            for name in SLOW
        ),
    ],
)
def test_histories_notice_a_defect(defect: str, limit: int) -> None:
    is_noticed = problems if defect in ENDING else is_judged
    first = FIRST_SEEDS.get(defect, 0)
    plans = itertools.chain(map(DENSE["keys"], range(3)), map(Plan.of, range(first, first + limit)))
    with seeded(defect):
        assert any(map(is_noticed, plans))


@pytest.mark.extended
@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize("seed", range(5))
def test_a_dense_history_breaks_no_promise(dense: str, seed: int) -> None:
    assert judged_twice(DENSE[dense](seed)) == []


@pytest.mark.parametrize(
    "defect",
    [name if name in QUICKLY_FOUND_DENSE else pytest.param(name, marks=pytest.mark.extended) for name in DENSE_DEFECTS],
)
def test_dense_histories_notice_a_defect(defect: str) -> None:
    dense, *_ = DENSE_DEFECTS[defect]
    first = FIRST_SEEDS.get(defect, 0)
    with seeded(defect):
        found = next((seed for seed in range(first, first + 40) if is_judged(DENSE[dense](seed))), None)
    assert found is not None


def test_a_failing_history_is_reported_as_the_shortest_that_fails() -> None:
    with seeded("a failed commit is remembered"):
        plan = next(plan for plan in map(Plan.of, range(200)) if plan.faults and problems(plan))
        short = shortest(plan)
        assert problems(short)
        assert len(short.faults) <= len(plan.faults)
        assert short.seconds <= plan.seconds
        assert all(problems(dataclasses.replace(short, faults=())) == [] for _ in short.faults)
        assert f"seed {plan.seed} breaks a promise" in report(plan)

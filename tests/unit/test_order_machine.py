"""The order of keys, whatever happens: random histories of callers, operators, faults and several real relays.

The model behind it is tests/support/order_model.py. `--long` plays many more histories, other ones each time.
"""

import contextlib
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.order_ledger import Task, is_dead
from tests.support.order_model import Worker, World
from tests.support.stepwise import Point, Stepper, patched

SECONDS = st.sampled_from([0.5, 1.0, 3.0, 11.0, 61.0, 600.0, 3600.0, 7200.0])

tasks = st.builds(
    dict,
    number=st.integers(0, 99),  # ids sort in another order than their tasks
    key=st.sampled_from(["k", "k", "k", "l", None]),
    topic=st.sampled_from(["orders", "orders", "orders", "invoices"]),
    delay=st.sampled_from([None, None, None, None, 1, 60, 5000]),
    lifetime=st.sampled_from([None, None, None, None, 1, 100, 5000]),
    priority=st.sampled_from([50, 50, 0, 100]),
    bad=st.sampled_from([False, False, False, False, True]),
    once=st.booleans(),  # where there is no key
)
registrations = st.lists(tasks, min_size=1, max_size=4)
#: Which worker continues, which of its threads, and which of the faults of its point it meets, or 0. A
#: commit that fails comes more often than the others.
step = st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([0] * 9 + [*range(1, 8), 3, 3]))
#: Other events of workers and tasks.
EVENTS = ("retry", "retry_plainly", "retry_dead", "execute_late", "lose_locks", "kill", "delete")


class OrderMachine(RuleBasedStateMachine):
    """Callers, operators, time, and workers that stop at every point where something may come between."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(patched())
        self.world = World()
        self.open: list[list[Task]] = []
        self.count = 0

    def drawn(self, registration: list[dict[str, Any]]) -> list[Task]:
        drawn = []
        for each in registration:
            self.count += 1
            given = {name: each[name] for name in ("key", "topic", "priority", "bad")}
            task = Task(id=f"{each['number']:02}-{self.count}", once=each["once"] and each["key"] is None, **given)
            begin = self.world.store.now + timedelta(seconds=each["delay"] or 0)
            task.available_at = begin if each["delay"] else None
            task.expires_at = begin + timedelta(seconds=each["lifetime"]) if each["lifetime"] else None
            drawn.append(task)
        return self.world.draw(*drawn)

    @initialize(
        workers=st.sampled_from([2, 3]),
        size=st.sampled_from([10, 3, 2, 1]),
        batches=st.sampled_from([2, 1, 4]),
        skip_dead=st.booleans(),
        first=st.lists(registrations, min_size=1, max_size=4),
    )
    def begin(self, workers: int, size: int, batches: int, skip_dead: bool, first: list[list[dict[str, Any]]]) -> None:
        self.world = World(workers, size=size, batches=batches, skip_dead=skip_dead)
        for each in first:
            self.world.commit(self.drawn(each))
        for worker in self.world.workers:
            self.world.rush(worker)  # it learns the names of the topics

    @rule(registration=registrations)
    def register(self, registration: list[dict[str, Any]]) -> None:
        self.world.commit(self.drawn(registration))

    @rule(registration=registrations)
    def register_slowly(self, registration: list[dict[str, Any]]) -> None:
        self.open.append(self.drawn(registration))

    @rule(which=st.integers(0, 9), commits=st.booleans())
    def end_registration(self, which: int, commits: bool) -> None:
        if self.open:
            tasks = self.open.pop(which % len(self.open))
            if commits:
                self.world.commit(tasks)

    @rule(steps=st.lists(step, min_size=8, max_size=40))
    def advance(self, steps: list[tuple[int, int, int]]) -> None:
        for worker, which, fault in steps:
            self.world.advance(self.worker(worker), which, fault)

    @rule(steps=st.lists(step, min_size=8, max_size=40))
    def advance_further(self, steps: list[tuple[int, int, int]]) -> None:
        self.advance(steps)

    @rule(worker=st.integers(0, 2))
    def rush(self, worker: int) -> None:
        self.world.rush(self.worker(worker))

    @rule(event=st.sampled_from(EVENTS), which=st.integers(0, 99))
    def meet(self, event: str, which: int) -> None:
        world, rows = self.world, self.world.store.rows
        worker = self.worker(which)
        match event:
            case "retry" | "retry_plainly" if sent := [id for id, row in rows.items() if row.sent_at]:
                world.retry(sent[which % len(sent)], plainly=event == "retry_plainly")
            case "retry_dead" if dead := [id for id, row in rows.items() if is_dead(row)]:
                world.retry(dead[which % len(dead)])
            case "delete" if dead := [id for id, row in rows.items() if is_dead(row)]:
                world.delete(dead[which % len(dead)])
            case "execute_late" if world.late:
                world.execute(world.late.pop(which % len(world.late)))
            case "lose_locks":
                for claim in [world.store.claims[each] for each in worker.threads if each in world.store.claims]:
                    world.store.lose(claim)
            case "kill":
                world.kill(worker)

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(seconds=SECONDS, which=st.integers(-1, 2))
    def step_a_clock(self, seconds: float, which: int) -> None:
        if which < 0:
            self.world.wait(seconds, workers=False)
        else:
            self.worker(which).ahead += seconds

    def worker(self, which: int) -> Worker:
        return self.world.workers[which % len(self.world.workers)]

    @invariant()
    def nothing_is_broken(self) -> None:
        assert not self.world.ledger.broken, self.world.ledger.broken

    def teardown(self) -> None:
        try:
            if not self.world.ledger.broken:
                self.world.settle()
            assert not self.world.ledger.broken, self.world.ledger.broken
        finally:
            for worker in self.world.workers:
                self.world.kill(worker)
            self.stack.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("histories", [120, pytest.param(200, marks=pytest.mark.extended)])
def test_order(long: bool, histories: int) -> None:
    """Keys keep the order of first publishes, no task is lost, none is sent after a rollback, and no caller waits."""
    run_state_machine_as_test(
        OrderMachine,
        settings=settings(
            max_examples=5000 if long else histories,
            stateful_step_count=40,
            derandomize=not long,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if long else [Phase.generate],  # to shrink takes minutes
        ),
    )


def until(world: World, worker: Worker, point: Point) -> Stepper:
    for _ in range(50):
        if found := [each for each in worker.threads if each.point is point]:
            return found[0]
        world.advance(worker, 0)
    pytest.fail(f"{worker.name} does not come to {point}")


def test_an_operators_retry_is_sent_though_a_worker_is_late() -> None:
    """It published, lost its locks to a worker that marked the task, and its transaction runs again after the retry."""
    with patched():
        world = World()
        world.register(Task(id="a", key=None))
        late, other = world.workers
        world.rush(other)  # it learns the topic's name
        at_commit = until(world, late, Point.COMMIT)
        world.store.lose(world.store.claims[at_commit])
        world.rush(other)
        world.retry("a", plainly=False)
        world.settle()
        assert world.ledger.published == ["a", "a", "a"]
        assert not world.ledger.broken

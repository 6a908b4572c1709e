"""Spanner and workers as far as the order of keys depends on them: everything goes one step at a time.

The workers are real relays with the real publisher; only the store, the channel and the threads are models.
"""

import itertools
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from random import Random
from typing import Any

import grpc

from publishworker.pubsub.publisher import PubSubPublisher
from publishworker.relay import Relay
from publishworker.spanner.store import StoreError
from publishworker.types import Key
from tests.support.fakes import serialized
from tests.support.order_charges import INITIAL_BACKOFF, LONGEST_BACKOFF, MAX_ATTEMPTS, Charges
from tests.support.order_ledger import Ledger, Task, is_dead
from tests.support.order_pubsub import Channel, Request
from tests.support.order_repeats import Repeats
from tests.support.order_store import Claim, ModelStore
from tests.support.parts import relay_of
from tests.support.stepwise import FAULTS, Crew, Fate, Point, Stepper, here


class Worker(Crew):
    def __init__(self, world: "World", name: str) -> None:
        super().__init__(name)
        self.world = world
        self.ahead = 0.0
        self.heads_at: datetime | None = None
        self.snapshots: dict[Stepper, datetime] = {}
        self.turning: Stepper | None = None
        self.relay: Relay = world.relay(self)

    def spawn(self, run: Callable[[], Any]) -> Stepper:
        stepper = super().spawn(run)
        self.snapshots[stepper] = self.heads_at or self.world.store.now
        return stepper

    def clock(self) -> float:
        return self.world.seconds + self.ahead

    def turn(self) -> Stepper:
        if self.turning is None or self.turning.ended:
            self.turning = self.spawn(self.relay.turn)
        return self.turning


class World:
    def __init__(self, workers: int = 2, *, size: int = 10, batches: int = 2, skip_dead: bool = False) -> None:
        self.size, self.batches, self.skip_dead = size, batches, skip_dead
        self.seconds = 0.0
        self.store = ModelStore(self)
        self.ledger = Ledger(self.store, skip_dead=skip_dead)
        self.repeats = Repeats()
        self.records = Charges()
        self.late: list[Request] = []  # no caller waits for them, and they may still be executed
        self._sequence = itertools.count(1)
        self._seed = itertools.count(1)
        self.workers = [Worker(self, f"worker {n}") for n in range(workers)]

    def relay(self, worker: Worker) -> Relay:
        channel: Any = Channel(self.send)
        return relay_of(
            self.store,
            PubSubPublisher(channel, "test-project", clock=worker.clock),
            size=self.size,
            batches=self.batches,
            retries={"longest": LONGEST_BACKOFF, "initial": INITIAL_BACKOFF, "max_attempts": MAX_ATTEMPTS},
            random=Random(next(self._seed)),
            clock=worker.clock,
            skip_dead=self.skip_dead,
        )

    def draw(self, *tasks: Task) -> list[Task]:
        """Register tasks in a transaction that is still open; tasks whose ID ends with 0 have no number."""
        for task in tasks:
            task.sequence = None if task.id.endswith("0") else next(self._sequence)
        return list(tasks)

    def commit(self, tasks: Sequence[Task]) -> None:
        created_at = self.store.tick()
        for task in tasks:
            if Key(task.topic, task.key or "") in self.store.ranges:
                self.ledger.broken.append(
                    f"registering {task.id} has to wait for a transaction that read the range of its key"
                )
            task.created_at = created_at
            self.ledger.tasks[task.id] = task
            self.ledger.keys.setdefault((task.topic, task.key), []).append(task)
            self.store.insert(
                task.id,
                task.topic,
                serialized(),
                ordering_key=task.key,
                sequence=task.sequence,
                priority=task.priority,
                created_at=created_at,
                available_at=task.available_at,
                expires_at=task.expires_at,
                at_most_once=task.once,
            )
            self.ledger.touched[task.id] = created_at
        for its in self.ledger.keys.values():
            its.sort(key=lambda task: task.place)

    def register(self, *tasks: Task) -> None:
        self.commit(self.draw(*tasks))

    def retry(self, id: str, *, plainly: bool = True) -> None:
        """Have a sent or a dead task sent again, by the DML of the documentation or by `outbox retry`.

        A dead one is mended, too. A sent one must be sent again, but for one doubt of a worker that does not know it
        from before: the DML leaves the row as it was.
        """
        row, task = self.store.rows.get(id), self.ledger.tasks[id]
        if row is None or not (row.sent_at is not None or is_dead(row)):
            return
        now = self.store.tick()
        self.store.write(id)
        self.repeats.allow([id])
        if row.sent_at is not None:
            row.sent_at = None
            task.retried += 1
        else:
            task.bad, task.excused, task.expires_at = False, self.ledger.is_excused(task), None
            row.available_at, row.attempts, row.expires_at = None, 0, None
        if not plainly:
            row.available_at, row.attempts, row.expires_at = now, 0, None
            task.expires_at, task.owed = None, task.published + 1

    def delete(self, id: str) -> None:
        if (row := self.store.rows.get(id)) is not None and is_dead(row):
            self.store.write(id)
            self.ledger.tasks[id].deleted = True
            del self.store.rows[id]

    def wait(self, seconds: float, *, database: bool = True, workers: bool = True) -> None:
        self.seconds += seconds if workers else 0
        self.store.now += timedelta(seconds=seconds if database else 0)

    # The workers.

    def ready(self, stepper: Stepper, fate: Fate = Fate.GO) -> bool:
        match stepper.point:
            case Point.LOCK:
                return fate in (Fate.FAIL, Fate.ABORT) or not self.store.holders.keys() & stepper.wanted
            case Point.LANDING:
                return bool(stepper.mailbox) or (fate is Fate.IMPATIENT and not stepper.patient)
        return True

    def step(self, stepper: Stepper, fate: Fate = Fate.GO) -> None:
        """Let a thread continue; raise its errors, except those of the store, which end a turn."""
        if not self.ready(stepper, fate):
            return
        if fate is not Fate.GO:
            self._risk(stepper, landed=fate is Fate.LANDED)
        if stepper.point is Point.ANSWER and not self._answer(self.store.claim_of(stepper), fate):
            return
        if stepper.point is Point.LOCK and fate is Fate.ABORT:
            for id in stepper.wanted:
                if id in self.store.holders:
                    self.store.lose(self.store.holders[id][1])
        stepper.resume(fate)
        if stepper.error is not None and not isinstance(stepper.error, StoreError):
            raise stepper.error

    def advance(self, worker: Worker, which: int, fault: int = 0) -> None:
        worker.turn()
        self.wait(0.1)
        ways = []
        for each in worker.threads:
            faults = FAULTS.get(each.point, ())
            fate = faults[fault - 1] if 0 < fault <= len(faults) else Fate.GO
            ways += [(each, fate)] if self.ready(each, fate) else []
        if ways:
            self.step(*ways[which % len(ways)])
        for each in [each for each in worker.threads if each.point is Point.START]:
            self.step(each)  # nothing that matters comes before its next point

    def rush(self, worker: Worker) -> bool:
        turn = worker.turn()
        while not turn.ended:
            able = next((each for each in worker.threads if self.ready(each)), None)
            if able is not None:
                self.step(able)
            elif self.ready(turn, Fate.IMPATIENT):
                self.step(turn, Fate.IMPATIENT)
            else:
                return True
        return turn.result is None or turn.result.made_progress or turn.result.in_flight

    def kill(self, worker: Worker) -> None:
        for stepper in list(worker.threads):
            self._risk(stepper)
            if (claim := self.store.claims.get(stepper)) is not None:
                self.repeats.allow(claim.answered.union(*(request.ids for request in claim.in_flight)))
            elif (past := self.store.past.get(stepper)) is not None:
                self.late += past.in_flight
            stepper.kill()
        worker.turning = None
        worker.relay = self.relay(worker)

    def finish(self) -> None:
        while threads := [each for worker in self.workers for each in worker.threads]:
            able = [each for each in threads if self.ready(each)] or [
                each for each in threads if self.ready(each, Fate.IMPATIENT)
            ]
            assert able, "all wait for one another"
            for each in able:
                if self.ready(each, Fate.IMPATIENT):
                    self.step(each, Fate.IMPATIENT if each.point is Point.LANDING else Fate.GO)

    def quiet(self, max_turns: int = 40) -> None:
        self.finish()
        for _ in range(max_turns):
            if not sum([self.rush(worker) for worker in self.workers]):
                return
        self.ledger.broken.append("the workers come to no end")

    # Pub/Sub.

    def send(self, request: Request) -> None:
        """Accept a request. Its tasks are checked here, its publishes in `execute`."""
        claim = self.store.claim_of(here())
        worker: Any = here().crew
        request.sender, request.process = worker, worker.relay
        claim.in_flight.append(request)
        # A failure says nothing about a row that was written since it was locked: the task is tried again.
        touched = self.ledger.touched
        fresh = {id for id, locked_at in claim.in_vain.items() if id in touched and touched[id] > locked_at}
        if again := claim.answered.intersection(request.ids) - fresh:
            self.ledger.broken.append(f"{sorted(again)} tried again in the same claim")
        if len(request.keys) > 1:
            self.ledger.broken.append(f"{request.ids} are of several keys")
        self.ledger.check_order(request)
        if claim.holds:
            self.ledger.check_heads(request, claim.heads_at)

    def _risk(self, stepper: Stepper, *, landed: bool = False) -> None:
        if (claim := self.store.claims.get(stepper) or self.store.past.get(stepper)) is not None:
            for id in claim.ids:
                row = self.store.rows.get(id)
                if landed or (row is not None and row.sent_at is not None):
                    self.ledger.tasks[id].risked = True

    def _answer(self, claim: Claim, fate: Fate) -> bool:
        if fate is Fate.ABORT:
            self.store.lose(claim)
            return False
        request = claim.in_flight[0]
        if fate in (Fate.LATE, Fate.ODD):
            self.late.append(request)
            code = grpc.StatusCode.DEADLINE_EXCEEDED if fate is Fate.LATE else grpc.StatusCode.DATA_LOSS
        elif fate is Fate.FAIL:
            code = grpc.StatusCode.UNAVAILABLE
        elif fate is Fate.MISSING and not request.executed:
            code = grpc.StatusCode.NOT_FOUND
        else:
            code = self.execute(request)
            if fate is Fate.EXECUTED:
                return False
            if fate is Fate.LANDED:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
        claim.in_flight.remove(request)
        if code is not grpc.StatusCode.OK and (request.executed or request in self.late):
            self.repeats.allow(request.ids)
        if code is not grpc.StatusCode.INVALID_ARGUMENT or len(request.ids) == 1:  # else it goes out again, in parts
            claim.answered.update(request.ids)
            if code is not grpc.StatusCode.OK and claim.locked_at is not None:
                claim.in_vain |= dict.fromkeys(request.ids, claim.locked_at)
        self.records.answered(request, code)
        request.answer(code)
        return True

    def execute(self, request: Request) -> grpc.StatusCode:
        if any(self.ledger.tasks[id].bad for id in request.ids if id in self.ledger.tasks) and not request.executed:
            return grpc.StatusCode.INVALID_ARGUMENT
        if not request.executed:
            request.executed = True
            self.ledger.check_order(request)
            for id in request.ids:
                self.ledger.published.append(id)
                task = self.ledger.tasks[id]
                if task.once:
                    if task.published > task.retried:
                        self.ledger.broken.append(f"{id} is published again, and was to be sent at most once")
                elif task.published and not self.repeats.may(id, request.process, request.sender.clock()):
                    self.ledger.broken.append(f"{id} is published again without a cause")
                task.published += 1
                if task.available_at is not None and task.available_at > self.store.now:
                    self.ledger.broken.append(f"{id} is published before its time")
        return grpc.StatusCode.OK

    def settle(self) -> None:
        """Let all faults end, and check that nothing is lost: first by itself, then with an operator's help."""
        for seconds in (0, 1, 11, 400, LONGEST_BACKOFF, 2 * LONGEST_BACKOFF, LONGEST_BACKOFF):
            self.wait(seconds)
            self.quiet()
            if self._unsent() == self._dead():
                break
        self.ledger.check_all_sent(but_held=True)
        for _ in self.ledger.tasks:  # one key may have as many that are bad
            if not self._unsent():
                break
            for id in self._dead():
                self.retry(id)
            self.wait(LONGEST_BACKOFF)
            self.quiet()
        self.ledger.check_all_sent(but_held=False)

    def _unsent(self) -> list[str]:
        return [id for id, row in self.store.rows.items() if row.sent_at is None]

    def _dead(self) -> list[str]:
        return [id for id, row in self.store.rows.items() if is_dead(row)]

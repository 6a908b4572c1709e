"""The relay protocol as a state machine. It imports nothing of the product (docs/architecture/specification.md).

A `State` is a value. `Protocol.steps` yields every step that the protocol allows in a state, with the next state. Each
step has a guard, which is the condition around its `yield`, and an effect. A step that breaks a promise sets `broken`.
There is no clock: a task becomes due at any moment, and a lock is lost at any moment.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.specification.state import (  # isort: skip
    ABSENT, DEAD, DEFERRED, EVENTS, FAULTS, GONE, NO_ANSWER, NOT_DUE, NOT_UNSENT, OPERATOR, PUBLISHED, READY, RETRYING,
    SCHEDULED, SENDABLE, SENT, Batch, Row, Seen, State, Worker,
)  # fmt: skip

# The promises. Those with a name are in docs/guarantees.md, in other words.
LOST = "A committed task is published at least once."  # OUT-LOSS-2
MARK = "The worker sets SentAt only after Pub/Sub has returned a message ID."  # OUT-LOSS-3
AGAIN = "A worker does not publish a task again that it knows to be published."  # OUT-TWICE-2
ORDER = "Tasks of an ordering key are published in commit order."  # OUT-ORDER-1
EARLY = "A task is not published before it is due."  # OUT-ORDER-2
CAUSE = "Each duplicate has a cause: a fault explains at most one more message of a task."
CANCELLED = "A cancelled task is not published again."  # OUT-CANCEL-1
ROUTED = "A task that is registered after all workers have read a route is not published to the former destination."
RELEASED = "No commit leaves the first unsent task of its key deferred, unless the worker then reads the key again."
#: The steps of a healthy system. From every state, they lead to a state in which everything is sent.
HEALTHY = frozenset({"poll", "lock", "publish", "commit", "roll back", "mark again", "read again", "read route", "due"})

Step = tuple[tuple[object, ...], State]


@dataclass(frozen=True)
class Protocol:
    """A fleet, and optionally a rule that is taken out of the protocol."""

    keys: Sequence[str | None]  # of each task, in the order of their commits
    workers: int = 2
    batch_size: int = 2
    registered: int = 99  # tasks at the beginning
    scheduled: tuple[int, ...] = ()
    skip_dead: bool = False
    events: dict[str, int] = field(default_factory=dict)
    without: str = ""
    lost: str = LOST
    healthy: frozenset[str] = HEALTHY

    def canonical(self, s: State) -> State:
        """Return the state that stands for all with another order of workers, or with knowledge that no step needs."""
        knows = (tuple(each for each in worker.knows if s.see(each[0]).message == each) for worker in s.workers)
        workers = (worker._replace(knows=each) for worker, each in zip(s.workers, knows, strict=True))
        return s._replace(workers=tuple(sorted(workers)), late=tuple(sorted(s.late)))

    def begin(self) -> State:
        """Return the first state."""
        rows = (ABSENT if i >= self.registered else self._new(i) for i in range(len(self.keys)))
        return State(tuple(map(Row, rows)), (Worker(),) * self.workers, tuple(self.events.get(e, 0) for e in EVENTS))

    def is_done(self, s: State) -> bool:
        """Tell whether every task is sent, dead, behind a dead one of its key, or deleted."""
        unsent = {i for i, row in enumerate(s.rows) if row.state not in NOT_UNSENT and row.state != DEAD}
        return all(self.keys[i] and s.rows[self._queue(s, i)[0]].state == DEAD for i in unsent)

    def keeps(self, rule: str) -> bool:
        """Tell whether the protocol has this rule."""
        return rule != self.without

    def steps(self, s: State) -> Iterator[Step]:
        """Yield each step: what happens, to which worker or task, and the next state."""
        yield from self._outside(s)
        for w, worker in enumerate(s.workers):
            if worker.lives:
                if worker.route != s.route:
                    is_kept = self.keeps("a route does not end the doubt")
                    batches = tuple(each for each in worker.batches if is_kept or each.next != "mark_again")
                    yield ("read route", w), s.worker(w, route=s.route, batches=batches)
                yield from self._poll(s, w)
                for batch in worker.batches:
                    yield from getattr(self, "_" + batch.next)(s, w, batch)
                    for after in s.spend("lost lock") if batch.holds else ():
                        yield ("lost lock", w), after.batch(w, batch, batch._replace(holds=False))
                for after in s.spend("crash"):
                    yield ("crash", w), after.worker(w, lives=False, batches=(), knows=(), route=0)

    def _outside(self, s: State) -> Iterator[Step]:
        """Yield the steps of applications, time and operators, and requests that Pub/Sub executes late."""
        locked = s.locked if self.keeps("an operator waits for the lock") else set[int]()
        for after in s.spend("route"):
            yield ("route", s.route + 1), after._replace(route=s.route + 1)
        read = min((worker.route for worker in s.workers if worker.lives), default=s.route)
        for i, row in enumerate(s.rows):
            if row.state == ABSENT and (i == 0 or s.rows[i - 1].state != ABSENT):
                yield ("register", i), s.row(i, state=self._new(i), route=read)
            if row.state in (SCHEDULED, RETRYING) or (row.state == DEFERRED and self.keeps("a deferral ends")):
                yield ("due", i), self._due(s, i)
            for after in s.spend("retry") if row.state in (SENT, DEAD) and i not in locked else ():
                is_reset = row.state == SENT  # otherwise it asks for the same message, which may be in doubt
                reset = after.row(i, state=READY, resets=row.resets + is_reset, fresh=row.fresh and not is_reset)
                yield ("retry", i), reset
            for after in s.spend("cancel") if row.state not in NOT_UNSENT and i not in locked else ():
                gone = after.row(i, state=GONE)
                head = self._queue(gone, i)[:1] if self.keeps("a cancel releases the next task") else ()
                if locked.isdisjoint(head):
                    yield ("cancel", i), self._checked(s, self._release(gone, head), i)
        for n, request in enumerate(s.late):
            rest = s._replace(late=s.late[:n] + s.late[n + 1 :])
            yield ("execute late", request), self._receive(rest, request, late=True)

    def _poll(self, s: State, w: int) -> Iterator[Step]:
        """Read a snapshot: the ready tasks, and the first tasks of the keys that have a ready task."""
        if any(batch.next not in ("mark_again", "read_again") for batch in s.workers[w].batches):
            return  # two batches of one worker would be like those of two workers
        in_flight = {i for batch in s.workers[w].batches for i in batch.ids}
        busy = in_flight if self.keeps("tasks in doubt are no candidates") else set[int]()
        heads = self.keeps("a prefix begins at the key head")
        ready = [i for i, row in enumerate(s.rows) if row.state == READY]
        batches = [Batch((i,)) for i in ready if i not in busy and not (self.keys[i] and heads)]
        keys = {self.keys[i]: i for i in ready if heads and self.keys[i] not in {None, *(self.keys[j] for j in busy)}}
        batches += [self._of_key(s, self._queue(s, i)) for i in keys.values()]
        for batch in batches:
            is_needed = self.events.get(DEAD) or self.keys.count(self.keys[batch.ids[0]]) > 2  # by `_released`
            left = s.left[-len(OPERATOR) :] if is_needed else ()
            route = s.workers[w].route if self.keeps("a batch follows the route that its worker has read") else 0
            yield ("poll", w, *batch[:3]), s.start(w, batch._replace(left=left, route=route))

    def _of_key(self, s: State, queue: tuple[int, ...]) -> Batch:
        """Return the batch that sends the first tasks of a key, or that defers those behind a head that is not due."""
        sendable = next((n for n, i in enumerate(queue) if s.rows[i].state not in SENDABLE), len(queue))
        if sendable == 0:
            return Batch((queue[0], *(i for i in queue if s.rows[i].state == READY)), defers=True)
        n = min(sendable, self.batch_size)
        return Batch(queue[:n], release=tuple(i for i in queue[n:sendable][:1] if s.rows[i].state == DEFERRED))

    def _claim(self, s: State, w: int, batch: Batch) -> Iterator[Step]:
        """Lock the rows and read them again. Take those that the worker must publish or mark, as they are now."""
        if self.keeps("a claim waits for the locks of others") and s.locked & {*batch.ids, *batch.release}:
            return
        blocked, takes, answered = False, list[Seen](), list[Seen]()
        before = {seen.id: seen for seen in batch.answered if self.keeps("answers outlive a transaction attempt")}
        for i in batch.ids:
            now, seen = s.see(i), before.get(i)
            if seen and (seen.answer == PUBLISHED or seen._replace(answer="") == now):
                answered.append(seen)  # a failure counts only for the row as it was
            if now.state == GONE or (now.state == SENT and self.keeps("a sent row is skipped")):
                continue
            if seen and seen.answer == PUBLISHED:
                takes += [now] if self._is_version(seen, now) else []
            elif now.state in NOT_DUE and self.keeps("a row that is not due is skipped"):
                blocked |= self._blocks(s.rows[i])
            elif not (blocked and self.keeps("a row that is not due blocks those behind it")):
                takes.append(now)
        if batch.defers:
            blocked = s.rows[batch.ids[0]].state in NOT_DUE and self._blocks(s.rows[batch.ids[0]])
            blocked |= not self.keeps("a deferral reads the head again")
            takes = [s.see(i) for i in batch.ids[1:] if blocked and s.rows[i].state in SENDABLE]
        after = batch._replace(next="publish", holds=True, takes=tuple(takes), answered=tuple(answered))
        yield ("lock", w, batch.ids), s.batch(w, batch, after._replace(had_lost=len(answered) > 0))

    def _publish(self, s: State, w: int, batch: Batch) -> Iterator[Step]:
        """Publish the tasks before the first failure. Pub/Sub may execute a request without an answer later."""
        asked = {seen.id: seen.answer for seen in batch.answered}
        stop = next((i for i in batch.ids if asked.get(i, PUBLISHED) != PUBLISHED), len(self.keys))
        unasked = () if batch.defers else tuple(seen for seen in batch.takes if seen.id not in asked and seen.id < stop)
        s = s.breaks(ROUTED, any(s.rows[seen.id].route > batch.route for seen in unasked))
        for n in range(len(unasked) + 1):
            failing, stops = unasked[n : n + 1], self.keeps("a failure stops the key")
            ok = unasked[:n] if stops else unasked[:n] + unasked[n + 1 :]
            sent = self._learn(self._receive(s, [seen.id for seen in ok]), w, batch, ok)
            answered = (*batch.answered, *(seen._replace(answer=PUBLISHED) for seen in ok))
            if not failing:
                yield ("publish", w, n), sent.batch(w, batch, batch._replace(next="commit", answered=answered))
            for answer in (RETRYING, DEAD, NO_ANSWER) if failing else ():
                for after in sent.spend(answer):
                    rest = (tuple(seen.id for seen in unasked[n:]),) if answer == NO_ANSWER else ()
                    news = batch._replace(next="commit", answered=(*answered, failing[0]._replace(answer=answer)))
                    yield (answer, w, n), after._replace(late=(*after.late, *rest)).batch(w, batch, news)

    def _receive(self, s: State, ids: Iterable[int], *, late: bool = False) -> State:
        """Let Pub/Sub receive tasks."""
        used = sum(self.events.get(event, 0) - s.left[n] for n, event in enumerate(FAULTS))
        for i in ids:
            row, before = s.rows[i], [s.rows[j] for j in range(i) if self.keys[i] and self.keys[j] == self.keys[i]]
            is_first = all(each.messages or each.excused or each.state == GONE for each in before)
            s = s.breaks(ORDER, row.messages == 0 and not is_first).breaks(CAUSE, row.messages > row.resets + used)
            s = s.row(i, messages=row.messages + 1, fresh=row.fresh or not late)
        return s

    def _learn(self, s: State, w: int, batch: Batch, seen: Iterable[Seen]) -> State:
        """Let a worker get the answer that tasks are published."""
        for each in seen:
            s = s.breaks(AGAIN, each.message in s.workers[w].knows).breaks(EARLY, each.state in NOT_DUE)
            s = s.breaks(CANCELLED, s.rows[each.id].state == GONE and batch.holds)
        return s.worker(w, knows=tuple(sorted({*s.workers[w].knows, *(each.message for each in seen)})))

    def _commit(self, s: State, w: int, batch: Batch) -> Iterator[Step]:
        """Write all marks or none. If the answer to the commit is lost, the published tasks are in doubt."""
        again = batch._replace(next="claim", holds=False)
        if not batch.holds:
            yield ("roll back", w), s.batch(w, batch, again)
            return
        ended = s.batch(w, batch)
        marked = self._marked(ended, batch)
        yield ("commit", w, batch.ids), marked.start(w, *self._reads(batch))
        for after in s.spend("abort"):
            yield ("abort", w), after.batch(w, batch, again)
        is_in_doubt = self.keeps("doubt is remembered") and any(seen.answer == PUBLISHED for seen in batch.answered)
        doubt = [again._replace(next="mark_again", takes=(), had_lost=True, left=(), route=0)] * is_in_doubt
        for written in (ended, marked):
            for after in written.spend("unknown commit"):
                yield ("unknown commit", w, written is marked), after.start(w, *doubt)

    def _marked(self, s: State, batch: Batch) -> State:
        """Return the state with the marks. The tasks behind a failed one are deferred until it is due."""
        before, answers, marked = s, {seen.id: seen.answer for seen in batch.answered}, set[int]()
        is_blocked = batch.defers and s.rows[batch.ids[0]].state != READY
        for i, *_ in batch.takes:
            answer = answers.get(i, "")
            is_skipped = answer == DEAD and self.skip_dead
            if answer == PUBLISHED or not (batch.defers or self.keeps("only published tasks are marked")):
                s = self._send(s, i)
            elif is_blocked:
                s = s.row(i, state=DEFERRED)
            elif answer in (RETRYING, DEAD):
                s = s.row(i, state=answer, excused=s.rows[i].excused or is_skipped)
                is_blocked = not is_skipped
            else:
                continue
            marked.add(i)
        return self._released(before, s, batch, (*batch.ids, *batch.release), marked)

    def _mark_again(self, s: State, w: int, batch: Batch) -> Iterator[Step]:
        """Mark tasks in doubt in a transaction that publishes nothing. It is tried until it works."""
        published = {seen.id: seen for seen in batch.answered if seen.answer == PUBLISHED}
        behind = [i for i in batch.ids if i > max(published)][:1]
        after, rows = s.batch(w, batch), [*published, *behind, *batch.release]
        for i, seen in published.items():
            now, holds = s.see(i), self.keeps("a deferral does not end the doubt")
            if now.state not in NOT_UNSENT and self._is_version(seen, now) and (holds or now.state == seen.state):
                after = self._send(after, i)
        if s.locked.isdisjoint(rows):
            after = self._released(s, after, batch, rows).start(w, *self._reads(batch))
            yield ("mark again", w, tuple(published)), after
        for after in s.spend("give up"):
            forgets = {seen.message for seen in published.values()}
            knows = tuple(each for each in s.workers[w].knows if each not in forgets)
            yield ("give up", w), after.worker(w, knows=knows).batch(w, batch)

    def _reads(self, batch: Batch) -> list[Batch]:
        """Return the batch that reads the key again, if that is needed."""
        is_needed = batch.had_lost and self.keys[batch.ids[0]] and self.keeps("a worker reads a key again")
        return [Batch(batch.ids[:1], next="read_again")] if is_needed else []

    def _read_again(self, s: State, w: int, batch: Batch) -> Iterator[Step]:
        """Release the key head. Other workers may have deferred it while the worker had lost its locks."""
        head = self._queue(s, batch.ids[0])[:1]
        if s.locked.isdisjoint(head):
            yield ("read again", w), self._release(s.batch(w, batch), head)

    def _new(self, i: int) -> str:
        return SCHEDULED if i in self.scheduled else READY

    def _blocks(self, row: Row) -> bool:
        return row.state not in NOT_UNSENT and not (self.skip_dead and row.state == DEAD)

    def _queue(self, s: State, task: int) -> tuple[int, ...]:
        """Return the unsent tasks of the key of a task that may block it, in order."""
        key = self.keys[task]
        return tuple(i for i, row in enumerate(s.rows) if key and self.keys[i] == key and self._blocks(row))

    def _due(self, s: State, i: int) -> State:
        """Make a task ready. No task is deferred for longer than its head."""
        is_head = s.rows[i].state != DEFERRED
        for j in (i, *(j for j in self._queue(s, i) if is_head and s.rows[j].state == DEFERRED)):
            s = s.row(j, state=READY)
        return s

    def _is_version(self, seen: Seen, now: Seen) -> bool:
        """Whether the row still asks for the message that was published."""
        return seen.times_sent == now.times_sent or not self.keeps("a mark is for one version")

    def _send(self, s: State, i: int) -> State:
        return s.breaks(MARK, not s.rows[i].fresh).row(i, state=SENT, times_sent=s.rows[i].times_sent + 1)

    def _release(self, s: State, rows: Iterable[int], marked: Iterable[int] = ()) -> State:
        """Make the first unsent one of these rows ready, if it is deferred."""
        head = next((i for i in rows if self._blocks(s.rows[i])), None)
        if head is None or head in marked or s.rows[head].state != DEFERRED:
            return s
        return s.row(head, state=READY)

    def _released(self, old: State, s: State, batch: Batch, rows: Iterable[int], marked: Iterable[int] = ()) -> State:
        """Release the key head, if the commit has locked it."""
        s = self._release(s, rows, marked) if self.keeps("a commit releases the next task") else s
        is_excused = batch.left not in ((), s.left[-len(OPERATOR) :])  # the page says what an operator may cause
        return s if is_excused or self._reads(batch) else self._checked(old, s, batch.ids[0])

    def _checked(self, old: State, s: State, i: int) -> State:
        """Note a new key head that is deferred."""
        before, now = ([(j, each.rows[j].state) for j in self._queue(each, i)[:1]] for each in (old, s))
        return s.breaks(RELEASED, before != now and any(state == DEFERRED for _, state in now))

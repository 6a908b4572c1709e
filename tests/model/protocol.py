"""The relay's protocol as a transition system: workers, rows, locks, requests, and the faults of each.

One step is one thing that Spanner, Pub/Sub or a worker does and others can see. Times are left out: a row that is put
off becomes due at any moment. `RULES` are the rules of docs/architecture/relay.md; without one of them the protocol is
another one, which `explore` shows to be wrong.
"""

from collections.abc import Collection, Iterator
from enum import IntEnum
from itertools import combinations
from typing import NamedTuple


class Row(IntEnum):
    ABSENT, ROLLED_BACK, DUE, LATER, SENT, DEAD = range(6)


class At(IntEnum):
    IDLE, POLLED, LOCKS, PUBLISHES, ASKED, COMMITS = range(6)


class Outcome(IntEnum):
    """A worker's knowledge of a task that it tried."""

    SENT, FAILED, OUTAGE, BAD = range(4)


#: The rules of the protocol, each with the invariant that breaks without it.
RULES = {
    "exclusive": "duplicate",  # the lock query locks exclusively
    "read again": "duplicate",  # SentAt is read again under the lock
    "answer": "loss",  # a row is marked after the answer of Pub/Sub
    "no answer": "loss",  # no answer is no success
    "one transaction": "duplicate",  # the transaction that has the lock writes the mark
    "re-run": "duplicate",  # the next transaction attempt remembers published tasks
    "doubts": "duplicate",  # the worker remembers published tasks when a commit fails or its outcome is unknown
    "key head": "order",  # a key is sent from its first unsent task on, whatever the poll saw
    "not due": "order",  # under the lock a task that is not due stops its key
    "failure": "order",  # a failed task stops its key, also in the next transaction attempt
    "committed": "no commit",  # only committed rows are read
}


class Worker(NamedTuple):
    """A worker: `seen` by its poll, its `batch` as `read`, tasks it `tried`, the request it `asks`, its `doubts`."""

    at: At = At.IDLE
    seen: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    read: tuple[Row, ...] = ()  # the batch as the lock query returned it
    holds: bool = False
    tried: tuple[tuple[int, Outcome], ...] = ()
    asks: tuple[int, ...] = ()
    doubts: tuple[int, ...] = ()
    marks: bool = False  # the batch is of doubts, to be marked only


class State(NamedTuple):
    """The whole state. `late` are requests for which no caller waits; `faults` may still happen."""

    rows: tuple[Row, ...]
    published: tuple[int, ...]
    allowed: tuple[int, ...]  # how often each task may have been published
    workers: tuple[Worker, ...]
    late: tuple[tuple[int, ...], ...]
    faults: int
    broken: str = ""


class Config(NamedTuple):
    """A scope: the key of each task (or None), how many workers and faults, which tasks Pub/Sub refuses."""

    keys: tuple[str | None, ...]
    workers: int = 2
    faults: int = 1
    bad: frozenset[int] = frozenset()
    without: str = ""

    def keeps(self, rule: str) -> bool:
        assert rule in RULES
        return rule != self.without


def start(config: Config) -> State:
    tasks = len(config.keys)
    return State((Row.ABSENT,) * tasks, (0,) * tasks, (1,) * tasks, (Worker(),) * config.workers, (), config.faults)


def is_done(config: Config, state: State) -> bool:
    """Return whether nothing is left to send: tasks behind a dead task of their key are blocked."""
    held: set[str] = set()
    for key, row in zip(config.keys, state.rows, strict=True):
        if row is Row.DEAD and key is not None:
            held.add(key)
        if row in (Row.ABSENT, Row.DUE, Row.LATER) and key not in held:
            return False
    return True


def steps(config: Config, state: State) -> Iterator[tuple[bool, str, State]]:
    for task, row in enumerate(state.rows):
        if row is Row.ABSENT and _is_next(config, state, task):
            yield False, f"commit {task}", _row(state, task, Row.DUE)
            yield False, f"roll back {task}", _row(state, task, Row.ROLLED_BACK)
        if row is Row.LATER:
            yield False, f"{task} is due", _row(state, task, Row.DUE)
    for place, request in enumerate(state.late):
        rest = state._replace(late=state.late[:place] + state.late[place + 1 :])
        yield False, f"late {request}", _execute(config, rest, request)
        yield False, f"never {request}", rest
    for number, worker in enumerate(state.workers):
        for is_fault, name, after in _worker(config, state, number, worker):
            if not is_fault:
                yield False, f"{number} {name}", after
            elif state.faults:
                yield True, f"{number} {name}", after._replace(faults=state.faults - 1)


def _is_next(config: Config, state: State, task: int) -> bool:
    """Return whether a task may commit now: the place in a key is the order of the commits."""
    earlier = [each for each in range(task) if config.keys[each] == config.keys[task]]
    return config.keys[task] is None or all(state.rows[each] is not Row.ABSENT for each in earlier)


def _worker(config: Config, state: State, number: int, worker: Worker) -> Iterator[tuple[bool, str, State]]:
    yield from _STEPS[worker.at](config, state, number, worker)
    may_repeat = {*worker.asks, *_sent(worker)}
    if worker.at is not At.IDLE or worker.doubts:
        late = state.late + ((worker.asks,) if worker.asks else ())
        killed = _put(state, number, Worker())._replace(late=late)
        yield True, "is killed", _allow(killed, may_repeat | {*worker.doubts})
    if worker.holds:
        without = _put(state, number, worker._replace(holds=False))
        yield True, "loses its locks", _allow(without, may_repeat | {*_open(config, worker)})


def _idle(config: Config, state: State, number: int, worker: Worker) -> Iterator[tuple[bool, str, State]]:
    """Mark tasks in doubt, or poll: a poll may return a part only."""
    if worker.doubts:
        marks = worker._replace(at=At.LOCKS, batch=worker.doubts, marks=True)
        yield False, "marks", _put(state, number, marks)
        yield True, "forgets", _allow(_put(state, number, worker._replace(doubts=())), worker.doubts)
        return
    shown = (Row.DUE,) if config.keeps("committed") else (Row.DUE, Row.ABSENT)
    due = [task for task, row in enumerate(state.rows) if row in shown]
    for count in range(1, len(due) + 1):
        for seen in combinations(due, count):
            yield False, f"polls {seen}", _put(state, number, worker._replace(at=At.POLLED, seen=seen))


def _polled(config: Config, state: State, number: int, worker: Worker) -> Iterator[tuple[bool, str, State]]:
    for batch in _batches(config, state, worker.seen):
        yield False, f"takes {batch}", _put(state, number, worker._replace(at=At.LOCKS, seen=(), batch=batch))
    yield False, "finds nothing", _put(state, number, worker._replace(at=At.IDLE, seen=()))


def _batches(config: Config, state: State, seen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    parts = [(task,) for task in seen if config.keys[task] is None]
    for key in sorted({key for task in seen if (key := config.keys[task]) is not None}):
        run: list[int] = []
        of_key = [task for task, each in enumerate(config.keys) if each == key]
        if not config.keeps("key head"):
            of_key = [task for task in of_key if task in seen]
        for task in of_key:
            if state.rows[task] is Row.DUE or (state.rows[task] is Row.ABSENT and task in seen):
                run.append(task)
            elif state.rows[task] in (Row.LATER, Row.DEAD) and config.keeps("key head"):
                break
        if run:
            parts.append(tuple(run))
    yield from parts
    if len(parts) > 1:
        yield tuple(sorted(task for part in parts for task in part))


def _locks(config: Config, state: State, number: int, worker: Worker) -> Iterator[tuple[bool, str, State]]:
    others = {task for each in state.workers if each.holds for task in each.batch}
    if others & set(worker.batch) and config.keeps("exclusive"):
        yield True, "gets no lock", _failed(config, state, number, worker)
        return
    at = At.COMMITS if worker.marks else At.PUBLISHES
    read = tuple(state.rows[task] for task in worker.batch)
    yield False, f"locks {worker.batch}", _put(state, number, worker._replace(at=at, read=read, holds=True))
    yield True, "gets no lock", _failed(config, state, number, worker)


def _open(config: Config, worker: Worker) -> list[int]:
    """Return the tasks of a batch to publish, by their locked rows, the tasks of a key in order."""
    sendable = {Row.DUE, *([] if config.keeps("read again") else [Row.SENT])}
    sendable |= set() if config.keeps("committed") else {Row.ABSENT}
    tried = dict(worker.tried)
    stopped: set[str | None] = set()
    found = []
    for task, row in zip(worker.batch, worker.read, strict=True):
        key, outcome = config.keys[task], tried.get(task)
        if key in stopped:
            continue
        failed = outcome not in {None, Outcome.SENT} and config.keeps("failure")
        held = outcome is None and row in {Row.LATER, Row.DEAD} and config.keeps("not due")
        if key is not None and (failed or held):
            stopped.add(key)
        elif outcome is None and row in sendable:
            found.append(task)
    return found


def _publishes(config: Config, state: State, number: int, worker: Worker) -> Iterator[tuple[bool, str, State]]:
    """Return the next request of the batch: a task without a key, or the open tasks of one key."""
    left = _open(config, worker)
    if not left:
        yield False, "has no more", _put(state, number, worker._replace(at=At.COMMITS))
        return
    key = config.keys[left[0]]
    request = tuple(task for task in left if config.keys[task] == key) if key is not None else (left[0],)
    if config.bad & set(request) and len(request) > 1:
        request = request[:1]  # refused as a whole, nothing is published; then they go singly
    after = worker._replace(at=At.ASKED, asks=request)
    yield False, f"asks for {request}", _put(state, number, after)


def _asked(config: Config, state: State, number: int, worker: Worker) -> Iterator[tuple[bool, str, State]]:
    """Pub/Sub accepts a request or not, and answers or not."""
    request = worker.asks

    def answered(outcome: Outcome, of: State = state) -> State:
        tried = tuple(sorted({**dict(worker.tried), **dict.fromkeys(request, outcome)}.items()))
        return _put(of, number, worker._replace(at=At.PUBLISHES, asks=(), tried=tried))

    if config.bad & set(request):
        yield False, f"{request} is refused", answered(Outcome.BAD)
        return
    yield False, f"{request} is published", answered(Outcome.SENT, _execute(config, state, request))
    if not config.keeps("answer"):
        yield False, f"does not wait for {request}", answered(Outcome.SENT, state._replace(late=(*state.late, request)))
    silent = (Outcome.OUTAGE, Outcome.FAILED) if config.keeps("no answer") else (Outcome.SENT,)
    for outcome in silent:
        yield True, f"{request} fails, {outcome.name}", answered(outcome)
        executed = _allow(_execute(config, state, request), request)
        yield True, f"{request} is published, {outcome.name}", answered(outcome, executed)
        late = _allow(state._replace(late=(*state.late, request)), request)
        yield True, f"{request} may be late, {outcome.name}", answered(outcome, late)


def _commits(config: Config, state: State, number: int, worker: Worker) -> Iterator[tuple[bool, str, State]]:
    if not config.keeps("one transaction") and worker.holds:
        yield False, "gives the lock back", _put(state, number, worker._replace(holds=False))
    again = worker._replace(at=At.LOCKS, read=(), holds=False, tried=worker.tried if config.keeps("re-run") else ())
    if not worker.holds and config.keeps("one transaction"):
        yield False, "is aborted", _put(state, number, again)
        return
    done = _written(config, state, worker)
    if not config.keeps("exclusive"):  # the first one to commit wins
        lost = [each._replace(holds=each.holds and not set(each.batch) & set(worker.batch)) for each in done.workers]
        done = done._replace(workers=tuple(lost))
    doubts = tuple(each for each in worker.doubts if each not in worker.batch) if worker.marks else worker.doubts
    yield False, "commits", _put(done, number, Worker(doubts=doubts))
    aborted = _put(state, number, again)
    repeats = _sent(worker) if len(state.workers) > 1 else set()  # another one may be faster
    yield True, "is aborted by Spanner", _allow(aborted, repeats)
    yield True, "does not commit", _allow(_failed(config, state, number, worker), repeats)
    yield True, "commits without an answer", _failed(config, done, number, worker)


def _failed(config: Config, state: State, number: int, worker: Worker) -> State:
    """Give a batch up, and remember its published tasks."""
    doubts = {*worker.doubts, *_sent(worker)} if config.keeps("doubts") else set()
    return _put(state, number, Worker(doubts=tuple(sorted(doubts))))


def _written(config: Config, state: State, worker: Worker) -> State:
    rows, broken = list(state.rows), state.broken
    tried = dict.fromkeys(worker.batch, Outcome.SENT) if worker.marks else dict(worker.tried)
    stopped: set[str | None] = set()
    for task in worker.batch:
        key, outcome = config.keys[task], tried.get(task)
        if outcome is None or rows[task] in (Row.SENT, Row.ABSENT):
            continue
        if outcome is Outcome.SENT:
            rows[task] = Row.SENT
            if not state.published[task]:
                broken = broken or f"loss: {task} is marked and was not published"
        elif key not in stopped:
            rows[task] = {Outcome.BAD: Row.DEAD, Outcome.FAILED: Row.LATER}.get(outcome, rows[task])
            stopped |= {key} - {None}
    return state._replace(rows=tuple(rows), broken=broken)


def _execute(config: Config, state: State, request: tuple[int, ...]) -> State:
    published, broken = list(state.published), state.broken
    for task in request:
        if state.rows[task] in (Row.ABSENT, Row.ROLLED_BACK):
            broken = broken or f"no commit: {task} is sent"
        key = config.keys[task]
        before = [each for each in range(task) if key is not None and config.keys[each] == key]
        if any(not published[each] and state.rows[each] is not Row.ROLLED_BACK for each in before):
            broken = broken or f"order: {task} is sent before one of {before}"
        published[task] += 1
        if published[task] > state.allowed[task]:
            broken = broken or f"duplicate: {task} is sent again without a fault that explains it"
    return state._replace(published=tuple(published), broken=broken)


def _sent(worker: Worker) -> set[int]:
    return {task for task, outcome in worker.tried if outcome is Outcome.SENT}


def _allow(state: State, tasks: Collection[int]) -> State:
    allowed = tuple(count + (task in tasks) for task, count in enumerate(state.allowed))
    return state._replace(allowed=allowed)


def _row(state: State, task: int, row: Row) -> State:
    return state._replace(rows=(*state.rows[:task], row, *state.rows[task + 1 :]))


def _put(state: State, number: int, worker: Worker) -> State:
    return state._replace(workers=(*state.workers[:number], worker, *state.workers[number + 1 :]))


_STEPS = {
    At.IDLE: _idle, At.POLLED: _polled, At.LOCKS: _locks, At.PUBLISHES: _publishes, At.ASKED: _asked,
    At.COMMITS: _commits,
}  # fmt: skip

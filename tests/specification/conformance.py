"""Compare what workers did with the specification: each transaction must be a path of steps there.

The rows that a worker has locked, and what it remembers of the batch, are a state of the specification. So are the rows
after its marks. Between the two, the specification must allow to lock, to publish with these answers, and to commit. A
claim of an ordering key must be one that the specification allows after the same poll.

Between the transactions of all workers, in the order of their commit timestamps, a row changes only by steps of
applications, operators and time.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from tests.specification import state as spec
from tests.specification.protocol import AGAIN, MARK, ORDER, Protocol
from tests.specification.state import (
    DEAD,
    GONE,
    NO_ANSWER,
    PUBLISHED,
    READY,
    RETRYING,
    SENDABLE,
    SENT,
    Batch,
    Row,
    Seen,
    State,
)

#: A line of a trace, as `trace.py` writes it.
Step: TypeAlias = Mapping[str, Any]
#: The tasks of an ordering key in a claim, or a task without a key, and the tasks to release behind them.
Lane: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]

_PUBLISH = ("publish", NO_ANSWER, RETRYING, DEAD)
#: The steps of a transaction, by the step of the batch before it.
_PATHS = {
    "claim": (("lock",), _PUBLISH, ("commit",)), "mark_again": (("mark again",),), "read_again": (("read again",),)
}  # fmt: skip
_LEFT = (9,) * len(spec.EVENTS)


@dataclass
class Conformance:
    """What was compared, what was not because it is not specified, and the differences as texts."""

    workers: int = 0
    transactions: int = 0
    skipped: int = 0
    differences: list[str] = field(default_factory=list)


class Transaction(NamedTuple):
    """A transaction attempt: the rows as read under the lock, and their states and TimesSent after it."""

    at: datetime  # the commit timestamp, or the time of the lock if that is unknown
    who: str
    rows: Mapping[str, Step]
    after: Mapping[str, tuple[str, int]]
    is_committed: bool  # otherwise unknown


@dataclass
class _Batch:
    """A batch, and what its worker remembers of it."""

    claim: Step
    to: str  # the Pub/Sub topic, by the routes that its worker had read
    answers: dict[str, tuple[str, Any]] = field(default_factory=dict)  # with the version of the row then
    asked: dict[str, Any] = field(default_factory=dict)  # the versions of tasks in requests without an answer
    path: str = "claim"
    may_publish: bool = True  # until a transaction is, or may be, committed
    is_refused: bool = False
    lock: Step = field(default_factory=dict)  # of the current transaction attempt
    before: dict[str, tuple[str, Any]] = field(default_factory=dict)  # the answers at the lock
    marks: Mapping[str, str] = field(default_factory=dict)
    is_marked: bool = False  # in the current transaction attempt

    def is_published(self, id: str) -> bool:
        """Tell whether Pub/Sub has accepted the task."""
        return id in self.answers and self.answers[id][0] == PUBLISHED

    def lanes(self) -> list[Lane]:
        """Return what the current transaction locks. One that marks again locks published tasks and those behind."""
        if self.path == "read_again":
            return [((id,), ()) for id in self.lock["ids"]]
        tasks, releases = self.claim["tasks"], self.claim["releases"]
        if self.path == "mark_again":
            keys, ids = dict([*tasks, *releases]), self.lock["ids"]
            tasks = [(id, keys[id]) for id in ids if self.is_published(id)]
            releases = [(id, keys[id]) for id in ids if not self.is_published(id)]
        return _lanes(tasks, releases)

    def is_specified(self, lane: Lane) -> bool:
        """Tell whether the specification has tasks such as these."""
        return all(self.lock["rows"][id]["is_specified"] for id in chain(*lane) if id in self.lock["rows"])

    def objection(self, ids: Sequence[str]) -> str:
        """Return why the batch must not publish these tasks now, or an empty text."""
        rows, places = self.lock.get("rows", {}), {id: place for place, id in enumerate(ids)}
        if not places.keys() <= rows.keys() & dict(self.claim["tasks"]).keys():
            return "It has not claimed and locked all of them"
        if self.is_marked or not self.may_publish:
            return "It may only mark now"
        for lane in _lanes(self.claim["tasks"], ()):
            ours = [id for id in lane[0] if id in places] if self.is_specified(lane) else []
            earlier = lane[0][: lane[0].index(ours[-1])] if ours else ()
            unsent = {id for id in earlier if rows.get(id, {"state": GONE})["state"] in SENDABLE} - {*ours}
            times = [datetime.fromisoformat(rows[id]["created"]) for id in ours]
            is_sorted = ours == sorted(ours, key=places.__getitem__) and times == sorted(times)
            if not (is_sorted and all(map(self.is_published, unsent))):
                return ORDER
        return ""

    def state(self, lane: Lane) -> tuple[tuple[str | None, ...], State]:
        """Return the keys of a lane and the state before the transaction. The marks tell what a failure counted as."""
        ids = (*lane[0], *lane[1])
        rows = [self.lock["rows"].get(id, {"state": GONE, "times_sent": 0, "version": [None, None]}) for id in ids]
        seen: list[Seen] = []
        for n, (id, row) in enumerate(zip(lane[0], rows, strict=False)):
            answer, version = self.before.get(id, ("", None))
            if answer == PUBLISHED:
                seen.append(Seen(n, READY, row["times_sent"] if _version(row)[0] == version[0] else -1, PUBLISHED))
            elif answer and _version(row) == version:
                end = self.marks.get(id)
                seen.append(Seen(n, row["state"], row["times_sent"], end if end in (RETRYING, DEAD) else NO_ANSWER))
                break  # the later tasks of the request have no answer of their own
        places, defers = tuple(range(len(ids))), self.claim["kind"] == "defer"
        batch = Batch(places[: len(lane[0])], defers, places[len(lane[0]) :], self.path, answered=tuple(seen))
        known = tuple(Row(row["state"], row["times_sent"], messages=1, fresh=True) for row in rows)
        is_keyed = self.path == "read_again" or len(ids) > 1 or dict(self.claim["tasks"]).get(ids[0]) is not None
        return ("key" if is_keyed else None,) * len(ids), State(known, (spec.Worker((batch,)),), _LEFT)


def conform(steps: Iterable[Step]) -> Conformance:
    """Compare the steps of workers with the specification; those of each worker are in their order."""
    traces: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        traces[step["worker"]].append(step)
    found = Conformance(len(traces))
    replays = [_Replay(name, found).transactions(trace) for name, trace in traces.items()]
    transactions = sorted(chain.from_iterable(replays), key=lambda each: each.at)
    found.differences += _between(transactions)
    return found


class _Replay:
    """Replays the steps of one worker."""

    def __init__(self, worker: str, found: Conformance) -> None:
        self._worker, self._found = worker, found
        self._batches: dict[int, _Batch] = {}
        self._queues: dict[tuple[str, str], Sequence[tuple[str, str]]] = {}
        self._routes: Mapping[str, str] = {}
        self._knows: dict[str, Any] = {}  # the versions of messages that the worker knows to be published

    def transactions(self, trace: Iterable[Step]) -> Iterator[Transaction]:
        """Yield the transactions that are, or may be, committed. Note differences."""
        in_batch = {"lock": self._lock, "publish": self._publish, "answer": self._answer, "mark": self._mark}
        for step in trace:
            match step["step"]:
                case "route" | "poll":
                    self._read(step)
                case "claim":
                    self._claim(step)
                case "give up":
                    self._knows = {id: version for id, version in self._knows.items() if id not in step["ids"]}
                case "commit" | "fail":
                    yield from self._end(self._batches[step["batch"]], step)
                case name:
                    in_batch[name](self._batches[step["batch"]], step)
        for batch in self._batches.values():  # the worker has ended in this transaction
            yield from self._end(batch, {"step": "fail", "written": "unknown"})

    def _read(self, step: Step) -> None:
        if step["step"] == "route":
            self._routes = step["routes"]
        elif "batch" in step:
            batch = self._batches[step["batch"]]
            batch.path, batch.may_publish = "read_again", False
        else:
            self._queues[step["topic"], step["key"]] = step["queue"]

    def _claim(self, step: Step) -> None:
        self._batches[step["batch"]] = _Batch(step, self._routes.get(step["topic"], step["topic"]))
        if step["kind"] != "mark first":
            keys = dict(step["tasks"])
            for lane in _lanes(step["tasks"], step["releases"]):
                if (key := keys[lane[0][0]]) is not None:
                    queue = self._queues.get((step["topic"], key), ())
                    if not _is_polled(queue, lane, step["skips_dead"], defers=step["kind"] == "defer"):
                        self._differ(step["batch"], f"claims {lane[0]} and releases {lane[1]} after a poll of {queue}")

    def _lock(self, batch: _Batch, step: Step) -> None:
        batch.before = dict(batch.answers)
        batch.lock, batch.marks = {**step, "rows": {row["id"]: row for row in step["rows"]}}, {}
        batch.is_marked = False
        for row in step["rows"]:  # a failure counts only for the row as it was
            if not batch.is_published(row["id"]) and batch.answers.get(row["id"], ("",))[-1] != _version(row):
                batch.answers.pop(row["id"], None)

    def _publish(self, batch: _Batch, step: Step) -> None:
        if step.get("to", batch.to) != batch.to:
            self._differ(step["batch"], f"publishes to {step['to']}, but the routes of its worker lead to {batch.to}")
        if batch.claim["kind"] != "mark first":  # such a batch publishes after its commit
            if reason := batch.objection(step["ids"]):
                self._differ(step["batch"], f"publishes {step['ids']}. {reason}")
            batch.path = "claim"
            rows = batch.lock.get("rows", {})
            batch.asked |= {id: _version(rows[id]) for id in step["ids"] if id in rows}

    def _answer(self, batch: _Batch, step: Step) -> None:
        for id in step["results"].keys() & batch.asked.keys():
            answer, version = step["results"][id], batch.asked.pop(id)
            batch.answers[id] = answer, version
            if answer == PUBLISHED:
                if self._knows.get(id) == version[0]:
                    self._differ(step["batch"], f"publishes {id} again. {AGAIN}")
                self._knows[id] = version[0]

    def _mark(self, batch: _Batch, step: Step) -> None:
        batch.marks, batch.is_marked, rows, number = step["states"], True, batch.lock["rows"], step["batch"]
        is_first = batch.claim["kind"] == "mark first"
        for id in (id for id, state in batch.marks.items() if state == SENT):
            if rows[id]["is_specified"] if is_first else not batch.is_published(id):
                self._differ(number, f"marks {id} as sent. {MARK}")
        if is_first or batch.is_refused:
            self._found.skipped += len(batch.lanes())
            return
        specified = sum(map(batch.is_specified, batch.lanes()))
        self._found.transactions += specified
        self._found.skipped += len(batch.lanes()) - specified
        for text in self._compared(batch):
            self._differ(number, text)

    def _compared(self, batch: _Batch) -> Iterator[str]:
        """Yield how a transaction differs from the specification."""
        lanes, ids, claimed = batch.lanes(), {*batch.lock["ids"]}, batch.claim["tasks"] + batch.claim["releases"]
        if batch.path == "claim" and ids != dict(claimed).keys():
            yield f"locks {sorted(ids)} for a claim of {sorted(dict(claimed))}"
        if others := batch.marks.keys() - {*chain(*chain(*lanes))}:
            yield f"marks {sorted(others)}, which are not in this transaction"
        for lane in filter(batch.is_specified, lanes):
            keys, before = batch.state(lane)
            published = frozenset(n for n, id in enumerate(lane[0]) if batch.is_published(id))
            after = tuple(batch.marks.get(id, row.state) for id, row in zip(chain(*lane), before.rows, strict=True))
            ends = _ends(keys, batch.claim["skips_dead"], before, batch.path, published)
            if after not in ends:
                answers = {id: batch.answers[id][0] for id in lane[0] if id in batch.answers}
                allowed = " or ".join(_shown(lane, end) for end in sorted(ends)) or "no commit with these answers"
                yield (
                    f"before: {_shown(lane, [row.state for row in before.rows])}\nanswers: {answers}\n"
                    f"after: {_shown(lane, after)}\nallowed: {allowed}"
                )

    def _end(self, batch: _Batch, step: Step) -> Iterator[Transaction]:
        written = step["written"] if step["step"] == "fail" else "yes"
        if written == "yes" and not batch.is_marked:
            self._differ(step["batch"], "commits a transaction without the steps `lock` and `mark`")
        if batch.lock and written in ("yes", "unknown"):
            rows = batch.lock["rows"]
            after = {
                id: (batch.marks.get(id, row["state"]), row["times_sent"] + (batch.marks.get(id) == spec.SENT))
                for id, row in rows.items()
            }
            gone = {id: {"state": GONE} for id in batch.lock["ids"] if id not in rows}
            at = datetime.fromisoformat(step.get("at", batch.lock["now"]))
            who = f"{self._worker}, batch {batch.claim['batch']}"
            yield Transaction(at, who, rows | gone, after, written == "yes")
        is_published = any(map(batch.is_published, batch.answers))
        batch.lock, batch.is_marked = {}, False
        batch.path = "claim" if written == "no" and batch.may_publish and not is_published else "mark_again"
        batch.may_publish &= written == "no"
        batch.is_refused |= written == "refused"

    def _differ(self, batch: int, text: str) -> None:
        self._found.differences.append(f"{self._worker}, batch {batch}: {text}")


def _lanes(tasks: Iterable[tuple[str, str | None]], releases: Iterable[tuple[str, str | None]]) -> list[Lane]:
    lanes: dict[str, list[str]] = defaultdict(list)
    for id, key in tasks:
        lanes[f"task {id}" if key is None else f"key {key}"].append(id)
    behind: dict[str, list[str]] = defaultdict(list)
    for id, key in releases:
        behind[f"key {key}"].append(id)
    return [(tuple(ids), tuple(id for id in behind[name] if id not in ids)) for name, ids in lanes.items()]


def _is_polled(queue: Sequence[tuple[str, str]], lane: Lane, skip_dead: bool, *, defers: bool) -> bool:
    """Tell whether a poll that has read these first tasks of a key allows this claim."""
    ids = [id for id, _ in queue]
    rows = (*(Row(state) for _, state in queue), Row(READY))  # it has found a ready task, which may be behind them
    machine = Protocol(("key",) * len(rows), batch_size=len(lane[0]), skip_dead=skip_dead)
    for (name, _, *claim), _ in machine.steps(State(rows, (spec.Worker(),), _LEFT)):
        if name == "poll" and claim[1] == defers:
            batch = Batch(*claim)  # type: ignore[arg-type]  # fields in their order
            named = tuple(ids[n] for n in batch.ids if n < len(ids))
            behind = tuple(ids[n] for n in batch.release if n < len(ids))
            # A shortened prefix may name the next task although it is not deferred, and a deferral more tasks.
            following = (*ids[len(named) :][:1],)
            return named[0] == lane[0][0] if defers else named == lane[0] and lane[1] in (behind, following)
    return False


@lru_cache(10_000)
def _ends(
    keys: tuple[str | None, ...], skip_dead: bool, before: State, path: str, published: frozenset[int]
) -> frozenset[tuple[str, ...]]:
    """Return the states of the rows after all paths of a transaction with these published tasks."""
    machine = Protocol(keys, skip_dead=skip_dead, events=dict.fromkeys(spec.EVENTS, 99))
    ends = [before]
    for names in _PATHS[path]:
        ends = [after for s in ends for name, after in machine.steps(s) if name[0] in names and not after.broken]
        if names == _PUBLISH:
            ends = [s for s in ends if _published(s) == published]
    return frozenset(tuple(row.state for row in s.rows) for s in ends)


def _published(s: State) -> set[int]:
    return {seen.id for batch in s.workers[0].batches for seen in batch.answered if seen.answer == PUBLISHED}


@lru_cache(10_000)
def _later(state: str, times_sent: int) -> frozenset[tuple[str, int]]:
    """Return what a row can become without a worker.

    A replay also restores a sent task that was deleted, with one more TimesSent than before.
    """
    machine = Protocol((None,), events=dict.fromkeys(spec.EVENTS, 99))
    rows = [Row(state, times_sent), *([Row(READY, times_sent + 1)] if state == SENT else [])]
    unvisited, found = [State((row,), (), _LEFT) for row in rows], set[tuple[str, int]]()
    while unvisited:
        s = unvisited.pop()
        if s.rows[0][:2] not in found:
            found.add(s.rows[0][:2])
            unvisited += [after for _, after in machine.steps(s)]
    return frozenset(found)


def _between(transactions: Iterable[Transaction]) -> Iterator[str]:
    """Yield the changes of rows between transactions that are no steps of the specification."""
    #: CreatedAt, the row after its last commit, and what commits without an answer may have made of it at any time.
    known: dict[str, tuple[datetime | None, set[tuple[str, int]], set[tuple[str, int]]]] = {}
    for each in transactions:
        for id, row in each.rows.items():
            if row["state"] == GONE or not row["is_specified"]:
                known.pop(id, None)
                continue
            now, (created, last, unknown) = (row["state"], row["times_sent"]), known.get(id, (None, set(), set()))
            if created != datetime.fromisoformat(row["created"]):  # or it is registered again
                last, unknown = set(), set()
            if not each.is_committed:
                unknown = unknown | {now, each.after[id]}
            elif last and not any(now in _later(*state) for state in last | unknown):
                before = sorted(last | unknown)
                yield f"{each.who}: reads {id} as {now} at {each.at.isoformat()}\nby the steps in all files: {before}"
            known[id] = datetime.fromisoformat(row["created"]), {each.after[id]} if each.is_committed else last, unknown


def _version(row: Step) -> tuple[object, object]:
    """Return what differs between messages, and between rows. After a reset, equal bytes are another message."""
    message, whole = row["version"]
    return (message, row["times_sent"]), whole


def _shown(lane: Lane, states: Iterable[str]) -> str:
    return "[" + ", ".join(f"{id} {state}" for id, state in zip(chain(*lane), states, strict=True)) + "]"

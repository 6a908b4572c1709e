"""One read of what waits, and why, and from it what is wrong with the outbox: the most severe first.

A problem that another one explains is one of its effects: a topic is late because its circuit is open, or because the
head of a key is dead.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from outbox.base.values import counted, spoken
from outbox.program.terminal import SHOWN
from outbox.rows.backlog import COUNTS, Backlog, Line
from outbox.rows.task_table import TaskTable
from outbox.rows.workers import SeenWorker
from outbox.table.controls import LIMITS, NO_CONTROLS, TopicControls, stated
from outbox.table.controls import problems as invalid
from outbox_admin import operations
from outbox_admin.advice import is_hopeless
from outbox_admin.operations import Operation
from outbox_admin.schema.reshard import Resharding, RunningReshard
from outbox_admin.status.live_workers import lost, open_circuits, shards_without_worker
from outbox_admin.tasks.lookup import BlockedHead, ErrorCount, blocked_heads, errors

#: A topic is late after this many seconds. The monitors of k8s/ have limits of their own.
LATE_SECONDS = 60.0
#: Max heads of keys that `outbox status` reads, and max topics that a problem names as its effects.
HEADS, EFFECTS = 20, 3
#: Max operations, and max characters of the selection of each.
OPERATIONS, SELECTION = 100, 10_000
_STATES = ("pending", "retrying", "blocked")
#: What further problems of a kind are.
_KINDS = {
    "invalid_route": "invalid route", "circuit_open": "open circuit", "paused": "paused topic", "dead": "dead task",
    "at_limit": "limited topic", "blocked": "blocked topic", "late": "late topic",
    "interrupted": "interrupted operation",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Remedy:
    """What to do about a problem: a page of the console, or a form without fields (`/topic/...`), and the same command.

    `flags` of the command that are in capitals are for the person to fill in.
    """

    title: str
    path: str
    query: Mapping[str, str]
    command: str
    arguments: Sequence[str] = ()
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A problem. If `is_bad`, tasks are not sent in time, or at all. `topic` is None if it is about several topics.

    `error` is why tasks fail, `effects` are the problems that it explains, `by` is the change of an operator that
    caused it, if that is recorded. `number` is above 1 for the last one of a kind: so many more are not shown.
    """

    kind: str
    topic: str | None
    is_bad: bool
    text: str
    action: Remedy
    since: datetime | None = None
    effects: Sequence[str] = ()
    by: Operation | None = None
    number: int = 1
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What was read as of a backlog. `orphans` are shards without a worker, `blocked` heads that block tasks."""

    backlog: Backlog
    controls: Mapping[str, TopicControls]
    orphans: Sequence[int] | None
    errors: Sequence[ErrorCount]
    blocked: Sequence[BlockedHead]
    reshard: RunningReshard | None
    operations: Sequence[Operation]
    problems: Sequence[Problem]

    def topics(self, part: str = "", sort: str = "") -> list[str]:
        """Return the topics whose names contain a text: by name, by a figure, or those with a problem first."""
        lines, bad = self.backlog.topics(), {each.topic for each in self.problems}

        def rank(topic: str) -> tuple[object, ...]:
            line = lines.get(topic)
            if sort == "topic":
                return (topic,)
            if sort in (*COUNTS, "oldest"):
                figure = self.backlog.age(line) if sort == "oldest" else getattr(line, sort, 0)
                return (-figure, topic)
            return topic not in bad, not (line and line.dead + line.blocked), -(line.unsent if line else 0), topic

        return sorted((topic for topic in {*lines, *self.controls} if part.lower() in topic.lower()), key=rank)


def read(table: TaskTable, backlog: Backlog, heads: int = HEADS, *, topics: Collection[str] | None = None) -> Status:
    """Read what belongs to a backlog, with at most so many heads that block tasks. Raises NotReached, OutboxError.

    If the backlog is of some `topics`, problems of others are left out.
    """
    controls, orphans = table.controls(), shards_without_worker(table, backlog.workers, backlog.as_of)
    blocked = blocked_heads(table, backlog, heads) if backlog.everything.blocked else ()
    changed_by = _changes(table, backlog, controls)
    last = operations.latest(table, OPERATIONS, views=False, at=backlog.as_of, characters=SELECTION)
    problems = find(backlog, orphans=orphans, controls=controls, changed_by=changed_by, blocked=blocked, last=last)
    problems = [each for each in problems if not topics or each.topic is None or each.topic in topics]
    reshard = Resharding(table).progress()
    return Status(backlog, controls, orphans, errors(table, backlog), blocked, reshard, last, problems)


def _changes(table: TaskTable, backlog: Backlog, controls: Mapping[str, TopicControls]) -> dict[str, Operation]:
    """Return the operation that paused or limited each topic that waits for that. Raises NotReached, OutboxError."""
    found: dict[str, Operation] = {}
    limited = [line for line in _late(backlog) if _limits(controls.get(line.topic))]
    waiting = [
        *((line.topic, {"paused"}, ("pause", "resume", "controls")) for line in _paused(backlog)[:SHOWN]),
        *((line.topic, {*LIMITS}, ("controls",)) for line in limited[:SHOWN]),
    ]
    for topic, names, kinds in waiting:
        # One read for each kind, because many changes of another kind may be newer.
        reads = (operations.latest(table, SHOWN, operation=kind, topic=topic, at=backlog.as_of) for kind in kinds)
        for each in sorted(itertools.chain(*reads), key=lambda each: each.started_at, reverse=True):
            match operations.parsed(each.selection):
                case {"topics": dict(topics)} if (
                    isinstance(fields := topics.get(topic), dict) and names & fields.keys()
                ):
                    is_end = "paused" in names and fields["paused"] not in ([None, True], [False, True])
                    found |= {} if is_end else {topic: each}
                    break
    return found


def find(
    backlog: Backlog,
    *,
    orphans: Sequence[int] | None,
    controls: Mapping[str, TopicControls],
    changed_by: Mapping[str, Operation],
    blocked: Sequence[BlockedHead],
    last: Sequence[Operation] = (),
) -> list[Problem]:
    """Return the problems, each with the problems that it explains: those that are bad first.

    Among these, the first of each kind comes first, so that forty open circuits do not hide a dead head.
    """
    found = [
        *_of_workers(backlog, orphans), *_of_topics(backlog, controls, changed_by), *_of_keys(backlog, blocked),
        *_of_dead(backlog, blocked), *_of_operations(last, backlog.as_of),
    ]  # fmt: skip
    late: dict[int, list[Line]] = defaultdict(list)
    for line in _late(backlog):
        causes = (place for place, each in enumerate(found) if _explains(each, line, blocked))
        # A cause of the topic alone says more than a missing worker of some shards.
        late[min(causes, key=lambda place: found[place].kind == "shards_without_worker", default=-1)].append(line)
    for place, lines in late.items():
        if place >= 0:
            effects = [_lateness(backlog, line) for line in lines[:EFFECTS]]
            more = [f"{counted(len(lines) - EFFECTS, 'more topic')} late"] if len(lines) > EFFECTS else []
            found[place] = dataclasses.replace(found[place], is_bad=True, effects=[*effects, *more])
    found += [_of_late(backlog, line, controls, changed_by) for line in late[-1]]
    cut = [*_cut(found)]
    firsts = {(each.kind, each.is_bad): each for each in reversed(cut)}
    return sorted(cut, key=lambda each: (not each.is_bad, each is not firsts[each.kind, each.is_bad]))


def _cut(found: Sequence[Problem]) -> Iterator[Problem]:
    numbers = Counter(each.kind for each in found)
    seen: Counter[str] = Counter()
    for each in found:
        seen[each.kind] += 1
        if seen[each.kind] <= SHOWN:
            yield each
        elif seen[each.kind] == SHOWN + 1:
            left = numbers[each.kind] - SHOWN
            text = counted(left, f"more {_KINDS[each.kind]}")
            yield Problem(each.kind, None, each.is_bad, text, Remedy("Topics", "/", {}, "topics"), number=left)


def why_waiting(workers: Sequence[SeenWorker], topic: str, at: datetime, controls: TopicControls | None) -> str | None:
    """Return why due tasks of a topic are not published now: a pause, an open circuit with its next probe, a limit."""
    if controls and controls.paused:
        return "the topic is paused"
    for each in open_circuits(workers):
        if each.topic == topic:
            wait = (each.next_probe - at).total_seconds()
            probe = f"in {spoken(wait)}" if wait > 0 else "now"
            where = "" if each.workers == len(workers) else f" in {each.workers} of {len(workers)} workers"
            return f"the circuit of the topic is open{where} ({each.reason}), and the next probe is {probe}"
    limits = _limits(controls)
    return f"the topic has a limit of {limits}" if limits else None


def _of_workers(backlog: Backlog, orphans: Sequence[int] | None) -> Iterator[Problem]:
    known, action = lost(backlog.workers, backlog.silent), Remedy("Workers", "/workers", {}, "workers")
    since = max((each.seen_at for each in backlog.silent), default=None)
    if not backlog.workers:
        known = known or "No live worker, so no task is published"
        text = f"{known}. Pending: {_number(backlog.total, 'pending')}"
        yield Problem("no_worker", None, True, text, action, since)
    elif orphans:
        text = f"{counted(len(orphans), 'shard')} without a live worker: no task there is published"
        yield Problem("shards_without_worker", None, True, text, action)
    if known and backlog.workers:
        yield Problem("workers_died", None, False, known, action, since)


def _of_topics(
    backlog: Backlog, controls: Mapping[str, TopicControls], changed_by: Mapping[str, Operation]
) -> Iterator[Problem]:
    for topic, control in controls.items():
        if "publish_to" in invalid(control):
            text = f"{topic}: its route to {control.publish_to!r:.300} is invalid, so its tasks are not published"
            query = {"name": topic, "edit": "1"}
            action = Remedy("Change the route", "/topic", query, "topics unset", [topic, "route"])
            yield Problem("invalid_route", topic, True, text, action)
    for each in open_circuits(backlog.workers):
        control = controls.get(each.topic, NO_CONTROLS)
        route = f" (routed to {control.publish_to})" if control.publish_to else ""
        seconds = (backlog.as_of - each.since).total_seconds()
        text = f"{each.topic}{route}: circuit open for {spoken(seconds)}: {each.reason}"
        query, flags = {"name": each.topic}, {"reason": "TEXT"}
        action = Remedy("Probe now", "/topic/probe", query, "topics probe", [each.topic], flags)
        yield Problem("circuit_open", each.topic, False, text, action, each.since, error=each.reason)
    for line in _paused(backlog):
        by = changed_by.get(line.topic)
        tasks = ", ".join(_number(line, name, f"{name} task") for name in _STATES if getattr(line, name))
        query, flags = {"name": line.topic}, {"reason": "TEXT"}
        action = Remedy("Resume", "/topic/resume", query, "resume", [line.topic], flags)
        since = by and by.started_at
        yield Problem("paused", line.topic, False, f"{line.topic} is paused: {tasks}", action, since, by=by)
    for line in _late(backlog, at_limit=True):
        limits, wait = _limits(controls.get(line.topic)), spoken(backlog.age(line))
        text = f"{line.topic} is sent at its limit of {limits}: its oldest task has waited {wait}"
        by = changed_by.get(line.topic)
        yield Problem("at_limit", line.topic, False, text, _raise_limit(line.topic), line.oldest, by=by)


def _raise_limit(topic: str) -> Remedy:
    flags = {"rate": "N", "burst": "N", "reason": "TEXT"}
    return Remedy("Raise the limit", "/topic", {"name": topic, "edit": "1"}, "topics set", [topic], flags)


def _of_keys(backlog: Backlog, blocked: Sequence[BlockedHead]) -> Iterator[Problem]:
    """Yield for each topic with blocked tasks the head that blocks most of them."""
    for line in backlog.lines:
        if line.blocked:
            found = [each for each in blocked if each.topic == line.topic]
            text = f"{line.topic}: {_number(line, 'blocked', 'blocked task')}"
            text += f" behind the heads of {len(found)} ordering keys, most" if len(found) > 1 else ""
            yield _of_head(f"{text} behind", line.topic, found[0] if found else None)


def _of_head(text: str, topic: str, first: BlockedHead | None) -> Problem:
    page = Remedy("Blocked keys", "/blocked", {}, "list", flags={"state": "blocked", "topic": topic})
    if not first or not first.head:
        return Problem("blocked", topic, False, f"{text} {first.id if first else 'the heads of their keys'}", page)
    columns, state = first.head.columns, first.head.state
    error = f": {columns['LastError']:.200}" if columns["LastError"] else ""
    text = f"{text} {first.id} of the key {columns['OrderingKey']}, which is {state}{error}"
    name = "cancel" if is_hopeless(columns["LastError"]) else "retry"
    title, query = f"{name.capitalize()} the head", {"id": first.id}
    change = Remedy(title, f"/tasks/{name}", query, name, [first.id], {"reason": "TEXT"})
    action = change if state in ("dead", "retrying") else page
    is_dead, known = state == "dead", columns["LastError"] or ""
    return Problem("blocked", topic, is_dead, text, action, columns["CreatedAt"], error=known)


def _of_dead(backlog: Backlog, blocked: Sequence[BlockedHead]) -> Iterator[Problem]:
    """Yield one problem of all dead tasks, unless each is a head that blocks others."""
    total, heads = backlog.everything, sum(1 for each in blocked if each.head and each.head.state == "dead")
    if total.dead > heads:
        topics = [line.topic for line in sorted(backlog.lines, key=lambda line: -line.dead) if line.dead]
        of = f" of {topics[0]}" if len(topics) == 1 else f" of {len(topics)} topics, most of {topics[0]}"
        query = {"state": "dead"} | ({"topic": topics[0]} if len(topics) == 1 else {})
        action = Remedy("Dead tasks", "/tasks", query, "retry", flags={**query, "dry_run": True})
        yield Problem("dead", None, False, f"{_number(total, 'dead', 'dead task')}{of}", action)


def _of_operations(last: Sequence[Operation], now: datetime) -> Iterator[Problem]:
    for each in last:
        if each.state(now) == "interrupted":
            who = each.principal or "an unknown account"
            text = f"A {each.operation} by {who:.200} was interrupted after {counted(each.tasks or 0, 'task')}"
            action = Remedy("Continue or stop it", "/operation", {"id": each.id}, "operations continue", [each.id])
            yield Problem("interrupted", None, False, text, action, each.seen_at)


def _explains(problem: Problem, line: Line, blocked: Sequence[BlockedHead]) -> bool:
    if problem.kind == "blocked" and problem.topic == line.topic:
        states = {each.head.state for each in blocked if each.head and each.topic == line.topic}
        return not states.isdisjoint(("dead", "retrying"))
    of_topic = problem.kind in ("circuit_open", "invalid_route") and problem.topic == line.topic
    return of_topic or problem.kind in ("no_worker", "shards_without_worker")


def _of_late(
    backlog: Backlog, line: Line, controls: Mapping[str, TopicControls], changed_by: Mapping[str, Operation]
) -> Problem:
    """Return the problem of a topic that is late for no other known reason than, perhaps, its limit."""
    text, topic = _lateness(backlog, line), line.topic
    if limits := _limits(controls.get(topic)):
        text = f"{text}, and it has a limit of {limits}"
        return Problem("late", topic, True, text, _raise_limit(topic), line.oldest, by=changed_by.get(topic))
    flags = {"state": "pending", "topic": topic}
    action = Remedy("Open the topic", "/topic", {"name": topic}, "list", flags=flags)
    return Problem("late", topic, True, text, action, line.oldest)


def _lateness(backlog: Backlog, line: Line) -> str:
    return f"{line.topic} is late: its oldest task has waited {spoken(backlog.age(line))}"


def _limits(controls: TopicControls | None) -> str:
    return ", ".join(stated(controls or NO_CONTROLS, LIMITS))


def _late(backlog: Backlog, *, at_limit: bool = False) -> list[Line]:
    lines = [line for line in backlog.topics().values() if not line.paused and line.at_limit is at_limit]
    late = [line for line in lines if backlog.age(line) > LATE_SECONDS]
    return sorted(late, key=backlog.age, reverse=True)


def _paused(backlog: Backlog) -> list[Line]:
    lines = [line for line in backlog.topics().values() if line.paused and any(getattr(line, name) for name in _STATES)]
    return sorted(lines, key=lambda line: -line.pending)


def _number(line: Line, name: str, noun: str = "task") -> str:
    return f"{'at least ' if name in line.at_least else ''}{counted(getattr(line, name), noun)}"

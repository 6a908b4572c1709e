"""One read of what waits, and why, and from it what is wrong with the outbox: the most severe first."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from outbox.base.values import counted, spoken
from outbox.program.terminal import SHOWN
from outbox.rows.backlog import Backlog, Line
from outbox.rows.task_table import TaskTable
from outbox.rows.workers import Worker
from outbox.table.controls import LIMITS, NO_CONTROLS, TopicControls, stated
from outbox.table.controls import problems as invalid
from outbox_admin import operations
from outbox_admin.operations import Operation
from outbox_admin.schema.reshard import Progress, Resharding
from outbox_admin.status.live_workers import lost, open_circuits, shards_without_worker
from outbox_admin.tasks.lookup import BlockedHead, ErrorCount, blocked_heads, errors

#: A topic is late after this many seconds. The monitors of k8s/ have limits of their own.
LATE_SECONDS = 60.0
_STATES = ("pending", "retrying", "blocked")


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A problem. If `is_bad`, tasks are not sent in time, or at all. `topic` is None if it is about several topics."""

    kind: str
    topic: str | None
    is_bad: bool
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What was read as of a backlog. `orphans` are shards without a worker, `blocked` heads that block tasks."""

    backlog: Backlog
    controls: Mapping[str, TopicControls]
    orphans: Sequence[int] | None
    errors: Sequence[ErrorCount]
    blocked: Sequence[BlockedHead]
    reshard: Progress | None
    problems: Sequence[Problem]


def read(table: TaskTable, backlog: Backlog, heads: int = 1) -> Status:
    """Read what belongs to a backlog, with at most so many heads that block tasks. Raises NotReached, OutboxError."""
    controls, orphans = table.controls(), shards_without_worker(table, backlog.workers, backlog.as_of)
    blocked = blocked_heads(table, backlog, heads) if backlog.everything.blocked else ()
    paused_by = _pauses(table, backlog)
    problems = find(backlog, orphans=orphans, controls=controls, paused_by=paused_by, blocked=blocked)
    reshard = Resharding(table).progress()
    return Status(backlog, controls, orphans, errors(table, backlog), blocked, reshard, problems)


def _pauses(table: TaskTable, backlog: Backlog) -> dict[str, Operation]:
    """Return the operation that paused each topic with a backlog, if it is recorded. Raises NotReached, OutboxError."""
    found: dict[str, Operation] = {}
    for line in _paused(backlog)[:SHOWN]:
        for each in operations.latest(table, SHOWN, topic=line.topic, at=backlog.as_of):
            match operations.parsed(each.selection):
                case {"topics": {line.topic: {"paused": [_, is_paused]}}}:
                    found |= {line.topic: each} if is_paused is True else {}
                    break
    return found


def find(
    backlog: Backlog,
    *,
    orphans: Sequence[int] | None,
    controls: Mapping[str, TopicControls],
    paused_by: Mapping[str, Operation],
    blocked: Sequence[BlockedHead],
) -> list[Problem]:
    """Return the problems: those that are bad first, and of these a cause before its effects.

    `orphans` are shards without a worker, `blocked` heads that block tasks.
    """
    found = [*_of_workers(backlog, orphans), *_of_topics(backlog, controls, paused_by), *_of_tasks(backlog, blocked)]
    kinds = [problem.kind for problem in found]
    shown = [each for place, each in enumerate(found) if kinds[:place].count(each.kind) < SHOWN]
    return sorted(shown, key=lambda each: not each.is_bad)


def hold(workers: Sequence[Worker], topic: str, at: datetime, *, is_paused: bool) -> str | None:
    """Return why due tasks of a topic are not published now: a pause, or an open circuit with its next probe."""
    if is_paused:
        return "the topic is paused"
    for each in open_circuits(workers):
        if each.topic == topic:
            wait = (each.next_probe - at).total_seconds()
            probe = f"in {spoken(wait)}" if wait > 0 else "now"
            where = "" if each.workers == len(workers) else f" in {each.workers} of {len(workers)} workers"
            return f"the circuit of the topic is open{where} ({each.reason}), and the next probe is {probe}"
    return None


def _of_workers(backlog: Backlog, orphans: Sequence[int] | None) -> Iterator[Problem]:
    known = lost(backlog.workers, backlog.silent)
    if not backlog.workers:
        known = known or "No live worker, so no task is published"
        yield Problem("no_worker", None, True, f"{known}. Pending: {_number(backlog.total, 'pending')}")
    elif orphans:
        text = f"{counted(len(orphans), 'shard')} without a live worker: no task there is published"
        yield Problem("shards_without_worker", None, True, text)
    if known and backlog.workers:
        yield Problem("workers_died", None, False, known)


def _of_topics(
    backlog: Backlog, controls: Mapping[str, TopicControls], paused_by: Mapping[str, Operation]
) -> Iterator[Problem]:
    for topic, control in controls.items():
        if "publish_to" in invalid(control):
            text = f"{topic}: its route to {control.publish_to!r:.300} is invalid, so its tasks are not published"
            yield Problem("invalid_route", topic, True, text)
    late = {line.topic for line in _late(backlog)}
    for each in open_circuits(backlog.workers):
        control = controls.get(each.topic, NO_CONTROLS)
        route = f" (routed to {control.publish_to})" if control.publish_to else ""
        seconds = (backlog.as_of - each.since).total_seconds()
        text = f"{each.topic}{route}: circuit open for {spoken(seconds)}: {each.reason}"
        yield Problem("circuit_open", each.topic, each.topic in late, text)
    for line in _paused(backlog):
        pause = paused_by.get(line.topic)
        since = f" since {pause.started_at:%Y-%m-%d %H:%M}, by {pause.principal}" if pause else ""
        tasks = ", ".join(_number(line, name, f"{name} task") for name in _STATES if getattr(line, name))
        yield Problem("paused", line.topic, False, f"{line.topic} is paused{since}: {tasks}")

    for line in _late(backlog, at_limit=True):
        limits = ", ".join(stated(controls[line.topic], LIMITS))
        text = f"{line.topic} is sent at its limit of {limits}: its oldest task has waited {spoken(backlog.age(line))}"
        yield Problem("at_limit", line.topic, False, text)


def _of_tasks(backlog: Backlog, blocked: Sequence[BlockedHead]) -> Iterator[Problem]:
    total = backlog.everything
    if total.blocked:
        first = f", most behind {blocked[0].id}" if blocked else ""
        state = f", which is {blocked[0].head.state}" if blocked and blocked[0].head else ""
        text = f"{_number(total, 'blocked', 'blocked task')} behind the heads of ordering keys{first}{state}"
        yield Problem("blocked", None, state.endswith("dead"), text)
    if total.dead:
        topics = [topic for topic, line in backlog.topics().items() if line.dead]
        of = f" of {topics[0]}" if len(topics) == 1 else f" of {len(topics)} topics"
        yield Problem("dead", None, False, f"{_number(total, 'dead', 'dead task')}{of}")
    for line in _late(backlog):
        text = f"{line.topic} is late: its oldest task has waited {spoken(backlog.age(line))}"
        yield Problem("late", line.topic, True, text)


def _late(backlog: Backlog, *, at_limit: bool = False) -> list[Line]:
    lines = [line for line in backlog.topics().values() if not line.paused and line.at_limit is at_limit]
    late = [line for line in lines if backlog.age(line) > LATE_SECONDS]
    return sorted(late, key=backlog.age, reverse=True)


def _paused(backlog: Backlog) -> list[Line]:
    lines = [line for line in backlog.topics().values() if line.paused and any(getattr(line, name) for name in _STATES)]
    return sorted(lines, key=lambda line: -line.pending)


def _number(line: Line, name: str, noun: str = "task") -> str:
    return f"{'at least ' if name in line.at_least else ''}{counted(getattr(line, name), noun)}"

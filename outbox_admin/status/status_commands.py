"""`outbox status` and `workers`: unsent tasks by topic, what is wrong, and what the live workers do."""

import argparse
import dataclasses
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, TypeAlias

import outbox_admin as admin
from outbox.base.start import exit_on
from outbox.base.values import counted, shown, spoken
from outbox.errors import SettingError
from outbox.program.settings import SECONDS, flag_of, whole_number
from outbox.program.terminal import Escaped, as_json, bars, cell, joined, named, note, say, shortened, table
from outbox_admin import flags, value_types
from outbox_admin.advice import section
from outbox_admin.tasks.task_commands import error_table, follow

STATUS_DESCRIPTION = """\
List what is wrong, the most severe first: since when, who did it, what follows, and the
command to run. Then count the unsent tasks of each topic, and show the age of the oldest
one. A terminal shows the part that fits, the worst first.

The command takes no locks. It stops counting at 10,000 tasks of each shard and topic
(shown as >=), or earlier if many topics have many tasks. --exact counts all tasks.

    outbox status --watch
    outbox status --max-age 5m --max-pending 10000 \\
        --max-dead 0 || notify-on-call"""
WORKERS_DESCRIPTION = """\
List the live workers with their shards, their in-flight batches, and the settings that
differ from the defaults. A setting or a version that differs between live workers is
marked with *.

    outbox workers --check || notify-on-call
    outbox workers --json | jq '.workers[] | {id, version, utilization}'"""

WORKER_HEADS = ("WORKER", "HOST", "VERSION", "HEARTBEAT", "SHARDS", "IN FLIGHT", "UTILIZATION", "SETTINGS")
LINE_HEADS = ("PENDING", "RETRYING", "SCHEDULED", "BLOCKED", "DEAD", "IN/MIN", "SENT/MIN", "OLDEST", "NEXT DUE")
CIRCUITS = ("CIRCUIT", "TOPIC", "WORKERS", "SINCE", "NEXT PROBE", "ERROR")
#: The first cells of a row, and the line with its figures.
Row: TypeAlias = "tuple[Sequence[object], admin.rows.backlog.Line]"
#: Seconds between two updates of --watch.
REFRESH_SECONDS = 5.0
#: The columns that a narrow terminal can do without, those that it needs least first.
LEAST = ("NEXT DUE", "IN/MIN", "SCHEDULED", "RETRYING", "SENT/MIN", "BLOCKED", "DEAD")
NOTHING = "no unsent tasks, and no task sent in the last minute"
MAX_TASKS = whole_number(0, 1_000_000_000)
_CLEAR = "\x1b[H\x1b[2J"


def add(commands: Any) -> None:
    parser = flags.command(commands, "status", "unsent tasks by topic", STATUS_DESCRIPTION, run_status)
    add_topics(parser)
    flags.switch(parser, "--json", "Print one JSON object instead of a table")
    flags.switch(parser, "--watch", "Update every five seconds, until Ctrl-C")
    flags.switch(parser, "--exact", "Count all tasks, without a limit")
    text = "Exit code 1 if a task should first have been sent longer ago than this: {}"
    flags.add(parser, "--max-age", SECONDS, text, metavar="S")
    text = "Exit code 1 if more than N tasks are pending. --max-age and --max-pending ignore paused topics"
    flags.add(parser, "--max-pending", MAX_TASKS, text, metavar="N")
    text = "Exit code 1 if more than N tasks are dead, also in paused topics"
    flags.add(parser, "--max-dead", MAX_TASKS, text, metavar="N")
    parser = flags.command(
        commands, "workers", "live workers, their load and settings", WORKERS_DESCRIPTION, run_workers
    )
    flags.switch(parser, "--json", "Print one JSON object instead of a table")
    text = "Exit code 1 if a shard has no live worker, three died within the hour, or settings differ or are unknown"
    flags.switch(parser, "--check", text)


def add_topics(parser: argparse.ArgumentParser) -> None:
    """Add `--topic`, which may be given several times."""
    text = "Only this topic. Repeat it for several ones"
    flags.add(parser, "--topic", value_types.TOPIC, text, metavar="TOPIC", action="append", dest="topics")


def run_status(options: argparse.Namespace) -> int:
    """Print the backlog; return 0, or 1 if a limit is exceeded. Raises SettingError, NotReached, OutboxError."""
    given = _limits(options)
    if options.watch and given:
        raise SettingError(f"--watch has no exit code: pass {' and '.join(given)} without it")
    if options.watch:
        with exit_on(signal.SIGTERM, signal.SIGINT, code=0):
            _watch(flags.open_table(options), options)
    task_table = flags.open_table(options)
    backlog = _read(task_table, options)
    say(_rendered(task_table, backlog, options))
    beyond = _beyond(backlog, options)
    for sentence in beyond:
        note(sentence)
    return 1 if beyond else 0


def _read(task_table: flags.Table, options: argparse.Namespace) -> "admin.rows.backlog.Backlog":
    # Count far enough to decide whether --max-pending or --max-dead is exceeded.
    highest = max((each for each in (options.max_pending, options.max_dead) if each is not None), default=None)
    limit = None if highest is None else max(admin.rows.backlog.COUNT_LIMIT, highest + 1)
    return read_noted(task_table, options.topics, exact=options.exact, limit=limit)


def read_noted(task_table: flags.Table, only: Sequence[str] | None, **limits: Any) -> "admin.rows.backlog.Backlog":
    """Return the backlog, or that of some topics. Print a note if it does not have all topics, or they are unknown.

    Raises NotReached, OutboxError.
    """
    found = admin.rows.backlog.read(task_table, **limits)
    if not found.whole:
        topics = f"{admin.rows.backlog.MAX_TOPICS:,}"
        note(f"there are more than {topics} topics. Only the first {topics} are counted")
    if not only:
        return found
    if unknown := admin.editing.unknown(task_table, only):
        note(flags.unknown_topics(task_table, unknown))
    lines = [line for line in found.lines if line.topic in only]
    return dataclasses.replace(found, lines=lines, workers=[each.of_topics(only) for each in found.workers])


def _watch(task_table: flags.Table, options: argparse.Namespace) -> None:
    history: admin.last_hour.History | None = None

    def read() -> Escaped:
        nonlocal history
        backlog = _read(task_table, options)
        history = None if options.json else admin.last_hour.read(task_table, backlog, history)
        return _rendered(task_table, backlog, options, history)

    for text in follow(read, REFRESH_SECONDS):
        say(Escaped((_CLEAR if sys.stdout.isatty() and not options.json else "") + text))
        time.sleep(REFRESH_SECONDS)


def _beyond(backlog: "admin.rows.backlog.Backlog", options: argparse.Namespace) -> list[str]:
    found = []
    oldest = backlog.oldest
    if options.max_age is not None and oldest and (age := backlog.age(oldest)) > options.max_age:
        found.append(
            f"the oldest task has waited {spoken(age)} (topic {cell(oldest.topic)}), more than --max-age "
            f"{spoken(options.max_age)}"
        )
    elif options.max_age is not None and any(
        "pending" in line.at_least for line in backlog.lines if not (line.paused or line.at_limit)
    ):
        found.append("--max-age cannot be checked, because not all pending tasks are counted. Pass --exact")
    total = backlog.total
    for name, most in (("pending", options.max_pending), ("dead", options.max_dead)):
        if most is not None and (value := getattr(total, name)) > most:
            number = cell(_number(name, value, total.at_least))
            are = "task is" if number == "1" else "tasks are"
            found.append(f"{number} {are} {name}, more than --max-{name} {most:,}")
    if not backlog.whole and (given := _limits(options)):
        found.append(f"{' and '.join(given)} cannot be checked, because not all topics are counted")
    return found


def _limits(options: argparse.Namespace) -> list[str]:
    limits = {"--max-age": options.max_age, "--max-pending": options.max_pending, "--max-dead": options.max_dead}
    return [flag for flag, value in limits.items() if value is not None]


def _rendered(
    task_table: flags.Table,
    backlog: "admin.rows.backlog.Backlog",
    options: argparse.Namespace,
    history: "admin.last_hour.History | None" = None,
) -> Escaped:
    status = admin.problems.read(task_table, backlog, topics=options.topics)
    if options.json:
        return _json(status, options)
    screen = shutil.get_terminal_size() if sys.stdout.isatty() else None
    most, width = (screen.lines - 3, screen.columns) if screen else (math.inf, 10**9)
    cards = [[*_card(each, options)] for each in status.problems]
    # A line that is too long takes several. At least one card is shown.
    sizes = accumulate(sum(1 + len(line) // width for line in card) for card in cards)
    number = max(1, sum(size <= most * 0.6 for size in sizes))
    most -= sum(len(line) // width for card in cards[:number] for line in card)
    more = sum(each.number for each in status.problems[number:])
    parts = [
        as_of(backlog.as_of, backlog.workers),
        *(["", "PROBLEMS"] if cards else []),
        *(line for card in cards[:number] for line in card),
    ]
    others = {
        "the last hour": _curves(history) if history else "",
        "circuits": "" if screen else circuit_table(backlog.workers, backlog.as_of),  # a problem each
        "errors": error_table(status.errors) if status.errors else "",
        "reshard": cell(str(status.reshard or "")),
    }
    topics, left_out = _topics(status, max(4, (most - len(parts)) / (2 if any(others.values()) else 1)))
    left_out = [counted(more, "problem"), *left_out] if more else left_out
    parts += ["", *topics.split("\n")]
    for name, text in others.items():
        if text and len(parts) + text.count("\n") + 2 > most:
            left_out.append(name)
        elif text:
            parts += ["", *text.split("\n")]
    left = [f"Left out, because the terminal is small: {', '.join(left_out)}"] if left_out else []
    return joined(*map(Escaped, [*parts, *left]))


def _topics(status: "admin.problems.Status", most: float) -> tuple[Escaped, list[str]]:
    """Return the table of the topics, those with problems first, and what did not fit into `most` lines."""
    backlog, lines = status.backlog, status.backlog.topics()
    found = [lines[topic] for topic in status.topics() if topic in lines]
    kept = found if len(found) + 2 <= most else found[: int(most) - 2]
    rows: list[Row] = [((line.topic + (" (paused)" if line.paused else ""),), line) for line in kept]
    rows += [(("all",), backlog.total)] if rows else []
    text, left_out = figures_table(backlog, ("TOPIC",), rows)
    more = [counted(len(found) - len(kept), "topic")] if len(kept) < len(found) else []
    paused = any(line.paused for line in backlog.lines)
    remarks = ["The row `all` excludes paused topics from PENDING and OLDEST"] if paused else []
    return joined(text if rows else NOTHING, *remarks), [*more, *left_out]


def _curves(history: "admin.last_hour.History") -> Escaped:
    """Return the last hour of all topics as lines of bars, each with its max and its last value."""
    figures: list[tuple[str, admin.last_hour.Values, Callable[[float], str]]] = [
        ("registered/min", history.registered(), "{:,.0f}".format),
        ("published/min", history.published(), "{:,.0f}".format),
        ("failed/min", history.failed(), "{:,.0f}".format),
        ("pending", history.pending(), "{:,.0f}".format),
        ("oldest", history.oldest(), spoken),
        ("slowest p95", history.latency(), spoken),
    ]
    known = [(name, values, unit, [each for each in values if each is not None]) for name, values, unit in figures]
    last = admin.last_hour.latest
    rows = [(name, bars(values), unit(max(all)), last(values, unit)) for name, values, unit, all in known if all]
    return table(("LAST HOUR", "", "MAX", "LAST"), rows) if rows else Escaped("no worker has sent its history yet")


def _json(status: "admin.problems.Status", options: argparse.Namespace) -> Escaped:
    backlog, reshard = status.backlog, None
    if found := status.reshard:
        reshard = {"from": found.change.former, "to": found.change.target, "since": found.change.operation.started_at}
        reshard |= {"next_step": found.step.text, "waits_for": found.step.waits_for}
    topics = [{"topic": line.topic, "paused": line.paused, **fields(backlog, line)} for line in backlog.lines]
    total = {"as_of": backlog.as_of, "workers": len(backlog.workers), **fields(backlog, backlog.total)}
    why = {"problems": [_problem(each, options) for each in status.problems], "errors": status.errors}
    circuits = admin.live_workers.open_circuits(backlog.workers)
    return as_json({**total, "topics": topics, **why, "circuits": circuits, "reshard": reshard})


def _problem(problem: "admin.problems.Problem", options: argparse.Namespace) -> dict[str, Any]:
    names = ("kind", "topic", "is_bad", "text", "since", "effects", "number")
    by, action = problem.by, problem.action
    return {
        **{name: getattr(problem, name) for name in names},
        "advice": section(problem.error)[1] if problem.error else None,
        "by": by and {"operation": by.id, "principal": by.principal, "reason": by.reason},
        "command": flags.command_line(
            action.command, *action.arguments, **flags.database_flags(options), **action.flags
        ),
    }


def _card(problem: "admin.problems.Problem", options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of a problem: what is wrong, since when and by whom, what follows, what to do, the command."""
    by, found = problem.by, _problem(problem, options)
    yield cell(problem.text)
    who = f"by {by.principal}{f': {by.reason}' if by.reason else ''}" if by else ""
    since = f"since {problem.since:%Y-%m-%d %H:%M} UTC" if problem.since else ""
    if since or who:
        yield f"    {cell(', '.join(filter(None, [since, who])))}"
    yield from (f"    {cell(effect)}" for effect in problem.effects)
    if found["advice"]:
        yield f"    {found['advice']}"
    yield f"    $ {cell(found['command'])}"


def _figures(backlog: "admin.rows.backlog.Backlog", line: "admin.rows.backlog.Line") -> list[object]:
    age = spoken(backlog.age(line)) if line.oldest else "-"
    due = f"in {spoken((line.next_due - backlog.as_of).total_seconds())}" if line.next_due else "-"
    return [*(_number(name, getattr(line, name), line.at_least) for name in admin.rows.backlog.COUNTS), age, due]


def fields(backlog: "admin.rows.backlog.Backlog", line: "admin.rows.backlog.Line") -> dict[str, Any]:
    """Return the JSON fields of a line: counts, age in seconds, time, and the names of counts that stopped early."""
    age = round(backlog.age(line), 3) if line.oldest else None
    return {
        **{name: getattr(line, name) for name in admin.rows.backlog.COUNTS},
        "oldest_age": age,
        "next_due": line.next_due,
        "at_least": sorted(line.at_least),
    }


def figures_table(
    backlog: "admin.rows.backlog.Backlog", heads: Sequence[str], rows: Sequence[Row]
) -> tuple[Escaped, list[str]]:
    """Return a table with the figures of each row behind its first cells, and the columns that do not fit.

    A terminal does not show columns in which no row has anything.
    """
    heads = (*heads, *LINE_HEADS)
    cells = [[*first, *_figures(backlog, line)] for first, line in rows]
    if not sys.stdout.isatty():
        return table(heads, cells), []
    width, kept, left_out = shutil.get_terminal_size().columns, [*range(len(heads))], list[str]()
    empty = [head for at, head in enumerate(heads) if head in LEAST and all(row[at] in (0, "-") for row in cells)]
    for head in (*empty, *(each for each in LEAST if each not in empty)):
        if head not in empty:
            if sum(2 + max(len(cell(row[at])) for row in [heads, *cells]) for at in kept) - 2 <= width:
                break
            left_out.append(head)
        kept.remove(heads.index(head))
    return table([heads[at] for at in kept], [[row[at] for at in kept] for row in cells]), left_out


def _number(name: str, value: int, at_least: set[str]) -> object:
    return f">= {value:,}" if name in at_least else value


def as_of(at: datetime, workers: "Sequence[admin.rows.workers.SeenWorker]") -> str:
    """Return the first line of a command that shows what workers say."""
    return f"as of {shown(at)}, {counted(len(workers), 'live worker')}"


def circuit_table(workers: "Sequence[admin.rows.workers.SeenWorker]", now: datetime) -> Escaped:
    """Return a table of the circuits that are not closed, or an empty text."""
    rows = []
    for each in admin.live_workers.open_circuits(workers):
        wait = (each.next_probe - now).total_seconds()
        state, probe = ("open", f"in {spoken(wait)}") if wait > 0 else ("half-open", "now")
        since = f"{spoken((now - each.since).total_seconds())} ago"
        rows.append([state, each.topic, each.workers, since, probe, shortened(f"{each.reason}: {each.error}")])
    left_out = int(sum(worker.number("circuits_left_out") for worker in workers))
    more = [f"... and {left_out:,} more, which did not fit into the heartbeats"] if left_out else []
    return joined(*([table(CIRCUITS, rows)] if rows else []), *more)


def run_workers(options: argparse.Namespace) -> int:
    """Print the workers; return 0, or 1 if --check finds a problem. Raises SettingError, NotReached, OutboxError."""
    task_table = flags.open_table(options)
    now = task_table.now()
    rows = admin.rows.workers.rows_at(task_table, now)
    workers = [each for each in rows if each.is_live]
    differing = admin.live_workers.differing(workers)
    orphans = admin.live_workers.shards_without_worker(task_table, workers, now)
    listed = [table(WORKER_HEADS, [_cells(worker, differing) for worker in workers])] if workers else []
    circuits = circuit_table(workers, now)
    found = {"as_of": now, "workers": [_fields(worker) for worker in workers]}
    found |= {"differing": differing, "shards_without_worker": orphans}
    flags.answer(options, found, as_of(now, workers), *listed, *(["", circuits] if circuits else []))
    known = admin.live_workers.lost(workers, [each for each in rows if not each.is_live])
    problems = [*filter(None, [known]), *_problems(workers, differing, orphans)]
    for sentence in problems:
        note(sentence)
    return 1 if options.check and problems else 0


def _problems(
    workers: "Sequence[admin.rows.workers.SeenWorker]", differing: Mapping[str, list[str]], orphans: list[int] | None
) -> list[str]:
    """Return a sentence for each setting that differs, for workers without Info, and for shards without a worker."""
    found = [
        f"{flag_of(name)} differs between live workers: {', '.join(values)}"
        for name, values in differing.items()
        if name != "version"
    ]
    if silent := [worker.id for worker in workers if not worker.info]:
        found.append(f"{named(silent)}: an older version, so its shards and settings are unknown")
    if orphans:
        found.append(f"no live worker polls shards {admin.live_workers.runs(orphans)}")
    return found


def _cells(worker: "admin.rows.workers.SeenWorker", differing: Mapping[str, list[str]]) -> list[object]:
    age = f"{spoken(worker.age)} ago"
    if not worker.info:
        return [worker.id, "", "older", age, "", "", "", ""]
    version = worker.text("version") + ("*" if "version" in differing else "")
    names = sorted({*worker.settings, *differing} - {"version"})
    settings = [f"{name}={worker.settings.get(name, 'default')}{'*' if name in differing else ''}" for name in names]
    load = [int(worker.number("in_flight")), f"{worker.number('utilization'):.0%}"]
    return [
        worker.id,
        worker.text("host"),
        version,
        age,
        admin.live_workers.runs(worker.shards),
        *load,
        " ".join(settings),
    ]


def _fields(worker: "admin.rows.workers.SeenWorker") -> dict[str, Any]:
    reported: dict[str, Any] = {name: worker.text(name) for name in ("host", "version")}
    reported |= {name: worker.number(name) for name in ("in_flight", "utilization", "circuits_left_out")}
    reported |= {name: getattr(worker, name) for name in ("shards", "circuits", "settings")}
    known = {"id": worker.id, "started_at": worker.started_at, "seen_at": worker.seen_at, "age": round(worker.age, 3)}
    return known | (reported if worker.info else dict.fromkeys(reported))

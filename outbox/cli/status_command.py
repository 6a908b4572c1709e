"""`outbox status`: count unsent tasks by topic and priority."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from outbox import admin
from outbox.admin import flags
from outbox.base.values import counted, shown, spoken
from outbox.cli import error_tables
from outbox.errors import OutboxError, SettingError
from outbox.program.settings import SECONDS, whole_number
from outbox.program.signals import exit_on
from outbox.program.terminal import Escaped, as_json, bars, cell, joined, note, say, table

DESCRIPTION = """\
Count the unsent tasks of each topic and priority, and those registered (IN/MIN) and sent
in the last minute. Show the age of the oldest task, when the next scheduled or
retrying task will be due, the topics to which a live worker does not
publish because they fail (open circuits), and the errors of unsent tasks (of at most
1,000 tasks of each state). While `outbox schema reshard` is under way, show its next
step. At the end, list the problems, the most severe first.

The command reads the index at LOW priority and takes no locks. It stops counting at
10,000 tasks of each shard and topic (shown as >=), or earlier if many topics have many
tasks. --exact counts all tasks.

    outbox status --project my-project --instance main --database shop
    outbox status --watch ...
    outbox status --max-age 5m --max-pending 10000 --max-dead 0 ... || notify-on-call
    outbox status --json ... | jq '.topics[] | select(.dead > 0)'"""

#: Seconds between two updates of --watch.
REFRESH_SECONDS = 5.0
COUNT = whole_number(0, 1_000_000_000)
_CLEAR = "\x1b[H\x1b[2J"


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "status", "unsent tasks by topic and priority", DESCRIPTION, run)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    parser.add_argument("--watch", action="store_true", help="Update every five seconds, until Ctrl-C.")
    parser.add_argument("--exact", action="store_true", help="Count all tasks, without a limit.")
    text = "Exit code 1 if a task should first have been sent longer ago than this: "
    flags.add(parser, "--max-age", SECONDS, text + SECONDS.allowed, metavar="S")
    text = "Exit code 1 if more than N tasks are pending. --max-age and --max-pending ignore paused topics"
    flags.add(parser, "--max-pending", COUNT, text, metavar="N")
    text = "Exit code 1 if more than N tasks are dead, also in paused topics"
    flags.add(parser, "--max-dead", COUNT, text, metavar="N")


def run(options: argparse.Namespace) -> int:
    """Print the backlog; return 0, or 1 if a limit is exceeded. Raises SettingError, NotReached, OutboxError."""
    if options.watch and _limits(options):
        raise SettingError(f"--watch has no exit code: pass {' and '.join(_limits(options))} without it")

    if options.watch:
        with exit_on(signal.SIGTERM, signal.SIGINT, code=0):
            _watch(flags.open_table(options), options)
        return 0
    task_table = flags.open_table(options)
    backlog = _read(task_table, options)
    say(_rendered(task_table, backlog, options))
    beyond = _beyond(backlog, options)
    for sentence in beyond:
        note(sentence)
    return 1 if beyond else 0


def _read(task_table: "admin.table.TaskTable", options: argparse.Namespace) -> "admin.backlog.Backlog":
    # Count far enough to decide whether --max-pending or --max-dead is exceeded.
    highest = max((each for each in (options.max_pending, options.max_dead) if each is not None), default=None)
    limit = None if highest is None else max(admin.backlog.COUNT_LIMIT, highest + 1)
    return read_noted(task_table, exact=options.exact, limit=limit)


def read_noted(task_table: "admin.table.TaskTable", **limits: Any) -> "admin.backlog.Backlog":
    """Return the backlog. If it does not have all topics, print a note. Raises NotReached, OutboxError."""
    found = admin.backlog.read(task_table, **limits)
    if not found.whole:
        topics = f"{admin.backlog.MAX_TOPICS:,}"
        note(f"there are more than {topics} topics. Only the first {topics} are counted")
    return found


def _watch(task_table: "admin.table.TaskTable", options: argparse.Namespace) -> None:
    succeeded, history = False, None
    while True:
        try:
            backlog = _read(task_table, options)
            history = None if options.json else admin.history.read(task_table, backlog, history)
            text = _rendered(task_table, backlog, options, history)
        except admin.table.LayoutChanged:
            continue
        except OutboxError as error:
            if not succeeded:
                raise  # probably permanent, such as a missing table
            note(f"{error}. Retrying")
        else:
            succeeded = True
            say(Escaped((_CLEAR if sys.stdout.isatty() and not options.json else "") + text))
        time.sleep(REFRESH_SECONDS)


def _beyond(backlog: "admin.backlog.Backlog", options: argparse.Namespace) -> list[str]:
    """Return a sentence for each limit that is exceeded."""
    found = []
    oldest = backlog.oldest
    if options.max_age is not None and oldest and (age := backlog.age(oldest)) > options.max_age:
        found.append(
            f"the oldest task has waited {spoken(age)} (topic {cell(oldest.topic)}, priority "
            f"{oldest.priority}), more than --max-age {spoken(options.max_age)}"
        )
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
    """Return the flags of the limits that were given."""
    limits = {"--max-age": options.max_age, "--max-pending": options.max_pending, "--max-dead": options.max_dead}
    return [flag for flag, value in limits.items() if value is not None]


def _rendered(
    task_table: "admin.table.TaskTable",
    backlog: "admin.backlog.Backlog",
    options: argparse.Namespace,
    history: "admin.history.History | None" = None,
) -> Escaped:
    groups, progress = admin.tasks.errors(task_table, backlog), admin.reshard.Resharding(task_table).progress()
    problems = admin.problems.find(
        backlog,
        orphans=admin.workers.shards_without_worker(task_table, backlog.workers, backlog.as_of),
        controls=task_table.controls(),
        paused_by=admin.problems.pauses(task_table, backlog),
        blocked=admin.tasks.blocked_heads(task_table, backlog, 1) if backlog.everything.blocked else (),
    )
    if options.json:
        return _json(backlog, groups, progress, problems)
    parts: list[str] = [_text(backlog)]
    if history:
        parts += ["", _curves(history)]
    if groups:
        parts += ["", error_tables.text(groups)]
    if progress:
        change, step = progress
        parts += ["", change.describe(step)]
    if problems:
        parts += ["", table(("PROBLEM",), [[each.text] for each in problems])]
    return joined(*parts)


def _curves(history: "admin.history.History") -> Escaped:
    """Return the last hour of all topics as lines of bars, each with its max and its last value."""
    low, high = history.latency()
    failed = [sum(filter(None, values)) for values in zip(*history.failed().values(), strict=True)]
    figures: list[tuple[str, admin.history.Values, Callable[[float], str]]] = [
        ("registered/min", history.registered(), "{:,.0f}".format),
        ("published/min", history.published(), "{:,.0f}".format),
        ("failed/min", failed, "{:,.0f}".format),
        ("pending", history.pending(), "{:,.0f}".format),
        ("oldest", history.oldest(), spoken),
        ("latency p50", low, spoken),
        ("latency p95", high, spoken),
    ]
    known = [(name, values, unit, [each for each in values if each is not None]) for name, values, unit in figures]
    rows = [(name, bars(values), unit(max(all)), unit(all[-1])) for name, values, unit, all in known if all]
    return table(("LAST HOUR", "", "MAX", "LAST"), rows) if rows else Escaped("no worker has sent its history yet")


def _json(
    backlog: "admin.backlog.Backlog",
    groups: "Sequence[admin.error_groups.ErrorCount]",
    progress: "tuple[admin.reshard.Change, admin.reshard.Step] | None",
    problems: "Sequence[admin.problems.Problem]",
) -> Escaped:
    reshard = None
    if progress:
        change, step = progress
        reshard = {"from": change.former, "to": change.target, "since": change.operation.started_at}
        reshard |= {"next_step": step.text, "waits_for": step.waits_for}
    topics = [
        {"topic": line.topic, "priority": line.priority, "paused": line.paused, **fields(backlog, line)}
        for line in backlog.lines
    ]
    total = {"as_of": backlog.as_of, "workers": len(backlog.workers), **fields(backlog, backlog.total)}
    circuits = admin.workers.open_circuits(backlog.workers)
    return as_json(
        {**total, "topics": topics, "problems": problems, "errors": groups, "circuits": circuits, "reshard": reshard}
    )


#: The first cells of a row, and the line with its figures.
Row: TypeAlias = "tuple[Sequence[object], admin.backlog.Line]"
HEADS = ("PENDING", "RETRYING", "SCHEDULED", "BLOCKED", "DEAD", "IN/MIN", "SENT/MIN", "OLDEST", "NEXT DUE")


def _cells(backlog: "admin.backlog.Backlog", line: "admin.backlog.Line") -> list[object]:
    """Return the cells of a line, below HEADS."""
    age = spoken(backlog.age(line)) if line.oldest else "-"
    due = f"in {spoken((line.next_due - backlog.as_of).total_seconds())}" if line.next_due else "-"
    return [*(_number(name, getattr(line, name), line.at_least) for name in admin.backlog.COUNTS), age, due]


def fields(backlog: "admin.backlog.Backlog", line: "admin.backlog.Line") -> dict[str, Any]:
    """Return the JSON fields of a line: counts, age in seconds, time, and the names of counts that stopped early."""
    age = round(backlog.age(line), 3) if line.oldest else None
    return {
        **{name: getattr(line, name) for name in admin.backlog.COUNTS},
        "oldest_age": age,
        "next_due": line.next_due,
        "at_least": sorted(line.at_least),
    }


def _text(backlog: "admin.backlog.Backlog") -> Escaped:
    rows: list[Row] = [
        ((line.topic + (" (paused)" if line.paused else ""), line.priority), line) for line in backlog.lines
    ]
    total: list[Row] = [(("all", None), backlog.total)] if rows else []
    paused = any(line.paused for line in backlog.lines)
    remarks = ["The row `all` excludes paused topics from PENDING and OLDEST"] if paused else []
    none = "no unsent tasks, and no task sent in the last minute"
    return listing(backlog, ("TOPIC", "PRIORITY"), rows + total, none, *remarks)


def listing(
    backlog: "admin.backlog.Backlog", heads: Sequence[str], rows: Sequence[Row], none: str, *remarks: str
) -> Escaped:
    """Return a table with the figures of each row behind its first cells, or `none`, and the open circuits."""
    head = f"as of {shown(backlog.as_of)}, {counted(len(backlog.workers), 'live worker')}"
    cells = [[*first, *_cells(backlog, line)] for first, line in rows]
    figures = table((*heads, *HEADS), cells) if rows else none
    return joined(head, figures, *remarks, *error_tables.circuit_lines(backlog.workers, backlog.as_of))


def _number(name: str, value: int, at_least: set[str]) -> object:
    return f">= {value:,}" if name in at_least else value

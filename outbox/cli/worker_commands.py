"""`outbox workers`: which workers are live, what they do, and whether they agree."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from outbox import admin
from outbox.admin import flags
from outbox.base.values import counted, shown, spoken
from outbox.cli import error_tables
from outbox.program.terminal import as_json, named, note, say, table

DESCRIPTION = """\
List the live workers with their shards, their in-flight batches, the part of their
places that these take, and the settings that differ from the defaults. A setting or
a version that differs between live workers is marked with *. A worker reports with
each heartbeat: every 7.5 s, or every 21 s while it waits for the change stream.

    outbox workers --project my-project --instance main --database shop
    outbox workers --check ... || notify-on-call
    outbox workers --json ... | jq '.workers[] | {id, version, utilization}'"""

HEADS = ("WORKER", "HOST", "VERSION", "HEARTBEAT", "SHARDS", "IN FLIGHT", "UTILIZATION", "SETTINGS")


def add(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = flags.command(commands, "workers", "live workers, their load and settings", DESCRIPTION, run)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    text = "Exit code 1 if a shard has no live worker, or if the settings of live workers differ or are unknown."
    parser.add_argument("--check", action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    """Print the workers; return 0, or 1 if --check finds a problem. Raises SettingError, NotReached, OutboxError."""
    task_table = flags.open_table(options)
    now = task_table.now()
    workers = admin.workers.live(task_table, now)
    differing = admin.workers.differing(workers)
    orphans = admin.workers.shards_without_worker(task_table, workers, now)
    if options.json:
        fields = [_fields(worker) for worker in workers]
        say(as_json({"as_of": now, "workers": fields, "differing": differing, "shards_without_worker": orphans}))
    else:
        listed = [table(HEADS, [_cells(worker, differing) for worker in workers])] if workers else []
        head = f"as of {shown(now)}, {counted(len(workers), 'live worker')}"
        say(head, *listed, *error_tables.circuit_lines(workers, now))
    problems = _problems(workers, differing, orphans)
    for sentence in problems:
        note(sentence)
    return 1 if options.check and problems else 0


def _problems(
    workers: "Sequence[admin.workers.Worker]", differing: Mapping[str, list[str]], orphans: list[int] | None
) -> list[str]:
    """Return a sentence for each setting that differs, for workers without Info, and for shards without a worker."""
    found = [
        f"--{name.replace('_', '-')} differs between live workers: {', '.join(values)}"
        for name, values in differing.items()
        if name != "version"
    ]
    if silent := [worker.id for worker in workers if not worker.info]:
        found.append(f"{named(silent)}: an older version, so its shards and settings are unknown")
    if orphans:
        found.append(f"no live worker polls shards {admin.workers.runs(orphans)}")
    return found


def _cells(worker: "admin.workers.Worker", differing: Mapping[str, list[str]]) -> list[object]:
    age = f"{spoken(worker.age)} ago"
    if not worker.info:
        return [worker.id, "", "older", age, "", "", "", ""]
    version = worker.text("version") + ("*" if "version" in differing else "")
    names = sorted({*worker.settings, *differing} - {"version"})
    settings = [f"{name}={worker.settings.get(name, 'default')}{'*' if name in differing else ''}" for name in names]
    load = [int(worker.number("in_flight")), f"{worker.number('utilization'):.0%}"]
    return [worker.id, worker.text("host"), version, age, admin.workers.runs(worker.shards), *load, " ".join(settings)]


def _fields(worker: "admin.workers.Worker") -> dict[str, Any]:
    reported: dict[str, Any] = {name: worker.text(name) for name in ("host", "version")}
    reported |= {name: worker.number(name) for name in ("in_flight", "utilization", "circuits_left_out")}
    reported |= {name: getattr(worker, name) for name in ("shards", "circuits", "settings")}
    known = {"id": worker.id, "started_at": worker.started_at, "seen_at": worker.seen_at, "age": round(worker.age, 3)}
    return known | (reported if worker.info else dict.fromkeys(reported))

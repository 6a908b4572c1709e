"""Write docs/reliability.md from the figures of a long run: `python -m tests.faults.page --scenarios FILE ...`.

Results that are not given stay unchanged in docs/reliability/results.json.
"""

import argparse
import inspect
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.page import markdown
from tests.benchmarks.results import ROOT, circumstances
from tests.faults import (
    test_load,
    test_reshard_faults,
    test_service_faults,
    test_subscriber_faults,
    test_wake_faults,
    test_worker_faults,
)

PAGE = ROOT / "docs" / "reliability.md"
KEPT = PAGE.with_suffix("") / "results.json"
#: The scenario about load, which has figures of its own.
LOAD = "arrivals_above_capacity"
#: The scenario with subscribers that use the inbox, which has figures of its own as well.
INBOX = "inbox"

HEAD = """\
# Reliability

This page shows what happens to tasks while workers are killed and services fail. No committed task is lost. No task of
a rolled-back transaction is published. The first messages of an ordering key arrive in the order of their registration.
Duplicates are rare and carry the same task ID.

Each line of the first two tables is a test in `tests/faults`. The test breaks something under load. Then it compares
the IDs that the application registered with the messages that the subscribers received. Workers are real processes on
both emulators. The random choices are the same each time, unless `--seed` changes them.

```console
$ make test                   # some scenarios, a few seconds each
$ make test-all               # the others
$ make test-long              # all of them, a minute each, and more
$ make soak MINUTES=30        # all faults at random, while the memory of one worker is measured
```

`python -m tests.faults.page` writes this page from [results.json](reliability/results.json). Do not edit it. The
emulators share two cores with workers and tests, so times are long, but counts are exact. Ten scenarios ran again with
the same seed after the first run: five with a longer time limit, four with a bound that is counted instead of
estimated, and one with arrivals that follow the capacity. The first table shows their last figures.
"""

WHY = """\
In each run there is one worker, the tasks are the same, and one call in ten fails.

**Aborts.** Spanner aborts transactions all the time. Each abort costs the article's protocol a duplicate, because it
publishes again when the transaction runs again. This relay remembers published tasks across transaction attempts and
failed commits ([in doubt](architecture/in-doubt.md)), so an abort costs no duplicate while the worker lives.

The other duplicates cannot be avoided, because Pub/Sub and Spanner share no transaction:

- **A worker dies** after it has published a batch and before it has marked it. The next worker publishes the whole
  batch again.
- **An answer of Pub/Sub is lost.** The worker cannot tell this from a request that never arrived. If it marked the
  tasks as sent, they could be lost. So it publishes them again. Batches repeat no more tasks than single tasks do,
  because there are fewer batches.
- **A connection breaks.** The worker repeats everything that was in flight on it: four batches here, one task there.
  After the first of these failures, the topic's circuit opens, and the worker probes the topic with single tasks. An
  outage therefore costs at most the tasks that were in flight when it began.

`--batch-size` and `--concurrency` limit these numbers. With smaller values, each fault costs fewer duplicates, but the
same tasks need more commits.
"""


LOAD_SAYS = """\
These figures are from the same run, of the scenario about load. Seconds and rates depend on the emulators. On Spanner,
too, the rows that a poll reads and the memory of a worker do not grow with the backlog.
"""

INBOX_SAYS = """\
Two subscribers use the [inbox](guide/subscribe.md). They are killed at random, paused for longer than their leases, and
cut off from Spanner and Pub/Sub. Two workers are killed, too. In the end some tasks are sent again. An effect is a row
with a random key, so a second effect of a task is a second row. [Another test](../tests/integration/test_inbox.py) lets
Pub/Sub deliver the same ten messages 10,000 times, and there are ten effects.
"""

#: The defects that the scenarios found.
FOUND = Path(__file__).with_name("found.md")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.page", description=__doc__)
    parser.add_argument("--scenarios", type=Path, help="what --figures of a test run wrote")
    parser.add_argument("--more", type=Path, help="the same of test_wake_faults.py and test_reshard_faults.py alone")
    parser.add_argument("--comparison", type=Path, help="what --output of tests.faults.comparison wrote")
    parser.add_argument("--soak", type=Path, help="the folder that a soak wrote")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    if options.scenarios:
        lines = [json.loads(line) for line in options.scenarios.read_text(encoding="utf-8").splitlines()]
        if others := [line for line in lines if line["scenario"] != INBOX]:
            results["scenarios"] = sorted(others, key=lambda line: str(line["scenario"]))
            results["scenarios_ran"] = _circumstances()
        for line in lines:
            if line["scenario"] == INBOX:
                results |= {INBOX: line, "inbox_ran": _circumstances()}
    if options.more:
        lines = [json.loads(line) for line in options.more.read_text(encoding="utf-8").splitlines()]
        results |= {"more": sorted(lines, key=lambda line: str(line["scenario"])), "more_ran": _circumstances()}
    if options.comparison:
        results["comparison"] = json.loads(options.comparison.read_text(encoding="utf-8"))
        results["comparison_ran"] = _circumstances()
    if options.soak:
        results["soak"] = json.loads((options.soak / "summary.json").read_text(encoding="utf-8"))
        results["soak_ran"] = _circumstances()
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(options.soak / "soak.png", KEPT.parent / "soak.png")
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(text(results), encoding="utf-8")


def _circumstances() -> dict[str, str]:
    known = circumstances()
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}"} | {
        name: known[name] for name in ("machine", "versions", "emulators")
    }


def text(results: dict[str, Any]) -> str:
    parts = [HEAD]
    if lines := results.get("scenarios"):
        command = f"python -m pytest --long --seed {lines[0]['seed']} --numprocesses 3 tests/faults"
        parts += ["## Scenarios\n", _ran(results["scenarios_ran"], command), _scenarios(lines)]
        if more := results.get("more"):
            files = "tests/faults/test_wake_faults.py tests/faults/test_reshard_faults.py"
            command = f"python -m pytest --long --seed {more[0]['seed']} --numprocesses 3 {files}"
            parts += ["### Change stream and number of shards\n", _ran(results["more_ran"], command), _scenarios(more)]
        parts += ["## Load\n", LOAD_SAYS, _load(lines)]
    if line := results.get(INBOX):
        command = f"python -m pytest --long --seed {line['seed']} tests/faults/test_subscriber_faults.py"
        parts += ["## Effects of subscribers\n", INBOX_SAYS, _ran(results["inbox_ran"], command), _effects(line)]
    if lines := results.get("comparison"):
        tasks = lines[0]["tasks"]
        parts += [
            "## Duplicates\n",
            _ran(results["comparison_ran"], f"python -m tests.faults.comparison --tasks {tasks}"),
        ]
        parts += [_comparison(lines), WHY]
    if soak := results.get("soak"):
        command = f"python -m tests.faults.soak --minutes {soak['minutes']:g} --seed {soak['seed']}"
        parts += ["## Soak\n", _ran(results["soak_ran"], command), _soak(soak)]
    parts.append(FOUND.read_text(encoding="utf-8"))
    return "\n".join(parts)


def _ran(ran: dict[str, str], command: str) -> str:
    return f"Ran {ran['date']} by `{command}`: {ran['machine']}; {ran['versions']}; {ran['emulators']}.\n"


@dataclass(frozen=True, slots=True)
class Scenario:
    title: str
    promise: str
    file: str


def scenarios() -> dict[str, Scenario]:
    rows = test_service_faults.SCENARIOS.items()
    found = {name: Scenario(each.title, each.promise, "test_service_faults.py") for name, each in rows}
    modules = (test_service_faults, test_worker_faults, test_wake_faults, test_reshard_faults, test_subscriber_faults)
    for module in (*modules, test_load):
        for name, function in vars(module).items():
            title, _, promised = " ".join((inspect.getdoc(function) or "").split()).partition(" Promised: ")
            if name.startswith("test_") and promised:
                found[name.removeprefix("test_")] = Scenario(title, promised, f"{module.__name__.split('.')[-1]}.py")
    return dict(sorted(found.items()))


def _scenarios(lines: Iterable[dict[str, Any]]) -> str:
    header = [
        "what happens", "promised", "registered", "rolled back", "lost", "sent though rolled back", "out of order",
        "duplicates", "allowed", "seconds to recover",
    ]  # fmt: skip
    names = ("registered", "rolled_back", "lost", "sent_though_rolled_back", "out_of_order", "duplicates",
             "duplicates_allowed", "recovery")  # fmt: skip
    known = scenarios()
    rows = []
    for line in lines:
        scenario = known[line["scenario"]]
        link = f"[{scenario.title.rstrip('.')}](../tests/faults/{scenario.file})"
        rows.append([link, scenario.promise, *(f"{line[name]:,}" for name in names)])
    return markdown(header, rows)


def _load(lines: Iterable[dict[str, Any]]) -> str:
    known = scenarios()
    rows = []
    for line in lines:
        if line["scenario"] == LOAD:
            own = [name for name in list(line) if name in _NOTES]
            rows += [[known[line["scenario"]].title, _NOTES[name], f"{line[name]:,}"] for name in own]
    return markdown(["what", "figure", ""], rows)


def _effects(line: dict[str, Any]) -> str:
    names = {
        "registered": "committed tasks",
        "rolled_back": "tasks of transactions that were rolled back",
        "effects": "effects in the subscriber's database",
        "without_effect": "tasks without an effect",
        "second_effects": "second effects of a task",
        "duplicates": "messages published again after a kill, or because the test asked for it",
        "duplicate_deliveries": "deliveries that the inbox recognized as duplicates",
    }
    return markdown(["figure", ""], [[label, f"{line[name]:,}"] for name, label in names.items()])


_NOTES = {
    "backlog": "largest backlog, tasks",
    "urgent_seconds_median": "from the commit of an urgent task to Pub/Sub, median, seconds",
    "urgent_seconds_longest": "the same, longest",
    "other_seconds_median": "the same of all others, median",
    "rows_a_poll_longest": "rows that a poll read, the largest mean of half a second",
    "memory_mb_first_half": "memory of the worker in the first half, MiB at most",
    "memory_mb_second_half": "the same in the second half",
}


def _comparison(lines: Sequence[dict[str, Any]]) -> str:
    relays = list(dict.fromkeys(line["relay"] for line in lines))
    header = ["fault", *(f"{relay}: {what}" for relay in relays for what in ("duplicates per 1,000", "faults", "lost"))]
    rows = []
    for fault in dict.fromkeys(line["fault"] for line in lines):
        of_it = {line["relay"]: line for line in lines if line["fault"] == fault}
        cells = [f"{of_it[relay][name]:,}" for relay in relays for name in ("per_thousand", "faults", "lost")]
        rows.append([fault, *cells])
    return markdown(header, rows)


def _soak(soak: dict[str, Any]) -> str:
    names = {
        "minutes": "minutes", "registered": "registered", "rolled_back": "rolled back", "lost": "lost",
        "sent_though_rolled_back": "sent though rolled back", "out_of_order": "out of order",
        "duplicates": "duplicates", "duplicates_allowed": "duplicates allowed",
        "recovery_median": "seconds until the backlog was small again, median", "recovery_longest": "the same, longest",
    }  # fmt: skip
    rows = [[label, f"{soak[name]:,}"] for name, label in names.items()]
    rows += [[f"{name} at the end over that after a quarter", f"{value}"] for name, value in soak["grown"].items()]
    faults = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(soak["faults"].items()))
    return markdown(["figure", ""], rows) + f"\nFaults: {faults}.\n\n![backlog and use](reliability/soak.png)\n"


if __name__ == "__main__":
    main()

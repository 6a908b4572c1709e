"""Write docs/reliability.md from the figures of a long run: `python -m tests.faults.page --scenarios FILE ...`.

Results that are not given stay unchanged in docs/reliability/results.json.
"""

import argparse
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.faults import test_reshard_faults, test_subscriber_faults, test_worker_faults
from tools.benchmarks.page import markdown
from tools.benchmarks.results import ROOT, circumstances

PAGE = ROOT / "docs" / "reliability.md"
KEPT = PAGE.with_suffix("") / "results.json"
#: The scenario with subscribers that use the inbox, which has figures of its own.
INBOX = "inbox"

HEAD = """\
# Reliability

The tests on this page run real workers on the emulators of Spanner and Pub/Sub, and cause faults. Each line of the
first two tables is a test. The test fails if a task is lost, is sent although it was rolled back, or arrives out of
order, or if there are more duplicates than *allowed*, the largest number that its faults and commands can cause. For
example, each killed worker allows 80 duplicates, its tasks in flight (four batches of 20).

*Seconds to recover* is the time from the end of the last fault and registration until all tasks are sent. A test with
several variants has the largest value of each column. The numbers are from the *long form* of the tests, with outages
of a minute (`make test-long`), on two cores with the emulators, so times are long.

`python -m tests.faults.page` writes this page from [results.json](reliability/results.json), which also has the
versions of the software.
"""

INBOX_SAYS = """\
Two subscribers use the [inbox](guide/subscribe.md). They are killed, paused until Pub/Sub delivers their messages
again, and cut off from Spanner and Pub/Sub, and two workers are killed, all at random. The test sends some tasks again.
A second effect of a task would be a second row.
"""

SOAK_SAYS = """\
`make soak MINUTES=30` runs three workers under load, and causes one random fault after the other. Memory, open files
and threads are those of a worker without faults. Each *growth factor* is the median of the last quarter of the run,
divided by that of the second quarter. At most 1.2 is allowed. A recovery ends when at most 60 tasks are unsent.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.page", description=__doc__)
    parser.add_argument("--scenarios", type=Path, help="what --figures of a test run wrote")
    parser.add_argument("--more", type=Path, help="the same of test_reshard_faults.py alone")
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
    if options.soak:
        results["soak"] = json.loads((options.soak / "summary.json").read_text(encoding="utf-8"))
        results["soak_ran"] = _circumstances()
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
        parts += ["## Scenarios\n", _scenarios(lines), _ran(results["scenarios_ran"], command)]
        if more := results.get("more"):
            command = f"python -m pytest --long --seed {more[0]['seed']} tests/faults/test_reshard_faults.py"
            parts += ["### Number of shards\n", _scenarios(more)]
            parts.append(_ran(results["more_ran"], command))
    if line := results.get(INBOX):
        command = f"python -m pytest --long --seed {line['seed']} tests/faults/test_subscriber_faults.py"
        parts += ["## Effects of subscribers\n", INBOX_SAYS, _table(line, EFFECTS), _ran(results["inbox_ran"], command)]
    if soak := results.get("soak"):
        command = f"python -m tests.faults.soak --minutes {soak['minutes']:g} --seed {soak['seed']}"
        figures = soak | soak["grown"] | {"faults": sum(soak["faults"].values())}
        parts += ["## Soak\n", SOAK_SAYS, _table(figures, SOAK), _ran(results["soak_ran"], command)]
    return "\n".join(parts)


def _ran(ran: dict[str, str], command: str) -> str:
    return f"{ran['date']}, {ran['machine']}: `{command}`\n"


@dataclass(frozen=True, slots=True)
class Scenario:
    title: str
    promise: str
    file: str


def scenarios() -> dict[str, Scenario]:
    rows = test_worker_faults.SCENARIOS.items()
    found = {name: Scenario(each.title, each.promise, "test_worker_faults.py") for name, each in rows}
    for module in (test_worker_faults, test_reshard_faults, test_subscriber_faults):
        for name, function in vars(module).items():
            title, _, promised = " ".join((inspect.getdoc(function) or "").split()).partition(" Promised: ")
            if name.startswith("test_") and promised:
                found[name.removeprefix("test_")] = Scenario(title, promised, f"{module.__name__.split('.')[-1]}.py")
    return dict(sorted(found.items()))


def _scenarios(lines: Sequence[dict[str, Any]]) -> str:
    header = ["what happens", "tasks", "duplicates", "allowed", "seconds to recover"]
    names = ("registered", "duplicates", "duplicates_allowed", "recovery")
    known = scenarios()
    rows = {}  # a scenario that ran in several ways has one row, with the largest values
    for line in lines:
        scenario = known[line["scenario"]]
        link = f"[{scenario.title.rstrip('.')}](../tests/faults/{scenario.file})"
        rows[link] = [
            max(new, old) for new, old in zip((line[name] for name in names), rows.get(link, [0] * 4), strict=True)
        ]
    lost, rolled_back, order = (
        sum(line[name] for line in lines) for name in ("lost", "sent_though_rolled_back", "out_of_order")
    )
    return f"""{markdown(header, [[link, *(f"{value:,}" for value in values)] for link, values in rows.items()])}
All lines together: {lost} tasks lost, {rolled_back} sent although rolled back, {order} out of order.
"""


def _table(line: dict[str, Any], names: dict[str, str]) -> str:
    shown = {name: f"{line[name]:,}" if isinstance(line[name], int) else f"{line[name]:g}" for name in names}
    return markdown(["figure", ""], [[label, shown[name]] for name, label in names.items()])


EFFECTS = {
    "registered": "committed tasks",
    "effects": "effects in the subscriber's database",
    "without_effect": "tasks without an effect",
    "second_effects": "second effects of a task",
    "duplicates": "messages published again after a kill, or because the test asked for it",
    "duplicate_deliveries": "deliveries that the inbox recognized as duplicates",
}
SOAK = {
    "faults": "random faults",
    "minutes": "minutes",
    "registered": "committed tasks",
    "rolled_back": "further tasks, whose transactions were rolled back on purpose",
    "lost": "lost tasks",
    "out_of_order": "tasks out of order",
    "sent_though_rolled_back": "tasks sent although rolled back",
    "duplicates": "duplicates",
    "duplicates_allowed": "allowed duplicates",
    "recovery_longest": "longest time to recover from a fault, seconds",
    "rss_mb": "growth factor of memory",
    "descriptors": "growth factor of open files",
    "threads": "growth factor of threads",
}


if __name__ == "__main__":
    main()

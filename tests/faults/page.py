"""Write the tables of docs/reliability.md from the figures of a run: `python -m tests.faults.page --scenarios FILE`.

Results that are not given stay unchanged in docs/reliability/results.json.
"""

import argparse
import inspect
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults import test_reshard_faults, test_subscriber_faults, test_worker_faults
from tools.benchmarks.page import markdown
from tools.benchmarks.results import ROOT, circumstances

PAGE = ROOT / "docs" / "reliability.md"
KEPT = PAGE.with_suffix("") / "results.json"
PYTEST = "python -m pytest --long --seed {seed}"
#: The heading of each part of the results, and the command that writes its figures.
SECTIONS = {
    "scenarios": ("Scenarios", f"{PYTEST} --numprocesses 3 tests/faults"),
    "more": ("Number of shards", f"{PYTEST} tests/faults/test_reshard_faults.py"),
    "inbox": ("Effects of subscribers", f"{PYTEST} tests/faults/test_subscriber_faults.py"),
    "soak": ("Soak", "python -m tests.faults.soak --minutes {minutes:g} --seed {seed}"),
}
#: The names of figures in the tables with one figure a line.
FIGURES = {
    "inbox": {
        "registered": "committed tasks",
        "effects": "effects in the subscriber's database",
        "without_effect": "tasks without an effect",
        "second_effects": "second effects of a task",
        "duplicates": "messages published again after a kill, or because the test asked for it",
        "duplicate_deliveries": "deliveries that the inbox recognized as duplicates",
    },
    "soak": {
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
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.page", description=__doc__)
    parser.add_argument("--scenarios", type=Path, help="what --figures of a test run wrote")
    parser.add_argument("--soak", type=Path, help="the folder that a soak wrote")
    options, new = parser.parse_args(arguments), dict[str, list[dict[str, Any]]]()
    parts = {"test_reshard_faults.py": "more", "test_subscriber_faults.py": "inbox"}
    for line in options.scenarios.read_text(encoding="utf-8").splitlines() if options.scenarios else ():
        figures = json.loads(line)
        new.setdefault(parts.get(scenarios()[figures["scenario"]].file, "scenarios"), []).append(figures)
    if options.soak:
        new["soak"] = [json.loads((options.soak / "summary.json").read_text(encoding="utf-8"))]
    known = circumstances() | {"date": f"{datetime.now(UTC):%Y-%m-%d}"}
    ran = {name: known[name] for name in ("date", "machine", "versions", "emulators")}
    results = json.loads(KEPT.read_text(encoding="utf-8")) | new | {f"{part}_ran": ran for part in new}
    KEPT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(text(results, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def text(results: dict[str, Any], page: str) -> str:
    """Return the page with the tables of these results."""
    for part, (title, command) in SECTIONS.items():
        lines, ran = results[part], results[f"{part}_ran"]
        table = _figures(lines[-1], FIGURES[part]) if part in FIGURES else _scenarios(lines)
        new = f"{table}\n{ran['date']}, {ran['machine']}: `{command.format(**lines[-1])}`\n"
        page = re.sub(rf"(?s)(#+ {title}\n[^|]*)\|.*?(?=\n#|\Z)", lambda found, new=new: found[1] + new, page)
    return page


class Scenario(NamedTuple):
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
    return found


def _scenarios(lines: Sequence[dict[str, Any]]) -> str:
    header = ["what happens", "tasks", "duplicates", "allowed", "seconds to recover"]
    names = ("registered", "duplicates", "duplicates_allowed", "recovery")
    known, rows = scenarios(), dict[str, list[float]]()
    for line in sorted(lines, key=lambda each: str(each["scenario"])):
        scenario = known[line["scenario"]]
        link = f"[{scenario.title.rstrip('.')}](../tests/faults/{scenario.file})"
        # A scenario that ran in several ways has one row, with the largest values.
        rows[link] = [*map(max, (line[name] for name in names), rows.get(link, [0] * 4))]
    lost, rolled_back, order = (
        sum(line[name] for line in lines) for name in ("lost", "sent_though_rolled_back", "out_of_order")
    )
    return f"""{markdown(header, [[link, *(f"{value:,}" for value in values)] for link, values in rows.items()])}
All lines together: {lost} tasks lost, {rolled_back} sent although rolled back, {order} out of order.
"""


def _figures(line: dict[str, Any], names: dict[str, str]) -> str:
    found = line | line.get("grown", {}) | {"faults": sum(line.get("faults", {}).values())}
    shown = {name: f"{found[name]:,}" if isinstance(found[name], int) else f"{found[name]:g}" for name in names}
    return markdown(["figure", ""], [[label, shown[name]] for name, label in names.items()])


if __name__ == "__main__":
    main()

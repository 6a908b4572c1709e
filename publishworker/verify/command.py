"""`publishworker verify`: progress, table, JSON and the HTML report."""

import argparse
import dataclasses
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, Template

from outbox.cli.chunks import confirm
from outbox.cli.output import as_json, table
from outbox.errors import SettingError
from publishworker import exits
from publishworker.settings import WorkerSettings
from publishworker.verify.checks import CHECKS, FAILED, Check, run_all
from publishworker.verify.scratch import named, scratch


def verify(options: argparse.Namespace) -> int:
    """Run all checks on a scratch database. Return 1 if one of them fails."""
    flags = vars(options)
    if options.rows < 100:
        raise SettingError(f"--rows: {options.rows} is not allowed: it must be at least 100")
    if options.report and not Path(options.report).absolute().parent.is_dir():
        raise SettingError(f"--report: the folder of {options.report!r} does not exist")
    # Not OUTBOX_DATABASE, which names the database of the application.
    settings = named(WorkerSettings.read(flags | {"database": flags["database"] or "scratch"}), flags["database"] or "")
    confirm(
        f"This creates database {settings.database} in instance {settings.instance} and a topic of the same name in "
        f"project {settings.project}, loads {options.rows:,} tasks, and takes minutes. Both are "
        f"{'kept (--keep)' if options.keep else 'deleted at the end'}. No other database is changed. Continue?",
        yes=options.yes,
    )
    with scratch(settings, options.rows, keep=options.keep) as target:
        found = list(run_all(target, _progress))
    print(_as_json(found) if options.json else _as_table(found))
    if options.report:
        Path(options.report).write_text(_page().render(checks=found, settings=settings), encoding="utf-8")
    return exits.FAILED if any(check.verdict == FAILED for check in found) else exits.DONE


def _progress(name: str) -> None:
    print(f"publishworker: {name} ({list(CHECKS).index(name) + 1} of {len(CHECKS)})", file=sys.stderr, flush=True)


def _as_table(found: list[Check]) -> str:
    lines = [table(("CHECK", "VERDICT", "FINDING"), [(each.name, each.verdict, each.text) for each in found])]
    for each in found:
        if each.figures:
            lines += ["", table((each.name.upper(), "FIGURE"), [(name, value) for name, value in each.figures.items()])]
    verdicts = Counter(each.verdict for each in found)
    return "\n".join([*lines, "", ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())])


def _as_json(found: list[Check]) -> str:
    return as_json({"checks": [dataclasses.asdict(each) for each in found]})


@cache
def _page() -> Template:
    loader = PackageLoader("publishworker.verify", "")
    return Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("report.html.jinja")

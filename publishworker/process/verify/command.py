"""`publishworker verify`: progress, table and JSON."""

import argparse
import dataclasses
import uuid
from collections import Counter
from collections.abc import Mapping

from outbox.program.output import confirm, table
from outbox.program.terminal import Escaped, as_json, complain, say
from publishworker.process import exits
from publishworker.process.verify.checks import CHECKS, FAILED, Finding, run
from publishworker.process.verify.scratch import scratch
from publishworker.process.worker_settings import WorkerSettings


def verify(options: argparse.Namespace) -> int:
    """Run all checks on a scratch database. Return 1 if one of them fails."""
    # Not OUTBOX_DATABASE, which names the database of the application.
    name = options.database or f"outbox-verify-{uuid.uuid4().hex[:8]}"
    settings = WorkerSettings.read(vars(options) | {"database": name})
    confirm(
        f"This creates database {settings.database} in instance {settings.instance}, loads {options.rows:,} tasks, and "
        f"takes minutes. The database is {'kept (--keep)' if options.keep else 'deleted at the end'}. No other one is "
        "changed. Continue?",
        yes=options.yes,
    )
    with scratch(settings, options.rows, keep=options.keep) as target:
        found = {}
        for number, name in enumerate(CHECKS, 1):
            complain("publishworker", f"{name} ({number} of {len(CHECKS)})")
            found[name] = run(CHECKS[name], target)
    if options.json:
        say(as_json({"checks": [{"name": name} | dataclasses.asdict(each) for name, each in found.items()]}))
    else:
        say(_as_table(found))
    return exits.FAILED if any(each.verdict == FAILED for each in found.values()) else exits.DONE


def _as_table(found: Mapping[str, Finding]) -> Escaped:
    rows = [(name, each.verdict, each.text) for name, each in found.items()]
    tables = [table(("CHECK", "VERDICT", "FINDING"), rows)]
    tables += [
        table((name.upper(), "FIGURE"), list(each.figures.items())) for name, each in found.items() if each.figures
    ]
    verdicts = Counter(each.verdict for each in found.values())
    return Escaped("\n\n".join([*tables, ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())]))

"""The pages of the overview, of blocked keys and of workers, and the figures that all pages share."""

import dataclasses
from functools import partial

from outbox.rows import backlog as counting
from outbox.rows.task_table import TaskTable
from outbox_admin.advice import section
from outbox_admin.status import charts, last_hour, live_workers, problems
from outbox_admin.status.last_hour import History
from outbox_admin.tasks.lookup import OF_PART
from outbox_admin.web.visits import ENVIRONMENT, Route, Work, render

#: Max heads of blocked keys, and max workers.
HEADS = WORKERS = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Figures(problems.Status):
    """What `outbox status`, `workers` and `operations` print, read together."""

    history: History


def read(table: TaskTable, last: Figures | None) -> Figures:
    """Read what the pages show without a selection. Raises NotReached, OutboxError."""
    backlog = counting.read(table)
    found = problems.read(table, backlog, HEADS)
    return Figures(
        **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
        history=last_hour.read(table, backlog, last.history if last else None),
    )


ENVIRONMENT.filters["runs"] = live_workers.runs
ENVIRONMENT.globals |= {
    "counting": counting,
    "charts": charts,
    "differing": live_workers.differing,
    "unusual_first": live_workers.unusual_first,
    "usual": live_workers.usual,
    "why_waiting": problems.why_waiting,
    "open_circuits": live_workers.open_circuits,
    "section": section,
    "OF_PART": OF_PART,
    "HEADS": HEADS,
    "OPERATIONS": problems.OPERATIONS,
    "WORKERS": WORKERS,
}
_PAGES = {"/": "status/overview", "/blocked": "status/blocked", "/workers": "status/workers"}
ROUTES = [Route(path, partial(render, template=name), work=Work.LIGHT) for path, name in _PAGES.items()]

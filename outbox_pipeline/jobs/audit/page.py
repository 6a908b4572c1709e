"""The report of an audit as one HTML page without scripts, network requests or other files."""

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, Template, Undefined
from markupsafe import Markup

from outbox.base.values import spoken
from outbox.program.terminal import cell
from outbox_pipeline.jobs.audit.transforms import STATES

#: Max rows of the table of topics. summary.json has all topics.
MOST_ROWS = 200
#: Counts that should be 0, the most serious first.
_WRONG = (
    "lost", "not_applied", "mismatched", "cancelled_after_publish", "unknown", "unregistered", "out_of_order", "dead",
    "unreadable",
)  # fmt: skip
_LATENCIES = ("p50", "p95", "p99", "max")


def page(summary: Mapping[str, Any]) -> str:
    """Return the HTML page of a summary, with times as RFC 3339 texts or datetimes and latencies in seconds."""

    def tone(name: str, counts: Mapping[str, Any] = summary) -> str:
        return "zero" if not counts.get(name) else "wrong" if name in _WRONG else ""

    return _template().render(
        summary=summary,
        states=STATES,
        counts=("tasks", *STATES, "mismatched"),
        wrong=_WRONG,
        tone=tone,
        topics=sorted(summary["by_topic"], key=lambda row: (-row["lost"], -row["tasks"], row["topic"])),
        most_rows=MOST_ROWS,
        latencies=_LATENCIES,
    )


@cache
def _template() -> Template:
    environment = Environment(loader=PackageLoader(__package__, "."), autoescape=True, finalize=_cell)
    environment.filters |= {
        "time": _time,
        "seconds": _seconds,
        "spoken": spoken,
        "words": lambda name: name.replace("_", " "),
    }
    return environment.get_template("report.html.jinja")


def _cell(value: object) -> object:
    """Format a value. Control characters become escapes, because XML does not allow them."""
    if isinstance(value, Markup):
        return value
    return "" if isinstance(value, Undefined) else cell(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "\u2013"
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _time(value: str | datetime | None) -> str:
    return cell(value).replace(".000000Z", "Z")

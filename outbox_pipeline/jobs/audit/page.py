"""The report of an audit as one HTML page without scripts, network requests or other files."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, Template, Undefined
from markupsafe import Markup

from outbox.base.times import spoken
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
_HOUR = timedelta(hours=1)


def page(summary: Mapping[str, Any]) -> str:
    """Return the HTML page of a summary, with times as RFC 3339 texts or datetimes and latencies in seconds."""

    def tone(name: str, counts: Mapping[str, Any] = summary) -> str:
        return "zero" if not counts.get(name) else "wrong" if name in _WRONG else ""

    by_hour = summary["by_hour"]
    plotted = ("tasks", *(name for name in STATES[1:] if summary[name]), *_LATENCIES[:-1])
    return _template().render(
        summary=summary,
        states=STATES,
        counts=("tasks", *STATES, "mismatched"),
        wrong=_WRONG,
        tone=tone,
        plots={name: bars for name in plotted if (bars := _bars(by_hour, name))},
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


def _bars(by_hour: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the bars of a plot: the hour, its value, and its place and height in percent of the plot."""
    values = [line[name] or 0 for line in by_hour]
    hours = [datetime.fromisoformat(_time(line["hour"])) for line in by_hour]
    if not any(values):
        return []
    first, length, most = min(hours), max(hours) - min(hours) + _HOUR, max(values)
    return [
        {
            "hour": hour,
            "value": value,
            "left": 100 * ((hour - first) / length),
            "width": 100 * (_HOUR / length),
            "height": 100 * value / most,
        }
        for hour, value in zip(hours, values, strict=True)
        if value
    ]


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

"""The plots of an audit's report as inline SVG. They contain no text from the data."""

import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The states of tasks from the bottom of the plot, with colors, and hatches for readers who cannot tell the colors
#: apart.
STATES = {
    "delivered": ("#3f9c6b", None),
    "late": ("#d9a300", "//"),
    "lost": ("#d1242f", "xx"),
    "arriving": ("#7a9cc6", "||"),
    "pending": ("#9aa0a6", ".."),
    "dead": ("#8250df", "--"),
}
_PERCENTILES = {"p50": ("#3f9c6b", "-"), "p95": ("#2f81d6", "--"), "p99": ("#d1242f", ":")}
#: A placeholder that `_svg` replaces by the page's text color, which depends on the light or dark mode.
_INK = "#0a0b0c"
_LOOKS = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
}
_HOUR = timedelta(hours=1)
#: The min latency of the plots, in seconds.
_SOONEST = 0.001


def tasks_per_hour(lines: Iterable[Mapping[str, Any]]) -> str:
    """Plot the tasks of each hour by state. Lost tasks, and the other undelivered tasks, have panels of their own."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only the audit needs it

    hours: dict[datetime, dict[str, int]] = defaultdict(lambda: dict.fromkeys(STATES, 0))
    for line in lines:
        of_hour = hours[_time(line["hour"])]
        for name in STATES:
            of_hour[name] += line[name]
    used = [name for name in STATES if any(of_hour[name] for of_hour in hours.values())]
    others = [name for name in used if name not in ("delivered", "lost")]
    # A few undelivered tasks are invisible among millions of delivered ones.
    panels = {"all tasks": used, "lost": ["lost"] if "lost" in used else [], "others": others}
    panels = {title: names for title, names in panels.items() if names}

    def draw() -> Figure:
        figure = Figure(figsize=(9.6, 1 + 1.5 * len(panels)), layout="constrained")
        heights = [2] + [1] * (len(panels) - 1)
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, names) in zip(rows, panels.items(), strict=True):
            _stack(axes, hours, names)
            axes.set_ylabel(title)
        _time_axis(rows[-1], hours)
        handles, labels = rows[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(STATES))
        return figure

    return _svg(draw, "tasks")


def latencies(lines: Sequence[Mapping[str, Any]], topics: Sequence[str]) -> list[str]:
    """Plot the latency percentiles of each hour for each topic, with the same scales."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - the same

    by_topic: dict[str, dict[datetime, Mapping[str, Any]]] = {topic: {} for topic in topics}
    for line in lines:
        if line["topic"] in by_topic:
            by_topic[line["topic"]][_time(line["hour"])] = line
    every = [_time(line["hour"]) for line in lines]
    values = [line[name] for rows in by_topic.values() for line in rows.values() for name in _PERCENTILES]
    known = [max(value, _SOONEST) for value in values if value is not None] or [_SOONEST]
    lowest = math.floor(math.log10(min(known)))
    highest = max(math.ceil(math.log10(max(known))), lowest + 1)

    def draw(rows: Mapping[datetime, Mapping[str, Any]]) -> Figure:
        figure = Figure(figsize=(4.2, 2.2))
        axes = figure.subplots(gridspec_kw={"left": 0.17, "right": 0.95, "bottom": 0.22, "top": 0.87})
        edges, steps = _steps(rows)
        for name, (color, dashes) in _PERCENTILES.items():
            points = [rows[at][name] if at in rows else None for at in steps]
            known = [math.nan if value is None else max(value, _SOONEST) for value in points]
            axes.stairs(known, edges, baseline=None, color=color, linestyle=dashes, linewidth=1.8, label=name)
        axes.set_yscale("log")
        axes.set_ylim(10.0**lowest, 10.0**highest)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylabel("seconds")
        axes.grid(visible=True, axis="y", color=_INK, alpha=0.15)
        _time_axis(axes, every)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, ncols=3)
        return figure

    return [_svg(lambda rows=rows: draw(rows), f"latency {place}") for place, rows in enumerate(by_topic.values())]


def _stack(axes: "Axes", hours: Mapping[datetime, Mapping[str, int]], names: Sequence[str]) -> None:
    edges, steps = _steps(hours)
    below = [0] * len(steps)
    for name in names:
        above = [low + (hours[at][name] if at in hours else 0) for at, low in zip(steps, below, strict=True)]
        color, hatch = STATES[name]
        # A step of height 0 would still have an edge.
        tops = [math.nan if high == low else high for high, low in zip(above, below, strict=True)]
        patch = axes.stairs(tops, edges, baseline=below, fill=True, facecolor=color, label=name, linewidth=0.4)
        patch.set(edgecolor=_INK if hatch else color, hatch=hatch)
        below = above
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", integer=True, nbins=4, min_n_ticks=1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(visible=True, axis="y", color=_INK, alpha=0.15)
    axes.set_axisbelow(True)


def _steps(hours: Iterable[datetime]) -> tuple[Any, list[datetime]]:
    """Return the edges of a plot's steps, and the start of each step. A gap between hours is one step."""
    from matplotlib.dates import date2num  # noqa: PLC0415 - the same

    edges: list[datetime] = []
    for hour in sorted(hours):
        if not edges or edges[-1] != hour:
            edges.append(hour)
        edges.append(hour + _HOUR)
    return date2num(edges), edges[:-1]


def _time_axis(axes: "Axes", hours: Iterable[datetime]) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num  # noqa: PLC0415 - the same

    every = list(hours)
    first, last = min(every), max(every) + _HOUR
    axes.set_xlim(*date2num([first, last]))
    locator = AutoDateLocator(tz=UTC, minticks=3, maxticks=8)
    # For each unit from years to seconds: the format of a tick, and of a tick at the start of the next larger unit.
    ticks = ["%Y", "%Y-%m", "%m-%d", "%H:%M", "%H:%M", "%H:%M:%S"]
    begins = ["", "%Y", "%m-%d", "%m-%d", "%H:%M", "%H:%M"]
    formatter = ConciseDateFormatter(locator, tz=UTC, formats=ticks, zero_formats=begins, show_offset=False)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(formatter)
    axes.set_xlabel(f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC")


def _svg(draw: Any, name: str) -> str:
    """Draw a plot as SVG. Its text is deterministic, and `name` makes its IDs unique in the page."""
    from matplotlib import style  # noqa: PLC0415 - the same

    file = io.StringIO()
    with style.context(["default", _LOOKS | {"svg.hashsalt": name}]):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw().savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])  # unused IDs, the same in each plot
    return text.replace(_INK, "currentColor")


def _time(value: str | datetime) -> datetime:
    return datetime.fromisoformat(value) if isinstance(value, str) else value

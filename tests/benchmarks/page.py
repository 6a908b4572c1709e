"""From results to a table on stdout, the page docs/benchmarks.md and its plots."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from tests.benchmarks.results import ROOT, Bar, Figure, Section

PAGE = ROOT / "docs" / "benchmarks.md"

HEAD = """\
# Benchmarks

`make bench` writes this page from [results.json](benchmarks/results.json). Do not edit it. To run one section, use
`python -m tests.benchmarks --only NAME`. With `--quick`, all sections together take a minute.

The emulators share the machine with the measured code, so absolute times and tasks per second say nothing about the
services. These results transfer to them: requests, rows, bytes and client CPU per task, and ratios between variants
that were measured in turns in the same run. Each section says which of these it has. Figures are medians over the
rounds, with min and max in brackets.
"""


def write(sections: dict[str, Section], page: Path = PAGE) -> None:
    parts = [HEAD, summary(sections)]
    for name, section in sections.items():
        image = draw(name, section, page.with_suffix("") / f"{name}.png") if section.plot else None
        parts.append(_text(section, image))
    page.write_text("\n".join(parts), encoding="utf-8")


def summary(sections: dict[str, Section]) -> str:
    rows = [
        [f"[{section.title}](#{section.title.lower().replace(' ', '-')})", *_bar(bar)]
        for section in sections.values()
        for bar in section.bars
    ]
    return markdown(["section", "what", "measured", "bar", ""], rows)


def text(section: Section) -> str:
    header, rows = grid(section.figures)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in [header, *rows]:
        lines.append("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
    lines += [f"{what}: {measured}, bar {bar}, {reached}" for what, measured, bar, reached in map(_bar, section.bars)]
    return "\n".join([f"{section.title}", *(f"  {line}" for line in lines), ""])


def grid(figures: list[Figure]) -> tuple[list[str], list[list[str]]]:
    columns = list(dict.fromkeys(figure.column for figure in figures))
    rows = list(dict.fromkeys(figure.row for figure in figures))
    cells = {(figure.row, figure.column): _cell(figure) for figure in figures}
    return ["", *columns], [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(name: str, section: Section, file: Path) -> Path:
    assert section.plot is not None
    columns = section.plot.columns
    rows = list(dict.fromkeys(figure.row for figure in section.figures if figure.column in columns))
    size = (4.2 * len(columns) + 2.4, 0.36 * len(rows) + 1.1)
    figure, axes = plt.subplots(1, len(columns), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, column in zip(axes[0], columns, strict=True):
        _bars(axis, rows, [each for each in section.figures if each.column == column], log=section.plot.log)
        axis.set_xlabel(column)
    axes[0][0].set_yticks(range(len(rows)), rows)
    axes[0][0].invert_yaxis()
    figure.suptitle(section.title, fontsize="medium")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110, metadata={"Software": None, "Title": name})
    plt.close(figure)
    return file


def _bars(axis: Axes, rows: list[str], figures: list[Figure], *, log: bool) -> None:
    places = [rows.index(figure.row) for figure in figures]
    medians = [figure.median for figure in figures]
    largest = [max(figure.values) for figure in figures]
    below = [figure.median - min(figure.values) for figure in figures]
    above = [most - median for most, median in zip(largest, medians, strict=True)]
    colors = ["tab:orange" if figure.row.startswith(("relay", "Spark")) else "tab:blue" for figure in figures]
    axis.barh(places, medians, xerr=[below, above], color=colors, ecolor="0.3", height=0.65)
    axis.grid(axis="x", color="0.85")
    axis.set_axisbelow(True)
    for place, most, median in zip(places, largest, medians, strict=True):
        axis.annotate(f" {number(median)}", (most, place), va="center", fontsize="small")
    if log:
        axis.set_xscale("log")
        axis.set_xlim(min(medians) / 3, max(largest) * 4)
    else:
        axis.set_xlim(0, max(largest) * 1.2)


def _text(section: Section, image: Path | None) -> str:
    header, rows = grid(section.figures)
    parts = [f"## {section.title}", markdown(header, rows).rstrip()]
    if section.bars:
        parts.append(markdown(["bar", "measured", "must be", ""], [list(_bar(bar)) for bar in section.bars]).rstrip())
    if image is not None:
        parts.append(f"![{section.title}](benchmarks/{image.name})")
    ran = section.ran
    machine = f"{ran['machine']}, load before {ran['load before']}"
    rounds = max(len(figure.values) for figure in section.figures)  # some sections run once, whatever was asked for
    often = f"{rounds} rounds" if rounds > 1 else "once"
    parts += [
        section.conditions,
        f"Transfers: {section.transfers}",
        f"Ran {ran['date']}, {often}, in {ran['seconds']} s, by `{ran['command']}`.",
        f"Commit {ran['commit']}; {machine}; {ran['versions']}; {ran['emulators']}.",
    ]
    return "\n\n".join(parts) + "\n"


def _cell(figure: Figure) -> str:
    if len(figure.values) == 1:
        return number(figure.median)
    return f"{number(figure.median)} ({number(min(figure.values))}-{number(max(figure.values))})"


def _bar(bar: Bar) -> tuple[str, str, str, str]:
    limit = f"{'>=' if bar.at_least else '<='} {number(bar.limit)}"
    return bar.what, number(bar.value), limit, "reached" if bar.reached else "**not reached**"


def number(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"

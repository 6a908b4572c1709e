"""From results to the page docs/benchmarks.md, and to its sections on stdout."""

from collections import Counter
from pathlib import Path

from tools.benchmarks.results import ROOT, Bar, Figure, Section

PAGE = ROOT / "docs" / "benchmarks.md"
SAME = ("machine", "versions", "emulators")

HEAD = """\
# Benchmarks

The emulators ran on the same machine as the measured code. So times and tasks per second say nothing about Spanner and
Pub/Sub. Requests, rows, bytes and client CPU of a task are valid for them, too, and so are ratios between variants.

`make bench` and `make bench-pipeline` write this page. `python -m tools.benchmarks` with the flag at the end of a
section runs this section alone. The tables show medians. [results.json](benchmarks/results.json) has the values of each
round and the limits. A section names each limit that is not kept.

Unless a section says otherwise: {where}.
"""


def write(sections: dict[str, Section], page: Path = PAGE) -> None:
    where, _ = Counter(_where(section) for section in sections.values()).most_common(1)[0]
    parts = [HEAD.format(where=where)]
    parts += [text(name, section, where) for name, section in sections.items()]
    page.write_text("\n".join(parts), encoding="utf-8")


def _where(section: Section) -> str:
    return "; ".join(section.ran[name] for name in SAME)


def grid(figures: list[Figure]) -> tuple[list[str], list[list[str]]]:
    columns = list(dict.fromkeys(figure.column for figure in figures))
    rows = list(dict.fromkeys(figure.row for figure in figures))
    cells = {(figure.row, figure.column): number(figure.median) for figure in figures}
    return ["", *columns], [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def text(name: str, section: Section, where: str = "") -> str:
    """Return a section, with what differs from `where`, the circumstances of most sections."""
    ran = section.ran
    parts = [f"## {section.title}", markdown(*grid(section.figures)).rstrip(), section.conditions]
    if missed := "; ".join(_bar(bar) for bar in section.bars if not bar.reached):
        parts.append(f"**Not kept:** {missed}.")
    rounds = max(len(figure.values) for figure in section.figures)  # some sections run once, whatever was asked for
    often = f"{rounds} rounds" if rounds > 1 else "once"
    others = "; ".join(ran[same] for same in SAME if ran[same] not in where)
    ending = f" {others}." if others else ""
    parts.append(f"Valid for the services: {section.transfers} {ran['date']}, {often}: `--only {name}`.{ending}")
    return "\n\n".join(parts) + "\n"


def _bar(bar: Bar) -> str:
    return f"{bar.what} {number(bar.value)} ({'>=' if bar.at_least else '<='} {number(bar.limit)})"


def number(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"

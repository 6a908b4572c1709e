"""Charts as SVG points, computed on the server. Pure."""

from collections.abc import Sequence

#: Size of a sparkline in the units of its view box.
WIDTH, HEIGHT = 120, 20
#: Max seconds between two samples that a line joins. A longer time had no visible tab.
GAP_SECONDS = 90.0
HOUR = 3_600.0


def sparkline(samples: Sequence[tuple[float, int]]) -> list[str]:
    """Return the points of each line of a sparkline. `samples` have an age in seconds and a value, oldest first."""
    top = max((value for _, value in samples), default=0) or 1
    lines: list[list[str]] = []
    before = float("inf")
    for age, value in samples:
        if before - age > GAP_SECONDS:
            lines.append([])
        lines[-1].append(f"{WIDTH * (1 - age / HOUR):.1f},{(HEIGHT - 1) * (1 - value / top) + 0.5:.1f}")
        before = age
    return [" ".join(points if len(points) > 1 else points * 2) for points in lines]  # a dot is a line to itself
